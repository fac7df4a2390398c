"""Messages begin strictly by number, whatever the order of arrival."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation.errors import Conflict
from waystation.runtime.hosts.order import BySequence


@given(st.permutations(range(12)))
def test_any_order_of_arrival_gives_the_order_of_numbers(arrivals: list[int]) -> None:
    order: BySequence[str] = BySequence()
    begun = []
    for count, sequence in enumerate(arrivals, start=1):
        begun += order.accept(sequence, f"message {sequence}")
        assert order.waiting == count - len(begun)
    assert begun == [(sequence, f"message {sequence}") for sequence in range(12)]


@pytest.mark.parametrize("again", [0, 2], ids=["begun", "waiting"])
def test_a_number_that_comes_twice_is_refused(again: int) -> None:
    order: BySequence[str] = BySequence()
    order.accept(0, "first")
    order.accept(2, "third")
    with pytest.raises(Conflict, match=f"message {again} has come twice; the next to begin is 1"):
        order.accept(again, "another")
    assert order.accept(1, "second") == [(1, "second"), (2, "third")]
