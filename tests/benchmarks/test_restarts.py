"""Restarts by several launchers: they run, and what figures mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import command, machine, restarts


def test_launchers_are_compared_in_the_same_round(tmp_path: Path) -> None:
    seconds = {restarts.ALONE: 1.0, restarts.STANDBY: 0.5, restarts.FRESH: 2.0, restarts.TORCHRUN: None}
    runs = [
        {"round": number, "job": job.name, "system": system, "seconds": own, "standby_bytes": []}
        for number in range(2)
        for job in restarts.JOBS
        for system in job.systems
        for own in [seconds[system]]
    ]
    runs.append(runs[1] | {"round": 2, "seconds": 0.1, "standby_bytes": [1 << 20]})
    runs += [run | {"round": 2, "seconds": 0.15} for run in runs[2:4]]
    document = {"machine": machine.describe(tmp_path), "quick": False, "runs": runs}
    restarts.show(document, command.wide_console())
    assert [(line.measured, line.worst, line.reached) for line in restarts.evaluate(document)] == [
        ("4.0x", "1.5x", True),
        ("1.5x", "1.5x", False),
        ("4.0x", "4.0x", True),
        ("never went on", "", None),
        ("4.0x", "4.0x", True),
    ]


@pytest.mark.long
@pytest.mark.parametrize("system", [restarts.ALONE, restarts.STANDBY, restarts.FRESH])
def test_a_program_takes_its_next_step(tmp_path: Path, system: str) -> None:
    run = restarts._run(tmp_path / "run", restarts.JOBS[-1], system)
    assert run["seconds"] > 0
    assert len(run["standby_bytes"]) == (system == restarts.STANDBY)
