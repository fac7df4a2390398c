"""What fresh processes of the benchmarks do, in processes that are forked where everything is imported."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import Outcome, Request, attempt
from tests.support.programs import Place, running


def measured(module: str, requests: Sequence[Request], directory: Path) -> list[Outcome]:
    """What one process of a module measures, request after request."""
    with running(_measure, module, requests, count=1, framework="torch", directory=directory) as programs:
        (outcomes,) = programs.values()
    found: list[Outcome] = outcomes
    return found


def _measure(place: Place, module: str, requests: Sequence[Request]) -> list[Any]:
    del place
    work = importlib.import_module(module).run
    return [attempt(work, request) for request in requests]
