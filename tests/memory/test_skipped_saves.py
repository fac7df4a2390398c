"""Saves in the background leave out what memory cannot take at once: training waits for no agent.

Agents are stopped by SIGSTOP, so that they do what they are asked only once a test lets them. All waits for
them are made so long (`PATIENCE_S`) that a call which waited would not return in time.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.memory import scenarios
from tests.memory.scenarios import PATIENCE_S, checkpointer_of, fingerprint, state_of, wait_for_agents_long
from tests.support.agents import Agent, memory_directory, running_agent, running_agents
from tests.support.programs import running

from waystation.coordination.single import SingleSession
from waystation.memory.save_actions import SaveAction
from waystation.training import Checkpointer

HOSTS = 3


@pytest.fixture
def agent() -> Iterator[Agent]:
    with memory_directory() as directory, running_agent(directory) as agent:
        yield agent


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    """Those of three hosts, which do not take each other for dead so soon as a test lets them go on."""
    options = ["--dead-after-s=5"]
    with memory_directory() as directory, running_agents(directory, HOSTS, options, slots=9) as agents:
        yield agents


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_agents_long(monkeypatch.setattr)


def counts(checkpointer: Checkpointer) -> dict[str, Any]:
    """What the tier has done."""
    statistics = checkpointer.tier_statistics
    assert statistics is not None
    return {name: getattr(statistics, name) for name in ("saves", "skipped", "failures", "last_saved_step")}


def save_async(checkpointer: Checkpointer, step: int) -> None:
    """Saves in the background, and is not kept."""
    begun = time.monotonic()
    checkpointer.save_async(step, state_of("numpy", step))
    assert time.monotonic() - begun < PATIENCE_S / 2


def test_steps_are_left_out_until_the_version_before_has_its_copies(
    agents: Sequence[Agent], tmp_path: Path
) -> None:
    with checkpointer_of(tmp_path / "run", agents[0].directory, on_disk_every=2) as checkpointer:
        save_async(checkpointer, 1)
        checkpointer.wait()
        for other in agents[1:]:
            other.signal(signal.SIGSTOP)
        for step in range(2, 7):
            save_async(checkpointer, step)
        assert counts(checkpointer) == {"saves": 1, "skipped": 4, "failures": 0, "last_saved_step": 1}
        for other in agents[1:]:
            other.signal(signal.SIGCONT)
        checkpointer.wait()
        assert counts(checkpointer) == {"saves": 2, "skipped": 4, "failures": 0, "last_saved_step": 2}
        found = {info.step: info.tiers for info in checkpointer.checkpoints}
        both, disk = ("memory", "directory"), ("directory",)
        assert found == {1: ("memory",), 2: both, 4: disk, 6: disk}, (
            "the directory has all that it is to have"
        )
        checkpointer.save(7, state_of("numpy", 7))
        checkpointer.save(8, state_of("numpy", 8))  # it waits for the copies of the one before
        checkpointer.wait()
        assert counts(checkpointer) == {"saves": 4, "skipped": 4, "failures": 0, "last_saved_step": 8}
        assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", 8))


def test_training_goes_on_beside_an_agent_of_its_own_host_that_is_stopped(
    agent: Agent, tmp_path: Path
) -> None:
    with checkpointer_of(tmp_path / "run", agent.directory) as checkpointer:
        save_async(checkpointer, 1)
        checkpointer.wait()
        agent.signal(signal.SIGSTOP)
        for step in range(2, 7):
            save_async(checkpointer, step)
        agent.signal(signal.SIGCONT)
        checkpointer.wait()
        assert counts(checkpointer) == {"saves": 1, "skipped": 5, "failures": 0, "last_saved_step": 1}
        _save_until_kept(checkpointer, 7)
        assert counts(checkpointer)["failures"] == 0
        kept = counts(checkpointer)["last_saved_step"]
        assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", kept))


def _save_until_kept(checkpointer: Checkpointer, step: int) -> None:
    """Saves steps until the tier has one of them: it asks the agents first."""
    for each in range(step, step + 4):
        save_async(checkpointer, each)
        checkpointer.wait()
        if counts(checkpointer)["last_saved_step"] == each:
            return
    raise AssertionError(counts(checkpointer))


def test_an_agent_that_is_killed_is_waited_for_in_the_background(agent: Agent, tmp_path: Path) -> None:
    with checkpointer_of(tmp_path / "run", agent.directory) as checkpointer:
        save_async(checkpointer, 1)
        checkpointer.wait()
        agent.kill()
        save_async(checkpointer, 2)
        save_async(checkpointer, 3)
        agent.start()
        checkpointer.wait()
        assert counts(checkpointer) == {"saves": 1, "skipped": 2, "failures": 0, "last_saved_step": 1}
        _save_until_kept(checkpointer, 4)


@pytest.mark.share(2)
@pytest.mark.parametrize("stopped", [0, 1, 2], ids=["primary", "other", "neither"])
def test_all_processes_leave_out_the_same_steps(
    agents: Sequence[Agent], tmp_path: Path, stopped: int
) -> None:
    directories = [agent.directory for agent in agents]
    with running(
        scenarios.save_beside_agents_that_stop,
        *(tmp_path / "run", directories),
        count=2,
        framework="jax",
        directory=tmp_path,
    ) as programs:
        assert [programs.report(index) for index in range(2)] == ["begun"] * 2
        agents[stopped].signal(signal.SIGSTOP)
        for index in range(2):
            programs.send(index, "stopped")
        told = [programs.report(index) for index in range(2)]
        agents[stopped].signal(signal.SIGCONT)
        for index in range(2):
            programs.send(index, "going on")
        first, second = programs.values()
    assert told[0] == told[1]
    assert told[0]["skipped"] > 0
    assert (told[0]["saves"], told[0]["failures"]) == (1, 0)
    assert first == second
    assert first["failures"] == 0
    assert first["last_saved_step"] > scenarios.STEPS_BESIDE_STOPPED_AGENTS


class Together(SingleSession):
    """Of other processes, whose actions are these."""

    def __init__(self, *others: SaveAction) -> None:
        super().__init__()
        self._others = [b"%d" % action for action in others]

    def round(self, work: Any, decide: Any) -> bytes:
        """Hands in what the others have to do as well."""
        return bytes(decide([work(), *self._others]))


def test_what_one_process_cannot_do_none_does() -> None:
    for action in SaveAction:
        assert SaveAction.SAVE.agreed(Together(action)) is action
        assert action.agreed(Together(SaveAction.SAVE, SaveAction.SAVE)) is action
        assert action.agreed(Together(SaveAction.PAUSE)).leaves_out
        assert SaveAction.BUSY.agreed(Together(action)) is SaveAction.BUSY
    assert SaveAction.ASK.agreed(Together(SaveAction.OPEN, SaveAction.GO_BACK)) is SaveAction.OPEN
