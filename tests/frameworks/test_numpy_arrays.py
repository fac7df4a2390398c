from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.frameworks.store import bits, load, save

from waystation.errors import InvalidInput, Unsupported, WrongType
from waystation.frameworks import AbstractNumpy, dtypes, registry

VIEWS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "whole": lambda base: base,
    "transposed": lambda base: base.T,
    "every second": lambda base: base[::2, 1::2],
    "reversed": lambda base: base[::-1, ::-2],
    "broadcast": lambda base: np.broadcast_to(base[0], (3, base.shape[1])),
    "Fortran order": np.asfortranarray,
    "zero-dimensional": lambda base: base[1, 1, ...],
    "empty": lambda base: base[:0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "complex128", ">i4", "<U3"])
def test_views_of_any_strides_are_saved_without_copying(view: Any, dtype: str) -> None:
    base = np.arange(24).reshape(4, 6).astype(np.float32).astype(dtype)
    array = view(base)
    (source,) = registry.codec_by_name("numpy").sources([array])
    assert source.mutable
    if view is not np.asfortranarray:
        assert base.ctypes.data <= source.blocks[0].address < base.ctypes.data + base.nbytes or not array.size
    loaded = load(save(array))
    assert loaded.dtype == array.dtype
    assert loaded.shape == array.shape
    assert bits(loaded) == bits(array)


@pytest.mark.parametrize("entry", dtypes.TABLE.values(), ids=dtypes.TABLE)
def test_every_dtype_round_trips(entry: dtypes.LogicalDtype, pattern: Any) -> None:
    array = pattern((3, 5), entry.host)
    loaded = load(save(array))
    assert loaded.dtype == entry.host
    assert bits(loaded) == bits(array)


@pytest.mark.parametrize(
    "scalar",
    [
        np.float64(1.5),
        np.bool_(True),
        np.str_("héllo"),
        np.bytes_(b"ab\0c"),
        np.datetime64("2026-11-21", "ns"),
        np.dtype("bfloat16").type(2.5),
        np.dtype("int4").type(-3),
        np.zeros((), "i4,f8")[()],
    ],
    ids=lambda scalar: type(scalar).__name__,
)
def test_scalars_come_back_as_scalars(scalar: Any) -> None:
    saved = save(scalar)
    assert saved.stored.framework == "scalar"
    loaded = load(saved)
    assert type(loaded) is type(scalar)
    assert loaded == scalar
    again = load(saved, registry.codec_by_name("scalar").abstract(saved.stored))
    assert type(again) is type(scalar)


def test_the_loaded_array_is_the_filled_buffer() -> None:
    codec = registry.codec_by_name("numpy")
    saved = save(np.arange(5.0))
    targets = codec.default_targets([saved.stored])
    boxes = [saved.boxes(targets[0])]
    assert codec.assemble(targets, boxes)[0] is boxes[0][0]


@pytest.mark.parametrize(
    "abstract",
    [np.zeros(3, np.float16), AbstractNumpy((3,), "float16"), AbstractNumpy([3], np.float16)],  # type: ignore[arg-type]
)
def test_abstract_leaves_cast(abstract: Any) -> None:
    loaded = load(save(np.arange(3.0)), abstract)
    assert loaded.dtype == np.float16
    assert loaded.tolist() == [0, 1, 2]


def test_an_abstract_leaf_without_dtype_keeps_the_saved_one() -> None:
    assert load(save(np.arange(3, dtype=np.int8)), AbstractNumpy((3,))).dtype == np.int8
    assert load(save(np.arange(3, dtype=np.int8)), registry.ANY_NUMPY).dtype == np.int8


def test_a_foreign_byte_order_can_be_cast_away() -> None:
    loaded = load(save(np.arange(3, dtype=">i4")), AbstractNumpy((3,), "int32"))
    assert loaded.tolist() == [0, 1, 2]


def test_another_shape_is_refused_naming_both() -> None:
    with pytest.raises(InvalidInput, match=r"shape \(3,\) was saved.*asks for \(4,\)") as raised:
        load(save(np.arange(3)), AbstractNumpy((4,), "int64"))
    assert raised.value.context["index"] == 0


def test_a_refused_leaf_is_named_by_its_index() -> None:
    leaves = [np.zeros(1), np.array([object()])]
    with pytest.raises(Unsupported, match="Python objects") as raised:
        registry.codec_by_name("numpy").sources(leaves)
    assert raised.value.context["index"] == 1


def test_masked_arrays_are_refused_with_advice() -> None:
    with pytest.raises(Unsupported, match=r"\.data and \.mask"):
        save(np.ma.masked_array([1, 2], [True, False]))


def test_abstract_leaves_cannot_be_saved() -> None:
    with pytest.raises(InvalidInput, match="abstract leaf"):
        save(AbstractNumpy((3,), "int8"))


def test_a_scalar_has_no_shape() -> None:
    with pytest.raises(InvalidInput, match="scalar"):
        AbstractNumpy((3,), "int8", scalar=True)


@pytest.mark.parametrize("shape", [(1.5,), "ab", 3, None, ([1],)], ids=repr)
def test_a_shape_of_something_else_is_refused(shape: Any) -> None:
    with pytest.raises(WrongType, match="a shape must be a tuple of integers"):
        AbstractNumpy(shape)


def test_what_no_array_can_be_like_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no negative extents"):
        AbstractNumpy((-1,))
    with pytest.raises(WrongType, match="'nope' is no dtype of NumPy"):
        AbstractNumpy((1,), "nope")
    assert AbstractNumpy([np.int64(2), 3]).shape == (2, 3)  # type: ignore[arg-type]
