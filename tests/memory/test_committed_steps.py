"""What was committed is not lost without a hardware fault, and what is lost is said.

A program that is killed after its load is one that loads and saves nothing: agents and the directory remember
the same of both.
"""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.memory.damages import DAMAGES
from tests.memory.scenarios import NEVER, checkpointer_of, fingerprint, state_of
from tests.support.agents import (
    HANG_S,
    RUN,
    Agent,
    lose,
    memory_directory,
    running_agent,
    running_agents,
    wait_until,
)
from tests.support.long import only_long

from waystation import _native
from waystation.errors import CommittedStepsLost, InvalidInput, MemoryTooSmall
from waystation.memory import (
    DoubtedStepWarning,
    LostStepWarning,
    MemoryTier,
    MemoryTierWarning,
    agent_program,
)
from waystation.memory.agent import check_room
from waystation.memory.records import COMMITTED_FILE, CommittedRecord
from waystation.memory.versions import Version
from waystation.training import Checkpointer

STEPS = 20


@pytest.fixture(params=["alone", "of three"])
def agents(request: pytest.FixtureRequest) -> Iterator[list[Agent]]:
    """One agent, or those of three hosts."""
    with memory_directory() as directory:
        if request.param == "alone":
            with running_agent(directory, slots=3) as agent:
                yield [agent]
        else:
            with running_agents(directory, 3, slots=6) as agents:
                yield agents


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def save_steps(root: Path, agent: Agent, steps: range, *, on_disk_every: int | None = None) -> None:
    with checkpointer_of(root, agent.directory, on_disk_every=on_disk_every) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of("numpy", step))


def assert_restores(
    root: Path, agent: Agent, step: int, *, doubted: tuple[int, ...] = (), warned: bool | None = None
) -> None:
    """A program begins with a step, to the bit, and ends before it has saved anything."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with checkpointer_of(root, agent.directory) as checkpointer:
            assert checkpointer.latest is not None
            assert checkpointer.latest.step == step
            assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", step))
            assert checkpointer.tier_statistics is not None
            assert checkpointer.tier_statistics.doubted_steps == doubted
    found = [entry.message for entry in caught if isinstance(entry.message, MemoryTierWarning)]
    assert bool(found) == (bool(doubted) if warned is None else warned), found
    assert all(isinstance(message, DoubtedStepWarning) for message in found)
    assert all(message.restored_step == step for message in found if isinstance(message, DoubtedStepWarning))


@pytest.mark.share(2)
def test_a_step_in_doubt_gives_way_to_the_one_before_and_none_is_lost(
    agents: list[Agent], root: Path
) -> None:
    save_steps(root, agents[0], range(1, STEPS + 1))
    for _ in range(2):
        assert_restores(root, agents[0], STEPS)
    kept = 3 if len(agents) == 1 else 2  # an agent alone has no other use for the slot of the next version
    for back in range(1, kept):
        doubted = tuple(range(STEPS - back + 1, STEPS + 1))
        for _ in range(2):
            assert_restores(root, agents[0], STEPS - back, doubted=doubted)
    # Nothing is above suspicion any more: the newest is as good as any.
    for _ in range(3):
        assert_restores(root, agents[0], STEPS, doubted=tuple(range(STEPS - kept + 1, STEPS + 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DoubtedStepWarning)
        with checkpointer_of(root, agents[0].directory) as checkpointer:
            assert fingerprint(checkpointer.load(STEPS - 1)) == fingerprint(state_of("numpy", STEPS - 1))
            assert fingerprint(checkpointer.load(STEPS)) == fingerprint(state_of("numpy", STEPS))
            checkpointer.save(STEPS + 1, state_of("numpy", STEPS + 1))
            checkpointer.wait()
    assert_restores(root, agents[0], STEPS + 1)


@pytest.mark.share(2)
def test_what_is_saved_after_a_fallback_is_trusted(agents: list[Agent], root: Path) -> None:
    save_steps(root, agents[0], range(1, STEPS + 1))
    for _ in range(2):
        assert_restores(root, agents[0], STEPS)
    with pytest.warns(DoubtedStepWarning):
        checkpointer = checkpointer_of(root, agents[0].directory)
    with checkpointer:
        assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", STEPS - 1))
        for step in (STEPS, STEPS + 1):
            checkpointer.save(step, state_of("numpy", step))
    assert_restores(root, agents[0], STEPS + 1)


@pytest.mark.share(2)
def test_two_committed_steps_are_there_while_the_next_is_saved(agents: list[Agent], root: Path) -> None:
    client = _native.AgentClient(str(agents[0].directory))
    with checkpointer_of(root, agents[0].directory) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, state_of("numpy", step))
            checkpointer.wait()
            kept = sorted(slot["step"] for slot in client.inventory() if slot["state"] == "committed")
            assert kept[-2:] == [step - 1, step][-min(step, 2) :]
            assert fingerprint(checkpointer.load(step)) == fingerprint(state_of("numpy", step))


@pytest.mark.share(2)
def test_the_directory_comes_before_what_is_in_doubt(agents: list[Agent], root: Path) -> None:
    save_steps(root, agents[0], range(4), on_disk_every=2)
    for step in (3, 3, 2, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DoubtedStepWarning)
            with checkpointer_of(root, agents[0].directory) as checkpointer:
                assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", step))
    with pytest.warns(DoubtedStepWarning, match="step 2 is restored from the directory instead"):
        checkpointer = checkpointer_of(root, agents[0].directory)
    with checkpointer:
        assert checkpointer.latest is not None
        assert (checkpointer.latest.step, checkpointer.latest.tiers) == (2, ("directory",))
        assert fingerprint(checkpointer.load(3)) == fingerprint(state_of("numpy", 3)), "as it is asked for"


@pytest.mark.share(2)
def test_a_program_does_not_begin_from_nothing_by_mistake(agents: list[Agent], root: Path) -> None:
    save_steps(root, agents[0], range(1, 4))
    lose(agents)
    for _ in range(2):
        with pytest.raises(CommittedStepsLost, match="start_from_nothing=True") as raised:
            checkpointer_of(root, agents[0].directory)
        assert raised.value.context["step"] >= 1
    tier = MemoryTier(directory=agents[0].directory, start_from_nothing=True)
    with Checkpointer(root, save_decision_policy=NEVER, memory=tier) as checkpointer:
        assert checkpointer.latest is None
        checkpointer.save(1, state_of("numpy", 1))
        checkpointer.wait()
    assert_restores(root, agents[0], 1)


def test_a_program_does_not_begin_from_nothing_without_an_agent(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with memory_directory() as directory, running_agent(directory) as agent:
        save_steps(root, agent, range(1, 4))
        agent.kill()
        tier = MemoryTier(directory=directory, deadline_s=0.2)
        with (
            pytest.warns(MemoryTierWarning, match="Unavailable"),
            pytest.raises(CommittedStepsLost, match="no agent answers"),
        ):
            Checkpointer(root, save_decision_policy=NEVER, memory=tier)
        agent.start()
        assert_restores(root, agent, 3)


@pytest.mark.share(2)
def test_a_program_that_never_saved_to_memory_begins_as_ever(agents: list[Agent], root: Path) -> None:
    for _ in range(2):
        with checkpointer_of(root, agents[0].directory) as checkpointer:
            assert checkpointer.latest is None
    save_steps(root, agents[0], range(1, 3))
    with checkpointer_of(root, agents[0].directory) as checkpointer:
        checkpointer.delete(2)
        checkpointer.delete(1)
    with checkpointer_of(root, agents[0].directory) as checkpointer:
        assert checkpointer.latest is None, "the program deleted all there was"


def test_a_record_that_cannot_be_read_counts(tmp_path: Path) -> None:
    assert CommittedRecord(tmp_path).read() is None
    CommittedRecord(tmp_path).note(Version(3, 7))
    assert CommittedRecord(tmp_path).read() == Version(3, 7)
    for content in ("", "null", "[]", '{"epoch": 1}', "\0"):
        (tmp_path / COMMITTED_FILE).write_text(content)
        assert CommittedRecord(tmp_path).read() == Version(0, 0)
    CommittedRecord(tmp_path).forget()
    assert CommittedRecord(tmp_path).read() is None


def test_too_few_slots_are_told_in_bytes() -> None:
    status = {"versions_per_shard": 3, "slot_bytes": 1000, "slot_count": 5, "directory": "/d"}
    check_room(status, 1)
    with pytest.raises(MemoryTooSmall, match="6 slots, 6000 bytes, and it has 5, 5000 bytes") as raised:
        check_room(status, 2)
    assert isinstance(raised.value, InvalidInput)
    assert raised.value.context["needed_bytes"] == 6000
    check_room(status | {"versions_per_shard": 2}, 2)


# ---- two of five hosts at once -------------------------------------------------------------------


@pytest.mark.parametrize("part", ["data", "both headers", "gone"])
def test_going_back_because_of_damage_is_told(root: Path, part: str) -> None:
    with memory_directory() as directory, running_agent(directory, slots=3) as agent:
        save_steps(root, agent, range(1, 4))
        inventory = _native.AgentClient(str(agent.directory)).inventory()
        (newest,) = [slot["slot"] for slot in inventory if slot.get("step") == 3]
        agent.kill()
        DAMAGES[part](agent.directory / f"slot-{newest:05}")
        agent.start()
        with pytest.warns(LostStepWarning, match="step 3 was committed.*is 2") as caught:
            checkpointer = checkpointer_of(root, agent.directory)
        assert len(caught) == 1
        with checkpointer:
            assert checkpointer.tier_statistics is not None
            assert checkpointer.tier_statistics.lost_step == 3
            assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", 2))
        with pytest.warns(LostStepWarning):  # until something newer is saved
            save_steps(root, agent, range(3, 5))
        assert_restores(root, agent, 4)


@pytest.fixture
def five() -> Iterator[list[Agent]]:
    with memory_directory() as directory, running_agents(directory, 5, slots=6) as agents:
        yield agents


def holders_of(agents: list[Agent], step: int) -> list[Agent]:
    """Who has a copy of a step."""

    def has(agent: Agent) -> bool:
        slots = _native.AgentClient(str(agent.directory)).inventory()
        return any(slot.get("step") == step and "digest" in slot for slot in slots)

    return [agent for agent in agents if has(agent)]


def test_two_hosts_are_lost_and_a_third_has_a_copy(five: list[Agent], root: Path) -> None:
    save_steps(root, five[0], range(1, 4))
    holders = holders_of(five, 3)
    assert len(holders) == 2
    assert holders[0] is five[0]
    other = next(agent for agent in five if agent not in holders)
    lose([five[0], other])
    assert_restores(root, five[0], 3)
    wait_until(lambda: len(holders_of(five, 3)) == 2)


def test_two_hosts_are_lost_with_both_copies(five: list[Agent], root: Path) -> None:
    save_steps(root, five[0], range(1, 4))
    lose(holders_of(five, 3))
    with pytest.raises(CommittedStepsLost, match="at least up to step 3") as raised:
        checkpointer_of(root, five[0].directory)
    assert raised.value.context["step"] == 3


@pytest.mark.long
@only_long
def test_two_hosts_are_lost_with_both_copies_of_what_the_directory_has_older(
    five: list[Agent], root: Path
) -> None:
    save_steps(root, five[0], range(4), on_disk_every=2)
    lose(holders_of(five, 3))
    with pytest.warns(LostStepWarning, match="step 3 was committed.*is 2") as caught:
        checkpointer = checkpointer_of(root, five[0].directory)
    (lost,) = [entry.message for entry in caught if isinstance(entry.message, LostStepWarning)]
    assert (lost.step, lost.whole_step, lost.tiers) == (3, 2, ("directory",))
    with checkpointer:
        assert checkpointer.tier_statistics is not None
        assert checkpointer.tier_statistics.lost_step == 3
        assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", 2))


def test_a_store_of_a_release_that_kept_one_version_is_told_how_to_open(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with memory_directory() as directory:
        with running_agent(directory, slots=4, options=["--versions=1"]) as agent:
            save_steps(root, agent, range(1, 4))
        command = [agent_program(), "run", f"--directory={directory}", f"--run-id={RUN}", "--slots=4"]
        command += ["--data-bytes=4MiB", "--contents-bytes=64KiB", "--memory-cap-bytes=1GiB"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
        assert done.returncode != 0
        assert "--versions 1" in done.stderr
        with running_agent(directory, slots=4, options=["--versions=1"]) as agent:
            assert_restores(root, agent, 3)
