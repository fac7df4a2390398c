"""What the processes do in tests of throttles."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from tests.support.programs import Place

import waystation

MIB = 1 << 20


def throttled(path: Path | str) -> waystation.Context:
    context = waystation.Context()
    context.engine.throttle_path = str(path)
    context.engine.block_bytes = 1 * MIB
    return context


def save_and_load(place: Place, nbytes: int) -> list[tuple[float, float]]:
    """Saves and loads a state of this process alone, when told to; returns the times of both."""
    state = {"x": np.full(nbytes, place.index, np.uint8)}
    path = place.directory / f"of-{place.index}"
    times = []
    with throttled(place.directory / "throttle"):
        for action in (lambda: waystation.save(path, state), lambda: waystation.load(path)):
            place.report("ready")
            place.receive()
            begin = time.monotonic()
            action()
            times.append((begin, time.monotonic()))
    np.testing.assert_array_equal(waystation.load(path)["x"], state["x"])
    return times
