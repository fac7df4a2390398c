"""Each claim of the demo can fail: given a run that breaks it, the proof says so."""

import math
import subprocess
import sys
from random import Random

import pytest

from waystation_demo.programs import Killer, TrainingRun
from waystation_demo.proof import LOSS_TOLERANCE, DemoFailed, Proof


@pytest.fixture
def announced() -> list[str]:
    return []


@pytest.fixture
def proof(announced: list[str]) -> Proof:
    return Proof(announced.append)


def _run(losses: list[float], first: int = 1) -> TrainingRun:
    run = TrainingRun("run", "2x4")
    run.losses = dict(enumerate(losses, first))
    return run


def test_claims_that_hold_are_announced_and_kept(proof: Proof, announced: list[str]) -> None:
    proof.claim(True, "water is wet")
    assert announced == proof.held == ["water is wet"]


def test_claim_that_fails_is_not_announced(proof: Proof, announced: list[str]) -> None:
    with pytest.raises(DemoFailed, match=r"does not hold: water is dry \(it is wet\)"):
        proof.claim(False, "water is dry", "it is wet")
    assert announced == proof.held == []


def test_learning(proof: Proof) -> None:
    proof.learned(_run([5.5, 4.0, 3.0, 2.9, 2.8, 2.7, 2.6]))
    for losses in ([5.5] * 10, [5.5, 5.0, 4.9, 4.8, 4.7, 4.6], [5.5, math.nan, math.nan]):
        with pytest.raises(DemoFailed, match="the model learns"):
            proof.learned(_run(losses))


@pytest.mark.parametrize(("exit_code", "last"), [(0, 3), (-15, 3), (-9, 10)])
def test_death(proof: Proof, exit_code: int, last: int) -> None:
    run = _run([1.0] * 3)
    run.exit_code = -9
    proof.killed(run, steps=10)
    run = _run([1.0] * last)
    run.exit_code = exit_code
    with pytest.raises(DemoFailed, match="SIGKILL"):
        proof.killed(run, steps=10)


def test_saves_that_finished_are_there(proof: Proof) -> None:
    run = _run([1.0])
    with pytest.raises(DemoFailed):
        proof.committed(run, [])  # no save at all proves nothing
    run.saves = [{"step": 5}, {"step": 10}]
    proof.committed(run, [5, 10, 15])
    with pytest.raises(DemoFailed, match=r"lost steps: \[10\]"):
        proof.committed(run, [5])


def test_leftovers(proof: Proof) -> None:
    whole = {"name": "step_000005", "checkpoint": True}
    proof.tidy([whole])
    with pytest.raises(DemoFailed, match="half"):
        proof.tidy([whole, {"name": "half", "checkpoint": False}])


@pytest.mark.parametrize("found", [{}, {"a": "1"}, {"a": "1", "b": "3"}, {"a": "1", "b": "2", "c": "3"}])
def test_bytes(proof: Proof, found: dict[str, str]) -> None:
    saved = {"a": "1", "b": "2"}
    proof.same_bytes("read", dict(saved), saved)
    with pytest.raises(DemoFailed, match="bit for bit"):
        proof.same_bytes("read", found, saved)


def test_losses_bit_for_bit(proof: Proof) -> None:
    reference = _run([5.0, 4.0, 3.0])
    proof.same_losses("resumed", _run([4.0, 3.0], first=2), reference)
    with pytest.raises(DemoFailed, match=r"1 differ, first: step \[3\]"):
        proof.same_losses("resumed", _run([4.0, math.nextafter(3.0, 4.0)], first=2), reference)


@pytest.mark.parametrize("wrong", [3.0 * (1 + 2 * LOSS_TOLERANCE), 3.0 * (1 - 2 * LOSS_TOLERANCE), math.nan])
def test_losses_within_tolerance(proof: Proof, wrong: float) -> None:
    reference = _run([5.0, 4.0, 3.0])
    near = _run([4.0, 3.0 * (1 + LOSS_TOLERANCE / 2)], first=2)
    assert proof.close_losses("moved", near, reference) == pytest.approx(LOSS_TOLERANCE / 2, rel=1e-6)
    with pytest.raises(DemoFailed, match="within"):
        proof.close_losses("moved", _run([4.0, wrong], first=2), reference)


@pytest.mark.parametrize("seed", range(5))
def test_kill_hits_only_a_save_that_began(seed: int) -> None:
    run = _run([1.0])
    run.saves = [{"step": 5, "total_s": 0.01}]
    killer = Killer([10], Random(seed))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], text=True) as process:
        for event in ({"event": "save_started", "step": 5}, {"event": "step", "step": 10, "loss": 1.0}):
            killer(event, run, process)
            assert run.kill is None
        killer({"event": "save_started", "step": 10}, run, process)
        assert process.wait() == -9
    assert run.kill is not None
    assert run.kill["step"] == 10
    assert 0 <= run.kill["delay_s"] <= 0.01
