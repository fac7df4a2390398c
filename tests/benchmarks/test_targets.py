"""The ratios of the benchmark: what they divide by what, and what happens to gaps."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.analysis import Ratio, Results, Series
from benchmarks.plan import Selection, all_cases, turns
from benchmarks.systems import SYSTEMS
from benchmarks.targets import Line, evaluate
from benchmarks.worker import OPERATIONS, STREAM_OPERATIONS

from benchmarks import markdown


def run(system: str, operation: str, way: str, repetition: int, **seconds: float) -> dict[str, Any]:
    return {
        "state": "llama",
        "system": system,
        "operation": operation,
        "way": way,
        "repetition": repetition,
        "status": "ok",
        "state_bytes": 1000,
        "peak_growth_bytes": 1000 + (300 << 20),
        "seconds": seconds,
    }


def line(runs: list[dict[str, Any]], beginning: str) -> Line:
    return next(found for found in evaluate(Results({"runs": runs})) if found.text.startswith(beginning))


def test_a_ratio_is_of_medians_and_its_worst_case_of_one_round() -> None:
    ours = Series("waystation", "default", {0: 1.0, 1: 2.0, 2: 4.0})
    theirs = Series("orbax", "default", {0: 8.0, 1: 2.0, 2: 16.0})
    ratio = Ratio.of(ours, theirs)
    assert ratio.median == 4.0
    assert ratio.worst == 1.0


def test_the_limit_is_its_way_with_the_best_median() -> None:
    runs = [run("limit", "save", "slow", index, durable=2.0) for index in range(3)]
    runs += [run("limit", "save", "quick", index, durable=seconds) for index, seconds in enumerate((1, 1, 9))]
    runs += [run("waystation", "save", "default", index, durable=1.25) for index in range(3)]
    found = line(runs, "durable save, waystation:")
    assert (found.measured, found.worst, found.reached) == ("0.80x", "0.80x", False)


def test_a_mapped_load_counts_with_its_pages_touched_and_against_its_like() -> None:
    runs = [run("safetensors-torch", "load-cold", "mmap", 0, loaded=0.01, touched=3.0)]
    runs += [run("waystation-torch", "load-cold", "read", 0, loaded=1.0, touched=1.1)]
    assert line(runs, "cold load: faster than safetensors-torch").reached is None
    runs += [run("waystation-torch", "load-cold", "mmap", 0, loaded=0.01, touched=1.5)]
    found = line(runs, "cold load: faster than safetensors-torch")
    assert (found.measured, found.reached) == ("2.00x", True)
    runs += [run("torch-dcp", "load-cold", "default", 0, loaded=4.0)]
    assert line(runs, "cold load: faster than torch-dcp").measured == "4.00x"


def test_loads_that_only_map_can_be_left_out() -> None:
    ways = {case.way for case in all_cases(Selection(["tiny"], ["waystation-torch"], ["load-warm"]))}
    assert ways == {"read", "mmap"}
    cases = all_cases(Selection(["tiny"], ["waystation-torch"], ["save", "load-warm"], maps=False))
    assert [(case.operation, case.way) for case in cases] == [("save", "default"), ("load-warm", "read")]


def test_tables_for_the_documentation_have_medians_worst_runs_and_mapped_loads_apart() -> None:
    runs = [run("waystation-torch", "load-cold", "read", index, loaded=1.0 + index) for index in range(3)]
    runs += [run("waystation-torch", "load-cold", "mmap", 0, loaded=0.1, touched=0.5)]
    runs += [run("torch-dcp", "save-async", "default", 0, blocking=0.25, durable=4.0)]
    assert list(markdown.lines(Results({"runs": runs}), "llama")) == [
        "| s | save-async, blocked | save-async, to its end | load, cold |",
        "|---|---:|---:|---:|",
        "| `waystation-torch` |  |  | 2.00 (3.00) |",
        "| `waystation-torch`, mapped |  |  | 0.50 (0.50) |",
        "| `torch-dcp` | 0.25 (0.25) | 4.00 (4.00) |  |",
    ]


def test_as_fast_as_the_limit_needs_memory_of_its_own() -> None:
    runs = [run("limit", "load-cold", "quick", 0, loaded=1.0)]
    runs += [run("waystation", "load-cold", "mmap", 0, loaded=0.1, touched=0.2)]
    assert line(runs, "cold load, waystation:").reached is None
    runs += [run("waystation", "load-cold", "read", 0, loaded=1.0)]
    assert line(runs, "cold load, waystation:").reached is True


def test_memory_is_judged_by_the_worst_run() -> None:
    runs = [run("waystation", "load-cold", "read", 0, loaded=1.0)]
    found = line(runs, "memory above the state, synchronous load")
    assert (found.measured, found.reached) == ("300 MiB", False)


def test_what_failed_is_not_measured_and_not_dropped() -> None:
    failed = {**run("orbax", "save", "default", 0), "status": "failed", "reason": "it broke\nbadly"}
    results = Results({"runs": [failed]})
    assert list(results.failures()) == [("orbax", "failed", "it broke")]
    assert line([failed], "durable save: faster than orbax").reached is None


def test_percentiles_lie_between_runs() -> None:
    series = Series("orbax", "default", {index: float(index) for index in range(11)})
    assert (series.percentile(50), series.percentile(90)) == (5.0, 9.0)


def test_rounds_begin_with_another_system_and_hold_the_same_cases() -> None:
    selection = Selection(("llama",), tuple(SYSTEMS), OPERATIONS)
    rounds = [list(turns(selection, "llama", repetition)) for repetition in range(3)]
    assert len({turns_of_round[0].writer for turns_of_round in rounds}) == 3
    held = [{case for turn in entry for case in (*turn.saves, *turn.loads)} for entry in rounds]
    assert held[0] == held[1] == held[2] == set(all_cases(selection))


def test_all_load_what_the_publisher_of_a_state_has_written() -> None:
    systems = ("limit", "safetensors-jax", "fastsafetensors")
    selection = Selection(
        ("llama", "one"),
        systems,
        ("load-cold",),
        systems_of={"one": systems[:2]},
        publishers=dict.fromkeys(("llama", "one"), "published"),
    )
    found = {turn.writer: {case.system for case in turn.loads} for turn in turns(selection, "llama", 0)}
    assert found == {"limit": {"limit"}, "published": {"safetensors-jax", "fastsafetensors"}}
    found = {turn.writer: {case.system for case in turn.loads} for turn in turns(selection, "one", 0)}
    assert found == {"limit": {"limit"}, "published": {"safetensors-jax"}}


def test_the_readers_of_one_checkpoint_take_turns_at_being_first() -> None:
    systems = ("safetensors-torch", "fastsafetensors", "runai")
    selection = Selection(("llama",), systems, ("load-cold",))
    first = [next(turns(selection, "llama", repetition)).loads[0].system for repetition in range(3)]
    assert first == list(systems)


def test_what_cannot_write_loads_in_the_turn_of_its_writer() -> None:
    selection = Selection(("llama",), ("fastsafetensors",), ("load-cold",))
    (turn,) = turns(selection, "llama", 0)
    assert turn.writer == "safetensors-torch"
    assert not turn.saves
    assert {case.system for case in turn.loads} == {"fastsafetensors"}


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_takes_part_in_every_operation_that_it_has(name: str) -> None:
    every = (*OPERATIONS, *STREAM_OPERATIONS)
    operations = {case.operation for case in all_cases(Selection(("llama",), (name,), every))}
    assert ({"load-cold", "load-warm"} <= operations) == bool(SYSTEMS[name].load_ways)
    assert ({"stream-cold", "stream-warm"} <= operations) == bool(SYSTEMS[name].stream_ways)
    assert ("save-async" in operations) == SYSTEMS[name].saves_async
