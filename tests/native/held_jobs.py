"""Programs that hold a job of the engine in the middle of its work and look at what then happens.

Each runs in a process of its own, because it forks, interrupts itself or counts threads:
`python -m tests.native.held_jobs PROGRAM DIRECTORY`. A program whose claim does not hold fails or hangs.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.support.held_memory import HeldMemory

import waystation
from waystation import _native, errors

# More than all staging blocks of a job, so that its files are there while the job is held.
FREE_BYTES = 48 << 20


def start(path: Path, memory: HeldMemory, owners: object = None) -> _native.Job:
    """A write job that has created its file and is held."""
    words = np.array([0, memory.nbytes, 0, 1, -1, memory.address])
    job = _native.start_write([(str(path), b"", memory.nbytes, words)], owners)
    wait_until(path.exists)
    return job


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def later(action: Callable[[], None]) -> threading.Thread:
    """Does something on another thread once this one has had time to begin to wait."""

    def run() -> None:
        time.sleep(0.2)
        action()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def is_refused(call: Callable[[], object]) -> bool:
    """Whether a call on a parent's job is refused as such."""
    try:
        call()
    except errors.InvalidInput as error:
        return "parent" in error.message
    return False


def saves_and_loads(path: Path) -> bool:
    expected = np.arange(3 << 20)
    waystation.save(path, {"x": expected})
    found = waystation.load(path)["x"]
    return bool(np.array_equal(found, expected))


def open_things() -> tuple[int, int, int]:
    """Threads, open files and arena bytes in use."""
    return (
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        _native.arena_statistics()["live_bytes"],
    )


# ---- programs ----------------------------------------------------------------------------------


def fork_beside_a_job(directory: Path) -> None:
    """A forked child cannot use the parent's job, is not hung up by it, and has an engine of its own."""
    memory = HeldMemory(FREE_BYTES)
    job = start(directory / "file", memory)
    child = os.fork()
    if child == 0:
        calls = (job.wait, job.done, job.progress, job.cancel, job.result, lambda: job.wait_gathered(0))
        assert all(is_refused(call) for call in calls)
        assert saves_and_loads(directory / "of-the-child")
        return  # and through the whole exit of an interpreter, where the job is dropped
    assert os.waitpid(child, 0)[1] == 0
    assert not job.done()
    assert saves_and_loads(directory / "of-the-parent")
    memory.release()
    assert job.result()["bytes_written"] == memory.nbytes
    assert (directory / "file").read_bytes() == bytes(memory.nbytes)


def fork_beside_a_save(directory: Path) -> None:
    """The same with a whole save in the background, which the child neither waits for nor harms."""
    memory = HeldMemory(FREE_BYTES)
    context = waystation.Context()
    context.memory.caller_keeps = True
    with context:
        response = waystation.save_async(directory / "held", {"x": np.frombuffer(memory.buffer, np.uint8)})
    wait_until(lambda: any(directory.glob("held.waystation-tmp-*/state/*.safetensors")))
    child = os.fork()
    if child == 0:
        assert saves_and_loads(directory / "of-the-child")
        return
    assert os.waitpid(child, 0)[1] == 0
    assert not response.done()
    memory.release()
    response.result()
    assert not waystation.load(directory / "held")["x"].any()
    assert sorted(os.listdir(directory)) == ["held", "of-the-child"]


def interrupt_a_wait(directory: Path) -> None:
    """Ctrl-C ends a wait while the job goes on; cancelled then, it removes its file and leaves nothing."""
    before = open_things()
    for wait in (_native.Job.wait, _native.Job.result, lambda job: job.wait_gathered(FREE_BYTES + 1)):
        memory = HeldMemory(FREE_BYTES)
        job = start(directory / "file", memory)
        thread = later(interrupt)
        try:
            wait(job)
        except KeyboardInterrupt:
            assert not job.done()
        else:
            raise AssertionError("the job was held, so only Ctrl-C could end the wait")
        thread.join()
        job.cancel()
        memory.release()
        assert job.wait()
        try:
            job.result()
        except errors.Cancelled:
            assert os.listdir(directory) == []
        else:
            raise AssertionError("a cancelled job succeeded")
    del job
    gc.collect()
    assert open_things() == before, (open_things(), before)


def interrupt_a_save(directory: Path) -> None:
    """Ctrl-C in a save raises KeyboardInterrupt, with nothing left on the disk and nothing still open."""
    before = open_things()
    memory = HeldMemory(FREE_BYTES)
    held = np.frombuffer(memory.buffer, np.uint8)

    def interrupt_and_release() -> None:
        wait_until(lambda: any(directory.glob("*/state/*.safetensors")))
        interrupt()
        time.sleep(0.2)  # cancelled while it is held
        memory.release()

    thread = threading.Thread(target=interrupt_and_release)
    thread.start()
    try:
        waystation.save(directory / "checkpoint", {"x": held})
    except KeyboardInterrupt:
        thread.join()
    else:
        raise AssertionError("the save was held, so only Ctrl-C could end it")
    assert os.listdir(directory) == []
    assert open_things() == before, (open_things(), before)


class Owner:
    """Something that keeps memory alive."""


def release_owners(directory: Path) -> None:
    """Owners are let go of by a Python thread, and not while a thread of the engine may read."""
    for end in (_native.Job.wait, _native.Job.done, _native.Job.result, lambda _job: None):
        released_on: list[int] = []
        memory, owner = HeldMemory(FREE_BYTES), Owner()
        weakref.finalize(owner, lambda to=released_on: to.append(threading.get_ident()))
        path = directory / "file"
        job = start(path, memory, [owner])
        del owner
        assert not job.wait(0.05)
        assert not released_on
        if end is _native.Job.done:
            later(memory.release).join()
            wait_until(job.done)
        else:
            later(memory.release)
            end(job)
            del job  # cancels, where nothing waited, and waits
        assert released_on == [threading.get_ident()]
        path.unlink(missing_ok=True)


def wait_without_the_interpreter(directory: Path) -> None:
    """Other Python threads run while one waits: here, the one without which the wait would not end."""
    waits = (_native.Job.wait, _native.Job.result, lambda job: job.wait_gathered(1 << 62))
    for number, wait in enumerate(waits):
        memory = HeldMemory(FREE_BYTES)
        job = start(directory / str(number), memory)
        thread = later(memory.release)
        wait(job)
        assert job.wait()
        thread.join()
    memory, slab = HeldMemory(0), _native.allocate(4096)
    thread = later(memory.release)
    _native.copy_batch(np.array([slab.address, memory.address, memory.nbytes]), None)
    thread.join()
    memory = HeldMemory(FREE_BYTES)
    job = start(directory / "dropped", memory)
    thread = later(memory.release)
    del job
    thread.join()
    assert not (directory / "dropped").exists()


PROGRAMS = {
    program.__name__: program
    for program in (
        fork_beside_a_job,
        fork_beside_a_save,
        interrupt_a_wait,
        interrupt_a_save,
        release_owners,
        wait_without_the_interpreter,
    )
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]))
