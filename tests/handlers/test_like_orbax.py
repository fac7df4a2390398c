"""What checkpointables do: the same as with genuine Orbax, which runs beside ours.

Each case is a function of a library and a path. What it returns is the same for both; what it raises is
caught by every built-in that what Orbax raises is caught by.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.handlers import cases_of_checkpointables, cases_of_handlers
from tests.handlers.cases import CASES, Case, InOrbaxLayout, careful

import waystation

orbax = pytest.importorskip("orbax.checkpoint.experimental.v1")

BUILT_INS = (ValueError, KeyError, FileNotFoundError, TypeError, RuntimeError, OSError, NotImplementedError)


def test_both_tables_are_there() -> None:
    assert {function.__module__ for function in CASES.values()} == {
        cases_of_checkpointables.__name__,
        cases_of_handlers.__name__,
    }


def outcome(ocp: Any, run: Case, path: Path) -> tuple[Any, BaseException | None]:
    try:
        return run(ocp, path), None
    except Exception as error:
        return None, error


OURS: dict[str, Any] = {"native": waystation, "orbax-layout": InOrbaxLayout(use_ocdbt=True)}


@pytest.mark.share(3)
@pytest.mark.parametrize("ours", OURS.values(), ids=OURS)
@pytest.mark.parametrize("name", CASES)
def test_like_orbax(name: str, ours: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings(), careful(orbax.Context()):
        warnings.simplefilter("ignore")
        expected, expected_error = outcome(orbax, CASES[name], tmp_path / "orbax" / "checkpoint")
    with ours.Context():
        found, error = outcome(ours, CASES[name], tmp_path / "ours" / "checkpoint")
    if expected_error is None:
        if error is not None:
            raise error
        assert found == expected
        return
    assert error is not None, f"Orbax raises {expected_error!r}, ours returned {found!r}"
    assert isinstance(error, waystation.errors.WaystationError), repr(error)
    lacking = [
        kind.__name__
        for kind in BUILT_INS
        if isinstance(expected_error, kind) and not isinstance(error, kind)
    ]
    assert not lacking, f"Orbax raises {expected_error!r}, ours {error!r}, which is no {lacking}"
