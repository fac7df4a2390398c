"""A program that forks at random times while its threads save, load and keep states in memory.

`python -m tests.checkpoint.forking SEED CHILDREN DIRECTORY MEMORY`: ends with 0 if all children have ended by
themselves, and everything of the parent is there.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.testing  # before threads are: a child would wait for an import of theirs

import waystation as ws
from waystation.errors import InvalidInput
from waystation.memory import MemoryTier
from waystation.training import Checkpointer
from waystation.training.save_decision_policies import FixedIntervalPolicy
from waystation.transfers.handle import AsyncResponse

BOUND_S = 60
# What a child may hear of its parent's handles, checkpointers and tiers: that they are not its own.
NOT_ITS_OWN = InvalidInput
STATE = {"a": np.arange(300_000), "b": {"c": np.ones((7, 11), np.float32)}}


class Parent:
    """What goes on in threads of the parent.

    Args:
        directory: Where it saves.
        memory: The directory of the host's agent.
    """

    def __init__(self, directory: Path, memory: str) -> None:
        self.directory = directory
        self.failures: list[str] = []
        self.handle: AsyncResponse[None] | None = None
        self.stopping = threading.Event()
        self.checkpointer = Checkpointer(
            directory / "steps",
            save_decision_policy=FixedIntervalPolicy(1),
            memory=MemoryTier(directory=memory, save_decision_policy=FixedIntervalPolicy(1)),
        )
        self._steps = 0
        self.checkpointer.save(0, STATE)
        ws.save(directory / "given", STATE)
        works = [self.save, self.save_in_background, self.load, self.step]
        self._threads = [threading.Thread(target=self._repeat, args=(work,)) for work in works]

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join(BOUND_S)
            if thread.is_alive():
                self.failures.append(f"{thread} has not ended")
        self.checkpointer.close()
        check(ws.load(self.directory / "saved"))
        check(self.checkpointer.load())

    def save(self) -> None:
        ws.save(self.directory / "saved", STATE, overwrite=True)

    def save_in_background(self) -> None:
        self.handle = ws.save_async(self.directory / "saved in background", STATE, overwrite=True)
        self.handle.result()

    def load(self) -> None:
        check(ws.load(self.directory / "given"))

    def step(self) -> None:
        self._steps += 1
        self.checkpointer.save_async(self._steps, STATE)
        if self._steps % 5 == 0:
            check(self.checkpointer.load())

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self.stopping.is_set():
            try:
                work()
            except BaseException:
                self.failures.append(traceback.format_exc())
                return


def check(state: dict) -> None:
    """Raises unless it is what was saved."""
    np.testing.assert_array_equal(state["a"], STATE["a"])
    np.testing.assert_array_equal(state["b"]["c"], STATE["b"]["c"])


def not_its_own(work: Callable[[], object]) -> None:
    """Does what may work, or be refused since it is of the parent."""
    try:
        work()
    except NOT_ITS_OWN as error:
        if f"process {os.getppid()}" not in error.message:
            raise


def be_child(parent: Parent, own: Path) -> None:
    """What a child does: works of its own, and everything that it has inherited."""
    warnings.simplefilter("ignore")  # of a tier that the child cannot have
    check(ws.load(parent.directory / "given"))
    ws.save(own, STATE)
    check(ws.load_async(own).result())
    handle = parent.handle
    if handle is not None:
        for method in (handle.done, handle.progress, handle.cancel, handle.result):
            not_its_own(method)
    not_its_own(lambda: check(parent.checkpointer.load()))
    not_its_own(parent.checkpointer.is_saving_in_progress)
    not_its_own(parent.checkpointer.wait)
    not_its_own(parent.checkpointer.close)


def run_child(parent: Parent, number: int, *, is_quick: bool) -> None:
    """Forks, and ends the child process in one of two ways."""
    own = parent.directory / f"child {number}"
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(BOUND_S / 2, file=sys.__stderr__)
        code = 1
        try:
            be_child(parent, own)
            code = 0
        except BaseException:
            traceback.print_exc()
        if is_quick:
            os._exit(code)
        sys.exit(code)  # with everything that runs at the end of a process
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status:
                parent.failures.append(f"child {number} has ended with status {status}")
            return
        time.sleep(0.005)
    parent.failures.append(f"child {number} has not ended")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main() -> None:
    """Forks so many children, at times of chance."""
    seed, children, directory, memory = sys.argv[1:]
    chance = random.Random(int(seed))
    parent = Parent(Path(directory), memory)
    parent.begin()
    for number in range(int(children)):
        time.sleep(chance.random() * 0.05)
        run_child(parent, number, is_quick=chance.random() < 0.5)
        if parent.failures:
            break
    parent.end()
    sys.exit("\n".join(parent.failures) or 0)


if __name__ == "__main__":
    main()
