"""A `Checkpointer` that is opened beside a program that keeps one step always finds a step."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from tests.support.long import amount
from tests.support.warm_python import python

from waystation import training
from waystation.storage import AnyPath

_BOUND_S = 120

_COLLECTOR = """
import sys
import numpy as np
from waystation import training

policy = training.preservation_policies.LatestN(1)
with training.Checkpointer(sys.argv[1], preservation_policy=policy) as checkpointer:
    for step in range(1, int(sys.argv[2])):
        checkpointer.save(step, {"step": step, "x": np.full(1000, step)})
"""


@pytest.mark.long
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lightweight", [False, True])
@pytest.mark.share(4)
def test_a_step_is_always_found(
    directory: AnyPath, caplog: pytest.LogCaptureFixture, *, lightweight: bool
) -> None:
    end = amount(20, 150) if isinstance(directory, Path) else amount(8, 40)
    collector = subprocess.Popen([python(), "-c", _COLLECTOR, str(directory), str(end)])
    try:
        until = time.monotonic() + _BOUND_S
        while not training.Checkpointer(directory).checkpoints:
            assert time.monotonic() < until
        newest = 0
        while collector.poll() is None:
            with training.Checkpointer(directory, lightweight_initialize=lightweight) as checkpointer:
                state = checkpointer.load()
                assert (state["x"] == state["step"]).all()
                assert state["step"] >= newest
                newest = state["step"]
                assert checkpointer.metadata().step >= newest
                assert not checkpointer.damaged
        assert collector.returncode == 0
        assert not caplog.records  # such as those of a step that is read without a lease
    finally:
        collector.kill()
        collector.wait(_BOUND_S)
    assert training.Checkpointer(directory).load()["step"] == end - 1
