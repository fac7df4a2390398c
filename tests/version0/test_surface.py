"""Every public name of Orbax's version 0 is here, with its parameters and defaults, or is in
`docs/orbax-version-0.md`; options take the values that Orbax's take.
"""

from __future__ import annotations

import datetime
import fnmatch
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as theirs
import pytest
from tests.surface import walk
from tests.version0.pair import outcome

import waystation.compat.orbax as ours

PAGE = Path(__file__).parents[2] / "docs" / "orbax-version-0.md"
HEADING = "## Names that are not here, or differ"
ROW = re.compile(r"^\| `([^`]+)` \| (\S.*) \|$", re.MULTILINE)

# What programs import; other modules of Orbax are rows of the table.
MODULES = [
    *("abstract_checkpoint_manager", "args", "arrays", "checkpoint_args", "checkpoint_manager"),
    *(
        "checkpoint_managers",
        "checkpoint_utils",
        "checkpointers",
        "future",
        "handlers",
        "logging",
        "metadata",
    ),
    *("multihost", "options", "path.step", "pathways", "test_utils", "transform_utils", "tree"),
    *("type_handlers", "utils"),
]


def module_of(library: types.ModuleType, name: str) -> Any:
    """A module of one of the libraries, as programs get it."""
    found: Any = library
    for part in name.split("."):
        with_name = f"{library.__name__}.{name}"
        found = getattr(found, part, None) or importlib.import_module(with_name)
    return found


def public(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """What a module of Orbax offers that is of Orbax: no names of other libraries that it has imported."""
    for name in sorted(dir(module)):
        value = getattr(module, name)
        if name.startswith("_") or inspect.ismodule(value):
            continue
        is_constant = isinstance(value, str | int) and name.isupper()
        if is_constant or str(getattr(value, "__module__", "")).startswith("orbax"):
            yield name, value


def differences() -> Iterator[str]:
    """The names of all differences."""
    for module in (theirs, *MODULES):
        name = "" if module is theirs else f"{module}."
        own = theirs if module is theirs else module_of(theirs, str(module))
        mine = ours if module is theirs else module_of(ours, str(module))
        for each, value in public(own):
            if not hasattr(mine, each):
                yield f"{name}{each}"
            elif not isinstance(value, str | int):
                yield from walk._of_value(value, getattr(mine, each), f"{name}{each}")
    for name in sorted(dir(theirs)):
        value = getattr(theirs, name)
        if inspect.ismodule(value) and value.__name__.startswith("orbax") and not hasattr(ours, name):
            yield name


@pytest.fixture(scope="module")
def found() -> list[str]:
    return sorted(set(differences()))


def documented() -> list[str]:
    section = PAGE.read_text().split(HEADING)[1].split("\n## ")[0]
    return [match[1] for match in ROW.finditer(section)]


def _literal(row: str) -> str:
    return row.replace("[", "[[]").replace("?", "[?]")


def test_what_differs_is_in_the_table(found: list[str]) -> None:
    rows = documented()
    missing = [name for name in found if not any(fnmatch.fnmatchcase(name, _literal(row)) for row in rows)]
    assert not missing, "\n".join(missing)


def test_what_is_in_the_table_differs(found: list[str]) -> None:
    stale = [row for row in documented() if not fnmatch.filter(found, _literal(row))]
    assert not stale, "\n".join(stale)


def test_the_walk_sees_the_whole_api() -> None:
    assert {name for name, _ in public(theirs)} >= {"CheckpointManager", "PyTreeCheckpointer", "SaveArgs"}
    assert {name for name, _ in public(theirs.args)} >= {"Composite", "StandardSave"}


# ---- accepted values ---------------------------------------------------------------------------

VALUES: dict[str, list[Any]] = {
    "save_interval_steps": [1, 5],
    "max_to_keep": [None, 0, 1, -1],
    "keep_time_interval": [None, datetime.timedelta(hours=1)],
    "keep_period": [None, 3],
    "best_fn": [None, len],
    "best_mode": ["min", "max", "best"],
    "keep_checkpoints_without_metrics": [True, False],
    "step_prefix": [None, "step"],
    "step_format_fixed_length": [None, 0, 8],
    "create": [True, False],
    "cleanup_tmp_directories": [True, False],
    "save_on_steps": [None, [1, 2], {3}, range(4)],
    "single_host_load_and_broadcast": [True, False],
    "todelete_subdir": [None, "trash"],
    "enable_background_delete": [True, False],
    "num_deletion_threads": [None, 2],
    "read_only": [False],
    "enable_async_checkpointing": [True, False],
    "should_save_fn": [None, lambda _step, _last: True],
    "save_root_metadata": [True, False],
    "prevent_write_metrics": [True, False],
    "enable_should_save_is_saving_in_progress_check": [True, False],
    "enable_per_process_directory_creation": [False, True],
    "lightweight_initialize": [True, False],
}
OF_OBJECTS = {
    "step_name_format": lambda library: library.path.step.standard_name_format(step_prefix="a"),
    "async_options": lambda library: library.AsyncOptions(timeout_secs=5),
    "multiprocessing_options": lambda library: library.options.MultiprocessingOptions(primary_host=0),
    "file_options": lambda library: library.options.FileOptions(path_permission_mode=0o750),
    "atomicity_options": lambda library: library.options.AtomicityOptions(
        mode=library.options.AtomicityMode.ATOMIC_RENAME
    ),
    "save_decision_policy": lambda library: library.checkpoint_managers.FixedIntervalPolicy(2),
    "preservation_policy": lambda library: library.checkpoint_managers.LatestN(2),
}
REFUSED = {"todelete_full_path", "temporary_path_class"}  # see the page


def test_every_option_is_tried() -> None:
    names = set(inspect.signature(theirs.CheckpointManagerOptions).parameters)
    assert names == {*VALUES, *OF_OBJECTS, *REFUSED}


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, values in VALUES.items() for number in range(len(values))]
)
@pytest.mark.share(2)
def test_options_take_what_those_of_orbax_take(name: str, number: int, tmp_path: Path) -> None:
    given = {name: VALUES[name][number]}
    outcomes = []
    for library, root in ((theirs, tmp_path / "theirs"), (ours, tmp_path / "ours")):
        root.mkdir()

        def run(library: Any = library, root: Path = root) -> list[int]:
            options = library.CheckpointManagerOptions(**given)
            with library.CheckpointManager(root, options=options) as manager:
                for step in range(2):
                    manager.save(step, args=library.args.StandardSave({"step": step}), metrics={"a": step})
                return list(manager.all_steps())

        outcomes.append(outcome(run))
    first, second = outcomes
    assert (first.error is None) == (second.error is None), outcomes
    assert first.value == second.value


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_options_take_objects_of_their_library(name: str, tmp_path: Path) -> None:
    seen = []
    for library in (theirs, ours):
        options = library.CheckpointManagerOptions(**{name: OF_OBJECTS[name](library)})
        with library.CheckpointManager(tmp_path / library.__name__, options=options) as manager:
            for step in range(4):
                manager.save(step, args=library.args.StandardSave({"step": step}))
            seen.append(list(manager.all_steps()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "given",
    [
        {"max_to_keep": 1, "preservation_policy": None},
        {"todelete_full_path": "trash"},
        {"temporary_path_class": object},
    ],
    ids=str,
)
def test_what_is_refused_says_so(given: dict[str, Any], tmp_path: Path) -> None:
    if "preservation_policy" in given:
        given = {**given, "preservation_policy": ours.checkpoint_managers.LatestN(1)}
    with pytest.raises((ValueError, NotImplementedError), match="|".join(given)):
        ours.CheckpointManager(tmp_path, options=ours.CheckpointManagerOptions(**given))
