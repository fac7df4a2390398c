"""Every public name of Orbax's v1 is here, with its parameters and defaults, or is in `docs/orbax.md`."""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from orbax.checkpoint import pathways
from orbax.checkpoint import v1 as oracle
from tests.surface.walk import differences, public, same_default

import waystation

PAGE = Path(__file__).parents[2] / "docs" / "orbax.md"
HEADING = "## Names and defaults that differ"
ROW = re.compile(r"^\| `([^`]+)` \| (\S.*) \|$", re.MULTILINE)


def documented() -> list[str]:
    """The names in the table."""
    section = PAGE.read_text().split(HEADING)[1].split("\n## ")[0]
    return [match[1] for match in ROW.finditer(section)]


def options_of(theirs: Any, ours: Any, prefix: str) -> Iterator[str]:
    """The options of a context that are missing or have other defaults."""
    for entry in dataclasses.fields(theirs):
        name = f"{prefix}{entry.name}"
        if entry.name.startswith("_"):
            continue
        if not hasattr(ours, entry.name):
            yield name
            continue
        default, own = getattr(theirs, entry.name), getattr(ours, entry.name)
        if dataclasses.is_dataclass(default):
            yield from options_of(default, own, f"{name}.")
        elif not same_default(default, own):
            yield f"{name}="


def context_differences() -> Iterator[str]:
    theirs, ours = oracle.Context(), waystation.Context()
    for name in sorted(set(dir(type(theirs)))):
        group = None if name.startswith("_") or name.endswith("_options") else getattr(theirs, name)
        if dataclasses.is_dataclass(group):
            yield from options_of(group, getattr(ours, name), f"Context.{name}.")
        elif isinstance(group, enum.Enum) and group.value != getattr(ours, name).value:
            yield f"Context.{name}="


@pytest.fixture(scope="module")
def found() -> list[str]:
    return sorted({*differences(oracle, waystation), *context_differences()})


def test_what_differs_is_in_the_table(found: list[str]) -> None:
    rows = documented()
    missing = [name for name in found if not any(fnmatch.fnmatchcase(name, _literal(row)) for row in rows)]
    assert not missing, "\n".join(missing)


def test_what_is_in_the_table_differs(found: list[str]) -> None:
    stale = [row for row in documented() if not fnmatch.filter(found, _literal(row))]
    assert not stale, "\n".join(stale)


def _literal(row: str) -> str:
    """A row as a pattern in which only the star is special."""
    return row.replace("[", "[[]").replace("?", "[?]")


def test_the_walk_sees_the_whole_api() -> None:
    names = {name for name, _ in public(oracle)}
    assert {"save", "load_checkpointables_async", "Context", "training", "path", "PLACEHOLDER"} <= names
    assert {name for name, _ in public(oracle.training)} >= {"Checkpointer", "preservation_policies"}
    assert dict(public(oracle.training.save_decision_policies)).keys() >= {"FixedIntervalPolicy"}


@pytest.mark.parametrize("member", [*pathways.CheckpointingImpl, None], ids=str)
def test_what_orbax_takes_for_pathways_is_taken(member: Any, tmp_path: Path) -> None:
    for number, library in enumerate((oracle, waystation)):
        context: Any = library.Context()
        context.pathways.checkpointing_impl = member
        with context:
            library.save(tmp_path / str(number), {"a": np.arange(3)})
            assert library.load(tmp_path / str(number))["a"].tolist() == [0, 1, 2]
        kept = context.pathways.checkpointing_impl
        assert getattr(kept, "name", None) == getattr(member, "name", None)


def test_what_is_no_choice_for_pathways_is_refused() -> None:
    context = waystation.Context()
    for value in ("dispatcher", 3, waystation.options.CheckpointLayout.AUTO):
        with pytest.raises(waystation.errors.InvalidInput, match="CheckpointingImpl"):
            context.pathways.checkpointing_impl = value  # type: ignore[assignment]


def test_a_difference_has_a_name() -> None:
    class Bare:
        def save(self) -> None: ...

    seen = list(differences(oracle, Bare()))
    assert "load" in seen
    assert "save(path)" in seen
    assert "save(overwrite)" in seen
