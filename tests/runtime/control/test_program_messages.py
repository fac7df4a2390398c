"""What programs ask arrives as it was asked, and to run a program once more is a few integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation.errors import Corrupt
from waystation.runtime.control.packing import Packer, Unpacker
from waystation.runtime.control.program_messages import (
    NO_ANSWER,
    Call,
    pack_answer,
    pack_calls,
    unpack_answers,
    unpack_calls,
)
from waystation.runtime.ir import Sharding

HANDLES = st.lists(st.integers(0, 2**63 - 1), max_size=4).map(tuple)
SLICES = st.lists(st.integers(0, 9), max_size=2).map(tuple)
COSTS = st.none() | st.floats(0, 10)
CALLS = st.one_of(
    st.builds(Call, st.just("run"), st.tuples(st.text(), SLICES, HANDLES, HANDLES, COSTS, st.integers(0, 3))),
    st.builds(Call, st.just("free"), st.tuples(HANDLES)),
    st.builds(Call, st.just("wait"), st.tuples(HANDLES), st.integers(0, 2**62)),
)


@given(st.lists(st.lists(CALLS, max_size=5), max_size=4))
def test_calls_arrive(batches: list[list[Call]]) -> None:
    packer, unpacker = Packer(), Unpacker()
    for calls in batches:
        assert list(unpack_calls(unpacker.open(pack_calls(calls, packer)))) == calls


def test_arrays_and_answers_arrive() -> None:
    sharding = Sharding((("d", 1),), (("d",),))
    packer, unpacker = Packer(), Unpacker()
    put = Call("put", (5, np.arange(3), 1, sharding), NO_ANSWER)
    (found,) = unpack_calls(unpacker.open(pack_calls([put], packer)))
    assert (found.arguments[0], found.arguments[2:]) == (5, (1, sharding))
    np.testing.assert_array_equal(found.arguments[1], np.arange(3))
    assert list(unpack_answers(unpacker.open(pack_answer(7, "made", packer)))) == [(7, "made")]


def test_to_run_a_program_once_more_is_a_few_integers() -> None:
    packer = Packer()
    run = Call("run", ("f" * 64, (0,), (1,), (2,), None, 0))
    sizes = [len(pack_calls([run], packer)) for _ in range(3)]
    assert sizes[0] > sizes[1] == sizes[2] < 100


def test_what_is_no_call_is_refused() -> None:
    packer = Packer()
    packer.integers.extend((NO_ANSWER, 9))
    with pytest.raises(Corrupt, match="kind 9"):
        list(unpack_calls(Unpacker().open(packer.take())))
