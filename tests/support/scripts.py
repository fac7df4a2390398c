"""Runs programs that are files, in processes that are forked where the frameworks are imported."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.support.programs import Place, running


def output_of(script: Path, *arguments: object, directory: Path) -> str:
    """What a script prints, which ends well; `directory` is for a log."""
    told = [str(script), *map(str, arguments)]
    with running(_run, told, count=1, framework="torch", directory=directory) as programs:
        (ended,) = programs.end()
    assert (ended.exit_code, ended.value) == (0, None), ended.output
    return ended.output


def _run(place: Place, told: list[str]) -> None:
    del place
    sys.argv = told
    runpy.run_path(told[0], run_name="__main__")
