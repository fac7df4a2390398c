"""A model that starts in vLLM says the same whoever has brought its weights, where vLLM is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.rounds import Case, Results, Session
from benchmarks.startup_loaders import Clock
from benchmarks.startup_servers import SERVERS, VLLM

from benchmarks import startup, startup_loaders, startup_report

SERVER = SERVERS[VLLM]
ROOT = Path(__file__).resolve().parents[2]


def is_installed() -> bool:
    try:
        SERVER.find_interpreter()
    except SystemExit:
        return False
    return True


@pytest.mark.timeout(1200)  # each start imports vLLM and torch, which takes a minute on busy cores
@pytest.mark.skipif(not is_installed(), reason="vLLM is not installed; `make bench-startup-vllm` installs it")
def test_what_vllm_says_does_not_depend_on_who_loads(tmp_path: Path) -> None:
    session = Session(
        directory=tmp_path / "work",
        results=tmp_path / "results.json",
        document={"runs": [], "server": VLLM},
        quick=True,
        timeout_s=500.0,
    )
    ours = [Case("startup", "warm", name, "default") for name, one in SERVER.loaders.items() if one.is_ours]
    peer = Case("startup", "cold", "fastsafetensors", "buffered")
    startup.run(session, [*ours, peer], "tiny", 6, 1)
    kept = json.loads((tmp_path / "results.json").read_text())
    assert len(ours) == 2
    for run in kept["runs"]:
        assert run["status"] == "ok", run
        assert run["imported_s"] < run["skeleton_s"] < run["loaded_s"] < run["first_s"] < run["last_s"]
    assert kept["model"]["versions"].keys() == {"vllm", "torch"}


def test_who_has_no_vllm_is_told_what_installs_it(tmp_path: Path) -> None:
    elsewhere = replace(SERVER, interpreter=(tmp_path / "python", "make of-it"))
    with pytest.raises(SystemExit, match="vllm is not installed; `make of-it`"):
        elsewhere.find_interpreter()


def test_loaders_of_another_server_are_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.startup", "--server", "vllm", "--loaders", "transformers"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "vllm has no loader 'transformers'; it has safetensors, " in done.stderr


def test_loaders_of_vllm_are_compared_with_the_changed_import() -> None:
    def run(system: str, way: str, **figures: float) -> dict[str, Any]:
        case = {"experiment": "startup", "subject": "cold", "system": system, "operation": way}
        return {**case, "round": 0, "status": "ok", **figures}

    runs = [run(SERVER.ours, "default", imported_to_first_s=2.0, load_s=1.0)]
    runs += [run("safetensors", "threads", imported_to_first_s=3.0, load_s=3.0)]
    runs += [run("limit", "quick", load_s=1.0)]
    results = Results({"runs": runs, "server": VLLM})
    (line,) = startup_report.evaluate(results)
    assert line.text == "cold, imports to first token: no later than safetensors (threads)"
    assert (line.measured, line.reached) == ("1.50x", True)


def test_a_clock_stands_still_while_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter((10.0, 11.0, 15.0, 17.0))
    monkeypatch.setattr(startup_loaders, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    clock = Clock(8.0)
    clock.mark("before")
    with clock.standing():
        pass
    clock.mark("after")
    assert clock.marks == {"before": 2.0, "after": 5.0}
