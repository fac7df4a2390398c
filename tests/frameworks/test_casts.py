"""Every cast gives an equal value, the nearest one, or an error: between all pairs of dtypes, for NumPy.

The oracle does not cast: it compares exact fractions with the neighbours that the wanted dtype has.

`make test` tries 64 random values of each dtype, `make test-long` 2,000.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import warnings
from bisect import bisect_left
from fractions import Fraction
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.long import amount, only_long

from waystation._errors import InvalidInput, LossyCast
from waystation.frameworks import casts, dtypes
from waystation.frameworks.base import CastRule
from waystation.frameworks.dtypes import LogicalDtype

STRICT = CastRule(may_lose=False, option="the option")
LENIENT = CastRule(may_lose=True, option="the option")
OTHERS = ["numpy:>f4", "numpy:>i2", "numpy:>f8", dtypes.of_numpy(np.dtype(np.longdouble)).name]
NUMBERS = sorted(
    [entry for entry in dtypes.TABLE.values() if entry.category not in ("key", "packed", "other")]
    + [dtypes.of_name(name) for name in OTHERS],
    key=lambda entry: entry.name,
)
REAL = [entry for entry in NUMBERS if entry.category != "complex"]
RANDOM_VALUES = amount(24, 2000)  # four times as many of a narrow dtype: of a dtype of 8 bits, all


def is_narrow(logical: LogicalDtype) -> bool:
    return logical.host.itemsize <= 2


@lru_cache
def all_values(name: str) -> list[Fraction]:
    """Every finite value of a dtype of at most 16 bits, in order."""
    host = dtypes.of_name(name).host
    bits = np.arange(1 << ml_dtypes.finfo(host).bits, dtype=f"u{host.itemsize}")
    with np.errstate(all="ignore"):
        floats = bits.view(host).astype(np.float64)
    return sorted({Fraction(value) for value in floats[np.isfinite(floats)].tolist()})


def exact(value: Any) -> Fraction | None:
    """The value of an element; None for infinities and NaN."""
    if isinstance(value, np.longdouble):
        if not np.isfinite(value):
            return None
        high = np.float64(value) if np.isfinite(np.float64(value)) else None
        if high is None:
            mantissa, exponent = np.frexp(value)
            whole = int(np.ldexp(mantissa, 64))
            return Fraction(whole) * Fraction(2) ** (int(exponent) - 64)
        return Fraction(float(high)) + Fraction(float(np.float64(value - high)))
    if isinstance(value, np.integer | np.bool_):
        return Fraction(int(value))
    converted = float(value)
    return Fraction(converted) if math.isfinite(converted) else None


def neighbours(name: str, value: Fraction) -> list[Fraction]:
    """The finite values of a dtype next to a number, itself among them where it is one."""
    logical = dtypes.of_name(name)
    if logical.category in ("integer", "bool"):
        limits = (0, 1) if logical.category == "bool" else _limits(logical)
        return [
            Fraction(min(max(near, limits[0]), limits[1])) for near in (math.floor(value), math.ceil(value))
        ]
    if is_narrow(logical):
        values = all_values(name)
        at = bisect_left(values, value)
        return values[max(0, at - 1) : at + 1]
    bits, least_exponent = {4: (24, -149), 8: (53, -1074)}.get(logical.host.itemsize, (64, -16445))
    if value == 0:
        return [value]
    exponent = math.floor(math.log2(abs(value.numerator)) - math.log2(value.denominator)) + 1
    step = Fraction(2) ** max(exponent - bits - 1, least_exponent)
    steps = [finer for finer in (step, 2 * step, 4 * step) if finer >= Fraction(2) ** least_exponent]
    around = [
        near * finer for finer in steps for near in (math.floor(value / finer), math.ceil(value / finer))
    ]
    candidates = [near for near in around if _significant_bits(near) <= bits]
    largest = Fraction(float(ml_dtypes.finfo(logical.host).max)) if logical.host.itemsize <= 8 else None
    return [near for near in candidates if largest is None or abs(near) <= largest]


def _significant_bits(value: Fraction) -> int:
    whole = abs(value.numerator)
    return whole.bit_length() - ((whole & -whole).bit_length() - 1 if whole else 0)


def _limits(logical: LogicalDtype) -> tuple[int, int]:
    found = ml_dtypes.iinfo(logical.host)
    return int(found.min), int(found.max)


def special_values(source: LogicalDtype) -> np.ndarray[Any, Any]:
    """What breaks casts: zeros, infinities, NaN, the ends of every dtype, and ties."""
    ends = [0.0, -0.0, 1.0, -1.0, 1.5, 2.5, 2.7, -1.5, 0.1, 3e9, 1e30, -1e30, 1e-30, 1e-45, 5e-324]
    for other in REAL:
        if other.category == "integer":
            ends += [float(end) for end in _limits(other)]
        elif other.category == "float":
            limits = ml_dtypes.finfo(other.host) if other.host.itemsize <= 8 else np.finfo(np.float64)
            ends += [float(limits.max), float(limits.tiny), float(limits.smallest_subnormal)]
            step = math.ldexp(1.0, math.frexp(float(limits.max))[1] - 1 - limits.nmant)
            ends += [float(limits.max) + step / 2] if math.isfinite(float(limits.max) + step / 2) else []
            one = 1 + 2.0 ** -(limits.nmant + 1)
            ends += [one, one + 2.0**-40, one - 2.0**-40, one + 2.0**-52, 3 * one]
    values = np.array(ends + [-end for end in ends])
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if source.category in ("bool", "integer"):
            least, most = (0, 1) if source.category == "bool" else _limits(source)
            whole = {min(max(int(end), least), most) for end in values if np.isfinite(end)}
            whole |= {min(max(1 << bit, least), most) + off for bit in range(64) for off in (0,)}
            whole |= {(1 << 40) + (1 << 32) + 1, (1 << 62) + (1 << 54) + 1, (1 << 30) + (1 << 22) + 1}
            whole |= {-number for number in whole}
            kept = sorted(number for number in whole if least <= number <= most)
            wide = np.array(kept, np.uint64 if most > np.iinfo(np.int64).max else np.int64)
            return wide.astype(source.host)
        near = np.concatenate([np.nextafter(values, np.inf), np.nextafter(values, -np.inf)])
        found = np.concatenate([values, near, [np.inf, -np.inf, np.nan]])
        return found.astype(source.host)


def random_values(source: LogicalDtype) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(sum(source.name.encode()))
    if source.category == "bool":
        return np.array([False, True])
    if is_narrow(source):
        kind = ml_dtypes.finfo if source.category == "float" else ml_dtypes.iinfo
        words = np.arange(1 << kind(source.host).bits, dtype=f"u{source.host.itemsize}")
        words = generator.permutation(words)[: 4 * RANDOM_VALUES]
        if source.category == "integer" and source.name[-1] in "124":
            return words.astype(source.host)
        return words.view(source.host)
    if source.host.itemsize > 8:
        parts = generator.integers(0, 256, (3, RANDOM_VALUES), np.uint64)
        scale = generator.integers(-200, 200, RANDOM_VALUES)
        mantissa = parts[0].astype(np.longdouble) + np.longdouble(2) ** -62 * parts[1].astype(np.longdouble)
        return np.ldexp(mantissa, scale.astype(np.int32))
    words = generator.integers(0, 256, RANDOM_VALUES * source.host.itemsize, np.uint8)
    # Bits that are all alike, as a long carry needs.
    runs = words.view(f"u{source.host.itemsize}").copy()
    low = generator.integers(0, 8 * source.host.itemsize, RANDOM_VALUES).astype(runs.dtype)
    runs[::2] = (runs[::2] >> low[::2]) << low[::2]
    runs[::4] |= 1
    return runs.view(source.host.newbyteorder("=")).astype(source.host)


def distinct(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One of each: in a narrow dtype most special values are the same."""
    places = {value.tobytes(): place for place, value in enumerate(values)}
    return values[sorted(places.values())]


def cast(values: np.ndarray[Any, Any], target: LogicalDtype) -> np.ndarray[Any, Any] | None:
    place = np.zeros(values.shape, target.host)
    try:
        casts.copy(place, values, STRICT)
    except LossyCast:
        return None
    return place


def same(one: Any, two: Any) -> bool:
    """Whether two elements are the same to the bit; extended precision has bytes that mean nothing."""
    used = 10 if isinstance(one, np.longdouble) else one.itemsize
    return bool(one.tobytes()[:used] == two.tobytes()[:used])


def check(source: LogicalDtype, target: LogicalDtype, value: Any, found: Any) -> None:
    before = exact(value)
    text = f"{value!r} of {source.name} became {found!r} of {target.name}"
    if before is None:
        assert target.category == "float", text
        assert np.isnan(value) == np.isnan(found), text
        assert np.isnan(value) or ((float(value) > 0) == (float(found) > 0) and np.isinf(found)), text
        return
    after = exact(found)
    assert after is not None, text
    near = neighbours(target.name, before)
    assert abs(after - before) == min(abs(each - before) for each in near), text
    if source.category in ("integer", "bool") and target.category == "integer":
        assert after == before, text


@pytest.mark.long
@pytest.mark.parametrize("source", REAL, ids=lambda logical: logical.name)
@pytest.mark.share(2)
def test_casts_of_real_numbers_are_equal_nearest_or_errors(source: LogicalDtype) -> None:
    values = distinct(np.concatenate([special_values(source), random_values(source)]))
    native = values.astype(values.dtype.newbyteorder("="))
    for target in REAL:
        together = cast(values, target)
        each = [cast(values[number : number + 1], target) for number in range(len(values))]
        assert (together is None) == any(found is None for found in each), f"{source.name} as {target.name}"
        for number, found in enumerate(each):
            if found is not None:
                check(source, target, native[number], found[0])
                assert together is None or same(together[number], found[0])


@pytest.mark.long
@only_long
def test_what_is_held_is_never_refused() -> None:
    """A value that the wanted dtype has, or lies between two of its values, is cast."""
    for source, target in itertools.product(REAL, REAL):
        kinds = source.category, target.category
        if target.category == "bool" or kinds == ("float", "integer") or source == target:
            continue
        for value in distinct(special_values(source)):
            before = exact(value)
            if before is None:
                continue
            native = np.array([value]).astype(source.host)
            if target.category == "float" and target.host.itemsize <= 8:
                limits = ml_dtypes.finfo(target.host)
                is_held = abs(before) <= Fraction(float(limits.max))
                is_held &= float(limits.min) < 0 or before >= Fraction(float(limits.tiny))
            elif target.category == "float":
                is_held = True
            else:
                least, most = _limits(target)
                is_held = least <= before <= most
            if is_held:
                assert cast(native, target) is not None, f"{value!r} of {source.name} as {target.name}"


def test_complex_numbers_cast_by_their_parts() -> None:
    complexes = [entry for entry in NUMBERS if entry.category == "complex"]
    for source, target in itertools.product(NUMBERS, complexes):
        if source.category == "complex":
            place = np.zeros(2, target.host)
            values = np.zeros(2, source.host)
            part = {"complex32": np.float16, "bcomplex32": ml_dtypes.bfloat16}
            values.view(part.get(source.name, f"f{source.host.itemsize // 2}"))[:] = [1, -2, 0.5, np.inf]
            casts.copy(place, values, STRICT)
            held = place.view(part.get(target.name, f"f{target.host.itemsize // 2}")).astype(float)
            assert held.tolist() == [1, -2, 0.5, np.inf]
        elif source.name not in ("int1",):
            values = np.ones(3, source.host)
            place = np.full(3, 0).astype(target.host)
            casts.copy(place, values, STRICT)
    with pytest.raises(LossyCast, match=r"1e\+300"):
        casts.copy(np.zeros(1, np.complex64), np.array([1 + 1e300j]), STRICT)


@pytest.mark.parametrize(
    ("values", "wanted", "held"),
    [
        (np.float32([2.7, -1.5, 3e9, np.nan, -np.inf]), "int32", [2, -1, 2**31 - 1, 0, -(2**31)]),
        (np.float64([1e30, -1, 255.9, 254.5]), "uint8", [255, 0, 255, 254]),
        (np.float64([1e30, 2**63, -1e30]), "int64", [2**63 - 1, 2**63 - 1, -(2**63)]),
        (np.float32([0, -0.0, 0.5, np.nan]), "bool", [False, False, True, True]),
        (np.array([300, -1, 5]), "uint8", [44, 255, 5]),
        (np.array([3 + 4j, np.nan]), "float32", [3, np.nan]),
        (np.array([0, 4j, 1]), "bool", [False, True, True]),
        (np.float32([1e30, -1e30, 1]), "float16", [np.inf, -np.inf, 1]),
        (np.float32([np.nan, 1e30, 1]), "float4_e2m1fn", [0, 6, 1]),
    ],
)
def test_what_a_lossy_cast_gives(values: np.ndarray[Any, Any], wanted: str, held: list[Any]) -> None:
    place = np.zeros(values.shape, dtypes.of_name(wanted).host)
    with pytest.raises(LossyCast, match="the option"):
        casts.copy(place, values, STRICT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        casts.copy(place, values, LENIENT)
    np.testing.assert_array_equal(place.astype(float) if wanted != "int64" else place, held)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5, 7, 3), (70_000,), (2, 66_000)])
def test_arrays_of_any_shape_and_stride(shape: tuple[int, ...]) -> None:
    values = np.asarray(np.arange(math.prod(shape), dtype=np.float32).reshape(shape) % 251)
    for source in (values, np.asfortranarray(values), np.flip(values)):
        place = np.zeros((*shape, 2), ml_dtypes.bfloat16)[..., 1]
        casts.copy(place, source, STRICT)
        np.testing.assert_array_equal(place.astype(np.float32), source)


def test_the_first_lost_value_is_named() -> None:
    values = np.zeros(200_000, np.float32)
    values[150_000:150_002] = [70_000.0, np.inf]
    with pytest.raises(
        LossyCast, match=r"the value 70000\.0 was saved as float32, and float16 holds numbers from"
    ):
        casts.copy(np.zeros(200_000, np.float16), values, STRICT)


def test_no_number_becomes_what_is_none() -> None:
    for stored, wanted in [
        ("key<threefry2x32>", "uint32"),
        ("numpy:<M8[ns]", "int64"),
        ("uint8", "numpy:<U3"),
    ]:
        with pytest.raises(InvalidInput, match="cannot be loaded as"):
            casts.check(stored, wanted, LENIENT)


@pytest.mark.parametrize("shape", [(1 << 22,), (3, 1 << 21), (1, 1, 1 << 22), (1 << 22, 1)])
@pytest.mark.parametrize(
    ("stored", "wanted"), [("float16", "float32"), ("bfloat16", "float32"), ("int16", "int64")]
)
def test_large_arrays_are_cast_in_parts(shape: tuple[int, ...], stored: str, wanted: str) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, shape, np.uint16)
    source = bits.view(dtypes.of_name(stored).host)
    place = np.empty((*shape, 2), dtypes.of_name(wanted).host)[..., 0]  # not contiguous
    assert place.nbytes >= 2 * casts._THREAD_BYTES
    casts.copy(place, source, STRICT)
    expected = source.astype(place.dtype)
    assert place.tobytes() == expected.tobytes()


def test_of_the_values_that_are_refused_the_first_is_named() -> None:
    source = np.zeros(1 << 23, np.float32)
    source[[10, -10]] = 1e6, 2e6
    with pytest.raises(LossyCast, match="1000000"):
        casts.copy(np.empty(source.shape, np.float16), source, STRICT)


def test_a_program_that_is_ending_starts_no_threads() -> None:
    code = """
import atexit, threading
import numpy as np
from waystation.frameworks import casts
from waystation.frameworks.base import CastRule

def cast():
    threading.main_thread().join()
    place = np.empty(1 << 23, np.float32)
    casts.copy(place, np.ones(place.shape, np.float16), CastRule(False, "x"))
    print(int(place.sum()))

threading.Thread(target=cast).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("8388608", "")
