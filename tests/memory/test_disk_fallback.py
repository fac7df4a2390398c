"""Of a version of which a shard is in the memory of no host any more, that shard comes from the disk.

Agents that are alone bring each other nothing: what a process lacks here is on the disk, whoever has it in
memory. That the rest is not read from there is shown in `test_memory_hosts`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.memory import scenarios
from tests.support.agents import Agent, memory_directory, running_agent
from tests.support.programs import running

from waystation.training import Checkpointer


class Hosts:
    """Two hosts, each with memory that can be lost."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._agents: list[tuple[ExitStack, Agent]] = [self._new() for _ in range(2)]

    def _new(self) -> tuple[ExitStack, Agent]:
        own = self._stack.enter_context(ExitStack())
        return own, own.enter_context(running_agent(own.enter_context(memory_directory())))

    @property
    def directories(self) -> list[Path]:
        return [agent.directory for _, agent in self._agents]

    def lose(self, index: int) -> None:
        """The agent of a host is killed and its memory deleted; another host takes its place."""
        own, agent = self._agents[index]
        agent.kill()
        own.close()  # which deletes the memory
        self._agents[index] = self._new()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(stack)


@pytest.fixture
def root(hosts: Hosts, tmp_path: Path) -> Path:
    """What two processes have saved, the last step in memory and on the disk."""
    root = tmp_path / "run"
    with running(
        scenarios.save_sharded_on_hosts,
        *(root, hosts.directories, 3, 2),
        count=2,
        framework="jax",
        directory=tmp_path,
    ) as programs:
        assert programs.values() == [[1], [1]]
    return root


def loaded(hosts: Hosts, root: Path, directory: Path) -> list[dict[str, Any]]:
    with running(
        scenarios.load_sharded_on_hosts,
        *(root, hosts.directories),
        count=2,
        framework="jax",
        directory=directory,
    ) as programs:
        return programs.values()


@pytest.mark.parametrize("lost", [0, 1], ids=["shard-of-the-primary", "shard-of-the-other"])
@pytest.mark.share(2)
def test_what_memory_lacks_is_read_from_the_disk(hosts: Hosts, root: Path, tmp_path: Path, lost: int) -> None:
    hosts.lose(lost)
    assert loaded(hosts, root, tmp_path) == [{"step": 2, "from memory": 1, "warned": []}] * 2


def test_what_another_call_has_saved_is_not_taken_for_it(hosts: Hosts, root: Path, tmp_path: Path) -> None:
    other = {name: scenarios.values_of(name, 2) for name in scenarios.SHAPES} | {"step": np.int64(2)}
    with Checkpointer(root) as checkpointer:
        checkpointer.save(2, other, force=True, overwrite=True)
    hosts.lose(1)
    for found in loaded(hosts, root, tmp_path):
        assert (found["step"], found["from memory"]) == (2, 0)
        assert len(found["warned"]) == 1


def test_a_step_that_only_memory_had_is_gone_with_a_shard(hosts: Hosts, root: Path, tmp_path: Path) -> None:
    shutil.rmtree(root / "2")
    hosts.lose(0)
    found = loaded(hosts, root, tmp_path)
    # Step 0 is the one of which the directory has what memory lacks.
    assert [(each["step"], each["from memory"]) for each in found] == [(0, 1)] * 2
