"""The benchmark of programs of several processes: they run and are checked, and what figures mean."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.distributed import (
    broadcast,
    disk,
    limits,
    models,
    programs,
    readers,
    replicas,
    reshard,
    throttles,
)
from benchmarks.distributed.broadcast import Model
from benchmarks.distributed.models import TOPOLOGIES
from benchmarks.distributed.process import Request
from benchmarks.distributed.report import evaluate
from benchmarks.distributed.session import Session
from benchmarks.rounds import Case, Results
from benchmarks.storage import server
from benchmarks.targets import Line
from tests.support import benchmark_processes
from tests.support.long import only_long

from waystation import _native

TIMEOUT_S = 200.0


def request_of(path: Path, **changes: Any) -> Request:
    request = Request(
        system="waystation",
        operation="save",
        model="replicas",
        mesh=(2, 2, 1),
        devices=4,
        processes=2,
        path=str(path),
        quick=True,
        verify_all=True,
    )
    return replace(request, **changes)


def session_in(directory: Path, **members: Any) -> Session:
    return Session(
        directory=directory / "work",
        results=directory / "results.json",
        document={"runs": []},
        quick=True,
        timeout_s=TIMEOUT_S,
        **members,
    )


# ---- programs ----------------------------------------------------------------------------------


def test_a_program_of_two_processes_saves_and_loads_under_a_throttle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_start", benchmark_processes.start)
    limits = throttles.store(tmp_path / "throttles")
    saving = request_of(tmp_path / "checkpoint", settings=limits)
    saved = programs.run(saving, tmp_path / "work", TIMEOUT_S)
    assert saved["status"] == "ok", saved
    assert saved["state_bytes"] == 8 * 512 * 512 * 4
    loaded = programs.run(replace(saving, operation="load"), tmp_path / "work", TIMEOUT_S)
    assert loaded["status"] == "ok", loaded
    assert loaded["bytes_read"] >= loaded["bytes_needed"] >= saved["state_bytes"]
    usage = _native.throttle_usage(str(tmp_path / "throttles" / "store"))
    assert usage["bytes"] >= 2 * saved["state_bytes"]
    assert not (tmp_path / "work").exists()


@pytest.mark.long
@only_long
def test_a_load_that_fails_makes_a_run_fail(tmp_path: Path) -> None:
    saving = request_of(tmp_path / "checkpoint", mesh=(1, 2, 1), devices=2, processes=1)
    assert programs.run(saving, tmp_path / "work", TIMEOUT_S)["status"] == "ok"
    other = replace(saving, operation="load", model="square")
    failed = programs.run(other, tmp_path / "work", TIMEOUT_S)
    assert failed["status"] == "failed"
    assert "StructureMismatch" in failed["reason"]


def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    failed = programs.run(request_of(tmp_path / "checkpoint"), tmp_path / "work", 0.01)
    assert failed["status"] == "failed"


def test_the_limit_is_measured_by_a_worker(tmp_path: Path) -> None:
    session = session_in(tmp_path)
    case = Case(disk.NAME, disk.SUBJECT, f"{limits.PREFIX}one", disk.OPERATION)
    limits.measure_save(session, case, 0, "threads buffered 8 MiB x1")
    (outcome,) = session.document["runs"]
    assert outcome["status"] == "ok", outcome
    assert outcome["seconds"] > 0


# ---- states ------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_mesh_divides_every_array(name: str, quick: bool) -> None:
    topology = TOPOLOGIES[name]
    for mesh in (topology.origin, *topology.targets):
        assert math.prod(mesh) <= math.prod(topology.origin)
        extents = dict(zip(models.AXES, mesh, strict=True))
        for array in models.describe(topology.model, quick):
            for extent, axis in zip(array.leaf.shape, array.spec, strict=True):
                assert axis is None or extent % extents[axis] == 0


def test_the_guides_blocks() -> None:
    topology = TOPOLOGIES["guide"]
    (array, *_) = models.describe(topology.model, quick=False)
    assert array.block_bytes(topology.origin) == (4 * 256) * (16 * 256) * 4
    assert array.block_bytes(topology.targets[0]) == (32 * 256) * (2 * 256) * 4
    assert topology.chunk_bytes(array) == (4 * 256) * (2 * 256) * 4


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
        "state_bytes": 128 << 20,
        **facts,
    }


def line(runs: list[dict[str, Any]], beginning: str) -> Line:
    return next(found for found in evaluate(Results({"runs": runs})) if found.text.startswith(beginning))


def test_a_resharded_load_is_compared_with_the_unchanged_one() -> None:
    resharded = Case(reshard.NAME, "guide", reshard.OURS, "load, (1, 1, 16)")
    unchanged = replace(resharded, operation=reshard.UNCHANGED)
    orbax = replace(resharded, system="orbax, subchunks")
    read = {"bytes_read": 104, "bytes_needed": 100}
    runs = [run(resharded, index, seconds, **read) for index, seconds in enumerate((1.2, 1.2, 3.0))]
    runs += [run(unchanged, index, 1.0) for index in range(3)]
    runs += [run(replace(resharded, system="waystation"), index, 2.0) for index in range(3)]
    runs += [run(orbax, index, 6.6) for index in range(3)]
    runs += [run(replace(orbax, system="orbax"), index, 9.0) for index in range(3)]
    slower = line(runs, "guide: load, (1, 1, 16), waystation, subchunks: times")
    assert (slower.measured, slower.worst, slower.reached) == ("1.20x", "3.00x", True)
    ratio = line(runs, "guide: load, (1, 1, 16), waystation, subchunks: bytes read")
    assert (ratio.measured, ratio.reached) == ("1.040x", True)
    faster = line(runs, "guide: load, (1, 1, 16): faster than orbax, the")
    assert (faster.measured, faster.worst, faster.reached) == ("5.50x", "2.20x", True)
    assert line(runs, "guide: load, (1, 1, 16): faster than orbax-plain, the").reached is None


def test_replicas_are_compared_where_links_limit() -> None:
    shared = Case(replicas.NAME, "2 replicas", replicas.PARALLEL, f"save, {replicas.LINKS}")
    runs = [run(shared, 0, 1.0), run(replace(shared, system=replicas.SINGLE), 0, 1.5)]
    found = line(runs, "2 replicas")
    assert (found.measured, found.reached) == ("1.50x", False)


def test_the_choice_is_compared_with_the_better_of_the_two() -> None:
    chosen = Case(broadcast.NAME, "4 replicas", broadcast.CHOSEN, broadcast.OPERATION)
    runs = [run(chosen, 0, 1.25)]
    runs += [run(replace(chosen, system=broadcast.EVERYONE), 0, 3.0)]
    runs += [run(replace(chosen, system=broadcast.BROADCAST), 0, 1.0)]
    found = line(runs, "4 replicas: chosen by itself")
    assert (found.measured, found.reached) == ("0.80x", False)
    assert line(runs, "4 replicas: load and broadcast").measured == "3.00x"


def test_the_model_gives_back_what_it_was_made_of() -> None:
    state_bytes = 2 * throttles.STORE_BYTES_PER_S
    model = Model.of(state_bytes, alone_s=2.5, broadcast_s=3.25)
    assert (model.own_s, model.sending_s) == (0.5, 0.75)
    assert model.everyone_s(1) == 2.5
    assert model.everyone_s(32) == 64.5
    assert model.broadcast_s() == 3.25
    assert broadcast.speedup([model], 32) == 64.5 / 3.25


def test_the_limit_is_its_best_way() -> None:
    ours = Case(disk.NAME, disk.SUBJECT, disk.OURS, disk.OPERATION)
    runs = [run(ours, index, 1.25) for index in range(3)]
    for way, seconds in (("slow", 3.0), ("quick", 1.0)):
        runs += [run(replace(ours, system=f"{limits.PREFIX}{way}"), index, seconds) for index in range(3)]
    found = line(runs, "4 processes save together")
    assert (found.measured, found.reached) == ("0.80x", True)


def test_shares_of_the_limit_are_by_bytes_and_for_one_direction() -> None:
    limit = Case(reshard.NAME, reshard.LIMIT_SUBJECT, f"{limits.PREFIX}quick", reshard.LIMIT_OPERATION)
    load = Case(reshard.NAME, "guide", reshard.OURS, reshard.UNCHANGED)
    save = replace(load, operation="save")
    half = (1 << 30) // 2
    runs = [run(limit, 0, 1.0), *(run(case, 0, 1.0) | {"state_bytes": half} for case in (load, save))]
    results = Results({"runs": runs})
    assert limits.share(results, load) == 0.5
    assert limits.share(results, save) is None
    assert limits.share(Results({"runs": runs[1:]}), load) is None


def test_what_failed_is_kept_with_its_reason(tmp_path: Path) -> None:
    told: list[Case] = []
    session = session_in(tmp_path, on_run=lambda case, outcome: told.append(case))
    case = Case(disk.NAME, disk.SUBJECT, disk.OURS, disk.OPERATION)
    assert not session.record(case, 0, {"status": "failed", "reason": "for a test"})
    assert told == [case]
    assert Results(session.document).series(case) is None
    assert "for a test" in (tmp_path / "results.json").read_text()


# ---- readers of a store ------------------------------------------------------------------------


def readers_document() -> dict[str, Any]:
    """Loads at 40 requests a second that took 0.5 s beyond the store's time."""
    requests = {
        (readers.EVERYONE, 2): 40, (readers.BROADCAST, 2): 24,
        (readers.EVERYONE, 8): 160, (readers.BROADCAST, 8): 36,
    }  # fmt: skip
    return {
        "runs": [
            {
                "experiment": readers.NAME,
                "subject": readers.subject_of(count),
                "system": manner,
                "operation": readers.OPERATION,
                "round": 0,
                "status": "ok",
                "requests": number,
                "seconds": number / readers.REQUESTS_PER_S + 0.5,
            }
            for (manner, count), number in requests.items()
        ]
    }


def test_the_model_of_readers_agrees_with_what_was_measured_and_counts_requests() -> None:
    model = readers.model_of(Results(readers_document()))
    assert model is not None
    assert (model.alone_requests, model.shared_requests, model.own_requests) == (20, 20, 2)
    assert model.seconds(8, broadcast=False) == pytest.approx(4.5)
    assert model.seconds(8, broadcast=True) == pytest.approx(1.4)
    assert model.seconds(32, broadcast=False) == pytest.approx(16.5)
    assert model.seconds(32, broadcast=True) == pytest.approx(2.6)
    faster = next(line for line in readers.evaluate(Results(readers_document())) if "faster" in line.text)
    assert faster.reached


@only_long
@pytest.mark.skipif(server.PROGRAM is None, reason="versitygw is not installed")
def test_readers_of_a_store_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "COUNTS", (2,))
    session = session_in(tmp_path)
    readers.measure(session, 0)
    runs = session.document["runs"]
    assert [run["status"] for run in runs] == ["ok"] * readers.count(session, 1)
    assert all(run["requests"] > 0 for run in runs if run["operation"] == readers.OPERATION)
