from __future__ import annotations

import copy
import json
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from waystation.errors import Corrupt
from waystation.frameworks.jax_shardings import boxes_by_device, describe_sharding, sharding_from_description


def mesh(types: tuple[AxisType, ...] = (AxisType.Auto, AxisType.Explicit)) -> Mesh:
    return Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("x", "y"), axis_types=types)


def again(sharding: Any, shape: tuple[int, ...]) -> Any:
    return sharding_from_description(json.loads(json.dumps(describe_sharding(sharding, shape))), shape)


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y"), P(("y", "x"), None), P("x", "y")], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_named_shardings_come_back_equal(spec: Any, kind: AxisType) -> None:
    sharding = NamedSharding(mesh((kind, AxisType.Auto)), spec)
    rebuilt = again(sharding, (8, 8))
    assert rebuilt == sharding
    assert rebuilt.mesh.axis_types == sharding.mesh.axis_types


@pytest.mark.parametrize("memory_kind", [None, "pinned_host"])
def test_memory_kinds_come_back(memory_kind: str | None) -> None:
    for sharding in (
        SingleDeviceSharding(jax.devices()[2], memory_kind=memory_kind),
        NamedSharding(mesh(), P("x"), memory_kind=memory_kind),
    ):
        assert describe_sharding(sharding, (8,))["memory_kind"] == memory_kind
        assert again(sharding, (8,)) == sharding


def test_other_kinds_keep_their_boxes_and_are_not_rebuilt() -> None:
    sharding = NamedSharding(mesh(), P("x", reduced={"y"}))
    description = describe_sharding(sharding, (8,))
    assert description["kind"] == "other"
    assert description["boxes"] == [((0,), (4,)), ((4,), (4,))]
    assert again(sharding, (8,)) is None


def test_boxes_cover_the_array_once_per_replica() -> None:
    boxes = boxes_by_device(NamedSharding(mesh(), P("y")), (8, 3))
    assert len(boxes) == 8
    assert sorted(set(boxes.values())) == [((start, 0), (2, 3)) for start in (0, 2, 4, 6)]


GOOD = {
    "kind": "named",
    "mesh": {
        "axes": [["x", 2], ["y", 4]],
        "axis_types": ["auto", "explicit"],
        "platform": "cpu",
        "devices": list(range(8)),
    },
    "spec": ["x", ["y"]],
    "memory_kind": None,
}


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    description: dict[str, Any] = copy.deepcopy(GOOD)
    place: Any = description
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return description


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("kind",), 3),
        (("mesh",), 0),
        (("mesh", "axes"), {"x": 2}),
        (("mesh", "axes", 0), ["x", 2, 3]),
        (("mesh", "axes", 0), ["y", 2]),
        (("mesh", "axes", 0), ["x", 0]),
        (("mesh", "axes", 0), ["x", True]),
        (("mesh", "axes", 0), ["x", 10**12]),
        (("mesh", "axis_types"), ["auto"]),
        (("mesh", "axis_types", 0), "__class__"),
        (("mesh", "axis_types", 0), ["auto"]),
        (("mesh", "devices"), list(range(7))),
        (("mesh", "devices", 0), 1),
        (("mesh", "devices", 0), "0"),
        (("mesh", "platform"), 5),
        (("spec",), "x"),
        (("spec",), ["x", None, None]),
        (("spec",), ["x", "x"]),
        (("spec",), ["x", ["y", "x"]]),
        (("spec",), ["z"]),
        (("spec",), [{"x": 1}]),
        (("spec",), [["y", 3]]),
        (("spec",), [None, ["x", "y"]]),
        (("memory_kind",), 1),
    ],
    ids=str,
)
def test_impossible_descriptions_are_corrupt(path: tuple[Any, ...], value: Any) -> None:
    assert sharding_from_description(copy.deepcopy(GOOD), (8, 4)) is not None
    with pytest.raises(Corrupt, match=r"impossible sharding|no kind"):
        sharding_from_description(changed(path, value), (8, 4))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("kind",), "of a newer version"),
        (("mesh", "platform"), "tpu"),
        (("mesh", "devices", 7), 8),
        (("mesh", "devices", 7), 10**30),
        (("memory_kind",), "somewhere"),
    ],
    ids=str,
)
def test_what_is_not_here_is_none(path: tuple[Any, ...], value: Any) -> None:
    assert sharding_from_description(changed(path, value), (8, 4)) is None


@pytest.mark.parametrize(
    "value", [None, [], "single", {}, {"kind": "single"}, {"kind": "single", "device": 1.5}]
)
def test_no_description_at_all_is_corrupt(value: Any) -> None:
    with pytest.raises(Corrupt):
        sharding_from_description(value, (8,))


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(["x", "y", "cpu", "auto", ""]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["x", "kind"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(
    st.sampled_from(["kind", "spec", "memory_kind", "axes", "axis_types", "platform", "devices"]), ANY_JSON
)
def test_any_change_gives_a_sharding_none_or_corrupt(key: str, value: Any) -> None:
    path = (key,) if key in GOOD else ("mesh", key)
    try:
        found = sharding_from_description(changed(path, value), (8, 4))
    except Corrupt:
        return
    assert found is None or found.shard_shape((8, 4))
