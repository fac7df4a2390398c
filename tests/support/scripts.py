"""Runs programs that are files, in processes that are forked where the frameworks are imported."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from tests.support.programs import Place, running


def output_of(
    script: Path,
    *arguments: object,
    directory: Path,
    environment: Mapping[str, str] | None = None,
    may_warn: bool = True,
) -> str:
    """What a script prints, which ends well.

    Args:
        script: The program.
        arguments: Its own.
        directory: For a log.
        environment: What it finds in its environment besides what this process has in its own.
        may_warn: Whether a warning is no error.
    """
    told = [str(script), *map(str, arguments)]
    given = told, dict(environment or {}), may_warn
    with running(_run, *given, count=1, framework="torch", directory=directory) as programs:
        (ended,) = programs.end()
    assert (ended.exit_code, ended.value) == (0, None), ended.output
    return ended.output


def _run(place: Place, told: list[str], environment: dict[str, str], may_warn: bool) -> None:
    del place
    os.environ |= environment
    if not may_warn:
        warnings.simplefilter("error")
    sys.argv = told
    runpy.run_path(told[0], run_name="__main__")
