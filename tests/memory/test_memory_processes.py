"""Programs of several processes keep their state in memory, and other numbers of processes take it up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.memory import scenarios
from tests.support.agents import Agent, memory_directory, running_agent, running_agents
from tests.support.programs import running

from waystation import _native


@pytest.fixture
def agent() -> Iterator[Agent]:
    with memory_directory() as directory, running_agent(directory, slots=12) as agent:
        yield agent


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def save(root: Path, agent: Agent, directory: Path) -> None:
    """Two processes with two devices each save three steps."""
    with running(
        scenarios.save_sharded, *(root, agent.directory, 3), count=2, framework="jax", directory=directory
    ) as programs:
        assert programs.values() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.share(3)
def test_other_numbers_of_processes_load_to_other_shardings(
    agent: Agent, root: Path, tmp_path: Path, count: int
) -> None:
    save(root, agent, tmp_path)
    slots = _native.AgentClient(str(agent.directory)).inventory()
    held = {slot["shard"].split("/")[1]: slot["data_bytes"] for slot in slots if slot["state"] == "committed"}
    assert held.keys() == {"0-of-2", "1-of-2"}
    with running(
        scenarios.load_sharded, *(root, agent.directory), count=count, framework="jax", directory=tmp_path
    ) as programs:
        expected = {"step": 2, "from memory": 1, "warned": []}
        assert programs.values() == [expected] * count


@pytest.mark.parametrize("damaged", [0, 1], ids=["shard-of-the-primary", "shard-of-the-other"])
@pytest.mark.share(2)
def test_all_pass_over_what_one_finds_damaged(agent: Agent, root: Path, tmp_path: Path, damaged: int) -> None:
    save(root, agent, tmp_path)
    client = _native.AgentClient(str(agent.directory))
    (slot,) = [
        slot
        for slot in client.inventory()
        if slot.get("step") == 2 and slot["shard"].endswith(f"/{damaged}-of-2")
    ]
    held = client.hold(slot["epoch"], 2, slot["shard"])
    path, _, _ = held.file
    offset = next(entry[5] for entry in held.entries if "/arrays/matrix" in entry[0])
    held.release()
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 16)
    with running(
        scenarios.load_sharded, *(root, agent.directory), count=2, framework="jax", directory=tmp_path
    ) as programs:
        first, second = programs.values()
    assert first["step"] == second["step"] == 1
    for found in (first, second):
        assert found["from memory"] == 1
        assert len(found["warned"]) == 1
        assert "step 2" in found["warned"][0]
        assert "Corrupt" in found["warned"][0]


def test_what_processes_share_is_kept_once(agent: Agent, root: Path, tmp_path: Path) -> None:
    save(root, agent, tmp_path)
    client = _native.AgentClient(str(agent.directory))
    kept: dict[str, int] = {}
    for slot in client.inventory():
        if slot.get("step") == 2:
            held = client.hold(slot["epoch"], 2, slot["shard"])
            for path, _, _, _, _, _, nbytes in held.entries:
                kept[path] = kept.get(path, 0) + nbytes
            held.release()
    for name in scenarios.SHAPES:
        assert kept[f"state/arrays/{name}"] == scenarios.values_of(name, 0).nbytes


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.share(2)
def test_agents_with_too_few_slots_are_refused_in_all_processes(
    root: Path, tmp_path: Path, hosts: int
) -> None:
    """Two processes at an agent that is alone, or at two that keep copies: two shards for each agent."""
    with memory_directory() as directory:
        running_all = (
            running_agent(directory, slots=5) if hosts == 1 else running_agents(directory, 2, slots=5)
        )
        with running_all as agents:
            directories = [each.directory for each in ([agents] * 2 if hosts == 1 else agents)]
            arguments = (root, directories, 1)
            with running(
                scenarios.save_sharded_on_hosts, *arguments, count=2, framework="jax", directory=tmp_path
            ) as programs:
                found = [programs.value(index) for index in range(2)]
    for raised in found:
        assert raised.type == "MemoryTooSmall"
        assert "takes 6 slots" in raised.message
        assert "and it has 5" in raised.message
        assert "--slots 6" in raised.message
        assert raised.context["path"] in map(str, directories)


def test_what_other_numbers_of_processes_have_kept_gives_way(root: Path, tmp_path: Path) -> None:
    """Two processes have left three versions, and there is room for but one of four processes beside them."""
    with memory_directory() as directory, running_agent(directory, slots=12) as agent:
        save(root, agent, tmp_path)
        arguments = (root, agent.directory, 6)
        with running(
            scenarios.take_up_and_save, *arguments, count=4, framework="jax", directory=tmp_path
        ) as programs:
            expected = {"first": 2, "tiers": ("memory", "directory"), "kept": 8}
            assert programs.values() == [expected] * 4
        client = _native.AgentClient(str(agent.directory))
        shards = {slot["shard"].split("/")[1] for slot in client.inventory() if slot["state"] == "committed"}
        assert shards == {f"{process}-of-4" for process in range(4)}
