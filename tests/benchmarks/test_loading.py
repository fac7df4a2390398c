"""The table of published models: what is measured, what is compared with what, and that it runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from benchmarks.analysis import Results
from benchmarks.chart import LOADING, draw
from benchmarks.loading import OPERATIONS_OF, PUBLISHERS, SYSTEMS, chosen
from benchmarks.loading_targets import JAX, PUBLISHED, TORCH, evaluate
from benchmarks.plan import Selection, all_cases
from benchmarks.report import show
from benchmarks.session import Session
from benchmarks.systems import SYSTEMS as EVERY_SYSTEM
from benchmarks.targets import Line
from rich.console import Console
from tests.support import benchmark_processes
from tests.support.long import only_long

from benchmarks import rounds

OPERATIONS = ("load-cold", "load-warm", "stream-cold", "stream-warm")
MIB = 1 << 20


def run(
    system: str, operation: str, way: str, seconds: float, state: str = "llama", **more: Any
) -> dict[str, Any]:
    return {
        "state": state,
        "system": system,
        "operation": operation,
        "way": way,
        "repetition": 0,
        "status": "ok",
        "arrays": 146,
        "state_bytes": 1000 * MIB,
        "peak_growth_bytes": 1010 * MIB,
        "mapped_growth_bytes": 0,
        "cache_growth_bytes": 5 * MIB,
        "disk_read_bytes": 7 * MIB,
        "cpu_s": 1.0,
        "seconds": {"loaded": seconds, "touched": seconds + 1.0},
        **more,
    }


def line(runs: list[dict[str, Any]], text: str) -> Line:
    (found,) = (line for line in evaluate(Results({"runs": runs})) if text in line.text)
    return found


def test_every_model_is_loaded_cold_and_warm_by_the_systems_that_it_is_for() -> None:
    cases = all_cases(chosen(tuple(PUBLISHERS), SYSTEMS, OPERATIONS))
    assert len(set(cases)) == len(cases)
    for state, publisher in PUBLISHERS.items():
        assert not EVERY_SYSTEM[publisher].load_ways
        for system in (JAX, "safetensors-jax"):
            found = {case.operation for case in cases if (case.state, case.system) == (state, system)}
            assert found == set(OPERATIONS_OF.get(state, OPERATIONS))
    assert {case.system for case in cases if case.state == "llama"} == set(SYSTEMS)
    assert {case.system for case in cases if case.state == "llama-aligned"} == {JAX, "safetensors-jax"}


def test_a_choice_of_systems_is_kept_where_a_model_is_for_some_alone() -> None:
    cases = all_cases(chosen(("llama-aligned", "llama"), ("runai",), ("load-cold",)))
    assert {(case.state, case.system) for case in cases} == {("llama", "runai")}


def test_copies_are_compared_with_copies_and_mappings_with_mappings() -> None:
    runs = [
        run("safetensors-torch", "load-warm", "mmap", 0.1),
        run("safetensors-torch", "load-warm", "pread", 3.0),
        run("fastsafetensors", "load-warm", "direct", 9.0),
        run("fastsafetensors", "load-warm", "buffered", 2.0),
        run("runai", "load-warm", "default", 1.0),
        run(TORCH, "load-warm", "read", 0.8),
        run(TORCH, "load-warm", "mmap", 0.2),
    ]
    fastest = line(runs, "no slower than the fastest that copies")
    assert ("(runai, default)" in fastest.text, fastest.measured, fastest.reached) == (True, "1.25x", True)
    assert line(runs, "faster than the median").measured == "2.50x"
    mapped = line(runs, "no slower than the one that maps")
    assert (mapped.measured, mapped.reached) == ("0.92x", False)  # 1.1 s over 1.2 s: every page touched


def test_the_median_of_two_peers_lies_between_them() -> None:
    runs = [
        run("safetensors-torch", "load-warm", "mmap", 1.0),
        run("safetensors-torch", "load-warm", "pread", 3.0),
        run("runai", "load-warm", "default", 1.0),
        run(TORCH, "load-warm", "read", 1.0),
    ]
    assert line(runs, "faster than the median").measured == "2.00x"


def test_what_is_asked_of_a_cold_load_is_shown_beside_the_limit_of_the_disk() -> None:
    runs = [
        run("safetensors-torch", "load-cold", "mmap", 1.0, "llama-half-gb"),
        run("runai", "load-cold", "default", 1.2, "llama-half-gb"),
        run(TORCH, "load-cold", "read", 1.0, "llama-half-gb"),
        run("limit", "load-cold", "quick", 0.96, "llama-half-gb"),
    ]
    found = line(runs, "llama-half-gb, cold, torch: faster than the median")
    assert (found.measured, found.reached) == ("1.20x (raw reads: 1.25x)", False)
    assert line(runs, f"llama-half-gb, cold, {TORCH}: of the raw read limit").measured == "0.96x"


def test_a_mapped_load_in_jax_shows_both_ratios_and_is_judged_by_the_first() -> None:
    runs = [
        run("safetensors-jax", "load-warm", "mmap", 4.0, "llama-aligned"),
        run(JAX, "load-warm", "mmap", 0.1, "llama-aligned"),
    ]
    found = line(runs, "mmap=True")
    assert (found.measured, found.reached) == ("40.00x (4.55x)", True)


def test_the_limit_is_reached_by_reads_alone() -> None:
    runs = [run("limit", "load-cold", "quick", 1.0), run(JAX, "load-cold", "mmap", 0.1)]
    assert line(runs, f"cold, {JAX}: of the raw read limit").reached is None
    found = line([*runs, run(JAX, "load-cold", "read", 1.25)], f"cold, {JAX}: of the raw read limit")
    assert (found.measured, found.reached) == ("0.80x", False)


def test_memory_counts_in_every_load_and_stream() -> None:
    runs = [run(JAX, "load-cold", "read", 1.0)]
    assert line(runs, f"memory above the tensors, {JAX}").measured == "10 MiB"
    runs += [run(JAX, "stream-warm", "default", 1.0, "minilm", peak_growth_bytes=1300 * MIB)]
    found = line(runs, f"memory above the tensors, {JAX}")
    assert (found.measured, found.reached) == ("300 MiB", False)


def document() -> dict[str, Any]:
    """A session of made figures, in which InstantTensor is missing."""
    runs = [
        run(system, operation, way, 1.0 + place / 10, state)
        for state in ("llama", "small")
        for operation in ("load-cold", "load-warm")
        for place, (system, way) in enumerate(
            [("limit", "threads direct 1 MiB x4"), (TORCH, "read"), (TORCH, "mmap"), ("runai", "default")]
        )
        if not (system == "limit" and state == "small")
    ]
    streamed = run(TORCH, "stream-cold", "default", 1.0, "llama-in-files")
    runs += [{**streamed, "seconds": {**streamed["seconds"], "first": 0.125}}]
    missing = run("instanttensor", "load-cold", "default", 0.0)
    runs += [{**missing, "status": "missing", "reason": "only CUDA"}]
    machine = {
        "cores": 2,
        "processor": "one",
        "memory_bytes": 1 << 34,
        "file_system": "ext4",
        "kernel": "6",
        "python": "3",
        "packages": {},
        "page_cache_can_be_dropped": True,
    }
    return {"machine": machine, "quick": False, "runs": runs}


def test_the_report_shows_times_caches_and_what_is_missing() -> None:
    console = Console(width=200, record=True)
    show(document(), console, PUBLISHED)
    shown = console.export_text()
    assert "One array after another, cold: llama-in-files" in shown
    (row,) = (text for text in shown.splitlines() if "0.125" in text)
    assert f"{TORCH}" in row
    assert [cell.strip() for cell in row.split("│")][-3:-1] == ["5", "7"]
    assert "missing: instanttensor, 1 runs (load-cold of llama): only CUDA" in shown


@pytest.mark.long
@only_long
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(document(), tmp_path / "loading.svg", LOADING)
    assert "<svg" in (tmp_path / "loading.svg").read_text()


def test_a_session_publishes_once_a_round_and_all_load_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "spawn", benchmark_processes.spawn)
    session = Session(
        selection=Selection(
            ("small",),
            ("safetensors-torch", TORCH),
            ("stream-warm",),
            publishers={"small": "published"},
        ),
        directory=tmp_path / "work",
        results=tmp_path / "results.json",
        document={"runs": []},
        repetitions=1,
        quick=True,
    )
    session.run()
    session.remove()
    runs = session.document["runs"]
    assert [entry["status"] for entry in runs] == ["ok"] * 3, runs
    assert all(entry["seconds"]["first"] <= entry["seconds"]["loaded"] for entry in runs)
    assert not (tmp_path / "work").exists()
    pairs = itertools.pairwise(entry["state_bytes"] for entry in runs)
    assert all(left == right for left, right in pairs)
