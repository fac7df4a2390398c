"""A model that starts says the same tokens whoever has loaded its weights, and figures are what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.rounds import Case, Results, Session
from benchmarks.startup_job import Request
from benchmarks.startup_loaders import LOADERS, OURS
from benchmarks.targets import Line
from tests.support.long import only_long

from benchmarks import startup, startup_model, startup_report

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 12
# Starts, but for what has been imported: each would take seconds for that.
SCRIPT = f"""
import json, pathlib, shutil, sys
from benchmarks import startup_model
from benchmarks.processes import attempt
from benchmarks.startup_job import Request, run
written, damaged = map(pathlib.Path, sys.argv[1:3])
startup_model.write(written, startup_model.SIZES["tiny"], {TOKENS})
shutil.copytree(written, damaged)
with sorted(damaged.glob("*/*.safetensors"))[-1].open("r+b") as file:
    file.seek(-1, 2)
    last = file.read(1)
    file.seek(-1, 2)
    file.write(bytes([last[0] ^ 1]))
outcomes = [attempt(run, Request(**json.loads(text))) for text in sys.argv[3:]]
print("\\n" + json.dumps(outcomes))
"""

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


# ---- starts ------------------------------------------------------------------------------------


@pytest.mark.long
@only_long
@needs_transformers
def test_every_loader_makes_the_model_say_the_same(tmp_path: Path) -> None:
    written, damaged = tmp_path / "written", tmp_path / "damaged"
    cases = [(written, name, way) for name, loader in LOADERS.items() for way in loader.ways]
    cases += [(written, "limit", "threads buffered 8 MiB x4"), (damaged, OURS, "read")]
    requests = [
        Request(name, way, str(directory), TOKENS, 0.0, verify=True) for directory, name, way in cases
    ]
    requests.append(replace(requests[0], tokens=2 * TOKENS))
    command = [sys.executable, "-c", SCRIPT, str(written), str(damaged), *(one.to_json() for one in requests)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *loaded, limit, of_damaged, of_others = json.loads(done.stdout.splitlines()[-1])
    for request, outcome in zip(requests, loaded, strict=False):
        assert outcome["status"] == "ok", (request, outcome)
        assert outcome["imported_s"] <= outcome["loaded_s"] <= outcome["first_s"] <= outcome["last_s"]
    assert limit["status"] == "ok", limit
    expected = json.loads((written / startup_model.EXPECTED).read_text())
    assert limit["state_bytes"] >= expected["bytes"]
    assert len(set(expected["tokens"])) > TOKENS // 2, "tokens that repeat would show no difference"
    assert of_damaged["status"] == of_others["status"] == "failed"
    assert of_others["reason"] == f"ValueError: {2 * TOKENS} tokens were said, not {TOKENS}"


@pytest.mark.long
@only_long
@needs_transformers
def test_a_session_starts_fresh_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told: list[Case] = []
    session = Session(
        directory=tmp_path / "work",
        results=tmp_path / "results.json",
        document={"runs": []},
        quick=True,
        timeout_s=200.0,
        on_run=lambda case, outcome: told.append(case),
    )
    cases = [
        Case("startup", "warm", OURS, "read"),
        Case("startup", "cold", "limit", "threads buffered 8 MiB x4"),
    ]
    assert set(cases) <= set(startup.cases_of([OURS]))
    startup.run(session, cases, "tiny", 2, 1)
    assert told == cases
    kept = Results(json.loads((tmp_path / "results.json").read_text()))
    figures = [kept.series(case, metric) for case, metric in zip(cases, ("first_s", "load_s"), strict=True)]
    assert all(series is not None and series.median > 0 for series in figures), kept.document


# ---- figures -----------------------------------------------------------------------------------


def run(system: str, way: str, repetition: int, cache: str = "cold", **figures: float) -> dict[str, Any]:
    return {
        "experiment": "startup",
        "subject": cache,
        "system": system,
        "operation": way,
        "round": repetition,
        "status": "ok",
        **figures,
    }


def line(runs: list[dict[str, Any]], beginning: str) -> Line:
    lines = startup_report.evaluate(Results({"runs": runs}))
    return next(found for found in lines if found.text.startswith(beginning))


def test_a_peer_is_compared_with_what_ends_as_it_does() -> None:
    runs = [run(OURS, "read", 0, imported_to_first_s=1.0), run(OURS, "mmap", 0, imported_to_first_s=2.0)]
    runs += [run("transformers", "default", 0, imported_to_first_s=3.0)]
    runs += [run("runai", "default", 0, imported_to_first_s=0.9)]
    mapped = line(runs, "cold, imports to first token: no later than transformers")
    assert (mapped.measured, mapped.reached) == ("1.50x", True)
    read = line(runs, "cold, imports to first token: no later than runai")
    assert (read.measured, read.reached) == ("0.90x", False)


def test_a_drop_in_is_no_peer() -> None:
    drop_ins = [name for name, loader in LOADERS.items() if loader.is_ours and name != OURS]
    assert len(drop_ins) == 3
    runs = [run(name, LOADERS[name].ways[0], 0, imported_to_first_s=1.0) for name in (OURS, *drop_ins)]
    assert not list(startup_report.evaluate(Results({"runs": runs})))


def test_the_limit_is_the_best_way_from_the_same_cache() -> None:
    runs = [run(OURS, "read", index, load_s=1.25) for index in range(3)]
    runs += [run("limit", "quick", index, load_s=seconds) for index, seconds in enumerate((1.0, 1.0, 9.0))]
    runs += [run("limit", "slow", index, load_s=2.0) for index in range(3)]
    runs += [run("limit", "quick", index, "warm", load_s=0.1) for index in range(3)]
    found = line(runs, "cold, load of the weights")
    assert (found.measured, found.reached) == ("0.80x", False)


def test_every_round_has_every_case_and_begins_elsewhere() -> None:
    cases = startup.cases_of(list(LOADERS))
    rounds = [list(startup.in_turns(cases, repetition)) for repetition in range(3)]
    assert len({turns[0] for turns in rounds}) == 3
    assert {frozenset(turns) for turns in rounds} == {frozenset(cases)}
