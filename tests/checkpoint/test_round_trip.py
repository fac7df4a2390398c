"""Whatever is saved comes back: values, dtypes, containers, keys."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.long import amount

import waystation


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Model:
    weights: Any
    rate: Any


def assert_same(left: Any, right: Any) -> None:
    """Equal in type, structure and every bit."""
    assert type(left) is type(right), (type(left), type(right))
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for mine, other in zip(left, right, strict=True):
            assert_same(mine, other)
    elif isinstance(left, np.ndarray | np.generic):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, Model):
        assert_same(vars(left), vars(right))
    elif isinstance(left, float):
        assert left.hex() == right.hex()
    else:
        assert left == right


def round_trip(path: Path, state: Any) -> Any:
    waystation.save(path, state)
    loaded = waystation.load(path)
    assert_same(state, loaded)
    assert_same(state, waystation.load(path, waystation.metadata(path)))
    return loaded


def test_containers_and_scalars(tmp_path: Path) -> None:
    state = {
        "arrays": [np.arange(6.0).reshape(2, 3), np.float32(3), np.zeros((0, 4), np.int8), np.array(7)],
        "point": Point(np.ones(3), (1, None)),
        "model": Model(np.zeros(2, ml_dtypes.bfloat16), 0.1),
        "ordered": OrderedDict(b=1, a=2),
        "numbers": [True, -5, 10**40, -(2**70), 1.5, math.inf, -0.0, 1 + 2j],
        "texts": ["", "a\0b", "\ud800", "ü" * 100_000, b"", b"\x00\xff" * 50_000],
        "nothing": {"none": None, "dict": {}, "list": [], "tuple": (), "point": Point((), None)},
    }
    round_trip(tmp_path / "checkpoint", state)


def test_not_a_number_survives_bit_for_bit(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", [math.nan])
    assert math.isnan(waystation.load(tmp_path / "checkpoint")[0])


@pytest.mark.parametrize("state", [np.arange(4), 5, "text", (None,), {}, [], ()], ids=repr)
def test_bare_states(tmp_path: Path, state: Any) -> None:
    round_trip(tmp_path / "checkpoint", state)


def test_none_is_no_state(tmp_path: Path) -> None:
    for save in (waystation.save, waystation.save_async):
        with pytest.raises(waystation.errors.InvalidInput, match="not None"):
            save(tmp_path / "checkpoint", None)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["AUTO", "metrics", "_CHECKPOINT_DELETION", "checkpoint.json", "owner.json"])
def test_reserved_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(waystation.errors.InvalidInput, match=f"'{name}' cannot be the name"):
        waystation.save(tmp_path / "checkpoint", {"x": 1}, checkpointable_name=name)
    assert not any(tmp_path.iterdir())


def test_labels_that_clash_are_different_arrays(tmp_path: Path) -> None:
    state = {
        "a.b": np.zeros(3),
        "a": {"b": np.ones(3)},
        "a.b~2": np.full(3, 2.0),
        "": np.full(3, 3.0),
        "__metadata__": np.full(3, 4.0),
        "\0": np.full(3, 5.0),
        "\ud800": np.full(3, 6.0),
        1: np.full(3, 7.0),
        "1": np.full(3, 8.0),
        (1, "x"): np.full(3, 9.0),
        b"1": np.full(3, 10.0),
        "../../etc": np.full(3, 11.0),
    }
    round_trip(tmp_path / "checkpoint", state)


keys = st.one_of(st.text(max_size=8), st.integers(), st.booleans(), st.binary(max_size=4))
scalars = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.none(),
    st.complex_numbers(allow_nan=False),
)
dtypes = st.sampled_from([np.dtype(name) for name in "?bBhHiIlLqQefdFD"] + [np.dtype("<U3"), np.dtype(">f4")])
arrays = st.builds(
    lambda dtype, shape, seed: (
        np.random.default_rng(seed).bytes(dtype.itemsize * math.prod(shape))
        and np.random.default_rng(seed).integers(0, 2, shape).astype(dtype)
        if math.prod(shape)
        else np.zeros(shape, dtype)
    ),
    dtypes,
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.integers(0, 1000),
)
trees = st.recursive(
    st.one_of(scalars, arrays),
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(keys, children, max_size=4),
        st.builds(Point, children, children),
        st.builds(Model, children, children),
    ),
    max_leaves=20,
)


@settings(
    max_examples=amount(25, 1200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(state=trees.filter(lambda tree: tree is not None))
def test_any_tree(tmp_path: Path, state: Any) -> None:
    path = tmp_path / "checkpoint"
    waystation.delete(path, missing_ok=True)
    round_trip(path, state)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24).reshape(4, 6)[::2, ::-1],
        np.arange(24).reshape(4, 6).T,
        np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
        np.broadcast_to(np.arange(5), (3, 5)),
        np.arange(10)[::-1],
    ],
    ids=["sliced", "transposed", "fortran", "broadcast", "reversed"],
)
def test_strided_arrays(tmp_path: Path, array: np.ndarray[Any, Any]) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": array})
    np.testing.assert_array_equal(waystation.load(tmp_path / "checkpoint")["x"], array)


def test_many_files(tmp_path: Path) -> None:
    state = {f"array {number}": np.full(1000 + number, number, np.int16) for number in range(50)}
    context = waystation.Context()
    context.file.file_bytes_target = 10_000
    with context:
        round_trip(tmp_path / "checkpoint", state)
    files = list((tmp_path / "checkpoint" / "state").glob("p00000-*.safetensors"))
    assert len(files) > 5


def test_deep_nesting(tmp_path: Path) -> None:
    state: Any = np.arange(3)
    for _ in range(20_000):
        state = [state]
    waystation.save(tmp_path / "checkpoint", state)
    loaded = waystation.load(tmp_path / "checkpoint")
    for _ in range(20_000):
        (loaded,) = loaded
    np.testing.assert_array_equal(loaded, np.arange(3))


def test_scalars_of_bytes_and_text_keep_their_nuls(tmp_path: Path) -> None:
    texts = ("ab\0", "\0", "", "\0\0a\0\0", "ab\ud800")
    state = {
        "bytes": [np.bytes_(text.encode("utf-8", "surrogatepass")) for text in texts],
        "text": [np.str_(text) for text in texts],
    }
    for loaded in (round_trip(tmp_path / "at", state), waystation.load(tmp_path / "at", state)):
        assert_same(state, loaded)
        for name in ("bytes", "text"):  # which NumPy compares without them
            assert [list(value) for value in loaded[name]] == [list(value) for value in state[name]]
