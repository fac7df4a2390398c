"""Programs over several hosts, each with an agent: what is killed, they go on from, to the bit.

Hosts are emulated by `waystation launch --hosts`: an agent, a directory and an address for each. In
`make test-long` every framework has everything killed, which takes ten minutes. In `make test` a program of
JAX loses a host, and the tests after it kill an agent beneath DDP and a host beneath FSDP.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.memory import scenarios, trainers
from tests.memory.scenarios import checkpointer_of, damage, fingerprint, state_of
from tests.support.agents import Agent, memory_directory, running_agents, wait_until
from tests.support.long import IS_LONG, amount, only_long
from tests.support.ports import claimed_ports
from tests.support.programs import running
from tests.support.warm_python import python

from waystation import _native
from waystation.errors import NotFound, WaystationError
from waystation.memory import MemoryTierWarning
from waystation.memory.exposition import samples_of

SCRIPT = str(Path(sys.executable).parent / "waystation")
HANG_S = 300
STEPS, KILLED_AT = amount(20, 40), 7
HOSTS = 3
RECOVERY_PHASE = "waystation_agent_last_recovery_phase_seconds"
FRAMEWORKS, VICTIMS = ("jax", "ddp", "fsdp"), ("host", "agent", "trainer")


@pytest.fixture
def store() -> Iterator[Path]:
    """The directory of the agents, which end with the test."""
    with memory_directory() as directory:
        store = directory / "agents"
        try:
            yield store
        finally:
            for path in store.glob("host-*/"):
                with contextlib.suppress(WaystationError, ProcessLookupError):
                    status = _native.AgentClient(str(path), timeout_s=0.0).status()
                    os.kill(status["process"], signal.SIGKILL)


def launch(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, "launch", "--grace", "20", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def metrics_of(store: Path) -> str:
    """The numbers of the agent of a host."""
    return _native.AgentClient(str(store)).metrics()


def told(directory: Path, what: str) -> list[int]:
    """The steps of which processes tell something."""
    lines = [line for index in range(HOSTS) for line in (directory / f"{index}.log").read_text().splitlines()]
    return [int(line.split()[1]) for line in lines if line.startswith(what)]


def trained(directory: Path) -> list[dict[int, str]]:
    """For each process the digests of its steps; of those that were done twice, all were the same."""
    found = []
    for index in range(HOSTS):
        steps: dict[int, str] = {}
        for line in (directory / f"{index}.log").read_text().splitlines():
            what, step, digest = line.split(maxsplit=2)
            if what != "saved":
                assert steps.setdefault(int(step), digest) == digest, line
        found.append(steps)
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[int, str]]]:
    """What a framework comes to without any failure, and without memory."""

    @functools.cache
    def of(framework: str) -> list[dict[int, str]]:
        directory = tmp_path_factory.mktemp(framework)
        arguments = framework, directory, STEPS
        with running(
            trainers.train_here, *arguments, count=HOSTS, framework="torch", directory=directory
        ) as programs:
            ended = programs.end()
        assert not [process.value for process in ended if process.value is not None], ended
        found = trained(directory)
        assert [sorted(steps) for steps in found] == [list(range(1, STEPS + 1))] * HOSTS
        return found

    return of


def kills() -> list[tuple[str, str]]:
    """Frameworks, with what is killed."""
    if IS_LONG:
        return list(itertools.product(FRAMEWORKS, VICTIMS))
    return [("jax", "host")]


@pytest.mark.long
@pytest.mark.parametrize(("framework", "victim"), kills())
def test_what_is_killed_is_gone_on_from(
    store: Path,
    tmp_path: Path,
    uninterrupted: Callable[[str], list[dict[int, str]]],
    framework: str,
    victim: str,
) -> None:
    program = python(), "-m", "tests.memory.trainers", framework, tmp_path, STEPS, victim, KILLED_AT
    options = "--hosts", HOSTS, "--agent", store, "--agent-memory", "32MiB", "--restarts", 2, "--json"
    done = launch(*options, "--", *program)
    assert done.returncode == 0, done.stderr
    assert trained(tmp_path) == uninterrupted(framework)
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["restarts"] == (victim != "agent"), done.stderr
    assert told(tmp_path, "resumed") == ([] if victim == "agent" else [KILLED_AT] * HOSTS)
    assert all(step > KILLED_AT for step in told(tmp_path, "saved")), "the agents have recovered"
    recoveries = document["recoveries"]
    assert [found["step"] for found in recoveries] == [KILLED_AT] * (victim != "agent")
    assert all(min(found["phases_s"].values()) >= 0 for found in recoveries)
    numbers = {(sample.name, *sample.labels.values()) for sample in samples_of(metrics_of(store / "host-1"))}
    assert {(RECOVERY_PHASE, "decide"), (RECOVERY_PHASE, "transfer")} <= numbers
    if victim != "trainer":
        assert "the agent of host-1 has ended and is started again" in done.stderr


@pytest.mark.long
@only_long
def test_an_agent_is_killed_under_three_launches(store: Path, tmp_path: Path) -> None:
    steps = KILLED_AT + 4
    names = [f"host-{index}" for index in range(HOSTS)]
    store.mkdir()
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("what only these agents know")
    program = python(), "-m", "tests.memory.trainers", "ddp", tmp_path, steps, "agent", KILLED_AT
    with claimed_ports(HOSTS + 3) as (first, *ports), ThreadPoolExecutor(HOSTS) as launches:
        listed = [
            {"name": name, "address": f"127.0.0.{index}:{port}"}
            for index, (name, port) in enumerate(zip(names, ports, strict=False), 2)
        ]
        (tmp_path / "hosts.json").write_text(json.dumps(listed))
        together = "--hosts", tmp_path / "hosts.json", "--secret-file", secret, "--port", first
        options = *together, "--agent-memory", "32MiB", "--restarts", 2, "--json"
        done = list(
            launches.map(
                lambda name: launch(*options, "--host", name, "--agent", store / name, "--", *program), names
            )
        )
    assert [found.returncode for found in done] == [0] * HOSTS, [found.stderr for found in done]
    assert [sorted(found) for found in trained(tmp_path)] == [list(range(1, steps + 1))] * HOSTS
    assert [json.loads(found.stdout)["restarts"] for found in done] == [0] * HOSTS
    assert told(tmp_path, "resumed") == [], "the program goes on beneath"
    assert all(step > KILLED_AT for step in told(tmp_path, "saved")), "and saves again"
    said = "has ended and is started again"
    assert [said in found.stderr for found in done] == [index == 1 for index in range(HOSTS)]
    adoption = _native.AgentClient(str(store / names[1])).status()["adoption"]
    assert not adoption["is_new"]
    assert adoption["whole"] >= 1, "what it had kept is there again"


@pytest.mark.long
@only_long
def test_what_no_memory_has_comes_from_the_disk_and_the_rest_from_memory(
    store: Path, tmp_path: Path, uninterrupted: Callable[[str], list[dict[int, str]]]
) -> None:
    trainer = "-m", "tests.memory.trainers", "fsdp", tmp_path, STEPS, "host", KILLED_AT, "disk"
    options = "--hosts", HOSTS, "--copies", 1, "--agent", store, "--agent-memory", "32MiB", "--restarts", 2
    done = launch(*options, "--", python(), *trainer)
    assert done.returncode == 0, done.stderr
    assert trained(tmp_path) == uninterrupted("fsdp")
    assert told(tmp_path, "resumed") == [KILLED_AT] * HOSTS


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    """Those of three hosts."""
    with memory_directory() as directory, running_agents(directory, 3, slots=12) as agents:
        yield agents


@pytest.mark.parametrize("hosts", [[2], [2, 0, 1], [1, 2, 2, 0]], ids=["one", "three", "four"])
@pytest.mark.share(3)
def test_other_processes_on_other_hosts_take_it_up(
    agents: list[Agent], tmp_path: Path, hosts: list[int]
) -> None:
    directories = [agent.directory for agent in agents]
    arguments = tmp_path / "run", directories[:2], 3
    with running(
        scenarios.save_sharded_on_hosts, *arguments, count=2, framework="jax", directory=tmp_path
    ) as programs:
        assert programs.values() == [[1, 2], [1, 2]]
    with running(
        scenarios.load_sharded_on_hosts,
        *(tmp_path / "run", [directories[host] for host in hosts]),
        count=len(hosts),
        framework="jax",
        directory=tmp_path,
    ) as programs:
        assert programs.values() == [{"step": 2, "from memory": 1, "warned": []}] * len(hosts)


def test_what_is_deleted_is_not_offered_again(agents: list[Agent], tmp_path: Path) -> None:
    root, directory = tmp_path / "run", agents[0].directory
    with checkpointer_of(root, directory, on_disk_every=2) as checkpointer:
        for step in range(4):
            checkpointer.save(step, state_of("numpy", step))
        checkpointer.wait()
        assert checkpointer.latest is not None
        assert (checkpointer.latest.step, checkpointer.latest.tiers) == (3, ("memory",))
        checkpointer.delete(3)
        assert checkpointer.latest.step == 2
    with checkpointer_of(root, directory) as checkpointer:
        assert checkpointer.latest is not None
        assert checkpointer.latest.step == 2
        assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", 2))


def test_a_program_that_was_replaced_saves_nothing_more(agents: list[Agent], tmp_path: Path) -> None:
    root = tmp_path / "run"
    with checkpointer_of(root, agents[0].directory) as first:
        first.save(1, state_of("numpy", 1))
        first.wait()
        with checkpointer_of(root, agents[1].directory) as second:
            assert fingerprint(second.load()) == fingerprint(state_of("numpy", 1))
            with pytest.warns(MemoryTierWarning, match="another program has begun on these hosts"):
                first.save(2, state_of("numpy", 2))
            second.save(5, state_of("numpy", 5))
            second.wait()
            assert second.tier_statistics is not None
            assert second.tier_statistics.last_saved_step == 5


def test_a_step_that_is_trained_again_replaces_what_was_later(agents: list[Agent], tmp_path: Path) -> None:
    root = tmp_path / "run"
    with checkpointer_of(root, agents[0].directory) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of("numpy", step))
        checkpointer.save(2, state_of("torch", 2))
        checkpointer.wait()
        assert [info.step for info in checkpointer.checkpoints] == [2]
    with checkpointer_of(root, agents[2].directory) as checkpointer:
        assert fingerprint(checkpointer.load()) == fingerprint(state_of("torch", 2))


@pytest.mark.parametrize("within", ["data", "tables"])
@pytest.mark.share(2)
def test_a_shard_that_is_damaged_comes_from_another_host(
    agents: list[Agent], tmp_path: Path, within: str
) -> None:
    root = tmp_path / "run"
    with checkpointer_of(root, agents[0].directory) as checkpointer:
        checkpointer.save(1, state_of("numpy", 1))
        checkpointer.wait()
    with checkpointer_of(root, agents[0].directory) as checkpointer:
        damage(agents[0], 1, within=within)  # after the agents have recovered, and found all of it whole
        assert fingerprint(checkpointer.load()) == fingerprint(state_of("numpy", 1))
        assert checkpointer.tier_statistics is not None
        assert (checkpointer.tier_statistics.loads, checkpointer.tier_statistics.failures) == (1, 0)
    wait_until(lambda: copies_of(agents, 1) == 2)


def test_what_is_damaged_on_all_hosts_is_given_up(agents: list[Agent], tmp_path: Path) -> None:
    root = tmp_path / "run"
    with checkpointer_of(root, agents[0].directory) as checkpointer:
        checkpointer.save(1, state_of("numpy", 1))
        checkpointer.wait()
    with checkpointer_of(root, agents[0].directory) as checkpointer:
        for agent in agents:
            if copies_of([agent], 1):
                damage(agent, 1)
        with pytest.warns(MemoryTierWarning, match="could not be loaded step 1"), pytest.raises(NotFound):
            checkpointer.load()


def copies_of(agents: list[Agent], step: int) -> int:
    """How many of the agents have a step."""
    inventories = [_native.AgentClient(str(agent.directory)).inventory() for agent in agents]
    return sum(any(slot.get("step") == step and "digest" in slot for slot in slots) for slots in inventories)
