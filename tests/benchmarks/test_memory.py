"""The benchmark of the memory tier: its processes run and are checked, and what figures mean."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks.distributed import programs
from benchmarks.distributed.session import Session
from benchmarks.memory import __main__ as command
from benchmarks.memory import agents, checkpoints, hosts, process, replication, training, training_process
from benchmarks.memory.checkpoints import (
    FIRST,
    INTO,
    INTO_WARM,
    MEMORY,
    RECOVER,
    RECOVER_WARM,
    SAVE,
    STORE,
    Bench,
)
from benchmarks.memory.report import show
from benchmarks.memory.targets import evaluate
from benchmarks.memory.training import NO_SAVES
from benchmarks.memory.training_process import NOWHERE
from benchmarks.processes import attempt
from benchmarks.rounds import Case, Results
from benchmarks.systems import SYSTEMS
from benchmarks.targets import Line
from benchmarks.wasted_time.measured import constants_of
from benchmarks.wasted_time.parameters import read_parameters
from rich.console import Console
from tests.support import benchmark_processes
from tests.support.long import only_long

from benchmarks import command as shared
from benchmarks import rounds, states

TIMEOUT_S = 200.0
STATE = "transformer-half-gb"


def session_in(directory: Path) -> Session:
    return Session(
        directory=directory / "work",
        results=directory / "results.json",
        document={"runs": []},
        quick=True,
        timeout_s=TIMEOUT_S,
    )


def attempt_here(module: str, request: Any, timeout_s: float) -> dict[str, Any]:
    """What a fresh process would do, without the seconds that importing everything takes it."""
    del timeout_s
    work: dict[str, Any] = {
        "benchmarks.memory.process": process.run,
        "benchmarks.memory.training_process": training_process.run,
    }
    found: dict[str, Any] = json.loads(json.dumps(attempt(work[module], request)))
    return found


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "spawn", attempt_here)


@contextmanager
def bench_in(directory: Path) -> Iterator[Bench]:
    nbytes = states.total_bytes(states.describe(STATE, quick=True))
    with agents.running(nbytes) as agent:
        yield Bench(session_in(directory), STATE, ("torch",), agent)


# ---- what is measured ----------------------------------------------------------------------------


@pytest.mark.long
@only_long
def test_what_was_saved_to_memory_is_recovered_after_its_process_was_killed(tmp_path: Path) -> None:
    with bench_in(tmp_path) as bench:
        checkpoints.in_memory(bench, "torch", 0)
    assert not bench.agent.directory.parent.exists()
    first, saved, recovered, into = bench.session.document["runs"]
    assert (first["system"], first["operation"], first["status"]) == (FIRST, SAVE, "ok"), first
    assert (saved["operation"], saved["status"]) == (SAVE, "ok"), saved
    assert (recovered["operation"], recovered["status"]) == (RECOVER, "ok"), recovered
    assert (into["operation"], into["status"]) == (INTO, "ok"), into
    assert 0 < saved["blocked_s"] <= saved["sealed_s"] == saved["seconds"]
    assert 0 < recovered["opened_s"] <= recovered["loaded_s"] == recovered["seconds"]
    assert recovered["import_s"] > 0
    assert saved["cpu_s_per_gb"] >= saved["cpu_s"] / (saved["state_bytes"] / 1e9)


@pytest.mark.long
@only_long
@pytest.mark.usefixtures("in_this_process")
def test_memory_is_used_round_after_round_by_both_frameworks(tmp_path: Path) -> None:
    with bench_in(tmp_path) as bench:
        for repetition in range(2):
            for framework in ("torch", "jax"):
                checkpoints.in_memory(bench, framework, repetition)
    runs = bench.session.document["runs"]
    every = [(SAVE, "ok"), (SAVE, "ok"), (RECOVER, "ok")]
    assert [(run["operation"], run["status"]) for run in runs] == [*every, (INTO, "ok"), *every] * 2, runs


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # which the peer says of itself
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.long
@only_long
def test_the_disk_is_read_into_tensors_that_are_there(tmp_path: Path) -> None:
    with bench_in(tmp_path) as bench:
        for system in checkpoints.ON_DISK["torch"]:
            path = tmp_path / system
            saver = SYSTEMS[system]()
            saver.prepare("read")
            saver.save(path, saver.build(states.describe(STATE, quick=True)))
            for name in (INTO, INTO_WARM):
                case = Case(checkpoints.NAME, "torch", system, name)
                is_cached = name == INTO_WARM
                checkpoints.run_process(bench, case, 0, "recover-disk-into", path, is_cached=is_cached)
    runs = bench.session.document["runs"]
    assert [run["status"] for run in runs] == ["ok"] * 6, runs


@pytest.mark.usefixtures("in_this_process")
def test_a_state_that_memory_has_not_is_not_recovered(tmp_path: Path) -> None:
    with bench_in(tmp_path) as bench:
        case = Case(checkpoints.NAME, "torch", MEMORY, RECOVER)
        checkpoints.run_process(bench, case, 0, "recover-memory", tmp_path / "never")
    (run,) = bench.session.document["runs"]
    assert run["status"] == "failed"
    assert "StepNotFoundError" in run["reason"]


@pytest.mark.usefixtures("in_this_process")
def test_a_store_is_as_slow_as_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = 32 << 20
    monkeypatch.setattr(checkpoints, "STORE_BYTES_PER_S", rate)
    with bench_in(tmp_path) as bench:
        checkpoints.in_store(bench, "torch", 0)
    for run in bench.session.document["runs"]:
        assert run["status"] == "ok", run
        # Less what may be moved at once after a pause.
        assert run["seconds"] > 0.5 * run["state_bytes"] / rate


@pytest.mark.long
@only_long
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_training_saves_as_often_as_was_said(framework: str, tmp_path: Path) -> None:
    session = session_in(tmp_path)
    ways = ((NOWHERE, NO_SAVES), ("memory", "every 1"), (training.DISK[framework], "every 2"))
    with agents.running(1 << 20) as agent:
        for system, operation in ways:
            training.train(session, Case(training.NAME, framework, system, operation), 0, "quick", 4, agent)
    runs = session.document["runs"]
    assert [run["status"] for run in runs] == ["ok"] * 3, runs
    assert [run["saves"] for run in runs] == [0, 4, 2]
    assert runs[0]["blocked_share"] == 0.0
    for run in runs[1:]:
        assert 0 < run["blocked_share"] < 1
    assert len({run["state_bytes"] for run in runs}) == 1


@pytest.mark.usefixtures("in_this_process")
def test_the_command_measures_and_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shared, "RESULTS", tmp_path / "results")
    arguments = ["--quick", "--experiments", "training", "--frameworks", "torch", "--iterations", "2"]
    monkeypatch.setattr("sys.argv", ["memory", *arguments, "--directory", str(tmp_path / "work")])
    command.main()
    (results,) = (tmp_path / "results").iterdir()
    document = json.loads(results.read_text())
    assert {run["status"] for run in document["runs"]} == {"ok"}, document["runs"]
    assert len(document["runs"]) == len(training.cases(["torch"]))
    assert "Training with saves" in capsys.readouterr().out
    assert not any((tmp_path / "work").iterdir())


@pytest.mark.long
@only_long
def test_a_lost_host_is_recovered_from_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_start", benchmark_processes.start)
    count = replication.HOSTS
    session = session_in(tmp_path)
    with hosts.running(count, 16 << 20) as found:
        lost = found.directories[count - 1]
        replication.in_memory(replication.Bench(session, STATE, count, found), 0)
        assert found.directories[count - 1] != lost
    runs = session.document["runs"]
    assert [run["status"] for run in runs] == ["ok"] * 3, runs
    assert [run["system"] for run in runs] == [replication.MEMORY, replication.MEMORY, replication.LOST_HOST]
    saved, recovered, replaced = runs
    assert 0 < saved["blocked_s"] <= saved["seconds"]
    assert 0 < recovered["opened_s"] <= recovered["seconds"]
    assert 0 < replaced["opened_s"] <= replaced["seconds"]
    assert saved["cpu_s_per_gb"] > 0


# ---- what figures mean ---------------------------------------------------------------------------


def run(case: Case, repetition: int, seconds: float, **facts: Any) -> dict[str, Any]:
    return {
        "experiment": case.experiment,
        "subject": case.subject,
        "system": case.system,
        "operation": case.operation,
        "round": repetition,
        "status": "ok",
        "seconds": seconds,
        "state_bytes": 2_000_000_000,
        **facts,
    }


def checkpoint(system: str, operation: str, seconds: float, **facts: Any) -> dict[str, Any]:
    return run(Case(checkpoints.NAME, "torch", system, operation), 0, seconds, **facts)


MEASURED = [
    checkpoint(MEMORY, SAVE, 0.5, blocked_s=0.1, sealed_s=0.5, cpu_s_per_gb=0.4),
    checkpoint(FIRST, SAVE, 2.0, blocked_s=1.0, sealed_s=2.0, cpu_s_per_gb=1.0),
    checkpoint(MEMORY, RECOVER, 0.25, import_s=2.0, cpu_s_per_gb=0.2),
    checkpoint(MEMORY, INTO, 0.2, import_s=2.0, cpu_s_per_gb=0.2),
    checkpoint("torch-save", INTO, 2.0, cpu_s_per_gb=1.0),
    checkpoint("torch-save", INTO_WARM, 1.0, cpu_s_per_gb=1.0),
    checkpoint(STORE, INTO, 6.5, cpu_s_per_gb=1.0),
    checkpoint("torch-save", SAVE, 6.0, cpu_s_per_gb=1.0),
    checkpoint("torch-save", RECOVER, 2.0, cpu_s_per_gb=1.0),
    checkpoint("torch-save", RECOVER_WARM, 1.0, cpu_s_per_gb=1.0),
    checkpoint(STORE, SAVE, 6.5, cpu_s_per_gb=1.0),
    checkpoint(STORE, RECOVER, 6.5, cpu_s_per_gb=1.0),
]


def trained(place: str, how: str, rate: float, blocked_share: float) -> dict[str, Any]:
    facts = {"iterations_per_s": rate, "blocked_share": blocked_share, "blocked_s": 1.0, "saves": 10}
    case = Case(training.NAME, "torch", place, how)
    return run(case, 0, 100 / rate, cpu_s=1.0, agent_cpu_s=0.0, **facts)


MACHINE = {
    "cores": 2,
    "processor": "some",
    "memory_bytes": 1 << 34,
    "file_system": "ext4",
    "kernel": "6",
    "python": "3.12",
    "packages": {},
    "page_cache_can_be_dropped": True,
}


def lines_of(runs: list[dict[str, Any]]) -> dict[str, Line]:
    return {line.text: line for line in evaluate(Results({"runs": runs}))}


def test_targets_compare_what_is_sealed_with_torch_save() -> None:
    found = [(line.measured, line.reached) for line in lines_of(MEASURED).values()]
    saves, recoveries = [("12.00x", True), ("3.00x", False)], [("8.00x", True), ("4.00x", False)]
    into = [("10.00x", True), ("5.00x", False), ("32.50x", True)]
    assert found == [*saves, *recoveries, ("13.00x", False), ("26.00x", True), *into]


def test_what_memory_itself_allows_is_shown_beside() -> None:
    copied = [
        run(
            Case(checkpoints.NAME, checkpoints.LIMIT, f"{threads} threads", checkpoints.TOUCHED),
            0,
            1 / threads,
        )
        for threads in (1, 2)
    ]
    lines = lines_of([*MEASURED, *copied])
    shown = [line.measured for line in lines.values() if "plain copies" in line.measured]
    assert shown == [
        "12.00x (plain copies: 12.00x)",
        "10.00x (plain copies: 4.00x)",
        "5.00x (plain copies: 2.00x)",
    ]


def test_what_was_not_measured_is_not_judged() -> None:
    lines = lines_of([entry for entry in MEASURED if entry["system"] != STORE])
    against_torch_save, against_store = [True, False], [None]
    expected = [*against_torch_save * 2, *against_store * 2, *against_torch_save, *against_store]
    assert [line.reached for line in lines.values()] == expected


@pytest.mark.parametrize(
    ("rate", "share", "reached"), [(0.5, 0.03, True), (0.5, 0.031, False), (5.0, 0.03, None)]
)
def test_blocking_is_judged_where_steps_are_long(rate: float, share: float, reached: bool | None) -> None:
    runs = [trained(NOWHERE, NO_SAVES, rate, 0.0), trained("memory", "every 1", rate / 2, share)]
    (line,) = lines_of(runs).values()
    assert line.reached == reached


def test_tables_show_every_case_and_what_failed() -> None:
    failed = {"status": "failed", "reason": "for a test"}
    runs = [
        *MEASURED,
        trained(NOWHERE, NO_SAVES, 4.0, 0.0),
        trained("memory", "every 1", 3.0, 0.1),
        run(Case(checkpoints.NAME, checkpoints.LIMIT, "1 threads", "copy to touched memory"), 0, 0.125),
        run(Case(checkpoints.NAME, "torch", "torch-dcp", SAVE), 0, 0.0) | failed,
    ]
    stream = io.StringIO()
    show({"runs": runs, "machine": MACHINE, "quick": False}, Console(file=stream, width=200))
    text = stream.getvalue()
    for expected in ("12.00 x", "16.00", "75.0%", "10.0%", "for a test", "2.00 GB"):
        assert expected in text


def test_the_simulation_takes_measured_rates(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    runs = [
        run(Case(checkpoints.NAME, "jax", MEMORY, SAVE), 0, 0.5, blocked_s=0.01),
        run(Case(replication.NAME, "4 hosts", replication.LOST_HOST, RECOVER), 0, 2.0),
    ]
    results.write_text(json.dumps({"runs": runs, "machine": {"cores": 2}, "quick": False}))
    constants = constants_of(results)
    values = {name: entry["value"] for name, entry in constants.items()}
    assert values == {"copy_bytes_per_s": 4e9, "stall_s": 0.01, "retrieval_bytes_per_s": 2.5e8}
    own = tmp_path / "own.json"
    own.write_text('{"commit_s": {"value": 0.02, "source": "measured: here"}}')
    found = read_parameters(own, constants)
    assert (found.copy_bytes_per_s, found.commit_s) == (4e9, 0.02)
    assert found.sources["copy_bytes_per_s"].startswith("measured: python -m benchmarks.memory")


@pytest.mark.parametrize(
    ("document", "message"),
    [({"runs": []}, "no saves to memory"), ({"runs": [], "quick": True}, "quick results")],
)
def test_results_without_rates_are_refused(document: dict[str, Any], message: str, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps(document))
    with pytest.raises(SystemExit, match=message):
        constants_of(results)


def test_replicas_are_compared_with_the_disk() -> None:
    def on_hosts(system: str, operation: str, seconds: float) -> dict[str, Any]:
        return run(Case(replication.NAME, "2 hosts", system, operation), 0, seconds, cpu_s_per_gb=1.0)

    runs = [
        *MEASURED,
        on_hosts(replication.MEMORY, SAVE, 2.0),
        on_hosts(replication.LOST_HOST, RECOVER, 1.0),
        on_hosts("orbax", SAVE, 8.0),
        on_hosts("orbax", RECOVER, 3.0),
        on_hosts("orbax-plain", RECOVER, 4.0),
    ]
    lines = [line for text, line in lines_of(runs).items() if text.startswith("2 hosts")]
    found = [(line.measured, line.reached) for line in lines]
    assert found == [
        ("4.00x", True),
        ("not measured", None),
        ("3.00x", True),
        ("3.00x", False),
        ("4.00x", True),
        ("2.00x", False),
    ]
    stream = io.StringIO()
    show({"runs": runs, "machine": MACHINE, "quick": False}, Console(file=stream, width=200))
    assert "A program on 2 hosts of this machine" in stream.getvalue()
