"""What genuine Orbax takes and refuses, Waystation takes and refuses: success, values and types of errors.

What is otherwise on purpose is in `DIFFERENCES`, each with the row of `docs/orbax.md` that tells users. `make
test-long` runs every case, in both layouts; `make test` a twelfth of them, some in both.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.orbax.oracle import v1 as oracle
from tests.orbax.rules import CASES, Case
from tests.support.long import IS_LONG

import waystation

PAGE = Path(__file__).parents[2] / "docs" / "orbax.md"
BATCHES = 20


@dataclass(frozen=True)
class Outcome:
    """What came of a case: what it returned, or what it raised."""

    value: Any = None
    error: BaseException | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"[:300]
        return f"returned {self.value!r}"[:300]


def _row(beginning: str, *cases: str) -> tuple[str, tuple[str, ...]]:
    return beginning, cases


# The beginning of a row of the page, and patterns of the names of the cases that it is about.
DIFFERENCES = [
    _row(
        "Wrong arguments can end in an `AttributeError`",
        *(f"*, at: {place}" for place in ("None", "number", "bytes", "empty", "with zero", "too long")),
        *("*, at: dangling link", "Checkpointer, at: file", "finish parts, at: below a file"),
        *("Checkpointer.*, step *", "empty Checkpointer.*, step None", "closed Checkpointer.*, step None"),
        *("save: deleted array", "save: cycle", "save: surrogate*", "load* as: text for a number"),
        *("parts: list after dict", "metrics: int keys"),
    ),
    _row(
        "A checkpointable may have any name",
        *(
            f"save*: {name}"
            for name in ("parent", "itself", "absolute", "with slash", "up", ".hidden", "a\nb", "~")
        ),
        *("save*: trailing slash", "save*: checkpoint.json", "save*: _CHECKPOINT_METADATA"),
        *("save*: *orbax-checkpoint-tmp*", "save*: orbax.checkpoint", "save*: _METADATA"),
    ),
    _row(
        "A directory with anything in it, or with nothing, loads",
        *("*, at: empty directory", "*, at: junk", "parts: over a directory"),
    ),
    _row("A save goes to a path inside a checkpoint", "save inside, at: *"),
    _row(
        "`overwrite=True` removes whatever is at the path",
        *(f"save over*, at: {place}" for place in ("file", "junk", "unfinished", "parent", "inside")),
    ),
    _row("An overwrite fails", "save over*, at: link", "save over*, at: with dots"),
    _row(
        "Empty arrays, `bytes`, complex numbers",
        *("*: empty dict", "save: empty *", "save: * dataclass", "save: NumPy *", "save: clashing keys"),
        *("save: mixed keys", "save: int of 65 bits", "save: complex number", "save: bytes"),
        *("save: array of *", "save: *time array", "save: *timedelta array", "save: structured array"),
        *("save: void array", "save: longdouble array", "save: record array", "save: JAX array of uint4"),
        "parts: empty",
    ),
    _row("Keys with dots", "save: clashing dots"),
    _row(
        "Without an abstract state tuples come back as lists",
        *("save: named tuple", "save: * keys", "save: None key"),
    ),
    _row("A masked array loses its mask", "save: masked array"),
    _row("A key of any type becomes text", "save: enum key", "save: key *", "save: long key"),
    _row("Arrays of another byte order", "save: big-endian array", "save: fixed-width text scalar"),
    _row(
        "A stored number becomes what the abstract leaf is",
        *("load* as: int for float number", "load* as: bool for int", "load* as: type bool"),
    ),
    _row("float32 loads as int32 or bool", "load* as: int for float"),
    _row("`None` in an abstract state leaves out", "load* as: None for *"),
    _row(
        "The shape of an abstract NumPy array is not looked at",
        *("load* as: larger NumPy shape", "load_checkpointables of several as: array for JSON"),
    ),
    _row("A NumPy scalar as abstract leaf gives an array", "load* as: NumPy number"),
    _row("A number that was saved as such", "load* as: struct for a number"),
    _row(
        "With `partial_load`, what the checkpoint lacks",
        *("load partly as: more*", "load partly as: renamed", "load partly as: None *"),
    ),
    _row(
        "A placeholder stands for a leaf, and not together",
        *("load partly as: *placeholder*", "load partly as: defaultdict"),
    ),
    _row(
        "With `partial_load`, an empty dict",
        *("load partly as: nothing", "load partly as: empty dict for a dict"),
    ),
    _row("`checkpointable_name=None` is for old checkpoints", "load by no name, at: *"),
    _row(
        "The directory of one checkpointable is no checkpoint",
        "load*, at: inside",
        "metadata*, at: inside",
        "is_*, at: inside",
    ),
    _row("A checkpointable that has lost files", "*, at: with an empty one"),
    _row("A tree with a leaf that cannot be saved has no handler", "save_checkpointables: *"),
    _row("`load_async` and", "load_async of nothing"),
    _row("Negative steps are saved", "Checkpointer.*, step negative"),
    _row("A step may be of any type", "*Checkpointer.*, step *"),
    _row("A `Checkpointer` goes on saving after `close`", "closed Checkpointer.*"),
    _row("NaN in `custom_metadata` makes a file", "custom_metadata*: NaN"),
    _row("Metrics are JSON values", "metrics: NumPy number inside"),
    _row("The same part twice raises", "parts: the same leaf*", "parts: leaf, then dict", "parts: dict, *"),
]
# No row is about these: the page says that parts are saved in the native layout only.
NATIVE_ONLY = ("parts:*", "* parts, at: *", "save in parts, at: *")


def _outcome(library: Any, case: Case, directory: Path, *, use_ocdbt: bool | None = None) -> Outcome:
    directory.mkdir()
    context = library.Context()
    if library is waystation:
        context.array.saving.use_ocdbt = use_ocdbt
    with contextlib.chdir(directory):
        try:
            with context:
                return Outcome(_comparable(case(library, directory)))
        except Exception as error:
            return Outcome(error=error)


def _comparable(value: Any) -> Any:
    """A value as one that can be compared, whatever containers and arrays are in it."""
    if isinstance(value, jax.Array):
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        host = np.asarray(jax.random.key_data(value) if is_key else value)
        return "JAX", str(value.dtype), host.shape, host.tobytes()
    if isinstance(value, np.ndarray):
        return "NumPy", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: _comparable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(part) for part in value]
    return type(value).__name__, repr(value)


def _agree(theirs: Outcome, ours: Outcome) -> bool:
    if theirs.error is None or ours.error is None:
        return theirs.error is ours.error and theirs.value == ours.value
    error = theirs.error.exceptions[0] if isinstance(theirs.error, ExceptionGroup) else theirs.error
    own = getattr(waystation.errors, type(error).__name__, None)
    if own is not None:
        return isinstance(ours.error, own)
    builtin = next(cls for cls in type(error).__mro__ if cls.__module__ == "builtins")
    return isinstance(ours.error, builtin)


def _is_documented(name: str) -> bool:
    return any(_matches(name, pattern) for _, patterns in DIFFERENCES for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.share(10)
def test_cases_end_as_in_orbax(batch: int, tmp_path: Path) -> None:
    wrong = []
    cases = list(CASES.items())[batch::BATCHES][:: 1 if IS_LONG else 12]
    for number, (name, case) in enumerate(cases):
        theirs = _outcome(oracle, case, tmp_path / f"{number}-theirs")
        is_native_only = any(_matches(name, pattern) for pattern in NATIVE_ONLY)
        with_orbax = not is_native_only and (number % 2 == 0 or IS_LONG)
        for use_ocdbt in (None, True) if with_orbax else (None,):
            directory = tmp_path / f"{number}-ours-{use_ocdbt}"
            ours = _outcome(waystation, case, directory, use_ocdbt=use_ocdbt)
            if not _agree(theirs, ours) and not _is_documented(name):
                wrong.append(f"{name} ({use_ocdbt=})\n    Orbax: {theirs}\n    ours: {ours}")
            if ours.error is not None and not isinstance(ours.error, waystation.errors.WaystationError):
                wrong.append(f"{name} ({use_ocdbt=})\n    ours is not typed: {ours}")
    gc.collect()  # or what genuine Orbax leaves of calls that fail would complain in a later test
    assert not wrong, "\n".join(wrong)


def test_differences_are_on_the_page() -> None:
    rows = [line.removeprefix("| ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for beginning, patterns in DIFFERENCES:
        assert any(row.startswith(beginning) for row in rows), beginning
        for pattern in patterns:
            assert any(_matches(name, pattern) for name in CASES), pattern
