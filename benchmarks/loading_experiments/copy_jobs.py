"""Jobs that copy memory beside a load, as in the experiments of the fastsafetensors paper.

Each fills a buffer of 160 MB with one 64-bit number after another, without end, and counts how often it has:
so one sees what the jobs do to a load, and what a load does to the jobs.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.loading_experiments.programs import Beside, Facts, context

BUFFER_BYTES = 160_000_000
UNDISTURBED_S = 1.0
READY_S = 60.0


def fill(passes: Any, index: int, connection: Connection) -> None:
    """What a job does until it is killed."""
    buffer = np.zeros(BUFFER_BYTES // 8, np.uint64)
    buffer.fill(1)
    connection.send("ready")
    while True:
        buffer.fill(passes[index])
        passes[index] += 1


def copying(count: int, backed_bytes: int = 0) -> Beside:
    """So many jobs beside a program; how fast they fill their buffers is added to its outcome.

    Args:
        count: How many.
        backed_bytes: Of memory that the program is going to use. The jobs begin after the program has had it
            backed, and may have taken just that, so it is backed once more.
    """

    @contextlib.contextmanager
    def beside(process_ids: Sequence[int]) -> Iterator[Facts]:
        del process_ids
        passes = context.RawArray(ctypes.c_uint64, max(1, count))
        jobs: list[Any] = []
        found: Facts = {}
        try:
            for index in range(count):
                here, there = context.Pipe()
                jobs.append(context.Process(target=fill, args=(passes, index, there), daemon=True))
                jobs[-1].start()
                there.close()
                with here:
                    if not here.poll(READY_S):
                        raise RuntimeError("a job that copies memory does not begin")
            if count and backed_bytes:
                measure.back_free_memory(backed_bytes)
            before, begin_s = sum(passes), time.monotonic()
            yield found
            passed_s = time.monotonic() - begin_s
            found["filled_bytes_per_s"] = (sum(passes) - before) * BUFFER_BYTES / passed_s
        finally:
            for job in jobs:
                job.kill()
                job.join()

    return beside


def undisturbed(count: int) -> Facts:
    """The jobs with no load beside them."""
    with copying(count)([]) as found:
        time.sleep(UNDISTURBED_S)
    return {"status": "ok", "seconds": UNDISTURBED_S, **found}
