"""Loads of parts of a checkpoint give what genuine Orbax gives, or refuse what it refuses: whatever layout
the checkpoint has, whoever wrote it, and for states of JAX, NumPy and torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from tests.orbax import oracle, partial_scenarios
from tests.orbax.partial_states import (
    ASKED,
    KINDS,
    LAYERS,
    WRITERS,
    abstract_of,
    genuine_loading,
    loading,
    plain,
    state_of,
)
from tests.support.programs import Raised, running

import waystation
from waystation import PLACEHOLDER, errors

SELECTED = r"^layers\.(03|11)\.w$"
ARRAY_TYPES = {"jax": jax.Array, "numpy": np.ndarray, "torch": torch.Tensor}
kinds = pytest.mark.parametrize("kind", KINDS)
writers = pytest.mark.parametrize("writer", WRITERS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of checkpoints, one for each kind of state and writer."""
    made = tmp_path_factory.mktemp("partial")
    for kind in KINDS:
        for writer, write in WRITERS.items():
            is_genuine = writer.startswith("genuine")
            write(made / kind / writer, state_of(known_to_orbax(kind) if is_genuine else kind))
    return made


def genuine_outcome(path: Path, wanted: Any, *, partial_load: bool) -> Any:
    """What genuine Orbax loads, or the error that it raises."""
    try:
        with genuine_loading(partial_load=partial_load):
            return oracle.load(path, wanted)
    except Exception as error:
        return error


def own_outcome(path: Path, wanted: Any, *, partial_load: bool) -> Any:
    """What we load, or the error that says how the structures differ."""
    with loading(partial_load=partial_load):
        try:
            return waystation.load(path, wanted)
        except errors.StructureMismatch as error:
            return error


@pytest.mark.share(3)
@kinds
@pytest.mark.parametrize("asked", ASKED)
def test_a_part_is_what_it_is_for_orbax(root: Path, kind: str, asked: str) -> None:
    choose, partial_load = ASKED[asked]
    known = known_to_orbax(kind)
    expected = genuine_outcome(
        root / known / "genuine", choose(abstract_of(known)), partial_load=partial_load
    )
    for writer in WRITERS:
        found = own_outcome(root / kind / writer, choose(abstract_of(kind)), partial_load=partial_load)
        if isinstance(expected, Exception):
            built_in = next(base for base in type(expected).__mro__ if base.__module__ == "builtins")
            assert isinstance(found, built_in), f"{writer}: Orbax raises {expected!r}, ours gives {found!r}"
            continue
        assert not isinstance(found, Exception), f"{writer}: {found}"
        assert plain(found) == plain(expected), writer
        assert all_arrays_are_of(kind, found), writer


def known_to_orbax(kind: str) -> str:
    """The kind of state that stands for one in Orbax, which has no tensors."""
    return "numpy" if kind == "torch" else kind


def all_arrays_are_of(kind: str, loaded: Any) -> bool:
    arrays = [leaf for leaf in jax.tree.leaves(loaded) if hasattr(leaf, "dtype")]
    return all(isinstance(leaf, ARRAY_TYPES[kind]) for leaf in arrays)


def test_some_parts_are_loaded_and_some_refused(root: Path) -> None:
    """That the test above sees both."""
    outcomes = [
        genuine_outcome(root / "jax" / "genuine", choose(abstract_of("jax")), partial_load=partial_load)
        for choose, partial_load in ASKED.values()
    ]
    refused = {
        asked for asked, outcome in zip(ASKED, outcomes, strict=True) if isinstance(outcome, ValueError)
    }
    assert refused == {
        "a subset, without leave",
        "a leaf less, without leave",
        "a placeholder, and less",
        "what is not there",
    }


@kinds
@pytest.mark.parametrize(
    "select",
    [SELECTED, lambda key_path: key_path in ("layers.03.w", "layers.11.w")],
    ids=["expression", "function"],
)
@pytest.mark.share(3)
def test_a_selection_is_what_orbax_gives_for_placeholders(root: Path, kind: str, select: Any) -> None:
    known = known_to_orbax(kind)
    wanted = only_selected(abstract_of(known), "")
    expected = plain(genuine_outcome(root / known / "genuine", wanted, partial_load=False))
    for writer in WRITERS:
        with loading(select=select):
            for abstract in (None, abstract_of(kind)):
                assert plain(waystation.load(root / kind / writer, abstract)) == expected, writer
            assert plain(waystation.load_async(root / kind / writer).result()) == expected, writer


def only_selected(tree: Any, label: str) -> Any:
    """A tree with placeholders for all but two leaves."""
    if isinstance(tree, dict):
        return {key: only_selected(value, f"{label}.{key}") for key, value in tree.items()}
    if isinstance(tree, list):
        return [only_selected(value, f"{label}.{number}") for number, value in enumerate(tree)]
    return tree if re.search(SELECTED, label.removeprefix(".")) else PLACEHOLDER


@kinds
@writers
def test_a_model_of_other_depth_is_an_error_that_shows_the_difference(
    root: Path, kind: str, writer: str
) -> None:
    with pytest.raises(errors.StructureMismatch) as deeper:
        waystation.load(root / kind / writer, abstract_of(kind, layers=16))
    for number in range(LAYERS, 16):
        for name in ("w", "b"):
            line = f"+ ['layers']['{number}']['{name}']: only in the abstract state"
            assert line in str(deeper.value)
    assert "'11'" not in str(deeper.value)
    assert "PLACEHOLDER" in str(deeper.value)
    with pytest.raises(errors.StructureMismatch) as flatter:
        waystation.load(root / kind / writer, abstract_of(kind, layers=10))
    assert "- ['layers']['10']['w']: only in the checkpoint" in str(flatter.value)
    assert "partial_load" in str(flatter.value)
    genuine = genuine_outcome(root / "jax" / "genuine", abstract_of("jax", layers=16), partial_load=False)
    assert isinstance(genuine, ValueError)


# ---- what differs on purpose: rows of the table in `docs/orbax.md` ------------------------------


def test_what_a_subset_lacks_is_an_error_where_orbax_says_nothing(root: Path) -> None:
    wanted = {"layers": abstract_of("jax", layers=LAYERS + 1)["layers"]}
    genuine = genuine_outcome(root / "jax" / "genuine", wanted, partial_load=True)
    assert isinstance(genuine["layers"]["12"]["w"], jax.ShapeDtypeStruct), "a leaf without data"
    for writer in WRITERS:
        found = own_outcome(root / "jax" / writer, wanted, partial_load=True)
        assert isinstance(found, errors.StructureMismatch), writer
        assert "['12']['w']: only in the abstract state" in str(found)


@pytest.mark.parametrize(
    ("choose", "partial_load", "refusal"),
    [
        (lambda tree: {**tree, "layers": PLACEHOLDER}, False, ValueError),
        (lambda tree: {"opt": [PLACEHOLDER, tree["opt"][1]]}, True, TypeError),
        (lambda tree: {"opt": tree["opt"][:1]}, True, ValueError),
    ],
    ids=["a placeholder for a tree", "a placeholder in a subset", "the beginning of a list"],
)
def test_what_orbax_refuses(
    root: Path, choose: Callable[[Any], Any], partial_load: bool, refusal: type[Exception]
) -> None:
    wanted, expected = choose(abstract_of("jax")), choose(state_of("jax"))
    genuine = genuine_outcome(root / "jax" / "genuine", wanted, partial_load=partial_load)
    assert isinstance(genuine, refusal)
    for writer in WRITERS:
        found = own_outcome(root / "jax" / writer, wanted, partial_load=partial_load)
        assert plain(found) == plain(expected), writer


# ---- several processes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "arguments", "framework"),
    [(partial_scenarios.in_jax, (2,), "jax"), (partial_scenarios.in_torch, (), "torch")],
    ids=["jax", "torch"],
)
@pytest.mark.share(2)
def test_processes_load_parts_together(
    tmp_path: Path, scenario: Any, arguments: tuple[Any, ...], framework: str
) -> None:
    (tmp_path / "checkpoints").mkdir()
    with running(
        scenario, *arguments, tmp_path / "checkpoints", count=2, framework=framework, directory=tmp_path
    ) as programs:
        values = programs.values()
    for value in values:
        assert not isinstance(value, Raised), value
        assert [name for name, is_right in value.items() if not is_right] == []
        assert len(value) >= 10
