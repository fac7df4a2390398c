"""Rich types: tuples and named tuples, as Orbax's metadata can record them, in both directions."""

from __future__ import annotations

import itertools
import json
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.orbax import oracle, states, writing
from tests.support.long import amount

import waystation
from waystation.tree import NamedNode


class Moments(NamedTuple):
    """Has a default, which changes nothing."""

    mean: Any
    variance: Any = None


class Nothing(NamedTuple):
    """Has no fields."""


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    """Orbax has no word for it but a dict."""

    weights: Any
    bias: Any


LAYOUTS: dict[str, dict[str, Any]] = {
    "ocdbt": {"use_ocdbt": True},
    "files": {"use_ocdbt": False},
    "files-plain-zarr2": {"use_ocdbt": False, "use_zarr3": False, "use_compression": False},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
_hypothesis = settings(
    max_examples=amount(3, 400),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
_numbers = itertools.count()


def rich(layout: dict[str, Any] | None = None) -> waystation.Context:
    """Options of ours."""
    context = writing.layout_of(layout or {})
    context.pytree.saving.pytree_metadata_options.support_rich_types = True
    return context


def rich_by_orbax() -> AbstractContextManager[Any]:
    """Options of genuine Orbax."""
    return oracle.context(rich=True)


def state() -> dict[str, Any]:
    parameters = {"w": jnp.arange(6.0).reshape(2, 3), "b": np.ones(3, np.float32)}
    return {
        "params": parameters,
        "optimizer": optax.adamw(1e-3).init(parameters),
        "moments": Moments([jnp.ones(2), (1, 2.5)], {"x": Moments("text")}),
        "layers": (Layer(jnp.zeros((2, 2)), None), [Layer(np.arange(3), jnp.int32(4))]),
        "empties": (None, (), [], {}, Nothing(), optax.EmptyState()),
        "keys": {"7": jax.random.key(1), "11": (True,)},
        "nested": ((((jnp.ones(1),),),),),
    }


def containers(tree: Any) -> Any:
    """A tree with containers of equal meaning made equal: classes of named tuples are told by their fields.
    Of empty ones no class is known; they are empty tuples."""
    if isinstance(tree, NamedNode):
        fields = {str(key)[1:]: value for key, value in tree.fields.items()}
        return {"named": list(fields), "children": [containers(child) for child in fields.values()]}
    if isinstance(tree, tuple) and tree and hasattr(tree, "_fields"):
        return {"named": list(tree._fields), "children": [containers(child) for child in tree]}
    if isinstance(tree, tuple):
        return {"tuple": [containers(child) for child in tree]}
    if isinstance(tree, list):
        return [containers(child) for child in tree]
    if isinstance(tree, dict):
        return {"dict": {name: containers(tree[name]) for name in sorted(tree)}}
    return tree


def trees() -> st.SearchStrategy[Any]:
    """Containers of every kind."""
    leaves = st.one_of(states.numpy_arrays(), states.scalars, st.sampled_from([None, (), [], {}, Nothing()]))
    inner = st.recursive(
        leaves,
        lambda children: st.one_of(
            st.lists(children, min_size=1, max_size=3),
            st.lists(children, min_size=1, max_size=3).map(tuple),
            st.dictionaries(states.keys, children, min_size=1, max_size=3),
            st.builds(Moments, children, children),
            st.builds(Layer, children, children),
        ),
        max_leaves=8,
    )
    return st.dictionaries(states.keys, inner, min_size=1, max_size=3)


@layouts
@_hypothesis
@given(tree=trees())
@pytest.mark.share(3)
def test_both_directions(layout: dict[str, Any], tree: dict[str, Any], tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    tree = {**tree, "one": np.ones(1)}
    with rich(layout):
        waystation.save(tmp_path / "ours", tree)
    oracle.save(tmp_path / "theirs", tree, rich=True, **layout)
    require_same_description(tmp_path / "ours", tmp_path / "theirs")
    with rich_by_orbax():
        expected = oracle.load(tmp_path / "theirs")
        oracle.assert_same(oracle.load(tmp_path / "ours"), expected)
    for name in ("ours", "theirs"):
        with rich():
            loaded = oracle.ours(tmp_path / name)
        oracle.assert_same(containers(loaded), containers(expected))
        # Who does not ask for rich types gets lists and dicts.
        oracle.assert_same(oracle.ours(tmp_path / name), oracle.load(tmp_path / "theirs"))


def require_same_description(ours: Path, theirs: Path) -> None:
    """What is said of containers is what Orbax says."""
    mine, other = (
        json.loads(json.loads((path / "state" / "_METADATA").read_text())["value_metadata_tree"])
        for path in (ours, theirs)
    )
    assert without_write_shapes(mine) == without_write_shapes(other)


def without_write_shapes(value: Any) -> Any:
    """Where arrays are cut is ours to say."""
    if isinstance(value, dict):
        return {name: without_write_shapes(item) for name, item in value.items() if name != "write_shape"}
    return [without_write_shapes(item) for item in value] if isinstance(value, list) else value


@layouts
@pytest.mark.parametrize("saver", ["ours", "theirs"])
def test_a_training_state(layout: dict[str, Any], saver: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    if saver == "ours":
        with rich(layout):
            waystation.save(path, state())
    else:
        oracle.save(path, state(), rich=True, **layout)
    with rich_by_orbax():
        theirs = oracle.load(path)
    with rich():
        ours = oracle.ours(path)
    oracle.assert_same(containers(ours), containers(theirs))
    assert type(ours["moments"]) is Moments, "the program has the class"
    assert type(ours["layers"]) is type(theirs["layers"]) is tuple
    assert type(ours["layers"][0]) is type(theirs["layers"][0]) is dict


@layouts
@pytest.mark.parametrize("saver", ["ours", "theirs"])
def test_an_abstract_state_gives_the_classes(layout: dict[str, Any], saver: str, tmp_path: Path) -> None:
    path, wanted = tmp_path / "c", state()
    abstract = jax.tree.map(
        lambda leaf: waystation.arrays.to_shape_dtype_struct(leaf) if isinstance(leaf, jax.Array) else leaf,
        wanted,
    )
    if saver == "ours":
        with rich(layout):
            waystation.save(path, wanted)
    else:
        oracle.save(path, wanted, rich=True, **layout)
    with rich():
        ours = oracle.ours(path, abstract)
    oracle.assert_same(ours, wanted)
    with rich_by_orbax():
        oracle.assert_same(oracle.load(path, abstract), ours)


def test_metadata_have_the_containers(tmp_path: Path) -> None:
    tree = {"pair": Moments(np.ones(2), (np.zeros(3), None)), "list": [np.ones(1)]}
    with rich(LAYOUTS["ocdbt"]):
        waystation.save(tmp_path / "c", tree)
        found = waystation.metadata(tmp_path / "c").metadata
    with rich_by_orbax():
        theirs = oracle.v1.metadata(tmp_path / "c").metadata

    def shapes(leaf: Any) -> Any:
        return list(leaf.shape)

    assert containers(jax.tree.map(shapes, found)) == containers(jax.tree.map(shapes, theirs))
    with rich():
        oracle.assert_same(oracle.ours(tmp_path / "c", found), tree)
