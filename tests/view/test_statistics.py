"""Statistics of arrays: equal to what NumPy says of the same values, in bounded reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import waystation
from waystation._options.in_effect import current_options
from waystation.cli.commands import inspect
from waystation.errors import Cancelled, Corrupt
from waystation.frameworks import dtypes
from waystation.view import statistics
from waystation.view.statistics import ArrayStatistics, statistics_of

RANDOM = np.random.default_rng(7)
NORMAL = RANDOM.normal(3, 2, (37, 23))
ODD = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.5, np.nan, 3e-8])

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "float32": NORMAL.astype(np.float32),
    "float64": ODD,
    "float16": ODD.astype(np.float16),
    "bfloat16": NORMAL.astype(ml_dtypes.bfloat16),
    "bfloat16 odd": ODD.astype(ml_dtypes.bfloat16),
    "float8_e4m3fn": NORMAL.astype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": ODD.astype(ml_dtypes.float8_e5m2),
    "int4": RANDOM.integers(-8, 8, (5, 7)).astype(ml_dtypes.int4),
    "uint4": RANDOM.integers(0, 16, 33).astype(ml_dtypes.uint4),
    "int8": RANDOM.integers(-128, 128, 1000).astype(np.int8),
    "int64": np.array([-(2**63), 2**63 - 1, 0, 5]),
    "uint64": np.array([2**64 - 1, 0, 7], np.uint64),
    "bool": RANDOM.integers(0, 2, 100).astype(bool),
    "complex64": (NORMAL + 1j * NORMAL[::-1]).astype(np.complex64),
    "complex128": np.array([3 + 4j, 0, complex(np.nan, 1), complex(np.inf, np.nan), complex(0, -np.inf)]),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.array(2.5),
    "constant": np.full(100, 0.1),
    "all NaN": np.full(5, np.nan),
    "huge": np.array([1e308, -1e308, 1e308, 0.0]),
    "tiny": np.array([5e-324, 0.0, 1e-300]),
    "big-endian": NORMAL.astype(">f4"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("statistics") / "c"
    waystation.save(path, {**ARRAYS, "text": np.array(["a", "bc"]), "key": jax.random.key(3)})
    return path


def found_in(path: Path, name: str, **options: Any) -> ArrayStatistics:
    opened = inspect.see(str(path)).states["state"].opened
    number = opened.tree.labels.index(name)
    return statistics_of(opened, number, current_options(), **options)


def expected_of(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The numbers that statistics are of, in a wide type."""
    category = dtypes.of_numpy(values.dtype).category
    if category == "complex":
        wide = values.astype(np.complex128)
        return np.where(np.isnan(wide), np.nan, np.abs(wide)).ravel()
    return values.astype(np.longdouble).ravel()


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("limit_bytes", [None, statistics.LIMIT_BYTES])
def test_statistics_are_those_of_numpy(checkpoint: Path, name: str, limit_bytes: int | None) -> None:
    array = ARRAYS[name]
    found = found_in(checkpoint, name, limit_bytes=limit_bytes)
    numbers = expected_of(array)
    finite = numbers[np.isfinite(numbers)]
    assert (found.elements, found.examined) == (array.size, array.size)
    assert found.of == ("magnitudes" if "complex" in name else "values")
    assert found.nans == np.count_nonzero(np.isnan(numbers))
    assert found.positive_infinities == np.count_nonzero(np.isposinf(numbers))
    assert found.negative_infinities == np.count_nonzero(np.isneginf(numbers))
    assert found.zeros == np.count_nonzero(numbers == 0)
    assert found.first_values == [str(value) for value in array.ravel()[:8]]
    if not len(finite):
        assert (found.minimum, found.maximum, found.mean, found.norm) == (None,) * 4
        assert found.histogram is None
        return
    assert found.minimum == (int if array.dtype.kind in "iub" else float)(finite.min())
    assert found.maximum == (int if array.dtype.kind in "iub" else float)(finite.max())
    largest = float(np.abs(finite).max())
    assert found.mean == pytest.approx(float(finite.mean()), rel=1e-12, abs=1e-15 * largest)
    assert found.deviation == pytest.approx(float(finite.std()), rel=1e-9, abs=1e-15 * largest)
    assert found.norm == pytest.approx(float(np.sqrt(np.square(finite).sum())), rel=1e-9, abs=1e-300)
    check_histogram(found, finite.astype(np.float64))


def check_histogram(found: ArrayStatistics, values: np.ndarray[Any, Any]) -> None:
    histogram = found.histogram
    assert histogram is not None
    values = np.clip(values, -(2.0**1022), 2.0**1022)
    assert 1 <= len(histogram.counts) <= 64
    assert math.frexp(histogram.width)[0] == 0.5, "a power of two"
    assert sum(histogram.counts) == len(values)
    for number, count in enumerate(histogram.counts):
        begin = histogram.begin + number * histogram.width
        inside = (values >= begin) & (values < begin + histogram.width)
        assert count == np.count_nonzero(inside), (number, begin)


def test_what_is_no_number_shows_its_values(checkpoint: Path) -> None:
    text, key = found_in(checkpoint, "text"), found_in(checkpoint, "key")
    assert (text.of, text.elements, text.examined, text.first_values) == (None, 2, 2, ["a", "bc"])
    assert (key.of, key.elements, key.minimum, key.histogram) == (None, 1, None, None)
    assert len(key.first_values) == 1


@given(
    hnp.arrays(np.float64, st.integers(1, 50), elements=st.floats(-4e307, 4e307)),
    st.lists(st.integers(0, 50), max_size=4),
)
def test_a_histogram_does_not_depend_on_how_values_come(
    values: np.ndarray[Any, Any], cuts: list[int]
) -> None:
    def of(parts: list[np.ndarray[Any, Any]]) -> Any:
        bins = statistics._Bins(least_exponent=None)
        for part in parts:
            if len(part):
                bins.add(part)
        return bins.found()

    whole = of([values])
    assert of(np.split(values, sorted(min(cut, len(values)) for cut in cuts))) == whole
    assert of([values[::-1]]) == whole
    assert of([values[number : number + 1] for number in range(len(values))]) == whole
    assert whole.begin <= values.min()
    assert len(whole.counts) <= 64
    assert sum(whole.counts) == len(values)
    assert whole.counts[0] > 0
    assert whole.counts[-1] > 0


def test_a_large_array_is_sampled_within_the_limit(tmp_path: Path) -> None:
    values = np.arange(6 << 20, dtype=np.float32)  # 24 MiB
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(8), ("x",))
    sharded = jax.device_put(values.reshape(1024, -1), jax.NamedSharding(mesh, jax.P(None, "x")))
    waystation.save(tmp_path / "c", {"whole": values, "sharded": sharded})
    for name in ("whole", "sharded"):
        for limit_bytes in (3 << 20, 8 << 20):
            found = found_in(tmp_path / "c", name, limit_bytes=limit_bytes)
            assert found.bytes_read <= limit_bytes
            assert limit_bytes / 4 <= found.examined * 4 <= limit_bytes
            assert found.minimum == 0
            assert found.maximum is not None
            assert found.mean == pytest.approx(values.mean(), rel=0.4), "the sample is spread"
        progress: list[tuple[int, int]] = []
        whole = found_in(
            tmp_path / "c",
            name,
            limit_bytes=None,
            on_progress=lambda *told, progress=progress: progress.append(told),
        )
        assert whole.examined == whole.elements == values.size
        assert (whole.minimum, whole.maximum) == (0, values.size - 1)
        assert whole.mean == pytest.approx((values.size - 1) / 2)
        assert progress[-1] == (values.nbytes, values.nbytes)
        assert whole.bytes_read < 1.5 * values.nbytes


def test_damage_is_raised_and_progress_can_end_the_work(tmp_path: Path) -> None:
    waystation.save(tmp_path / "c", {"a": np.ones(1000)})

    def end(_done: int, _total: int) -> None:
        raise Cancelled("enough")

    with pytest.raises(Cancelled):
        found_in(tmp_path / "c", "a", on_progress=end)
    (file,) = (tmp_path / "c" / "state").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    with pytest.raises(Corrupt):
        found_in(tmp_path / "c", "a")
