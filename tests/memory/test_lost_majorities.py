"""More hosts are lost than agents could do without: what has a copy of every shard left is gone on from."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.memory.scenarios import NEVER, checkpointer_of, fingerprint, state_of
from tests.support.agents import HANG_S, Agent, lose, memory_directory, running_agents
from tests.support.long import IS_LONG

from waystation.errors import CommittedStepsLost
from waystation.memory import LostStepWarning, MemoryTier, MemoryTierWarning, place
from waystation.memory.records import CommittedRecord
from waystation.training import Checkpointer

HEALED_S = 10.0  # after the hosts are there again
NEWEST = 3


def lost_sets() -> list[tuple[int, tuple[int, ...]]]:
    """How many hosts there are, and which of them are lost."""
    if not IS_LONG:
        return [(2, (0,)), (2, (1,)), (4, (0, 2, 3)), (4, (1, 2, 3))]
    return [
        (count, lost)
        for count in range(2, 6)
        for size in range(count // 2 + count % 2, count)
        for lost in itertools.combinations(range(count), size)
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def agents_of(count: int) -> Iterator[list[Agent]]:
    with (
        memory_directory() as directory,
        running_agents(directory, count, ["--dead-after-s=1"], slots=6) as agents,
    ):
        yield agents


@pytest.fixture
def four() -> Iterator[list[Agent]]:
    yield from agents_of(4)


@pytest.fixture
def two() -> Iterator[list[Agent]]:
    yield from agents_of(2)


def save_steps(root: Path, agent: Agent, *, on_disk_every: int | None = None) -> None:
    with checkpointer_of(root, agent.directory, on_disk_every=on_disk_every) as checkpointer:
        for step in range(1, NEWEST + 1):
            checkpointer.save(step, state_of("numpy", step))


def assert_goes_on(checkpointer: Checkpointer, step: int) -> None:
    """It begins with a step, to the bit, and saves the next to memory."""
    assert checkpointer.latest is not None
    assert (checkpointer.latest.step, checkpointer.latest.tiers) == (step, ("memory",))
    assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", step))
    checkpointer.save(step + 1, state_of("numpy", step + 1))
    checkpointer.wait()
    assert saved_step(checkpointer) == step + 1


def saved_step(checkpointer: Checkpointer) -> int | None:
    assert checkpointer.tier_statistics is not None
    return checkpointer.tier_statistics.last_saved_step


@pytest.mark.parametrize(("count", "lost"), lost_sets())
def test_a_copy_that_is_left_is_gone_on_from(count: int, lost: Sequence[int], root: Path) -> None:
    kept_by = place(count, 2).holders(0)
    for agents in agents_of(count):
        save_steps(root, agents[0])
        lose([agents[index] for index in lost])
        returned_s = time.monotonic()
        if set(kept_by) <= set(lost):
            with pytest.raises(CommittedStepsLost, match=f"at least up to step {NEWEST}"):
                checkpointer_of(root, agents[0].directory)
            continue
        with checkpointer_of(root, agents[0].directory) as checkpointer:
            assert_goes_on(checkpointer, NEWEST)
            assert time.monotonic() - returned_s < HEALED_S
            assert checkpointer.tier_statistics is not None
            assert checkpointer.tier_statistics.failures == 0


def test_while_agents_are_missing_what_is_here_is_restored_and_saves_wait(
    four: list[Agent], root: Path
) -> None:
    save_steps(root, four[0])
    lose(four[1:], are_replaced=False)
    memory = MemoryTier(directory=four[0].directory, deadline_s=3)
    missing = ", ".join(f"host-{index}" for index in range(1, 4))
    with pytest.warns(MemoryTierWarning, match=f"not heard of: {missing}. Of 4 agents 3 have to run"):
        checkpointer = Checkpointer(root, save_decision_policy=NEVER, memory=memory)
    with checkpointer:
        assert checkpointer.latest is not None
        assert checkpointer.latest.step == NEWEST
        assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", NEWEST))
        with pytest.warns(MemoryTierWarning, match=f"could not save step {NEWEST + 1}.*{missing}"):
            checkpointer.save(NEWEST + 1, state_of("numpy", NEWEST + 1))
        for agent in four[1:]:
            agent.start()
        deadline = time.monotonic() + HANG_S
        for step in itertools.count(NEWEST + 2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MemoryTierWarning)
                checkpointer.save(step, state_of("numpy", step))
                checkpointer.wait()
            if saved_step(checkpointer) == step:
                break
            assert time.monotonic() < deadline, "nothing is saved, though all agents are there"
    with checkpointer_of(root, four[2].directory) as checkpointer:
        assert_goes_on(checkpointer, step)


def test_what_is_lost_with_all_who_knew_of_it_is_told(two: list[Agent], root: Path) -> None:
    save_steps(root, two[0], on_disk_every=2)
    assert (version := CommittedRecord(root).read()) is not None
    assert version.step == NEWEST
    lose(two)
    with pytest.warns(LostStepWarning, match=f"step {NEWEST} was committed") as caught:
        checkpointer = checkpointer_of(root, two[0].directory)
    (told,) = [entry.message for entry in caught if isinstance(entry.message, LostStepWarning)]
    assert (told.step, told.whole_step, told.tiers) == (NEWEST, 2, ("directory",))
    with checkpointer:
        assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", 2))
