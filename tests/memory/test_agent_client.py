"""A process and the agent of its host: what is saved is there, whoever dies, and damage is seen."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.memory.damages import flip
from tests.memory.shards import (
    EPOCH,
    arrays_of,
    assert_equal,
    held_arrays,
    load,
    read,
    save,
    start_save,
    states,
)
from tests.support import held_memory
from tests.support.agents import RUN, Agent, memory_directory, running_agent, wait_until
from tests.support.held_memory import HeldMemory

from waystation import _native, errors

needs_held_memory = pytest.mark.skipif(
    not held_memory.is_granted(), reason="the system does not grant userfaultfd"
)


@pytest.fixture
def agent() -> Iterator[Agent]:
    """One that keeps a single committed version of each shard."""
    with memory_directory() as directory, running_agent(directory, options=["--versions=1"]) as agent:
        yield agent


@pytest.fixture
def client(agent: Agent) -> _native.AgentClient:
    return _native.AgentClient(str(agent.directory))


def test_what_is_saved_is_loaded(agent: Agent, client: _native.AgentClient) -> None:
    for step in (10, 20, 30):
        saved = save(client, step)
        assert client.inventory()[saved["slot"]]["digest"] == saved["digest"]
        assert client.commit(EPOCH, step) == [saved["slot"]]
        assert_equal(load(client, step), arrays_of(step))
    assert_equal(load(client, 20), arrays_of(20))
    with pytest.raises(errors.NotFound):
        load(client, 10)
    status = client.status()
    assert (status["run"], status["process"], status["process_count"]) == (RUN, agent.process, 1)
    assert (status["epoch"], status["slot_count"], status["versions_per_shard"]) == (0, 4, 2)
    assert status == {**agent.ready["status"], "process_count": 1}
    newest = [slot for slot in client.inventory() if slot.get("step") == 30]
    assert [(slot["state"], slot["shard"], slot["epoch"], slot["process"]) for slot in newest] == [
        ("committed", "0/1", EPOCH, os.getpid())
    ]


def test_what_is_held_is_not_overwritten(client: _native.AgentClient) -> None:
    save(client, 10)
    client.commit(EPOCH, 10)
    held = client.hold(EPOCH, 10, "0/1")
    save(client, 20)
    client.commit(EPOCH, 20)
    with pytest.raises(errors.Unavailable):  # the only one that might go is held
        save(client, 30)
    assert_equal(read(held), arrays_of(10))
    held.release()
    with pytest.raises(errors.InvalidInput, match="released"):
        read(held)
    save(client, 30)
    client.commit(EPOCH, 30)
    assert_equal(load(client, 30), arrays_of(30))


def test_versions_that_nobody_needs_are_freed(client: _native.AgentClient) -> None:
    save(client, 10)
    assert client.give_up(EPOCH, 10) == [0]
    save(client, 20)
    client.commit(EPOCH, 20)
    save(client, 30)
    client.commit(EPOCH, 30)
    assert client.retire_before(EPOCH, 30) == [0]
    assert states(client) == ["free", "committed", "free", "free"]
    assert client.commit(EPOCH, 99) == []


@needs_held_memory
def test_an_agent_that_is_replaced_while_a_slot_is_filled(agent: Agent, client: _native.AgentClient) -> None:
    memory = HeldMemory(1 << 20)
    job = start_save(client, 10, held_arrays(memory))
    wait_until(lambda: states(client)[0] == "writing")
    agent.kill()
    agent.start()
    assert agent.ready["status"]["adoption"]["in_writing"] == 1
    agent.kill()  # and when the slot is to be sealed, there is none for a while
    memory.release()
    assert job.wait_gathered(memory.nbytes)
    assert not job.wait(0.2)
    agent.start()
    job.result()
    assert not load(client, 10)["held"].any()


@needs_held_memory
def test_a_cancelled_save_gives_its_slot_back(client: _native.AgentClient) -> None:
    memory = HeldMemory(1 << 20)
    arrays = held_arrays(memory)
    owner = weakref.ref(arrays["held"])
    job = start_save(client, 10, arrays)
    wait_until(lambda: states(client)[0] == "writing")
    job.cancel()
    del arrays
    gc.collect()
    assert owner() is not None, "somebody still reads it"
    memory.release()
    with pytest.raises(errors.Cancelled):
        job.result()
    assert owner() is None
    assert states(client) == ["free"] * 4


def test_slots_that_nobody_waited_for_are_taken_back(agent: Agent, client: _native.AgentClient) -> None:
    """A process that gives up waiting for an agent that is stopped does not hear which slot that gives it."""
    save(client, 10)
    client.commit(EPOCH, 10)
    for step in (20, 30, 40):
        agent.signal(signal.SIGSTOP)
        job = start_save(client, step, arrays_of(step))
        assert not job.wait(0.2)
        job.cancel()
        with pytest.raises(errors.Cancelled):
            job.result()
        agent.signal(signal.SIGCONT)
    save(client, 50)
    client.commit(EPOCH, 50)
    for step in (10, 50):
        assert_equal(load(client, step), arrays_of(step))


@needs_held_memory
@pytest.mark.parametrize("agent_dies_too", [False, True])
def test_a_trainer_that_is_killed_while_it_fills_a_slot(
    agent: Agent, client: _native.AgentClient, agent_dies_too: bool
) -> None:
    save(client, 10)
    client.commit(EPOCH, 10)
    command = [sys.executable, "-m", "tests.memory.shards", str(agent.directory), "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "saving\n"
        wait_until(lambda: states(client)[1] == "writing")
        if agent_dies_too:
            agent.kill()
        trainer.kill()
    if agent_dies_too:
        agent.start()
        assert agent.ready["status"]["adoption"]["abandoned"] == 1
    wait_until(lambda: states(client) == ["committed", "free", "free", "free"])
    save(client, 20)
    client.commit(EPOCH, 20)
    for step in (10, 20):
        assert_equal(load(client, step), arrays_of(step))


@needs_held_memory
def test_what_is_gathered_may_change(agent: Agent, client: _native.AgentClient) -> None:
    memory = HeldMemory(1 << 20)
    job = start_save(client, 10, held_arrays(memory))
    wait_until(lambda: states(client)[0] == "writing")
    agent.signal(signal.SIGSTOP)
    memory.release()
    assert job.wait_gathered(memory.nbytes)
    assert not job.done(), "nobody has sealed it"
    memory.buffer[:] = b"\xff" * memory.nbytes
    agent.signal(signal.SIGCONT)
    job.result()
    assert not load(client, 10)["held"].any()


def test_damage_is_seen_and_quarantined(agent: Agent, client: _native.AgentClient) -> None:
    save(client, 10)
    client.commit(EPOCH, 10)
    save(client, 20)
    client.commit(EPOCH, 20)
    path, file_bytes, _ = client.hold(EPOCH, 20, "0/1").file
    with open(path, "r+b") as file:
        file.seek(file_bytes - 1)
        last = file.read(1)[0]
        file.seek(file_bytes - 1)
        file.write(bytes([last ^ 1]))
    with pytest.raises(errors.Corrupt, match=r"slot-00001"):
        load(client, 20)
    assert client.quarantine(EPOCH, 20) == [1]
    with pytest.raises(errors.NotFound):
        load(client, 20)
    assert_equal(load(client, 10), arrays_of(10))
    client.discard_quarantined(1)
    assert states(client) == ["committed", "free", "free", "free"]


def test_processes_that_all_ask_for_a_verification_are_all_answered(agent: Agent) -> None:
    """One verification neither reads nor frees what another one has found."""
    clients = [_native.AgentClient(str(agent.directory)) for _ in range(8)]
    for step in range(10, 40):
        save(clients[0], step)
        clients[0].commit(EPOCH, step)
        _damage(clients[0], step)
        at_once = threading.Barrier(len(clients))

        def ask(client: _native.AgentClient, at_once: threading.Barrier = at_once) -> None:
            at_once.wait()
            client.verify()

        with ThreadPoolExecutor(len(clients)) as pool:
            list(pool.map(ask, clients))
        assert states(clients[0]) == ["free"] * 4


def _damage(client: _native.AgentClient, step: int) -> None:
    """Flips a bit of the last byte of the data of a step."""
    held = client.hold(EPOCH, step, "0/1")
    path, file_bytes, _ = held.file
    held.release()
    flip(Path(path), file_bytes - 1)


def test_damaged_tables_are_seen(client: _native.AgentClient) -> None:
    save(client, 10)
    path, _, _ = client.hold(EPOCH, 10, "0/1").file
    with open(path, "r+b") as file:
        file.seek(12_288)  # where the table of contents begins
        file.write(b"\xff")
    with pytest.raises(errors.Corrupt, match=r"table of contents|entries"):
        client.hold(EPOCH, 10, "0/1")


def test_epochs_fence(agent: Agent, client: _native.AgentClient) -> None:
    save(client, 10)
    assert client.raise_epoch(3) == 3
    with pytest.raises(errors.Fenced, match="the epoch is 3 now"):
        save(client, 20)
    with pytest.raises(errors.Fenced):
        client.commit(EPOCH, 10)
    agent.kill()
    agent.start()
    assert client.status()["epoch"] == 3
    save(client, 20, epoch=3)
    assert_equal(load(client, 10), arrays_of(10))


def test_refusals(agent: Agent, client: _native.AgentClient) -> None:
    save(client, 10)
    with pytest.raises(errors.Conflict, match="in a slot already, sealed"):
        save(client, 10)
    with pytest.raises(errors.InvalidInput, match="larger than a slot"):
        start_save(client, 20, {"large": np.zeros(8 << 20, np.uint8)}).result()
    with pytest.raises(errors.Conflict, match="another run"):
        _native.AgentClient(str(agent.directory), run="f" * 32)
    with pytest.raises(errors.InvalidInput, match="32 hex digits"):
        _native.AgentClient(str(agent.directory), run="mine")
    contents, _, _ = _native.place_shard([("x", "uint8", (8,), (0,), (8,), 8)])
    on_device = np.array([0, 8, 0, 1, 0, 4096])
    with pytest.raises(errors.Unsupported, match="host memory first"):
        client.start_save(EPOCH, 20, "x", contents, on_device, None, data_bytes=8)
    source = np.zeros(16, np.uint8)
    beyond = np.array([0, 16, 0, 1, -1, source.ctypes.data])
    with pytest.raises(errors.InvalidInput, match="reach beyond the data"):
        client.start_save(EPOCH, 20, "x", contents, beyond, source, data_bytes=8).result()
    with pytest.raises(errors.InvalidInput, match="twice"):
        _native.place_shard([("x", "uint8", (8,), (0,), (8,), 8)] * 2)
    assert states(client) == ["sealed", "free", "free", "free"], "what failed gave its slot back"


def test_without_an_agent(tmp_path: Path) -> None:
    with pytest.raises(errors.Unavailable, match=re.escape(f"no agent answers in '{tmp_path}'")):
        _native.AgentClient(str(tmp_path), timeout_s=0.05)
    interrupter = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        _native.AgentClient(str(tmp_path), timeout_s=600)
    interrupter.join()


def test_an_agent_that_is_there_answers_who_does_not_wait(agent: Agent) -> None:
    assert _native.AgentClient(str(agent.directory), timeout_s=0.0).status()["process"] == agent.process


def test_an_agent_that_does_not_answer(agent: Agent) -> None:
    client = _native.AgentClient(str(agent.directory), timeout_s=2.0)
    agent.signal(signal.SIGSTOP)
    with pytest.raises(errors.Unavailable, match="does not answer in time"):
        client.status()
    agent.signal(signal.SIGCONT)
    assert client.status()["process"] == agent.process


def test_a_forked_child_has_no_part_in_it(agent: Agent) -> None:
    code = """
import os, sys
from tests.memory.shards import save, load, arrays_of, assert_equal
from waystation import _native, errors
client = _native.AgentClient(sys.argv[1])
save(client, 10)
child = os.fork()
if child == 0:
    try:
        client.status()
    except errors.InvalidInput as error:
        assert "parent" in error.message
        save(_native.AgentClient(sys.argv[1]), 11)
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert_equal(load(client, 10), arrays_of(10))
client.commit(1, 11)
save(client, 20)
assert_equal(load(client, 11), arrays_of(11))
assert_equal(load(client, 20), arrays_of(20))
"""
    with memory_directory() as directory, running_agent(directory, slots=6) as other:
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
        done = subprocess.run([*command, str(directory)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert other.end() == 0
    assert agent.end() == 0
