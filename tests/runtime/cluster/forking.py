"""A program of a cluster that forks: `python -m tests.runtime.cluster.forking ADDRESS`."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.runtime.cluster.driving import visiting

from waystation import runtime
from waystation.errors import InvalidInput
from waystation.transfers.handle import AsyncResponse

BOUND_S = 60.0
CHILDREN = 8


def refused(work: Callable[[], object]) -> None:
    """Does what belongs to the parent, and is refused."""
    with pytest.raises(InvalidInput, match=f"process {os.getppid()}"):
        work()


def be_child(cluster: Any, client: Any, function: Any, x: Any, y: Any, handle: Any) -> None:
    """Uses everything that it has inherited."""
    on = function.slice
    for work in (
        lambda: function(x),
        y.numpy,
        y.block_until_ready,
        cluster.status,
        cluster.start_client,
        client.suspend,
        lambda: client.put(np.zeros(3), on),
        lambda: client.jit(lambda x: x, on)(x),
        lambda: client.save("/nowhere", {"y": y}),
        lambda: runtime.program(function)(x),
        on.release,
        handle.result,
        handle.done,
    ):
        refused(work)
    # What ends something does nothing here.
    client.close()
    cluster.close()


def fork(*arguments: Any) -> None:
    """A child that does so, and its end."""
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(BOUND_S / 2)
        try:
            be_child(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    end_s = time.monotonic() + BOUND_S
    while time.monotonic() < end_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, status
            return
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("a child has not ended")


def main() -> None:
    """Calls in a thread, and forks meanwhile."""
    warnings.simplefilter("ignore")  # of forks beside threads
    with visiting(sys.argv[1], "forking") as cluster, cluster.start_client() as client:
        cluster.add_island("forking")
        clients = cluster.status().clients
        on = client.make_virtual_device_set().add_slice(devices=1, island="forking")
        function = client.jit(lambda x: x + 1, on)
        x = client.put(np.zeros(4, np.float32), on)
        y = function(x)
        may_end = threading.Event()
        failures: list[BaseException] = []

        def call() -> None:
            made, count = x, 0
            try:
                while not may_end.is_set():
                    made, count = function(made), count + 1
                    if count % 10 == 0:
                        assert made.numpy()[0] == count
            except BaseException as error:
                failures.append(error)

        handle = AsyncResponse("waiting", lambda _: may_end.wait(10 * BOUND_S))
        thread = threading.Thread(target=call)
        thread.start()
        try:
            for _ in range(CHILDREN):
                fork(cluster, client, function, x, y, handle)
        finally:
            may_end.set()
            thread.join(BOUND_S)
        assert not failures, failures
        assert function(y).numpy().tolist() == [2] * 4
        assert cluster.status().clients == clients


if __name__ == "__main__":
    main()
