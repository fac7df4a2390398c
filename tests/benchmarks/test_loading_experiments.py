"""The experiments with loads of published models: they run and are checked, and what figures mean."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.distributed import limits
from benchmarks.loading_experiments import (
    beside_copies,
    in_memory,
    models,
    sampler,
    scaling,
    scaling_chart,
    series,
    series_chart,
)
from benchmarks.loading_experiments.__main__ import draw
from benchmarks.loading_experiments.loaders import LOADERS
from benchmarks.loading_experiments.models import QUARTERS, Model
from benchmarks.loading_experiments.report import EXPERIMENTS, evaluate, show
from benchmarks.loading_experiments.session import Loading, in_turns
from benchmarks.rounds import Case, Results
from benchmarks.targets import Line
from tests.support.long import only_long

from benchmarks import states

ROOT = Path(__file__).resolve().parents[2]

# Another process, because a process has one server of forks, and pytest's is prepared for other programs.
SCRIPT = """
import json, sys
from pathlib import Path
from benchmarks.loading_experiments import copy_jobs, models, programs, sampler
from benchmarks.loading_experiments.models import Model
from benchmarks.loading_experiments.process import Request

programs.prepare_server()
directory, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
model, small = Model("llama-1gb", True), Model("llama-half-gb", True, 1)
warm_up, outcomes = (small, models.write(small, directory)), []
besides = {"jobs": copy_jobs.copying(2), "samples": sampler.sampling(directory)}
for entry in wanted:
    path = models.write(model, directory)
    beside, timeout_s = besides.get(entry.pop("beside", None), programs.alone), entry.pop("timeout_s", 100.0)
    damaged = entry.pop("damaged", None)
    if damaged is not None:
        with open(path / damaged, "r+b") as file:
            file.seek(-100, 2)
            file.write(b"damage")
    request = Request(model=model, directory=path, warm_up=warm_up, verify_all=True, **entry)
    outcomes.append(programs.run(request, directory / "program", timeout_s, beside))
    assert not (directory / "program").exists()
print("\\n" + json.dumps(outcomes))
"""


def outcomes_of(directory: Path, *wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs programs one after another."""
    found: list[dict[str, Any]] = json.loads(printed_by(SCRIPT, str(directory), json.dumps(wanted)))
    return found


def printed_by(script: str, *arguments: str) -> str:
    """The last line of what a script prints."""
    command = [sys.executable, "-c", script, *arguments]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()[-1]


def assert_well(loading: Loading, outcome: dict[str, Any]) -> bool:
    """Whether a load was measured: a peer may not be installed."""
    if outcome["status"] == "missing" and not loading.loader.startswith("waystation"):
        return False
    assert outcome["status"] == "ok", (loading, outcome)
    return True


# ---- programs ----------------------------------------------------------------------------------


@pytest.mark.long
@only_long
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_loader_loads_what_processes_want_byte_for_byte(framework: str, tmp_path: Path) -> None:
    planned = [
        (loading, wanted)
        for loading, wanted in scaling.plan()
        if LOADERS[loading.loader].framework == framework
    ]
    requests = [
        {"loader": loading.loader, "way": loading.way, "divided": wanted == scaling.BLOCKS, "processes": 2}
        for loading, wanted in planned
    ]
    outcomes = outcomes_of(tmp_path, *requests)
    model = Model("llama-1gb", quick=True)
    blocks = sum(leaf.nbytes // (2 if len(leaf.shape) == 2 else 1) for leaf in model.leaves())
    for (loading, wanted), outcome in zip(planned, outcomes, strict=True):
        if assert_well(loading, outcome):
            assert outcome["state_bytes"] == model.nbytes
            assert outcome["held_bytes"] == 2 * (blocks if wanted == scaling.BLOCKS else model.nbytes), (
                loading
            )
            assert 0 < outcome["loaded_s"] <= outcome["seconds"]


@pytest.mark.long
@only_long
def test_rounds_measure_what_is_planned(tmp_path: Path) -> None:
    script = """
import json, sys
from pathlib import Path
from benchmarks.loading_experiments import in_memory, programs, series
from benchmarks.loading_experiments.session import Session

programs.prepare_server()
directory = Path(sys.argv[1])
session = Session(
    directory=directory / "work",
    results=directory / "results.json",
    document={"runs": []},
    quick=True,
    timeout_s=100.0,
    memory_directory=directory / "memory",
)
in_memory.measure(session, 0)
series.measure(session, 1)
assert not session.memory_directory.exists()
session.remove()
assert not session.directory.exists()
print()
"""
    printed_by(script, str(tmp_path))
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert len(runs) == in_memory.count(1) + series.count(1)
    by_case = {(found["experiment"], found["system"]): found for found in runs}
    for loading in in_memory.loadings():
        assert_well(loading, by_case[in_memory.NAME, loading.system])
    for loading in series.LOADINGS:
        if assert_well(loading, by_case[series.NAME, loading.system]):
            assert by_case[series.NAME, loading.system]["samples"]["time_s"]
    for way in limits.COPY_WAYS:
        assert by_case[in_memory.NAME, limits.PREFIX + way]["seconds"] > 0


@pytest.mark.long
@only_long
def test_what_runs_beside_a_load_adds_its_figures(tmp_path: Path) -> None:
    request = {"loader": "safetensors-torch", "way": "pread"}
    jobs, samples = outcomes_of(tmp_path, {**request, "beside": "jobs"}, {**request, "beside": "samples"})
    assert jobs["filled_bytes_per_s"] >= 0
    columns = samples["samples"]
    assert set(columns) == set(sampler.COLUMNS)
    times = sampler.since_begin(samples)
    assert times == sorted(times)
    assert times[0] < 0 < samples["seconds"] < times[-1]
    held = sampler.growth(samples, "anonymous_bytes")[1]
    assert max(held) >= samples["state_bytes"] // 2


def test_wrong_bytes_and_lost_time_are_noticed(tmp_path: Path) -> None:
    request = {"loader": "safetensors-torch", "way": "mmap"}
    late, wrong = outcomes_of(
        tmp_path,
        {**request, "timeout_s": 0.01},
        {**request, "damaged": "model-00002-of-00008.safetensors"},
    )
    assert (late["status"], late["reason"].splitlines()[0]) == ("failed", "not finished in time")
    assert wrong["status"] == "failed"
    assert "differs" in wrong["reason"]


# ---- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
@pytest.mark.parametrize("state", ["llama-1gb", "llama"])
def test_models_grow_by_quarters_and_every_process_gets_a_block(state: str, quick: bool) -> None:
    whole = Model(state, quick)
    for quarters in range(1, QUARTERS + 1):
        model = Model(state, quick, quarters)
        assert model.nbytes * QUARTERS == whole.nbytes * quarters
        for leaf in model.leaves():
            assert len(leaf.shape) == 1 or leaf.shape[0] % scaling.COUNTS[-1] == 0


def test_files_hold_everything_once_and_alike() -> None:
    leaves = Model("llama-1gb", quick=False).leaves()
    shares = models.shares(leaves, 8)
    assert [leaf for share in shares for leaf in share] == leaves
    sizes = [states.total_bytes(share) for share in shares]
    assert len(sizes) == 8
    assert max(sizes) < 1.2 * min(sizes)


def test_a_model_is_written_once(tmp_path: Path) -> None:
    model = Model("llama-half-gb", quick=True, quarters=1)
    directory = models.write(model, tmp_path)
    written = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert models.write(model, tmp_path) == directory
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == written
    assert [Path(path).name for path in models.files_of(directory)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_each_load_is_planned_once() -> None:
    cases = [
        scaling.case_of(loading, *point, wanted)
        for loading, wanted in scaling.plan()
        for point in scaling.points(loading, wanted)
    ]
    assert len(set(cases)) == len(cases) == scaling.count(2) // 2 - len(scaling.LIMIT_WAYS)
    for module in (in_memory, beside_copies):
        assert len(set(module.loadings())) == len(module.loadings())


def test_ways_of_the_limit_are_ways_that_it_has() -> None:
    assert set(scaling.LIMIT_WAYS) <= set(limits.LOAD_WAYS)


def test_rounds_begin_with_another_loader() -> None:
    rounds = [list(in_turns("abc", repetition)) for repetition in range(4)]
    assert ["".join(found) for found in rounds] == ["abc", "bca", "cab", "abc"]


# ---- figures -----------------------------------------------------------------------------------


def run(case: Case, repetition: int, seconds: float, **facts: Any) -> dict[str, Any]:
    return {
        "experiment": case.experiment,
        "subject": case.subject,
        "system": case.system,
        "operation": case.operation,
        "round": repetition,
        "status": "ok",
        "seconds": seconds,
        "state_bytes": 1000,
        **facts,
    }


def line(runs: list[dict[str, Any]], beginning: str) -> Line:
    return next(found for found in evaluate(Results({"runs": runs})) if found.text.startswith(beginning))


def test_a_peer_counts_with_its_better_way() -> None:
    ours = scaling.case_of(scaling.OURS, QUARTERS, 4, scaling.WHOLE)
    plain, shared = (replace(ours, system=loading.system) for loading in scaling.PEERS["runai"])
    runs = [run(ours, index, 2.0) for index in range(3)]
    runs += [run(plain, index, 8.0) for index in range(3)]
    runs += [run(shared, index, seconds) for index, seconds in enumerate((3.0, 1.0, 4.0))]
    found = line(runs, "4 processes, everything: waystation-safetensors-torch no slower than runai")
    assert (found.measured, found.worst, found.reached) == ("1.50x", "0.50x", True)


def test_reading_twice_is_noticed_by_whoever_counts_it() -> None:
    ours = scaling.case_of(scaling.OURS_JAX, QUARTERS, 4, scaling.BLOCKS)
    text = "4 processes, a block each, waystation-safetensors-jax (read): read from the disk"
    once = [run(ours, index, 1.0, disk_read_bytes=1000, device_read_bytes=1040) for index in range(2)]
    assert (line(once, text).measured, line(once, text).reached) == ("1.040x", True)
    twice = [*once, run(ours, 2, 1.0, disk_read_bytes=2000, device_read_bytes=1000)]
    assert (line(twice, text).worst, line(twice, text).reached) == ("2.000x", False)
    assert line([run(ours, 0, 1.0)], text).reached is None


def test_loads_from_memory_are_compared_with_a_copy_of_as_many_bytes() -> None:
    copy = Case(
        in_memory.NAME, in_memory.LIMIT_SUBJECT, f"{limits.PREFIX}2 threads", in_memory.LIMIT_OPERATION
    )
    runs = [
        run(copy, 0, 1.0),
        run(in_memory.case_of(in_memory.OURS), 0, 0.5, state_bytes=(1 << 30) * 9 // 20),
    ]
    found = line(runs, "tmpfs, waystation-safetensors-torch: of a plain copy's speed")
    assert (found.measured, found.reached) == ("0.90x", True)
    assert line(runs, "tmpfs, torch: faster than the median peer").reached is None
    for name, seconds in (("fastsafetensors", 1.0), ("runai", 2.0), ("safetensors, read", 0.6)):
        runs.append(run(in_memory.case_of(in_memory.PEERS[name][0]), 0, seconds))
    assert line(runs, "tmpfs, torch: faster than the median peer").measured == "2.00x"


def test_jobs_and_loads_keep_shares_of_their_speed() -> None:
    before, after = beside_copies.case_of(beside_copies.OURS, 0), beside_copies.case_of(beside_copies.OURS, 2)
    runs = [run(before, 0, 1.0), run(after, 0, 1.25, filled_bytes_per_s=30.0)]
    runs.append(run(beside_copies.nothing_of(2), 0, 1.0, filled_bytes_per_s=40.0))
    results = Results({"runs": runs})
    assert beside_copies.kept_share(results, after) == 0.8
    assert beside_copies.jobs_share(results, after) == 0.75
    assert beside_copies.jobs_share(results, before) is None


def sampled(begin_s: float = 100.0, steps: int = 60) -> dict[str, Any]:
    """A load of 0.4 s that reads 1 GB/s on one core, with samples every 10 ms from 0.1 s before it."""
    times = [begin_s - 0.1 + 0.01 * step for step in range(steps)]
    passed = [min(max(0.0, at - begin_s), 0.4) for at in times]
    counts = {
        "time_s": times,
        "cpu_s": [50 + at for at in passed],
        "cached_bytes": [7e9 + 1e9 * at for at in passed],
        "disk_read_bytes": [5e9 + 1e9 * at for at in passed],
        "anonymous_bytes": [2e8 + 1e9 * at for at in passed],
        "mapped_bytes": [1e8 for _ in passed],
    }
    return {"begin_s": begin_s, "samples": counts}


def test_samples_become_growth_and_rates() -> None:
    found = sampled()
    times, grown = sampler.growth(found, "cached_bytes")
    assert grown[0] == pytest.approx(0, abs=1)
    assert grown[-1] == pytest.approx(0.4e9)
    assert times[0] == pytest.approx(-0.1)
    times, rates = sampler.rate(found, "cpu_s", window_s=0.05)
    middle = [value for at, value in zip(times, rates, strict=True) if 0.15 < at < 0.35]
    assert middle == pytest.approx([1.0] * len(middle))
    assert rates[-1] == pytest.approx(0.0)
    assert max(sampler.gaps_s(found)) == pytest.approx(0.01)


@pytest.mark.long
@only_long
def test_the_median_run_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [
        run(series.case_of(loading), index, seconds, **sampled(100.0 + index))
        for loading in series.LOADINGS
        for index, seconds in enumerate((0.3, 0.4, 0.9))
    ]
    machine = {"cores": 2, "processor": "a processor", "file_system": "ext4"}
    document = {"runs": runs, "machine": machine}
    assert series.median_run(Results(document), series.LOADINGS[0]) == runs[1]
    series_chart.draw(document, tmp_path / "series.svg")
    assert "<svg" in (tmp_path / "series.svg").read_text()
    assert line(runs, "time series").reached is True


def test_scaling_is_drawn_with_the_better_way_of_each(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [
        run(scaling.case_of(loading, *point, wanted), 0, 1.0 + point[1])
        for loading, wanted in scaling.plan()
        for point in scaling.points(loading, wanted)
    ]
    runs += [
        run(beside_copies.case_of(loading, jobs), 0, 1.0)
        for loading in beside_copies.loadings()
        for jobs in beside_copies.JOBS
    ]
    document = {"runs": runs, "machine": {"cores": 2, "processor": "p", "file_system": "ext4"}}
    assert draw(document, tmp_path) == ["loading-scaling.svg"]
    assert (tmp_path / "loading-scaling.svg").read_text().count("Run:ai") > 0
    shown = {loading for line in scaling_chart.LINES for loading in line.ways}
    assert shown >= {loading for loading, _ in scaling.plan()} | set(beside_copies.loadings())


def test_every_series_has_a_label_in_the_picture() -> None:
    assert set(series_chart.LABELS) == {loading.system for loading in series.LOADINGS}


def test_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.command import wide_console

    limit = Case(scaling.NAME, scaling.LIMIT_SUBJECT, f"{limits.PREFIX}quick", scaling.OPERATION)
    own = scaling.case_of(scaling.OURS, QUARTERS, 4, scaling.WHOLE)
    other = scaling.case_of(Loading("runai"), QUARTERS, 4, scaling.WHOLE)
    runs = [
        run(limit, 0, 1.0, state_bytes=1 << 30),
        run(replace(limit, system=f"{limits.PREFIX}slow"), 0, 2.0, state_bytes=1 << 30),
        run(own, 0, 1.0, state_bytes=1 << 29, disk_read_bytes=1 << 29),
        {**run(other, 0, 1.0), "status": "failed", "reason": "it broke"},
    ]
    machine = {"cores": 2, "processor": "p", "memory_bytes": 1, "file_system": "ext4", "kernel": "6"}
    machine |= {"python": "3", "packages": {}, "page_cache_can_be_dropped": True}
    show({"runs": runs, "machine": machine, "quick": False}, wide_console())
    shown = capsys.readouterr().out
    assert "limit, quick" in shown
    assert "limit, slow" not in shown
    assert "0.50" in shown
    assert "failed: scaling: runai, 1 runs: it broke" in shown
    assert set(EXPERIMENTS) == {"scaling", "tmpfs", "beside-copies", "series"}
