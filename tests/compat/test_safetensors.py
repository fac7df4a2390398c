"""The functions for NumPy and JAX, and what lies under all: the same files, arrays and errors as those of the
safetensors package, which runs beside ours."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.compat.comparing import outcome
from tests.compat.hostile import DAMAGED

import waystation.safetensors
from waystation import errors
from waystation.compat import safetensors as own
from waystation.compat import safetensors_flax, safetensors_jax, safetensors_numpy

DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "float16",
    "int32",
    "uint32",
    "float32",
    "int64",
    "uint64",
]
STATE = {
    "b": np.arange(3, dtype=np.float32),
    "a": np.arange(2, dtype=np.int64),
    "none": np.zeros((0, 3), np.uint8),
    "scalar": np.array(True),
    "wide": np.arange(24, dtype=np.float64).reshape(2, 3, 4),
    "half": np.ones(5, ml_dtypes.bfloat16),
}


def assert_same(ours: Any, genuine: Any) -> None:
    """Equal values; or an error of ours that whoever catches that of the genuine package catches."""
    if not isinstance(genuine, Exception):
        assert not isinstance(ours, Exception), ours
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(genuine))
        assert np.asarray(ours).dtype == np.asarray(genuine).dtype
        return
    assert isinstance(ours, errors.WaystationError), ours
    if isinstance(genuine, safetensors.SafetensorError):
        assert isinstance(ours, own.SafetensorError)
    else:
        assert isinstance(ours, type(genuine))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = str(tmp_path / "model.safetensors")
    safetensors.numpy.save_file(STATE, path, {"who": "somebody"})
    return path


# JSON has several ways to write control characters.
names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8).filter(
    lambda name: name != "__metadata__"
)
states = st.dictionaries(
    names,
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays.arrays(
            dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
        )
    ),
    max_size=6,
)


@given(states, st.none() | st.dictionaries(names, names, min_size=1, max_size=1))
def test_the_bytes_are_those_of_the_package(state: dict[str, Any], metadata: dict[str, str] | None) -> None:
    data = safetensors_numpy.save(state, metadata)
    assert data == safetensors.numpy.save(state, metadata)
    ours, genuine = safetensors_numpy.load(data), safetensors.numpy.load(data)
    assert ours.keys() == genuine.keys()
    for name, array in ours.items():
        assert array.dtype == genuine[name].dtype
        assert array.shape == genuine[name].shape
        assert array.tobytes() == genuine[name].tobytes()


def test_every_order_of_dtypes_is_that_of_the_package() -> None:
    held = np.zeros(16, np.uint8)
    specs = {}
    for module in (safetensors, own):
        specs[module] = {
            name: module.TensorSpec(dtype=name, shape=[16], data_ptr=held.ctypes.data, data_len=16)
            for name in (
                *("bool", "uint8", "int8", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu"),
                *("float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"),
            )
        } | {
            name: module.TensorSpec(dtype=name, shape=[16 // width], data_ptr=held.ctypes.data, data_len=16)
            for width, group in {
                2: ("int16", "uint16", "float16", "bfloat16"),
                4: ("int32", "uint32", "float32"),
                8: ("complex64", "float64", "int64", "uint64"),
            }.items()
            for name in group
        }
    assert own.serialize(specs[own]) == safetensors.serialize(specs[safetensors])
    for name, spec in specs[own].items():
        other = specs[safetensors][name]
        assert (spec.dtype, spec.shape, spec.data_len, repr(spec)) == (
            other.dtype,
            other.shape,
            other.data_len,
            repr(other),
        )


def test_files_go_both_ways(tmp_path: Path) -> None:
    ours, genuine = str(tmp_path / "ours"), str(tmp_path / "genuine")
    safetensors_numpy.save_file(STATE, ours, {"k": "v"})
    safetensors.numpy.save_file(STATE, genuine, {"k": "v"})
    assert Path(ours).read_bytes() == Path(genuine).read_bytes()
    for path in (ours, genuine):
        for backend in ("mmap", "pread"):
            loaded = safetensors_numpy.load_file(path, backend=backend)
            expected = safetensors.numpy.load_file(path, backend=backend)
            assert list(loaded) == list(expected)
            for name, array in loaded.items():
                assert_same(array, expected[name])
    assert sorted(os.listdir(tmp_path)) == ["genuine", "ours"]


def test_an_earlier_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors_numpy.save_file({"a": np.zeros(1 << 16)}, path)
    mapped = np.memmap(path, mode="r")
    before = mapped.tobytes()
    safetensors_numpy.save_file({"a": np.ones(4)}, path)
    assert mapped.tobytes() == before
    np.testing.assert_array_equal(safetensors_numpy.load_file(path)["a"], np.ones(4))


def test_arrays_of_any_strides_are_saved_by_their_elements() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    loaded = safetensors.numpy.load(safetensors_numpy.save({"t": array.T, "big": array.astype(">i4")}))
    np.testing.assert_array_equal(loaded["t"], array.T)
    np.testing.assert_array_equal(loaded["big"], array)


def test_what_the_package_cannot_load_is_loaded() -> None:
    state = {"e4m3": np.arange(4).astype(ml_dtypes.float8_e4m3fn)}
    data = safetensors_numpy.save(state)
    assert isinstance(outcome(lambda: safetensors.numpy.load(data)), KeyError)
    np.testing.assert_array_equal(safetensors_numpy.load(data)["e4m3"], state["e4m3"])


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_raise_what_the_package_raises(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGED[damage])
    assert_same(
        outcome(lambda: own.safe_open(path, "np")), outcome(lambda: safetensors.safe_open(path, "np"))
    )
    assert_same(
        outcome(lambda: own.deserialize(DAMAGED[damage])),
        outcome(lambda: safetensors.deserialize(DAMAGED[damage])),
    )
    assert isinstance(outcome(lambda: own.safe_open(path, "np")), errors.Corrupt)


BAD_CALLS: dict[str, Callable[[Any, Any, str], Any]] = {
    "no file": lambda module, _, path: module.safe_open(f"{path}.not", "np"),
    "a directory": lambda module, _, path: module.safe_open(os.path.dirname(path), "np"),
    "no path": lambda module, _, path: module.safe_open(None, "np"),
    "a path of bytes": lambda module, _, path: module.safe_open(os.fsencode(path), "np"),
    "no framework": lambda module, _, path: module.safe_open(path, "oops"),
    "no device": lambda module, _, path: module.safe_open(path, "np", device="oops"),
    "a GPU for NumPy": lambda module, _, path: module.safe_open(path, "np", device="cuda:0"),
    "no backend": lambda module, _, path: module.safe_open(path, "np", backend="oops"),
    "no tensor": lambda module, _, path: module.safe_open(path, "np").get_tensor("oops"),
    "no slice": lambda module, _, path: module.safe_open(path, "np").get_slice("oops"),
    "a number for a name": lambda module, _, path: module.safe_open(path, "np").get_tensor(1),
    "closed": lambda module, _, path: closed(module, path).keys(),
    "closed slice": lambda module, _, path: closed(module, path).get_tensor("a"),
    "text for bytes": lambda module, _, path: module.deserialize("text"),
    "no spec": lambda module, _, path: module.serialize({"a": 1}),
    "a list of specs": lambda module, _, path: module.serialize([]),
    "metadata of numbers": lambda module, _, path: module.serialize({}, metadata={"a": 1}),
    "unknown dtype": lambda module, _, path: module.TensorSpec(
        dtype="oops", shape=[], data_ptr=1, data_len=1
    ),
    "negative extent": lambda module, _, path: module.TensorSpec(
        dtype="bool", shape=[-1], data_ptr=1, data_len=1
    ),
    "wrong length": lambda module, _, path: module.serialize(
        {"a": module.TensorSpec(dtype="int32", shape=[2], data_ptr=STATE["a"].ctypes.data, data_len=4)}
    ),
    "an empty path": lambda module, _, path: module.safe_open("", "np"),
    "beneath a file": lambda module, _, path: module.safe_open(f"{path}/below", "np"),
    "a long name": lambda module, _, path: module.safe_open(f"{path}{'n' * 300}", "np"),
    "to a directory": lambda _, numpy, path: numpy.save_file(STATE, os.path.dirname(path)),
    "to nowhere": lambda _, numpy, path: numpy.save_file(STATE, f"{path}.d/not/there"),
    "no dtype for it": lambda _, numpy, path: numpy.save({"a": np.zeros(1, np.complex128)}),
    "strings": lambda _, numpy, path: numpy.save({"a": np.array(["text"])}),
    "objects": lambda _, numpy, path: numpy.save({"a": np.array([object()])}),
    "lists": lambda _, numpy, path: numpy.save({"a": [1, 2]}),
    "no dict": lambda _, numpy, path: numpy.save([1]),
    "a number for the name": lambda _, numpy, path: numpy.save({1: np.zeros(1)}),
}


def closed(module: Any, path: str) -> Any:
    with module.safe_open(path, "np") as opened:
        pass
    return opened


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_calls_raise_what_the_package_raises(file: str, call: str) -> None:
    genuine = outcome(lambda: BAD_CALLS[call](safetensors, safetensors.numpy, file))
    assert isinstance(genuine, Exception)
    assert_same(outcome(lambda: BAD_CALLS[call](own, safetensors_numpy, file)), genuine)


def test_errors_survive_pickling(file: str) -> None:
    error = outcome(lambda: own.safe_open(file, "np").get_tensor("oops"))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert isinstance(copy, own.SafetensorError)
    assert (str(copy), copy.context) == (str(error), error.context)


@pytest.mark.parametrize("framework", ["np", "numpy", "jax", "flax"])
def test_an_open_file_is_like_that_of_the_package(file: str, framework: str) -> None:
    with own.safe_open(file, framework) as ours, safetensors.safe_open(file, framework) as genuine:
        assert ours.keys() == genuine.keys()
        assert ours.offset_keys() == genuine.offset_keys()
        assert ours.metadata() == genuine.metadata()
        everything = genuine.get_tensors()
        assert list(ours.get_tensors()) == list(everything)
        for name in ours.keys():  # noqa: SIM118
            part, other = ours.get_slice(name), genuine.get_slice(name)
            assert (part.get_shape(), part.get_dtype()) == (other.get_shape(), other.get_dtype())
            assert_same(ours.get_tensor(name), everything[name])
            assert type(ours.get_tensor(name)) is type(everything[name])
            assert_same(ours.get_tensors()[name], everything[name])


INDICES = [
    *(0, 1, 5, slice(None), slice(0, 1), slice(1, 1), slice(1, 2), slice(2, 1), slice(0, 9), slice(3, None)),
    *((slice(None), slice(None, None, 2)), (0, 0), (0, slice(1, 3)), (0, 0, 0), (0, 0, 0, 0), ..., (..., 0)),
    *((0, ..., 0), (slice(None), 2, slice(1, 4, 3)), None, "text", [0, 1], ([0], 1), slice(None, None, -1)),
    *(slice(-1, None), slice(None, -1), (slice(None), 1.5), slice(None, None, 0), (), True, np.int64(1)),
]


@pytest.mark.parametrize("framework", ["np", "flax"])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_slices_are_those_of_the_package(file: str, index: Any, framework: str) -> None:
    ours = own.safe_open(file, framework).get_slice("wide")
    genuine = safetensors.safe_open(file, framework).get_slice("wide")
    assert_same(outcome(lambda: ours[index]), outcome(lambda: genuine[index]))


@pytest.mark.parametrize("index", [(0, 0, 0), [], True, (..., 0)], ids=str)
def test_parts_are_arrays_as_those_of_the_package(file: str, index: Any) -> None:
    ours = own.safe_open(file, "np").get_slice("wide")[index]
    genuine = safetensors.safe_open(file, "np").get_slice("wide")[index]
    assert type(ours) is type(genuine)
    assert ours.shape == genuine.shape


ERRORS: dict[str, Callable[[str], Any]] = {
    "outside": lambda path: own.safe_open(path, "np").get_slice("b")[100],
    "backwards": lambda path: own.safe_open(path, "np").get_slice("b")[::-1],
    "too long": lambda path: own.safe_open(path, "np").get_slice("b")[:100],
    "too many": lambda path: own.safe_open(path, "np").get_slice("b")[0, 0],
    "closed": lambda path: closed(own, path).get_tensor("b"),
    "absent": lambda path: own.safe_open(path, "np").get_tensor("zz"),
    "strings": lambda path: safetensors_numpy.save_file({"a": np.array(["x"])}, path),
    "strings of JAX": lambda path: safetensors_flax.save_file({"a": np.array(["x"])}, path),
    "lists": lambda path: safetensors_numpy.save_file({"a": [1]}, path),
    "native absent": lambda path: waystation.safetensors.open(path, framework="numpy").tensor("zz"),
    "native index": lambda path: waystation.safetensors.open(path, framework="numpy").slice("b")[100],
    "native bool": lambda path: waystation.safetensors.open(path, framework="numpy").slice("b")[True],
    "native closed": lambda path: native_closed(path).tensor("b"),
}


def native_closed(path: str) -> Any:
    with waystation.safetensors.open(path, framework="numpy") as opened:
        pass
    return opened


@pytest.mark.parametrize("call", ERRORS)
def test_every_error_names_the_file(file: str, call: str) -> None:
    with pytest.raises(errors.WaystationError) as caught:
        ERRORS[call](file)
    assert caught.value.context["path"] == file
    assert file in str(caught.value)


# ---- JAX ---------------------------------------------------------------------------------------


def test_jax_files_go_both_ways(tmp_path: Path) -> None:
    state = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones((2,), jnp.bfloat16), "c": jnp.zeros((0, 2))}
    safetensors_flax.save_file(state, tmp_path / "ours", {"k": "v"})
    safetensors.flax.save_file(dict(state), tmp_path / "genuine", {"k": "v"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "genuine").read_bytes()
    assert safetensors_flax.save(state) == safetensors.flax.save(dict(state))
    assert all(isinstance(array, jax.Array) for array in state.values())
    expected = safetensors.flax.load_file(tmp_path / "ours")  # its `load` knows no bfloat16
    for loaded in (
        safetensors_flax.load_file(tmp_path / "genuine"),
        safetensors_flax.load((tmp_path / "genuine").read_bytes()),
    ):
        assert loaded.keys() == expected.keys()
        for name, array in loaded.items():
            assert isinstance(array, jax.Array)
            assert_same(array, expected[name])


def test_both_names_of_the_jax_module_are_one() -> None:
    for name in safetensors_jax.__all__:
        assert getattr(safetensors_jax, name) is getattr(safetensors_flax, name)


def test_wide_numbers_become_what_jax_has(tmp_path: Path) -> None:
    path = tmp_path / "wide"
    safetensors.numpy.save_file({"f": np.array([1.5, 1e30]), "i": np.array([1, -2])}, path)
    expected = safetensors.flax.load_file(path)
    for loaded in (safetensors_flax.load_file(path), safetensors_flax.load(path.read_bytes())):
        for name, array in loaded.items():
            assert_same(array, expected[name])
    with jax.enable_x64(True):
        assert_same(safetensors_flax.load_file(path)["f"], np.array([1.5, 1e30]))


def test_an_error_of_a_part_of_a_wide_tensor_names_it(tmp_path: Path) -> None:
    path = str(tmp_path / "wide.safetensors")
    safetensors.numpy.save_file({"w": np.array([1.0, 1e300])}, path)
    part = own.safe_open(path, "flax").get_slice("w")
    assert part[:1].dtype == jnp.float32
    with pytest.raises(own.SafetensorError, match="float32") as caught:
        part[1:]
    assert caught.value.context == {"tensor": "w", "path": path}


def test_integers_that_jax_has_no_room_for_are_refused() -> None:
    data = safetensors_numpy.save({"i": np.array([1 << 40])})
    assert int(safetensors.flax.load(data)["i"][0]) != 1 << 40
    with pytest.raises(own.SafetensorError, match="fit"):
        safetensors_flax.load(data)


def test_jax_gets_no_lists() -> None:
    with pytest.raises(TypeError):
        safetensors_flax.save({"a": [1, 2]})
