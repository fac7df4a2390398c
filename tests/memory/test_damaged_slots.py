"""One damaged copy is replaced from another, whatever part of it is damaged."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.memory.damages import DAMAGES, slots
from tests.memory.scenarios import checkpointer_of, fingerprint, state_of
from tests.support.agents import Agent, memory_directory, running_agent, running_agents, wait_until

from waystation import _native
from waystation.memory import MemoryTierWarning

STEPS = 3
# What an agent without others can put right: it knows each header, and has the file of each slot open.
MENDED_ALONE = ["first header", "second header", "both headers", "gone", "replaced"]


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    """Those of three hosts."""
    with memory_directory() as directory, running_agents(directory, 3, slots=6) as agents:
        yield agents


def copies_of(agents: list[Agent], step: int) -> list[tuple[Agent, Path]]:
    """Who has a step, and in which file."""
    return [
        (agent, agent.directory / f"slot-{slot['slot']:05}")
        for agent in agents
        for slot in _native.AgentClient(str(agent.directory)).inventory()
        if slot.get("step") == step and "digest" in slot
    ]


def save_steps(root: Path, agent: Agent) -> None:
    with checkpointer_of(root, agent.directory) as checkpointer:
        for step in range(1, STEPS + 1):
            checkpointer.save(step, state_of("numpy", step))


def assert_loaded(root: Path, agent: Agent, damage: object = None) -> None:
    """The last step is loaded to the bit without a warning, though damage is done after the tier opens."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", MemoryTierWarning)
        with checkpointer_of(root, agent.directory) as checkpointer:
            if callable(damage):
                damage()
            assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", STEPS))


@pytest.mark.share(24)
@pytest.mark.parametrize("part", DAMAGES)
@pytest.mark.parametrize("which", ["own slot", "all slots"])
def test_a_copy_that_is_damaged_comes_from_another_host(
    agents: list[Agent], tmp_path: Path, part: str, which: str
) -> None:
    root, own = tmp_path / "run", agents[0]
    save_steps(root, own)
    found = [path for agent, path in copies_of(agents, STEPS) if agent is own]
    assert len(found) == 1

    def damage() -> None:
        for path in list(slots(own.directory)) if which == "all slots" else found:
            DAMAGES[part](path)

    assert_loaded(root, own, damage)
    wait_until(lambda: len(copies_of(agents, STEPS)) == 2)
    assert_loaded(root, own)


@pytest.mark.share(4)
@pytest.mark.parametrize("part", ["both headers", "data", "cut to nothing", "gone"])
def test_what_an_agent_finds_damaged_as_it_starts_comes_from_another_host(
    agents: list[Agent], tmp_path: Path, part: str
) -> None:
    """Also if it is loaded at once: the agents are recovering then, and are waited for."""
    root, own = tmp_path / "run", agents[0]
    save_steps(root, own)

    def damage() -> None:
        own.kill()
        for path in slots(own.directory):
            DAMAGES[part](path)
        own.start()

    assert_loaded(root, own, damage)
    wait_until(lambda: len(copies_of(agents, STEPS)) == 2)


@pytest.mark.share(12)
@pytest.mark.parametrize("part", DAMAGES)
def test_a_copy_on_the_other_host_is_put_right_before_the_own_one_goes(
    agents: list[Agent], tmp_path: Path, part: str
) -> None:
    """Damage that no load of the host has met is found when a program begins."""
    root = tmp_path / "run"
    save_steps(root, agents[0])
    ((other, path),) = [found for found in copies_of(agents, STEPS) if found[0] is not agents[0]]
    DAMAGES[part](path)
    assert_loaded(root, agents[0])
    wait_until(lambda: len(copies_of(agents, STEPS)) == 2)
    ((own, path),) = [found for found in copies_of(agents, STEPS) if found[0] is agents[0]]
    assert own is not other
    DAMAGES[part](path)
    assert_loaded(root, agents[0])


@pytest.mark.parametrize("part", DAMAGES)
def test_what_an_agent_alone_can_put_right_it_does(tmp_path: Path, part: str) -> None:
    root = tmp_path / "run"
    with memory_directory() as directory, running_agent(directory) as agent:
        save_steps(root, agent)
        ((_, path),) = copies_of([agent], STEPS)
        if part in MENDED_ALONE:
            assert_loaded(root, agent, lambda: DAMAGES[part](path))
        else:
            with checkpointer_of(root, agent.directory) as checkpointer:
                DAMAGES[part](path)
                with pytest.warns(MemoryTierWarning, match=rf"step {STEPS}.*Corrupt"):
                    found = checkpointer.load()
            assert fingerprint(found) == fingerprint(state_of("numpy", STEPS - 1))
        with checkpointer_of(root, agent.directory) as checkpointer:
            if part in MENDED_ALONE:  # a third program that begins with the step would doubt it
                assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", STEPS))
            for step in range(STEPS + 1, STEPS + 5):
                checkpointer.save(step, state_of("numpy", step))
            checkpointer.wait()
            assert checkpointer.tier_statistics is not None
            assert checkpointer.tier_statistics.failures == 0, "every slot can be written again"
