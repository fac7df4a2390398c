"""The checker of histories finds what must not be, and lets pass what may."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.memory import trajectories
from tests.memory.histories import Advanced, Broken, Event, HostLost, Kept, NothingLeft, Restored, audit
from tests.memory.trajectories import uninterrupted

SEED = 5


def restored(program: int, step: int, *, process: int = 0, epoch: int | None = None) -> Restored:
    digest = uninterrupted(SEED, process).digest_at(step)
    return Restored(program, process, step, digest, program + 1 if epoch is None else epoch)


def advanced(program: int, step: int, process: int = 0) -> Advanced:
    return Advanced(program, process, step, uninterrupted(SEED, process).digest_at(step))


def begin(process_count: int = 1) -> list[Event]:
    """A program that has made two steps, both kept in memory."""
    history: list[Event] = [restored(0, 0, process=process) for process in range(process_count)]
    for step in (1, 2):
        history += [advanced(0, step, process) for process in range(process_count)]
        history += [Kept(0, process, step, 0) for process in range(process_count)]
    return history


GOOD: dict[str, tuple[int, list[Event]]] = {
    "what was kept is restored": (1, [*begin(), restored(1, 2), advanced(1, 3)]),
    "what was only begun may be restored": (1, [*begin(), advanced(0, 3), restored(1, 3)]),
    "as many hosts are lost as there are copies": (
        1,
        [*begin(), HostLost(0), NothingLeft(1, 0), restored(1, 0)],
    ),
    "fewer are lost": (2, [*begin(2), HostLost(0), restored(1, 2), restored(1, 2, process=1)]),
    "the directory has it": (1, [*begin(), Kept(0, 0, 2, 1), HostLost(0), restored(1, 1)]),
}
BAD: dict[str, tuple[int, list[Event], str]] = {
    "kept and lost": (1, [*begin(), restored(1, 1)], "was kept and is lost"),
    "fewer hosts lost than copies": (2, [*begin(2), HostLost(0), restored(1, 1)], "was kept and is lost"),
    "the same host lost twice": (2, [*begin(), HostLost(0), HostLost(0), restored(1, 1)], "was kept"),
    "directory lost": (1, [*begin(), Kept(0, 0, 2, 1), HostLost(0), restored(1, 0)], "was kept and is lost"),
    "kept after a loss, and lost": (
        1,
        [
            *(*begin(), HostLost(0), NothingLeft(1, 0), restored(1, 0)),
            *(advanced(1, 1), Kept(1, 0, 1, 0), restored(2, 0)),
        ],
        "was kept and is lost",
    ),
    "lost in silence": (1, [*begin(), HostLost(0), restored(1, 0)], "was not told that all is lost"),
    "said to be lost": (2, [*begin(), HostLost(0), NothingLeft(1, 0)], "is said to be lost"),
    "said to be lost beside a directory": (
        1,
        [*begin(), Kept(0, 0, 2, 1), HostLost(0), NothingLeft(1, 0)],
        "the directory has something",
    ),
    "another step": (1, [restored(0, 0), restored(0, 1, process=1)], "is another step than"),
    "other bytes": (1, [replace(restored(0, 0), digest="")], "is not the state"),
    "other bytes later": (1, [restored(0, 0), replace(advanced(0, 1), digest="")], "is not the state"),
    "a step left out": (1, [restored(0, 0), advanced(0, 2)], "was left out"),
    "an old epoch": (1, [*begin(), restored(1, 2, epoch=1)], "is not in a later epoch"),
    "kept too early": (1, [restored(0, 0), Kept(0, 0, 1, 0)], "before it was made"),
    "an old program": (1, [*begin(), restored(1, 2), restored(0, 2, process=1)], "is over"),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_may_happen_passes(name: str) -> None:
    copies, history = GOOD[name]
    audit(SEED, 2, copies, history)


@pytest.mark.parametrize("name", BAD)
def test_what_must_not_happen_is_found(name: str) -> None:
    copies, history, message = BAD[name]
    with pytest.raises(Broken, match=message):
        audit(SEED, 2, copies, history)


def test_a_trajectory_never_comes_back_after_a_wrong_bit() -> None:
    state = trajectories.first(SEED, 0)
    for name in state:
        wrong = {**state, name: state[name].copy()}
        wrong[name].view(np.uint8).reshape(-1)[3] ^= 1
        one, other = state, wrong
        for _ in range(3):
            assert trajectories.digest(one) != trajectories.digest(other), name
            one, other = trajectories.following(one), trajectories.following(other)
