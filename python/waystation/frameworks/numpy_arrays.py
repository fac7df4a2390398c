"""NumPy leaves: arrays of any layout, scalars, and the abstract leaf that stands for them.

Invariants: nothing is copied; the blocks of an array point into the user's memory, which is why they are
marked mutable; loaded arrays are the very buffers that the loader filled.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waystation._errors import InvalidInput, UnsupportedLeaf, WaystationError, WrongType
from waystation.frameworks import casts, dtypes
from waystation.frameworks.base import ArraySource, Block, Codec, Contiguous, InPlace, StoredArray, Target
from waystation.frameworks.carried import CarriedArray, DescribedArray
from waystation.frameworks.kinds import contiguous_by_kind, targets_by_kind
from waystation.frameworks.storage import Storage, StorageMetadata
from waystation.tree import register_leaf


@dataclass(frozen=True, slots=True)
class AbstractNumpy:
    """A NumPy array without its data: asks a load for one.

    Attributes:
        shape: The shape of the array.
        dtype: Anything that `numpy.dtype` takes; None keeps the saved dtype.
        scalar: Whether a NumPy scalar is wanted instead of an array; the shape is then `()`.
        storage: Says how the array is stored, in what `metadata` returns.
    """

    shape: tuple[int, ...]
    dtype: Any = None
    scalar: bool = False
    storage: Storage | None = field(default=None, kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "shape", tuple(map(operator.index, self.shape)))
        except TypeError:
            raise WrongType(f"a shape must be a tuple of integers, not {self.shape!r:.60}") from None
        if min(self.shape, default=0) < 0:
            raise InvalidInput(f"a shape has no negative extents, as {self.shape} has")
        try:
            object.__setattr__(self, "dtype", None if self.dtype is None else np.dtype(self.dtype))
        except TypeError as error:
            raise WrongType(f"{self.dtype!r:.60} is no dtype of NumPy: {error}") from None
        if self.scalar and self.shape:
            raise InvalidInput(f"a NumPy scalar has the shape (), not {self.shape}; leave scalar out")

    @property
    def storage_metadata(self) -> StorageMetadata | None:
        """How the array is stored; None unless `metadata` says so."""
        return None if self.storage is None else self.storage()

    def __reduce__(self) -> tuple[Any, ...]:
        return AbstractNumpy, (self.shape, self.dtype, self.scalar)  # the checkpoint does not come along


# A dataclass would be taken apart as a container.
register_leaf(AbstractNumpy)


class AnyNumpy:
    """The abstract leaf for a NumPy array of whatever shape and dtype was saved."""

    def __repr__(self) -> str:
        return "ANY_NUMPY"


ANY_NUMPY = AnyNumpy()


# Where a scalar of bytes or text goes that was saved as one, and is as long as its dtype says.
_EXACT_TEXT = "exact text"


class _InPlace:
    """Loads into NumPy arrays of the caller."""

    def loaded_into(self, abstracts: Sequence[Any], targets: Sequence[Target]) -> list[Target]:
        """The targets with the arrays that are loaded into, which must be writeable."""
        found = []
        for index, (abstract, target) in enumerate(zip(abstracts, targets, strict=True)):
            is_array = isinstance(abstract, np.ndarray)
            if is_array and not abstract.flags.writeable:
                raise InvalidInput("a read-only array cannot be loaded into; give a copy", index=index)
            found.append(replace(target, into=abstract) if is_array else target)
        return found

    def may_write(self, array: Any) -> bool:
        """Whether an array is writeable."""
        writeable: bool = array.flags.writeable
        return writeable

    def wrote(self, owners: Sequence[object]) -> None:
        """Nobody needs to know."""

    def memory_of(self, target: Target) -> NDArray[np.uint8] | None:
        """The memory of such an array, if it is C-contiguous."""
        array: np.ndarray[Any, Any] = target.into
        if array.size == 0 or not array.flags.c_contiguous:
            return None
        memory: NDArray[np.uint8] = array.reshape(-1).view(np.uint8)
        return memory

    def span_of(self, target: Target) -> tuple[int, int] | None:
        """Where such an array begins and ends, if its memory is in one piece."""
        array: np.ndarray[Any, Any] = target.into
        if array.size == 0:
            return None
        steps = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
        begin = array.ctypes.data + sum(step for step in steps if step < 0)
        end = array.ctypes.data + sum(step for step in steps if step > 0) + array.itemsize
        return (begin, end) if end - begin == array.nbytes else None

    def put_into(self, target: Target, leaf: Any) -> np.ndarray[Any, Any]:
        """Such an array, with the values of another."""
        array: np.ndarray[Any, Any] = target.into
        if array.ctypes.data != leaf.ctypes.data:
            np.copyto(array, leaf, casting="equiv")
        return array


class NumpyCodec(Codec):
    """NumPy arrays and scalars to blocks and back."""

    name = "numpy"
    in_place: InPlace | None = _InPlace()

    def is_leaf(self, value: Any) -> bool:
        """Whether `value` is a NumPy array or scalar, stands for one, or describes another array."""
        kinds = np.ndarray | np.generic | AbstractNumpy | AnyNumpy | CarriedArray | DescribedArray
        return isinstance(value, kinds)

    def sources(self, leaves: Sequence[Any]) -> list[ArraySource]:
        """Describes arrays and scalars, without copying."""
        found = []
        for index, leaf in enumerate(leaves):
            try:
                found.append(_source(leaf))
            except WaystationError as error:
                raise error.where(index=index)
        return found

    def contiguous(self, leaves: Sequence[Any]) -> Contiguous:
        """Describes C-contiguous arrays."""
        alike = [leaf.dtype if type(leaf) is np.ndarray else None for leaf in leaves]

        def describe(place: int) -> ArraySource:
            leaf = leaves[place]
            return _described(leaf, dtypes.of_numpy(leaf.dtype), "numpy", [])

        return contiguous_by_kind(describe, leaves, alike, hold=False)

    def targets(self, abstracts: Sequence[Any], stored: Sequence[StoredArray]) -> list[Target]:
        """Each array whole, in host memory."""
        found = []
        known: dict[Any, Target] = {}  # of those that differ in nothing that counts
        for index, (abstract, array) in enumerate(zip(abstracts, stored, strict=True)):
            is_any = isinstance(abstract, AnyNumpy)
            kind = (type(abstract), id(array), *(() if is_any else _asked(abstract)))
            target = known.get(kind)
            if target is None:
                try:
                    target = known[kind] = _target(abstract, array, index)
                except WaystationError as error:
                    raise error.where(index=index)
            found.append(target)
        return found

    def default_targets(self, stored: Sequence[StoredArray]) -> list[Target]:
        """Each array whole, in host memory, as it was saved."""
        return [_whole(array, array.dtype, array.framework == "scalar") for array in stored]

    def place_of(self, place: Any) -> None:
        """Nothing: NumPy arrays are in host memory."""
        if place not in (None, "cpu"):
            raise InvalidInput(
                f"NumPy arrays are in host memory, not on {place!r:.200}; leave device and sharding out, or "
                "load for another framework"
            )

    def placed(
        self, stored: Sequence[StoredArray], dtypes: Sequence[str], places: Sequence[Any]
    ) -> list[Target]:
        """Each array whole, in host memory."""
        return targets_by_kind(_placed, stored, dtypes, places)

    def assemble(self, targets: Sequence[Target], boxes: Sequence[list[Any]]) -> list[Any]:
        """The filled buffers themselves; scalars taken out of theirs."""
        return [
            (_text(own[0]) if target.placement == _EXACT_TEXT else own[0][()]) if target.placement else own[0]
            for target, own in zip(targets, boxes, strict=True)
        ]

    def stays_on_host(self, target: Target) -> bool:
        """Whether the leaf is the buffer itself: arrays are, scalars are taken out of theirs."""
        return not target.placement

    def abstract(self, stored: StoredArray) -> Any:
        """What stands for a stored array in an abstract state."""
        logical = dtypes.of_stored(stored)
        # What is stored was checked already, and there may be 100,000 of them.
        abstract = object.__new__(AbstractNumpy)
        put = object.__setattr__
        put(abstract, "shape", tuple(stored.shape))
        put(abstract, "dtype", None if logical.category == "key" else logical.host)
        put(abstract, "scalar", stored.framework == "scalar")
        put(abstract, "storage", None)
        return abstract

    def shown(self, stored: StoredArray, storage: Storage) -> Any:
        """What stands for a stored array, with how it is stored."""
        abstract = self.abstract(stored)
        object.__setattr__(abstract, "storage", storage)  # nobody else has it yet
        return abstract


def stored_scalar(value: np.ndarray[Any, Any]) -> StoredArray:
    """A scalar of the tree file as if it were stored as a zero-dimensional array."""
    logical = dtypes.of_numpy(value.dtype)
    return StoredArray((), logical.name, "numpy", logical.storage, logical.storage_shape(()), None, {})


def host_block(array: np.ndarray[Any, Any], logical: dtypes.LogicalDtype, offset: tuple[int, ...]) -> Block:
    """A block over a host array; `offset` is in storage terms."""
    return Block(
        offset,
        array.shape if logical.host_trailing else array.shape + logical.trailing,
        logical.storage_strides(array.strides),
        array.__array_interface__["data"][0],
        array,
    )


def _source(leaf: Any) -> ArraySource:
    if isinstance(leaf, CarriedArray):
        return leaf.source()
    if isinstance(leaf, DescribedArray):
        return leaf.source
    scalar = isinstance(leaf, np.generic)
    if not scalar and not isinstance(leaf, np.ndarray):
        raise InvalidInput(f"{leaf!r} is an abstract leaf; save the array itself")
    # Where there is a masked array, its module is imported; naming it here would import it for everybody.
    if "numpy.ma" in sys.modules and isinstance(leaf, np.ma.MaskedArray):
        raise UnsupportedLeaf("masked arrays cannot be saved; save their .data and .mask as two leaves")
    array = np.asarray(leaf)
    # An array of no bytes or text has room for one element; a scalar of that has none.
    logical = dtypes.of_numpy(leaf.dtype)
    block = host_block(array, logical, (0,) * len(logical.storage_shape(array.shape)))
    return _described(array, logical, "scalar" if scalar else "numpy", [block])


def _described(
    array: np.ndarray[Any, Any], logical: dtypes.LogicalDtype, framework: str, blocks: list[Block]
) -> ArraySource:
    return ArraySource(
        array.shape,
        logical.name,
        framework,
        logical.storage,
        logical.storage_shape(array.shape),
        storage_item_bytes=logical.storage_item_bytes,
        blocks=blocks,
        mutable=framework == "numpy",
    )


def _asked(abstract: Any) -> tuple[Any, ...]:
    return abstract.shape, abstract.dtype, isinstance(abstract, AbstractNumpy) and abstract.scalar


def _target(abstract: Any, stored: StoredArray, index: int) -> Target:
    if isinstance(abstract, AnyNumpy):
        return _whole(stored, stored.dtype, scalar=False)
    scalar = abstract.scalar if isinstance(abstract, AbstractNumpy) else isinstance(abstract, np.generic)
    dtype = stored.dtype if abstract.dtype is None else dtypes.of_numpy(abstract.dtype).name
    if dtype != stored.dtype and dtypes.numpy_dtype(stored.dtype) == abstract.dtype:
        dtype = stored.dtype  # packed values are held as the bytes that they are
    casts.check_request(abstract.shape, dtype, stored, index)
    return _whole(stored, dtype, scalar)


def _placed(stored: StoredArray, dtype: str, _place: Any, index: int) -> Target:
    if dtype != stored.dtype:
        casts.check_request(stored.shape, dtype, stored, index)
    return _whole(stored, dtype, scalar=False)


def _whole(stored: StoredArray, dtype: str, scalar: bool) -> Target:
    dtypes.of_stored(stored)
    shape = tuple(stored.shape)
    is_text = stored.framework == "scalar" and dtypes.of_stored(stored).host.kind in "SU"
    placement = _EXACT_TEXT if scalar and is_text else scalar
    return Target(shape, dtype, [((0,) * len(shape), shape)], placement=placement)


def _text(array: np.ndarray[Any, Any]) -> np.bytes_ | np.str_:
    """A scalar of all the bytes or characters that were saved: NumPy takes NULs at the end for padding."""
    if array.dtype.kind == "S":
        return np.bytes_(array.tobytes())
    order = "be" if array.dtype.str[0] == ">" else "le"
    return np.str_(array.tobytes().decode(f"utf-32-{order}", "surrogatepass"))


CODEC = NumpyCodec()
