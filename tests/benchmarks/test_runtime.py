"""The benchmark of the runtime: it runs and is checked, and what figures mean."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.rounds import Case, Results
from benchmarks.runtime import dispatch, hiding, pipeline, tenants, training
from benchmarks.runtime.computations import check
from benchmarks.runtime.dispatch import (
    ALONE,
    CHAINED,
    CONTROLLERS,
    FUSED,
    OP_BY_OP,
    OURS,
    RAY,
    UNJOINED,
    WAITING,
)
from benchmarks.runtime.report import evaluate
from benchmarks.runtime.shapes import Shape
from benchmarks.runtime.turns import Timed, in_rounds
from benchmarks.targets import Line
from tests.support.long import only_long

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@only_long
def test_the_command_measures_all_systems_and_shows_what_it_has_kept(tmp_path: Path) -> None:
    module = [sys.executable, "-m", "benchmarks.runtime"]
    command = [*module, "--quick", "--experiments", "dispatch", "--shapes", "1x2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    kept = Path(next(line for line in done.stdout.splitlines() if line.startswith("results: "))[9:])
    document = json.loads(kept.read_text())
    kept.unlink()
    assert not [run for run in document["runs"] if run["status"] != "ok"], document["runs"]
    systems = {
        OURS: {OP_BY_OP, ALONE, CHAINED, UNJOINED, FUSED},
        CONTROLLERS: {OP_BY_OP, FUSED},
        RAY: {OP_BY_OP, WAITING, CHAINED, FUSED},
    }
    measured = {(case.system, case.operation) for case in Results(document).cases(dispatch.NAME)}
    assert measured == {(system, way) for system, ways in systems.items() for way in ways}
    report = tmp_path / "report.json"
    report.write_text(json.dumps(document))
    again = subprocess.run(
        [*module, "--report", str(report)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert again.stdout.strip() in done.stdout


# ---- how it is measured ------------------------------------------------------------------------


def test_what_was_computed_says_how_many_computations_there_were() -> None:
    mean = 0.0
    for _ in range(5):
        scalars = np.array([mean + 1, mean + 2, mean + 3], np.float32)
        mean = float(scalars.mean())
    check(scalars, 5, devices=3)
    check(scalars[1:], 5, devices=3, first=1)
    for count in (4, 6):
        with pytest.raises(ValueError, match="should have made"):
            check(scalars, count, devices=3)


def test_a_round_measures_everything_once_and_begins_elsewhere() -> None:
    order: list[str] = []

    def timed(name: str, seconds: float, unit: int) -> Timed:
        def run(count: int) -> float:
            assert count % unit == 0
            order.append(name)
            return seconds * count

        return Timed("one", "system", name, run, unit)

    runs = list(in_rounds([timed("a", 0.01, 1), timed("b", 0.001, 128)], rounds=2, budget_s=1.0))
    assert order[-4:] == ["a", "b", "b", "a"]
    assert [(run["round"], run["operation"]) for run in runs] == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert {run["operation"]: run["computations"] for run in runs} == {"a": 100, "b": 1024}
    assert [run["seconds"] for run in runs] == pytest.approx([0.01, 0.001, 0.001, 0.01])


@pytest.mark.parametrize("text", ["2", "0x1", "1x0", "axb"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        Shape.parse(text)


# ---- figures -----------------------------------------------------------------------------------


def run(case: Case, seconds: float, repetition: int = 0, **facts: Any) -> dict[str, Any]:
    return {
        "experiment": case.experiment,
        "subject": case.subject,
        "system": case.system,
        "operation": case.operation,
        "round": repetition,
        "status": "ok",
        "seconds": seconds,
        **facts,
    }


def line(runs: list[dict[str, Any]], beginning: str) -> Line:
    return next(found for found in evaluate(Results({"runs": runs})) if found.text.startswith(beginning))


def test_dispatch_is_compared_with_the_same_work_of_others() -> None:
    ours = Case(dispatch.NAME, "2x1", OURS, FUSED)
    runs = [run(ours, 1.0), run(Case(dispatch.NAME, "2x1", CONTROLLERS, FUSED), 0.97)]
    runs += [run(Case(dispatch.NAME, "2x1", OURS, CHAINED), 2.0)]
    runs += [run(Case(dispatch.NAME, "2x1", CONTROLLERS, OP_BY_OP), 3.0)]
    runs += [run(Case(dispatch.NAME, "2x1", OURS, OP_BY_OP), 2.5)]
    runs += [run(Case(dispatch.NAME, "2x1", RAY, OP_BY_OP), 7.5)]
    fused = line(runs, "2x1: Fused")
    assert (fused.measured, fused.reached) == ("0.97x", False)
    assert line(runs, "2x1: Chained").measured == "1.50x"
    assert line(runs, "2x1: OpByOp").reached is True
    assert line(runs[:1], "2x1: Fused").reached is None


def test_the_controller_is_hidden_from_where_all_longer_computations_are_as_fast() -> None:
    runs = []
    for milliseconds, seconds in ((0.1, 5.0), (1.0, 1.04), (2.3, 1.2), (10.0, 1.01), (35.0, 1.0)):
        runs.append(run(Case(hiding.NAME, "1x1", OURS, hiding.operation(milliseconds)), seconds))
        runs.append(run(Case(hiding.NAME, "1x1", CONTROLLERS, hiding.operation(milliseconds)), 1.0))
    (remark,) = hiding.remarks(Results({"runs": runs}))
    assert remark.endswith("is reached from 10 ms on")
    (remark,) = hiding.remarks(Results({"runs": runs[:2]}))
    assert remark.endswith("by none up to 0.1 ms")


def test_ways_to_dispatch_a_pipeline_are_compared() -> None:
    name = pipeline.subject(pipeline.JUDGED)
    ways = {pipeline.SEQUENTIAL: 3.0, pipeline.PARALLEL: 2.0, pipeline.MANY: 0.4}
    runs = [run(Case(pipeline.NAME, name, OURS, way), seconds) for way, seconds in ways.items()]
    assert line(runs, f"{name}: parallel").measured == "1.50x"
    assert line(runs, f"{name}: one message").measured == "5.00x"


def test_clients_together_are_compared_with_one_program_that_asks_nobody() -> None:
    text = hiding.operation(1.0)
    runs = [run(Case(tenants.NAME, tenants.subject(1), CONTROLLERS, text), 1.0)]
    runs += [run(Case(tenants.NAME, tenants.subject(4), OURS, text), 1.25)]
    shares = Case(tenants.NAME, tenants.SHARES, OURS, "1:2:4:8")
    runs += [run(shares, 1.0, at, shares=[], off=off) for at, off in enumerate((0.01, 0.04, 0.06))]
    assert line(runs, "4 clients, programs of 1 ms").measured == "0.80x"
    shared = line(runs, "shares 1:2:4:8")
    assert (shared.measured, shared.worst, shared.reached) == ("4.0%", "6.0%", True)


def test_losses_are_the_same_if_all_of_their_bits_are() -> None:
    ours = Case(training.NAME, "small, 1x2", OURS, "step")
    plain = Case(training.NAME, "small, 1x2", CONTROLLERS, "step")
    losses = [value.hex() for value in (1.0, 0.5)]
    runs = [run(ours, 1.0, 0, losses=losses), run(plain, 0.98, 0, losses=losses)]
    assert line(runs, "small, 1x2: losses").reached is True
    assert line(runs, "small, 1x2: of plain").measured == "0.98x"
    runs[0]["losses"] = [losses[0], float(np.nextafter(0.5, 1.0)).hex()]
    assert line(runs, "small, 1x2: losses").reached is False
