"""Turns are had in the order in which they were taken, whatever the threads do."""

from __future__ import annotations

import random
import threading

from hypothesis import given
from hypothesis import strategies as st

from waystation.checkpoint.loading import Ticket


@given(st.permutations(range(5)), st.sets(st.integers(0, 4)))
def test_turns_come_in_order(started: list[int], given_up: set[int]) -> None:
    turns = [Ticket() for _ in started]
    seen: list[int] = []

    def run(number: int) -> None:
        if number not in given_up:
            turns[number].wait()
            seen.append(number)
        turns[number].end()
        turns[number].end()

    threads = [threading.Thread(target=run, args=(number,)) for number in started]
    random.Random(len(given_up)).shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [number for number in range(5) if number not in given_up]


def test_a_ticket_that_is_dropped_has_ended() -> None:
    dropped, later = Ticket(), Ticket()
    waiter = threading.Thread(target=later.wait, daemon=True)
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    del dropped
    waiter.join(60)
    assert not waiter.is_alive()
    later.end()
