"""Casts between logical dtypes: which lose values, and how elements are converted.

Invariants: without `CastRule.may_lose` an element that is cast is equal to what was stored, or that value
rounded once to the nearest one of the new dtype (ties go to even, in float8_e8m0fnu up); any other element
raises `LossyCast`.
Infinity stays infinity and NaN stays NaN, or they raise. ml_dtypes rounds 64-bit numbers twice, by way of
float32; here they are rounded to odd first, after which the second rounding gives the nearest value.
Elements are converted in blocks that fit a core's cache, so a cast takes next to no memory of its own; the
processors share large arrays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from waystation import _native
from waystation._errors import InvalidInput, LossyCast, WaystationError
from waystation._options import Options
from waystation._threads import Threads, processor_count
from waystation.frameworks.base import CastRule, StoredArray
from waystation.frameworks.dtypes import LogicalDtype, of_name, of_numpy

Values = NDArray[Any]

_BLOCK_ITEMS = 1 << 16
# Memory of less was touched with others, or is soon.
_LARGE_BYTES = 2 << 20
# A thread is started for so much of an array.
_THREAD_BYTES = 4 << 20


def rule_of_loads(options: Options) -> CastRule:
    """The rule of what is loaded."""
    return CastRule(options.array.loading.allow_lossy_casts, "array.loading.allow_lossy_casts")


@functools.lru_cache(maxsize=1024)
def check(stored: str, wanted: str, rule: CastRule) -> None:
    """Refuses a cast that is impossible, or that loses values of nearly every array.

    Numbers become other numbers. Everything else stays what it is; packed bytes may be had as `uint8`.

    Raises:
        InvalidInput: No value of `stored` can become one of `wanted`.
        LossyCast: More than rounding is lost: floats become integers, complex numbers real ones, or anything
            becomes a bool; and the rule forbids it.
    """
    if stored == wanted:
        return
    source, target = of_name(stored), of_name(wanted)
    _check_possible(source, target)
    lost = _loss(source, target)
    if lost is not None and not rule.may_lose:
        raise LossyCast(
            f"the saved dtype {stored} cannot be loaded as {wanted}: {lost}; ask for {stored} and convert "
            f"the array afterwards, or set {rule.option}"
        )


def _check_possible(source: LogicalDtype, target: LogicalDtype) -> None:
    refusal = f"the saved dtype {source.name} cannot be loaded as {target.name}"
    categories = {source.category, target.category}
    if "key" in categories:
        raise InvalidInput(
            f"{refusal}: PRNG keys keep their implementation; ask for {source.name}, or save and load "
            "jax.random.key_data(key) to have them as numbers"
        )
    if "packed" in categories:
        if target.name != "uint8" or source.category != "packed":
            raise InvalidInput(f"{refusal}: packed 4-bit values load only as themselves or as uint8")
    elif "other" in categories:
        raise InvalidInput(f"{refusal}: only numbers can be cast; ask for {source.name}")


def check_request(shape: Sequence[int], dtype: str, stored: StoredArray, index: int) -> None:
    """Raises InvalidInput if an abstract leaf asks for what the stored array cannot give. Whether values may
    be lost is for the load to say, which knows its options."""
    if tuple(shape) != tuple(stored.shape):
        raise InvalidInput(
            f"an array of shape {tuple(stored.shape)} was saved, the abstract state asks for {tuple(shape)}; "
            "give the saved shape and reshape after loading",
            index=index,
        )
    if dtype != stored.dtype:
        try:
            _check_possible(of_name(stored.dtype), of_name(dtype))
        except WaystationError as error:
            raise error.where(index=index)


def _loss(source: LogicalDtype, target: LogicalDtype) -> str | None:
    """What a cast loses by the kinds of the two dtypes alone."""
    if source.category == target.category or source.category == "packed":
        return None
    if target.category == "bool":
        return "a bool keeps only whether a number is zero"
    if source.category == "complex":
        return "the imaginary part would be lost; load it as complex, take .real"
    if source.category == "float" and target.category == "integer":
        return "an integer keeps no fraction, no infinity and no NaN"
    return None


def copy(destination: Values, source: Values, rule: CastRule) -> None:
    """Copies `source` into `destination` of the same shape, casting.

    Raises:
        LossyCast: A value of `source` would become another one, or NaN, or an infinity that it is not; the
            message has the first such value. `destination` has a part of the values then.
    """
    if source.dtype == destination.dtype:
        np.copyto(destination, source)
        return
    check(of_numpy(source.dtype).name, of_numpy(destination.dtype).name, rule)
    convert = _conversion(source.dtype, destination.dtype, rule)
    parts = _parts(destination, source)
    if len(parts) == 1:
        _convert(destination, source, convert)
        return
    _together([functools.partial(_convert, *part, convert) for part in parts])


def _together(works: Sequence[Callable[[], None]]) -> None:
    """Does work in threads of its own.

    Raises:
        LossyCast: Of several that raise it the first.
    """
    with Threads(len(works), "cast") as threads:
        for done in [threads.submit(work) for work in works]:
            done.result()


def _parts(destination: Values, source: Values) -> list[tuple[Values, Values]]:
    """Both in as many parts as there are processors to cast large arrays, in order."""
    count = min(processor_count(), destination.nbytes // _THREAD_BYTES)
    axis = next((axis for axis, extent in enumerate(destination.shape) if extent >= count), None)
    if count < 2 or axis is None:
        return [(destination, source)]
    both = (np.array_split(array, count, axis) for array in (destination, source))
    return list(zip(*both, strict=True))


def _convert(destination: Values, source: Values, convert: _Conversion) -> None:
    """Converts block by block."""
    dtypes = [destination.dtype.newbyteorder("="), source.dtype.newbyteorder("=")]
    contiguous: Any = [["writeonly", "contig"], ["readonly", "contig"]]  # which NumPy's stubs do not know
    blocks = np.nditer(
        [destination, source],
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=contiguous,
        op_dtypes=dtypes,
        casting="equiv",
        buffersize=_BLOCK_ITEMS,
    )
    is_large = destination.nbytes >= _LARGE_BYTES
    with np.errstate(all="ignore"), blocks:
        for place, values in blocks:
            if is_large:
                _native.prepare_memory(place.__array_interface__["data"][0], place.nbytes)
            convert(place, values)


# ---- conversions of blocks ---------------------------------------------------------------------

_Conversion = Callable[[Values, Values], object]

_COMPONENTS = {
    "complex32": np.dtype(np.float16),
    "bcomplex32": np.dtype(ml_dtypes.bfloat16),
    "complex64": np.dtype(np.float32),
    "complex128": np.dtype(np.float64),
}


@functools.lru_cache(maxsize=1024)
def _conversion(stored: np.dtype[Any], wanted: np.dtype[Any], rule: CastRule) -> _Conversion:
    """What converts contiguous blocks of one dtype, in native byte order, to another."""
    source, target = of_numpy(stored.newbyteorder("=")), of_numpy(wanted.newbyteorder("="))
    if source.host == target.host:  # of another byte order
        return _copied
    if source.category == "complex":
        return _from_complex(source, target, rule)
    if target.category == "complex":
        component = _component(target)
        real = _real_conversion(source.host, component, rule)

        def to_complex(place: Values, values: Values) -> None:
            parts = place.view(component)
            found = np.empty(values.shape, component)
            real(found, values)
            parts[0::2] = found
            parts[1::2] = 0

        return to_complex
    return _real_conversion(source.host, target.host, rule)


def _component(logical: LogicalDtype) -> np.dtype[Any]:
    found: np.dtype[Any] = _COMPONENTS.get(logical.name, np.dtype(np.longdouble))
    return found


def _from_complex(source: LogicalDtype, target: LogicalDtype, rule: CastRule) -> _Conversion:
    component = _component(source)
    if target.category == "complex":
        wanted = _component(target)
        both = _real_conversion(component, wanted, rule)
        return lambda place, values: both(place.view(wanted), values.view(component))
    if target.category == "bool":
        parts_are_set = _real_conversion(component, np.dtype(np.bool_), rule)

        def to_bool(place: Values, values: Values) -> None:
            found = np.empty(2 * values.size, np.bool_)
            parts_are_set(found, values.view(component))
            np.logical_or(found[0::2], found[1::2], out=place)

        return to_bool
    real = _real_conversion(component, target.host, rule)
    return lambda place, values: real(place, np.ascontiguousarray(values.view(component)[0::2]))


def _real_conversion(stored: np.dtype[Any], wanted: np.dtype[Any], rule: CastRule) -> _Conversion:
    """The same for real numbers. Values pass through a dtype of NumPy's own that holds all of them."""
    if stored == wanted:
        return _copied
    if stored == ml_dtypes.bfloat16 and wanted == np.float32:
        return _extended
    between = _held_exactly(stored)
    range_ = None if rule.may_lose else _range(stored, wanted, between)
    put = _putting(between, wanted)
    if range_ is None and wanted == between:
        return _copied

    def convert(place: Values, values: Values) -> None:
        exact = values if values.dtype == between else values.astype(between)
        if range_ is not None:
            range_.check(exact, stored, wanted, rule)
        put(place, exact)

    return convert


def _held_exactly(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A dtype that NumPy computes with, and that holds all values of another."""
    if (dtype.isbuiltin == 1 and dtype.kind in "iu") or (dtype.kind == "f" and dtype.itemsize >= 4):
        return dtype
    category = of_numpy(dtype).category
    if category == "float":
        return np.dtype(np.float32)
    return np.dtype(np.uint8 if category == "bool" or ml_dtypes.iinfo(dtype).min == 0 else np.int8)


# ---- what a dtype holds ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Range:
    """Which values a dtype holds.

    Attributes:
        least: The smallest number that it has a nearest value for.
        most: The largest one.
        text: The two, as people write them.
        has_infinity: Whether it has both infinities.
        has_nan: Whether it has NaN.
    """

    least: Any
    most: Any
    text: str
    has_infinity: bool
    has_nan: bool

    def check(self, values: Values, stored: np.dtype[Any], wanted: np.dtype[Any], rule: CastRule) -> None:
        """Raises LossyCast if any of the values is outside."""
        if not values.size or (values.min() >= self.least and values.max() <= self.most):
            return  # NaN fails both comparisons
        is_lost = ~((values >= self.least) & (values <= self.most))
        if values.dtype.kind == "f":
            if self.has_nan:
                is_lost &= ~np.isnan(values)
            if self.has_infinity:
                is_lost &= ~np.isinf(values)
        if is_lost.any():
            first = values[is_lost.argmax()].item()
            raise LossyCast(
                f"the value {first} was saved as {stored}, and {wanted} holds {self.text}; ask for a wider "
                f"dtype, or set {rule.option}"
            )


def _range(stored: np.dtype[Any], wanted: np.dtype[Any], between: np.dtype[Any]) -> _Range | None:
    """What `wanted` holds, as values of `between`; None if it holds every value of `stored`."""
    if of_numpy(wanted).category == "integer":
        limits = ml_dtypes.iinfo(wanted)
        found = _Range(int(limits.min), int(limits.max), f"{limits.min} to {limits.max}", False, False)
    else:
        found = _range_of_floats(wanted, between)
    return None if _holds_all(found, stored) else found


def _holds_all(held: _Range, stored: np.dtype[Any]) -> bool:
    category = of_numpy(stored).category
    if category == "bool":
        return bool(held.least <= 0 and held.most >= 1)
    if category == "integer":
        limits = ml_dtypes.iinfo(stored)
        return bool(held.least <= int(limits.min) and int(limits.max) <= held.most)
    has_infinity, has_nan = _specials(stored)
    if has_infinity > held.has_infinity or has_nan > held.has_nan:
        return False
    most = _finfo(stored).max
    return bool(held.least <= -most and most <= held.most)


def _range_of_floats(wanted: np.dtype[Any], between: np.dtype[Any]) -> _Range:
    """A number is held whose nearest value is finite, as if exponents went on: less than half the last step
    beyond the largest value. An exponent-only dtype has neither signs nor zero."""
    limits = _finfo(wanted)
    has_infinity, has_nan = _specials(wanted)
    if wanted == np.longdouble or (wanted == np.float64 and between.kind in "iu"):
        return _Range(-math.inf, math.inf, "", has_infinity, has_nan)
    largest = float(limits.max)
    last_step = math.ldexp(1.0, math.frexp(largest)[1] - 1 - limits.nmant)
    most = _before_the_tie(largest, last_step, between)
    is_exponent_only = _is_exponent_only(wanted)
    smallest = float(limits.tiny) if is_exponent_only else -largest
    least: Any = -most
    if is_exponent_only:
        least = math.ceil(smallest) if between.kind in "iu" else smallest
    finite = f"numbers from {smallest:.8g} to {largest:.8g}"
    others = [name for name, is_held in (("infinities", has_infinity), ("NaN", has_nan)) if is_held]
    return _Range(least, most, ", ".join([finite, *others]), has_infinity, has_nan)


def _before_the_tie(largest: float, last_step: float, between: np.dtype[Any]) -> Any:
    """The largest value of `between` that is less than half a step beyond the largest of a dtype."""
    if between.kind in "iu":
        return math.ceil(int(largest) + last_step / 2) - 1
    with np.errstate(over="ignore"):
        tie = between.type(largest) + between.type(last_step) / between.type(2)
    return np.nextafter(tie, between.type(0))


def _finfo(dtype: np.dtype[Any]) -> Any:
    return np.finfo(dtype) if dtype == np.longdouble else ml_dtypes.finfo(dtype)


def _is_exponent_only(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype of floats is powers of two, without sign and zero."""
    return float(_finfo(dtype).min) > 0


@functools.lru_cache(maxsize=256)
def _specials(dtype: np.dtype[Any]) -> tuple[bool, bool]:
    """Whether a dtype of floats has infinities, and NaN."""
    with np.errstate(all="ignore"):
        back = np.array([np.inf, np.nan], np.float32).astype(dtype).astype(np.float32)
    return bool(np.isinf(back[0])), bool(np.isnan(back[1]))


# ---- converting what is held -------------------------------------------------------------------


def _putting(between: np.dtype[Any], wanted: np.dtype[Any]) -> _Conversion:
    """What rounds values of `between` to the nearest ones of `wanted`, once."""
    category = of_numpy(wanted).category
    if category == "bool":
        return lambda place, values: np.not_equal(values, 0, out=place)
    if category == "integer":
        return _truncated if between.kind == "f" else _copied
    if _is_exponent_only(wanted):
        return lambda place, values: _put_exponents(place, _rounded_to_odd(values))
    is_narrow = wanted.kind != "f" or wanted.itemsize < 4
    if not is_narrow or between == np.float32 or (between.kind in "iu" and between.itemsize <= 2):
        return _copied
    if wanted == np.float16 and between != np.longdouble:
        return _copied  # NumPy rounds float64 once; integers that float16 holds are exact in float32
    return lambda place, values: _copied(place, _rounded_to_odd(values))


def _copied(place: Values, values: Values) -> None:
    np.copyto(place, values, casting="unsafe")


def _extended(place: Values, values: Values) -> None:
    """bfloat16 as float32, of which it is the upper half: faster than a cast, and without the interpreter."""
    np.left_shift(values.view(np.uint16), 16, out=place.view(np.uint32), dtype=np.uint32)


def _put_exponents(place: Values, values: Values) -> None:
    """float32 as exponent-only floats. ml_dtypes rounds subnormal ones up, so they are doubled first."""
    is_subnormal = np.abs(values) < np.finfo(np.float32).tiny
    _copied(place, np.where(is_subnormal, values * np.float32(2), values))
    place.view(np.uint8)[is_subnormal & (values > 0)] -= 1


def _truncated(place: Values, values: Values) -> None:
    """Floats as integers: toward zero, within the range, and NaN as 0."""
    limits = ml_dtypes.iinfo(place.dtype)
    whole = np.dtype(np.int64 if limits.min < 0 else np.uint64)
    # The float next to the upper limit may be beyond it.
    bound = np.nextafter(values.dtype.type(limits.max), values.dtype.type(0))
    found = np.clip(np.nan_to_num(values, nan=0.0), values.dtype.type(limits.min), bound).astype(whole)
    found[values >= values.dtype.type(limits.max)] = limits.max
    _copied(place, found)


def _rounded_to_odd(values: Values) -> Values:
    """Values as float32: exact, or of the two next to it the one whose last bit is 1.

    Rounding that to fewer than 23 bits gives what rounding the value itself gives.
    """
    if values.dtype == np.float32:
        return values
    if values.dtype.kind in "iu":
        values = (_sticky(values) if values.dtype.itemsize == 8 else values).astype(np.float64)
    elif values.dtype != np.float64:
        values = _odd(values, np.dtype(np.float64), np.dtype(np.uint64))
    return _odd(values, np.dtype(np.float32), np.dtype(np.uint32))


def _sticky(values: Values) -> Values:
    """Integers that float64 holds: the lowest 11 bits of large ones become one, set if any of them is."""
    found = ((values >> 11) | ((values & 0x7FF) != 0)) << 11
    is_large = values > 1 << 53
    if values.dtype.kind == "i":
        is_large |= values < -(1 << 53)
    return np.where(is_large, found, values)


def _odd(values: Values, narrower: np.dtype[Any], bits: np.dtype[Any]) -> Values:
    found = values.astype(narrower)
    back = found.astype(values.dtype)
    is_inexact = (back != values) & ~np.isnan(values)
    is_beyond = is_inexact & (np.abs(back) > np.abs(values))
    words = found.view(bits)
    words -= is_beyond.astype(bits)
    words |= is_inexact.astype(bits)
    return found
