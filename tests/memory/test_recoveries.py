"""What a program tells of having been started again: the phases, and the line for the launch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from waystation.memory import RECOVERY_VARIABLE, Recovery
from waystation.memory.recovering import Recovering
from waystation_launch.launch import Recoveries

OF_PROGRAM = ["decide", "transfer", "restore", "first step"]


def follow(recovering: Recovering, *, is_primary: bool = True) -> Recovery:
    recovering.begins()
    recovering.is_prepared(0.0)
    assert recovering.steps(is_primary=is_primary) is None, "nothing was loaded"
    recovering.has_loaded(7, 0.5, 0.25)
    recovery = recovering.steps(is_primary=is_primary)
    assert recovery is not None
    assert recovering.steps(is_primary=is_primary) is None, "it is told once"
    return recovery


def test_phases_are_what_lies_between_moments() -> None:
    recovery = Recovery(
        step=7,
        failed_at_s=100.0,
        ended_at_s=101.0,
        started_at_s=101.5,
        begun_at_s=105.0,
        prepared_at_s=105.75,
        loading_at_s=106.0,
        loaded_at_s=107.0,
        stepped_at_s=107.5,
        transfer_s=0.5,
        brought_s=0.25,
    )
    assert recovery.phases_s == {
        "detect": 1.0,
        "start": 4.0,
        "decide": 0.25,
        "transfer": 0.75,
        "restore": 0.75,
        "first step": 0.5,
    }


def test_the_primary_tells_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recoveries.jsonl"
    told = {"file": str(file), "launch": "own", "failed_at_s": 1.0, "ended_at_s": 2.0, "started_at_s": 3.0}
    monkeypatch.setenv(RECOVERY_VARIABLE, json.dumps(told))
    follow(Recovering(), is_primary=False)
    assert not file.exists()
    recovery = follow(Recovering())
    assert list(recovery.phases_s) == ["detect", "start", *OF_PROGRAM]
    assert recovery.begun_at_s <= recovery.prepared_at_s <= recovery.loaded_at_s <= recovery.stepped_at_s
    (line,) = file.read_text().splitlines()
    found = json.loads(line)
    assert (found["step"], found["ended_at_s"], found["brought_s"]) == (7, 2.0, 0.25)
    assert (found["phases_s"], found["launch"]) == (recovery.phases_s, "own")


def test_of_two_launches_on_one_agent_each_reports_its_own(tmp_path: Path) -> None:
    first, second = (Recoveries(tmp_path / "recoveries.jsonl") for _ in range(2))
    for launch in (first, second, first):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(RECOVERY_VARIABLE, launch.environment()[RECOVERY_VARIABLE])
            follow(Recovering())
    assert (len(first.found()), len(second.found())) == (2, 1)
    assert Recoveries(tmp_path / "recoveries.jsonl").found() == []


def test_a_later_return_to_memory_has_no_failure_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"failed_at_s": 1.0, "ended_at_s": 2.0, "started_at_s": 3.0}
    monkeypatch.setenv(RECOVERY_VARIABLE, json.dumps(told))
    recovering = Recovering()
    assert follow(recovering).failed_at_s == 1.0
    assert follow(recovering).failed_at_s is None


@pytest.mark.parametrize("told", ["", "no json", "[]", '{"file": "/nowhere/at/all"}'])
def test_whatever_the_launch_says_nothing_fails(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECOVERY_VARIABLE, told)
    assert list(follow(Recovering()).phases_s) == OF_PROGRAM


def test_transfers_that_began_before_the_program_count_only_as_far_as_it_waited() -> None:
    recovering = Recovering()
    recovering.begins()
    recovering.is_prepared(3600.0)
    recovering.has_loaded(7, 0.0, 0.0)
    recovery = recovering.steps(is_primary=False)
    assert recovery is not None
    assert recovery.phases_s["decide"] >= 0
    assert recovery.phases_s["transfer"] < 3600
