"""A training program loses a process to SIGKILL, and is started again with another number of processes.

It goes on from the last checkpoint that was committed, bit by bit, and what the killed save has left behind
is gone once the same step is saved again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.distributed import jax_scenarios
from tests.support.programs import Programs, running

STEPS = 2
# How long after a commit the victim dies, in seconds: a save takes about a tenth of one.
DELAYS_S = (0.0, 0.03, 0.06)


def wait_for_step(programs: Programs, count: int, step: int) -> None:
    for index in range(count):
        while programs.report(index) < step:
            pass


@pytest.mark.parametrize("victim", [0, 2], ids=["primary", "other"])
@pytest.mark.share(2)
def test_another_number_of_processes_goes_on_after_a_kill(tmp_path: Path, victim: int) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    reached = 0
    topologies = [(3, 2), (2, 4), (4, 1), (1, 2)]
    for (count, devices), delay_s in zip(topologies, (*DELAYS_S, 0.0), strict=True):
        with running(
            jax_scenarios.train,
            devices,
            root,
            count=count,
            framework="jax",
            directory=tmp_path,
            heartbeat_timeout_seconds=10,
        ) as programs:
            begun = [programs.report(index) for index in range(count)]
            assert len(set(begun)) == 1
            # Killed after a commit, before the others were told: a step more than was reported.
            assert begun[0] in (reached, reached + 1)
            reached = begun[0] + STEPS
            wait_for_step(programs, count, reached)
            time.sleep(delay_s)
            programs.signal(min(victim, count - 1))
            ended = programs.end()
        assert all(process.exit_code != 0 or process.value is not None for process in ended), ended
        reached = max(reached, committed(root))
    assert reached >= STEPS * len(topologies)


def committed(root: Path) -> int:
    """The last step; all earlier ones are there, and what else there is belongs to the one after it."""
    last = jax_scenarios.latest_step(root)
    names = {f"step {step}" for step in range(1, last + 1)}
    present = set(os.listdir(root))
    assert names <= present
    assert all(name.startswith(f"step {last + 1}.") for name in present - names), present
    return last
