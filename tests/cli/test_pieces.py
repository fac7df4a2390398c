"""Cutting arrays into pieces, and counting differences piece by piece as NumPy would at once."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from waystation.checkpoint import differing_values
from waystation.checkpoint.differing_values import Tally, Tolerance, same_scalar
from waystation.transfers.pieces import cut, group_parts, read_ahead

SHAPES = st.lists(st.integers(0, 7), max_size=5).map(tuple)


@given(SHAPES, st.integers(1, 60))
def test_a_cut_covers_the_array_in_c_order(shape: tuple[int, ...], most_items: int) -> None:
    numbered = np.arange(math.prod(shape)).reshape(shape)
    pieces = []
    for offset, extents in cut(shape, most_items):
        selected = numbered[tuple(slice(at, at + size) for at, size in zip(offset, extents, strict=True))]
        assert selected.shape == extents
        assert 1 <= selected.size <= max(1, most_items)
        pieces.append(selected.ravel())
    together = np.concatenate(pieces) if pieces else np.empty(0, int)
    np.testing.assert_array_equal(together, numbered.ravel())


@given(st.lists(st.tuples(SHAPES, st.integers(0, 16)), max_size=8), st.integers(1, 500))
def test_groups_are_as_large_as_allowed(parts: list[tuple[tuple[int, ...], int]], group_bytes: int) -> None:
    shapes, sizes = [part[0] for part in parts], [part[1] for part in parts]
    groups = list(group_parts(shapes, sizes, group_bytes))
    weights = [[math.prod(part.box[1]) * sizes[part.index] for part in group] for group in groups]
    assert all(sum(group) <= group_bytes or len(group) == 1 for group in weights)
    assert all(sum(one) + two[0] > group_bytes for one, two in pairwise(weights))
    seen = [part.index for group in groups for part in group]
    assert seen == sorted(seen)
    assert set(seen) == {index for index, shape in enumerate(shapes) if math.prod(shape)}


def test_an_error_while_reading_ahead_arrives_in_its_turn() -> None:
    groups = list(group_parts([(4,)], [1], 1))

    def read(group: list) -> int:
        if group is groups[2]:
            raise OSError("gone")
        return group[0].box[0][0]

    seen: list[int] = []
    with pytest.raises(OSError, match="gone"):
        seen.extend(found for _, found in read_ahead(groups, read))
    assert seen == [0, 1]


FLOATS = arrays.arrays(
    np.float64,
    12,
    elements=st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0]) | st.integers(-4096, 4096).map(float),
    fill=st.nothing(),
)


@given(FLOATS, FLOATS, st.sampled_from([0.0, 0.5, 10.0]), st.sampled_from([0.0, 0.1]), st.integers(1, 12))
def test_counts_are_those_of_math_isclose(
    one: np.ndarray, two: np.ndarray, absolute: float, relative: float, step: int
) -> None:
    tolerance = Tolerance(absolute, relative)
    tally = Tally((12,), tolerance, numeric=True)
    for start in range(0, 12, step):
        end = min(12, start + step)
        tally.add(((start,), (end - start,)), one[start:end], two[start:end])

    def differs(x: float, y: float) -> bool:
        if tolerance.exact:
            return np.float64(x).tobytes() != np.float64(y).tobytes()
        both_nan = math.isnan(x) and math.isnan(y)
        return not both_nan and not math.isclose(x, y, rel_tol=relative, abs_tol=absolute)

    expected = [place for place, (x, y) in enumerate(zip(one, two, strict=True)) if differs(x, y)]
    found = tally.difference()
    assert (found.differing if found else 0) == len(expected)
    if found:
        assert found.first_index == (expected[0],)
        gaps = [abs(one[at] - two[at]) for at in expected if not (np.isnan(one[at]) or np.isnan(two[at]))]
        assert found.max_absolute == (max(gaps) if gaps else None)
    for x, y in zip(one.tolist(), two.tolist(), strict=True):
        assert same_scalar(x, y, tolerance) is not differs(x, y)


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)), min_size=1))
def test_integers_are_subtracted_exactly(pairs: list[tuple[int, int]]) -> None:
    one, two = (np.array(side, np.int64) for side in zip(*pairs, strict=True))
    tally = Tally(one.shape, Tolerance(), numeric=True)
    tally.add(((0,), one.shape), one, two)
    found = tally.difference()
    gap = max(abs(x - y) for x, y in pairs)
    assert (found.max_absolute if found else 0) == float(gap)


def test_blocks_inside_a_piece_count_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differing_values, "_BLOCK_ITEMS", 5)
    one = np.arange(24).reshape(4, 6)
    two = one.copy()
    two[2, 3] += 7
    two[3, 5] -= 9
    tally = Tally((4, 6), Tolerance(), numeric=True)
    tally.add(((0, 0), (2, 6)), one[:2], two[:2])
    tally.add(((2, 0), (2, 6)), one[2:], two[2:])
    found = tally.difference()
    assert found is not None
    assert (found.differing, found.first_index, found.first_values) == (2, (2, 3), ("15", "22"))
    assert found.max_absolute == 9
