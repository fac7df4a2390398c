"""SIGKILL of trainers, of the agent, and of both: a later program goes on from memory, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.memory import scenarios
from tests.memory.scenarios import checkpointer_of, fingerprint, state_of
from tests.support import held_memory
from tests.support.agents import Agent, memory_directory, running_agent
from tests.support.programs import running


@pytest.fixture
def agent() -> Iterator[Agent]:
    with memory_directory() as directory, running_agent(directory, slots=12) as agent:
        yield agent


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.share(3)
def test_a_trainer_is_killed_between_saves(agent: Agent, tmp_path: Path, framework: str) -> None:
    root = tmp_path / "run"
    begun = -1
    for kill in range(3):
        with running(
            scenarios.train_until_killed,
            *(root, agent.directory, framework),
            count=1,
            framework="jax",
            directory=tmp_path,
        ) as programs:
            step, found = programs.report(0)
            if step is None:
                assert kill == 0
            else:
                # Of the save that had begun last nobody knows whether it was whole.
                assert begun - 1 <= step <= begun
                assert found == fingerprint(state_of(framework, step))
            for _ in range(3):
                begun = programs.report(0)
                programs.send(0, "go on")
            programs.signal(0)


@pytest.mark.skipif(not held_memory.is_granted(), reason="the system does not grant userfaultfd")
@pytest.mark.parametrize("agent_dies_too", [False, True], ids=["trainer", "both"])
@pytest.mark.share(2)
def test_a_trainer_is_killed_within_a_save(agent: Agent, tmp_path: Path, agent_dies_too: bool) -> None:
    root = tmp_path / "run"
    for kill in range(3):  # each leaves a slot that was being written
        with running(
            scenarios.die_within_a_save,
            *(root, agent.directory, 4 + kill),
            count=1,
            framework="jax",
            directory=tmp_path,
        ) as programs:
            assert programs.report(0) == "saving"
            if agent_dies_too:
                agent.kill()
            programs.signal(0)
        if agent_dies_too:
            agent.start()
        with checkpointer_of(root, agent.directory) as checkpointer:
            assert checkpointer.latest is not None
            assert checkpointer.latest.step == 3 + kill
            assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", 3 + kill))


def test_trainer_and_agent_are_killed_after_saves(agent: Agent, tmp_path: Path) -> None:
    root = tmp_path / "run"
    with running(
        scenarios.save_and_die,
        *(root, agent.directory, "torch", 5),
        count=1,
        framework="jax",
        directory=tmp_path,
    ) as programs:
        assert [ended.exit_code for ended in programs.end()] == [-9]
    agent.kill()
    agent.start()
    with checkpointer_of(root, agent.directory) as checkpointer:
        assert fingerprint(checkpointer.load()) == fingerprint(state_of("torch", 4))


@pytest.mark.share(6)
@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize("victim", [0, 1], ids=["primary", "other"])
def test_one_of_several_processes_is_killed(
    agent: Agent, tmp_path: Path, framework: str, victim: int
) -> None:
    root = tmp_path / "run"
    newest = -1
    for _ in range(3):
        with running(
            scenarios.train_together_until_killed,
            *(root, agent.directory),
            count=2,
            framework=framework,
            directory=tmp_path,
        ) as programs:
            starts = [programs.report(index) for index in range(2)]
            assert starts[0] == starts[1] >= newest, "what all were told to be whole is there"
            for _ in range(3):
                newest = min(programs.report(index) for index in range(2))
            programs.signal(victim)
