"""Random graphs of calls over slices of two islands, traced and not, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from tests.support.long import amount, only_long

from waystation import runtime

SHAPE = (4, 8)
SPECS = [P(), P("x"), P(None, "x"), P("y", "x"), P(("x", "y")), P("x", "y")]
# Their results are small integers, so that no order of additions matters.
FUNCTIONS = [
    lambda x, y: (x + 2 * y) % 7,
    lambda x, y: x * y % 7,
    lambda x, y: (x - y.sum(axis=0)) % 5,
    lambda x, y: (x @ y.T @ y) % 5,
]


@pytest.fixture(scope="module")
def functions() -> Iterator[list[Any]]:
    with runtime.local({"left": 4, "right": 4}) as client:
        slices = [
            client.make_virtual_device_set().add_slice(shape=(2, 2), island=island)
            for island in ("left", "right")
        ]
        shardings = zip(
            SPECS + SPECS[:2], SPECS[::-1] + SPECS[3:5], SPECS[2:] + SPECS[:4], FUNCTIONS * 2, strict=True
        )
        yield [
            (function, client.jit(function, slices[at % 2], in_shardings=(spec, other), out_shardings=out))
            for at, (spec, other, out, function) in enumerate(shardings)
        ]


# Each call: which function, and which two of the values so far.
CALLS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8)


@given(
    calls=CALLS,
    traced=st.booleans(),
    returned=st.sets(st.integers(0, 9), min_size=1),
    reads=st.sets(st.integers(0, 7)),
)
@settings(max_examples=amount(25, 1200))
@pytest.mark.long
@only_long
def test_random_graphs(
    functions: list[Any],
    calls: list[tuple[int, int, int]],
    traced: bool,
    returned: set[int],
    reads: set[int],
) -> None:
    def build(apply: Any, values: list[Any], read: Any) -> list[Any]:
        for at, (which, first, second) in enumerate(calls):
            x, y = values[first % len(values)], values[second % len(values)]
            values.append(apply(functions[which], x, y))
            if at in reads:
                read(values[-1])
        return [values[each % len(values)] for each in sorted(returned)]

    given_arrays = [np.arange(32, dtype="float32").reshape(SHAPE) % 5, np.ones(SHAPE, "float32")]
    wanted = build(lambda pair, x, y: pair[0](x, y), list(given_arrays), lambda _: None)

    def run(x: Any, y: Any) -> list[Any]:
        return build(lambda pair, a, b: pair[1](a, b), [x, y], (lambda _: None) if traced else np.asarray)

    found = (runtime.program(run) if traced else run)(*given_arrays)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)
