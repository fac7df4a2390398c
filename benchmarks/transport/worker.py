"""The consumer of one system: `python -m benchmarks.transport.worker REQUEST` measures all sizes."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.processes import Outcome, Request, answer
from benchmarks.transport.systems import SYSTEMS, block


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportRequest(Request):
    """What to measure.

    Attributes:
        system: Of `SYSTEMS`.
        sizes: Of blocks, in bytes.
        budget_s: How long to go on with each size.
    """

    system: str
    sizes: tuple[int, ...]
    budget_s: float


LEAST, MOST, WARM = 5, 400, 3


def measure(request: TransportRequest) -> Outcome:
    """The median seconds of a hand-over, by size."""
    consumer = SYSTEMS[request.system](request.sizes)
    numbers = iter(range(1 << 30))
    found = {}
    for nbytes in request.sizes:
        for _ in range(WARM):
            taken = consumer.take(nbytes, next(numbers))
            if not np.array_equal(taken, block(nbytes)):
                raise ValueError(f"'{request.system}' brought other bytes than were sent")
            del taken  # as a program that is done with it does: its memory can be used again
        times: list[float] = []
        end = time.perf_counter() + request.budget_s
        while len(times) < LEAST or (time.perf_counter() < end and len(times) < MOST):
            begun = time.perf_counter()
            taken = consumer.take(nbytes, next(numbers))
            times.append(time.perf_counter() - begun)
            del taken
        found[str(nbytes)] = statistics.median(times)
    consumer.close()
    return {"status": "ok", "seconds": found}


if __name__ == "__main__":
    answer(TransportRequest, measure)
    sys.stdout.flush()
