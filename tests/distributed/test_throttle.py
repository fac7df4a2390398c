"""A throttle is one limit for all processes that name its file, for reads and for writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.distributed.throttle_scenarios import MIB, save_and_load, throttled
from tests.support.programs import running

import waystation
from waystation import _native, errors

BURST_S = 0.01


def run_all(directory: Path, count: int, nbytes: int) -> list[float]:
    """How long all processes together took to save, and to load."""
    with running(save_and_load, nbytes, count=count, framework="torch", directory=directory) as programs:
        for _ in range(2):
            for index in range(count):
                programs.report(index)
            for index in range(count):
                programs.send(index, "go")
        values = programs.values()
    return [
        max(times[action][1] for times in values) - min(times[action][0] for times in values)
        for action in range(2)
    ]


def test_processes_share_a_limit_on_bytes(tmp_path: Path) -> None:
    throttle = tmp_path / "throttle"
    _native.create_throttle(str(throttle), bytes_per_s=32 * MIB)
    for duration_s in run_all(tmp_path, 3, 8 * MIB):
        assert duration_s >= 24 / 32 - BURST_S
    usage = _native.throttle_usage(str(throttle))
    assert usage["bytes"] >= 2 * 3 * 8 * MIB
    assert usage["bytes"] < 2 * 3 * 9 * MIB


def test_processes_share_a_limit_on_requests(tmp_path: Path) -> None:
    throttle = tmp_path / "throttle"
    _native.create_throttle(str(throttle), requests_per_s=40)
    # Requests of a load may be smaller than blocks, those of a save are not.
    for duration_s in run_all(tmp_path, 2, 8 * MIB):
        assert duration_s >= 16 / 40 - BURST_S
    assert _native.throttle_usage(str(throttle))["requests"] >= 2 * 16


def test_a_cancelled_save_does_not_wait_for_the_store(tmp_path: Path) -> None:
    throttle = tmp_path / "throttle"
    _native.create_throttle(str(throttle), bytes_per_s=1)
    with throttled(throttle):
        response = waystation.save_async(tmp_path / "checkpoint", {"x": np.zeros(4 * MIB, np.uint8)})
    response.cancel()
    with pytest.raises(errors.Cancelled):
        response.result(timeout=60)
    assert not (tmp_path / "checkpoint").exists()


def test_throttles_are_made_once_and_checked(tmp_path: Path) -> None:
    path = str(tmp_path / "throttle")
    with throttled(path), pytest.raises(errors.NotFound, match="throttle"):
        waystation.save(tmp_path / "checkpoint", {"x": np.zeros(10)})
    with pytest.raises(errors.InvalidInput, match="let something through"):
        _native.create_throttle(path, bytes_per_s=0)
    _native.create_throttle(path, bytes_per_s=MIB)
    with pytest.raises(errors.Conflict):
        _native.create_throttle(path, bytes_per_s=MIB)
    (tmp_path / "other").write_bytes(b"x" * 56)
    with (
        throttled(tmp_path / "other"),
        pytest.raises(errors.InvalidInput, match="not the file"),
    ):
        waystation.save(tmp_path / "checkpoint", {"x": np.zeros(10)})
    assert not (tmp_path / "checkpoint").exists()
    context = waystation.Context()
    with pytest.raises(errors.InvalidInput, match="throttle_path"):
        context.engine.throttle_path = 5  # type: ignore[assignment]
