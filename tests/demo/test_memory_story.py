"""The demo of the memory tier, small: real processes, hosts that are really lost, every claim checked.

Hosts are made both ways, of namespaces and of directories. Training goes on from memory, and from the disk.
"""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console
from tests.support.long import only_long

from waystation_demo import DemoFailed
from waystation_demo.memory_tier import Plan, run
from waystation_demo.memory_tier.hosts import DirectoryHosts, Hosts, hosts_of
from waystation_demo.memory_tier.namespaces import why_forbidden
from waystation_demo.memory_tier.runs import HostsRun, Runs
from waystation_demo.memory_tier.timeline import MEANINGS, SHARED_PHASES, Phase, Timeline

# Nine processes, or fifteen, that import torch, three at a time, on a machine that may have more to do.
pytestmark = [pytest.mark.timeout(900), pytest.mark.long, only_long]

PLAN = Plan(host_count=3, steps=30, save_every=6, width=32, layers=1)


TIERS = ("memory", "disk")


@pytest.fixture(scope="module", params=[False, True])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of one demo, and what it printed."""
    if request.param is False and (why := why_forbidden()) is not None:
        pytest.skip(why)
    output = tmp_path_factory.mktemp("demo") / "output"
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    run(output, plan=PLAN, tiers=TIERS, console=console, are_shared=request.param)
    return output, printed.getvalue()


@pytest.fixture(scope="module")
def report(told: tuple[Path, str]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((told[0] / "waystation-demo.json").read_text())
    return content


def test_a_host_was_lost_and_training_went_on(report: dict[str, Any]) -> None:
    reference = report["losses"]["reference"][0]
    assert sorted(map(int, reference)) == list(range(1, PLAN.steps + 1))
    for name in TIERS:
        first, *_, last = report["losses"][name]
        assert first | last == reference
        timeline = report["timelines"][name]
        assert 0 < timeline["restored_step"] <= timeline["reached_step"] < PLAN.steps
        assert min(map(int, last)) == timeline["restored_step"] + 1
        assert name == "memory" or timeline["restored_step"] % PLAN.save_every == 0


def test_the_recovery_has_its_phases(report: dict[str, Any]) -> None:
    of_disk = [name for name in MEANINGS if name not in ("decide", "transfer")]
    for tier in TIERS:
        phases = report["timelines"][tier]["phases"]
        assert [phase["name"] for phase in phases] == (list(MEANINGS) if tier == "memory" else of_disk)
        assert all(phase["took_s"] >= 0 for phase in phases)
        assert all(phase["took_s"] > 0 for phase in phases if phase["name"] in ("detect", "restore"))
    (recovery,) = report["recoveries"]
    assert recovery["step"] == report["timelines"]["memory"]["restored_step"]
    assert recovery["failed_at_s"] > report["lost"]["memory"]["at_s"]
    hosts = {agent["host"] for agent in report["timelines"]["memory"]["agents"]}
    assert hosts == set(range(PLAN.host_count)), "every agent has recovered, the new one too"


def test_every_claim_and_phase_is_printed(told: tuple[Path, str], report: dict[str, Any]) -> None:
    assert len(report["claims"]) >= 4 + 4 * len(TIERS)
    for text in [*report["claims"], *MEANINGS, report["hosts"]]:
        assert text in told[1]


def test_plot_is_a_png(told: tuple[Path, str], report: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    assert report["plot"] == str(told[0] / "recovery.png")
    assert Path(report["plot"]).read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def directories() -> Iterator[Hosts]:
    with hosts_of(2, are_shared=True) as hosts:
        yield hosts


def test_a_launch_that_fails_shows_its_own_error(
    directories: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAYSTATION_AGENT", "/nowhere/at/all")
    runs = Runs(tmp_path, dataclasses.replace(PLAN, host_count=2), Random(1))
    with pytest.raises(DemoFailed, match=r"(?s)the launch on host-\d ended with 2.*is not an executable"):
        runs.run(HostsRun("wrong"), directories, save_every=0, has_memory=True, on_loss=lambda *_: None)


def test_a_lost_host_leaves_nothing(directories: Hosts) -> None:
    assert isinstance(directories, DirectoryHosts)
    memory = directories.stores[0].parent
    (memory / "kept").write_text("x")
    command = ["sh", "-c", "sleep 1000 & echo started; wait"]
    with directories.start(0, command, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"started\n"
        directories.lose(0)
        assert started.stdout.read() == b"", "nobody has the pipe any more"
    assert not memory.exists()
    directories.replace(0)
    assert list(memory.iterdir()) == []


def test_sums_leave_out_what_is_the_same_for_all() -> None:
    took_s = {"detect": 1.0, "process start": 8.0, "restore": 0.5, "first step": 2.0}
    phases = [Phase(name, 0.0, seconds) for name, seconds in took_s.items()]
    timeline = Timeline(10, 9, phases, [])
    assert timeline.without_shared_s() == 2.5
    assert timeline.took_s("process start") == 8
    assert timeline.took_s("transfer") == 0
    assert set(SHARED_PHASES) < set(MEANINGS)
