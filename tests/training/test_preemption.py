"""A program that is told that it will be ended saves, and can end by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.programs import running
from tests.training import sequences

import waystation
from waystation.training import Checkpointer, handle_sigterm, save_decision_policies

COUNT = 2
PROGRAM = """
import sys, time
from waystation.training import Checkpointer, handle_sigterm, save_decision_policies as policies

handler = handle_sigterm()
with Checkpointer(sys.argv[1], save_decision_policy=policies.PreemptionCheckpointingPolicy()) as checkpointer:
    print("ready", flush=True)
    step = 0
    while not checkpointer.is_preempted:
        step += 1
        checkpointer.save_async(step, {"step": step})
        time.sleep(0.005)
print(step, flush=True)
"""


def test_a_program_saves_when_the_scheduler_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        last = int(process.stdout.readline())
    assert process.returncode == 0, "the signal did not end it"
    with Checkpointer(tmp_path) as checkpointer:
        assert [info.step for info in checkpointer.checkpoints] == [last]
        assert checkpointer.load() == {"step": last}


@pytest.mark.parametrize("told", [0, 1], ids=["primary", "other"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.share(2)
def test_all_processes_save_the_same_step_when_one_is_told(tmp_path: Path, framework: str, told: int) -> None:
    """JAX spreads the notice itself; other programs ask for it."""
    root = tmp_path / "run"
    with running(
        sequences.train_until_told,
        root,
        framework != "jax",
        count=COUNT,
        framework=framework,
        directory=tmp_path,
    ) as programs:
        for index in range(COUNT):
            assert programs.report(index) == "ready"
        programs.signal(told, signal.SIGTERM)
        first, second = programs.values()
    assert first == second
    assert first["steps"] == [first["step"]], "once, at the step at which all were told"
    assert first["more"] == [False, False]
    assert waystation.metadata(root / str(first["step"])).metadata["step"] == first["step"]
    assert waystation.verify(root / str(first["step"])).damages == []


def test_one_save_is_enough(tmp_path: Path) -> None:
    policy = save_decision_policies.PreemptionCheckpointingPolicy()
    with handle_sigterm(), Checkpointer(tmp_path, save_decision_policy=policy) as checkpointer:
        assert not checkpointer.save(0, {"a": 0})
        assert not checkpointer.is_preempted
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpointer.should_save(1)
        assert checkpointer.should_save(1), "asking is not saving"
        assert checkpointer.save(1, {"a": 1})
        assert not checkpointer.save(2, {"a": 2})
        assert checkpointer.is_preempted
