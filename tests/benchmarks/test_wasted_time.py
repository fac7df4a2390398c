"""The simulation of wasted time, against closed formulas where there are any."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from benchmarks.wasted_time import __main__ as command
from benchmarks.wasted_time import formulas
from benchmarks.wasted_time.parameters import DAY_S, Parameters, Strategy, read_parameters, strategies
from benchmarks.wasted_time.simulation import Outcome, Simulation
from rich.console import Console

from waystation.memory import place, recovery_probability

FAILURES = 20_000
ALL_HARDWARE = Parameters()


def played(
    strategy: Strategy, hosts: int, parameters: Parameters = ALL_HARDWARE, failures: int = FAILURES
) -> Outcome:
    return Simulation(strategy, place(hosts, parameters.copies), parameters, seed=7).run(failures)


def by_name(parameters: Parameters, hosts: int) -> dict[str, Strategy]:
    return {strategy.name: strategy for strategy in strategies(parameters, hosts)}


def error_of_mean(spread: float) -> float:
    """What the mean of so many may be off, four standard errors."""
    return 4 * spread / math.sqrt(FAILURES)


def test_constants_follow_from_the_figures_of_the_paper() -> None:
    remote, gemini, ours = strategies(Parameters(), 16)
    assert remote.store_s == remote.store_interval_s == 480
    assert remote.store_interval_s / (gemini.save_every * Parameters().iteration_s) == 8
    assert 240 < remote.store_s / gemini.peer_s < 250
    assert ours.save_every == 1
    assert ours.commit_s == pytest.approx(1.2e12 / 16 * (1 / 7.7e9 + 1 / 25e9) + 0.1)
    assert Parameters().failures_per_host_day == pytest.approx(0.0148, abs=5e-5)


def test_a_save_that_takes_longer_than_a_step_is_made_less_often() -> None:
    slow = dataclasses.replace(Parameters(), copy_bytes_per_s=0.5e9)
    ours = by_name(slow, 16)["ours"]
    assert ours.commit_s > 150
    assert ours.save_every == 3


@pytest.mark.parametrize("name", ["remote storage", "GEMINI's rule", "ours"])
def test_rare_failures_cost_what_the_formula_says(name: str) -> None:
    rare = dataclasses.replace(Parameters(), failures_per_host_day=1e-4)
    strategy = by_name(rare, 16)[name]
    if strategy.uses_memory:
        interval_s, commit_s, retrieval_s = rare.iteration_s, strategy.commit_s, strategy.peer_s
    else:
        interval_s, commit_s, retrieval_s = strategy.store_interval_s, strategy.store_s, strategy.store_s
    expected = formulas.wasted_s(commit_s, interval_s, retrieval_s)
    found = played(strategy, 16, rare)
    assert found.wasted_per_failure_s == pytest.approx(
        expected, abs=error_of_mean(interval_s / math.sqrt(12))
    )
    assert found.retrieval_per_failure_s == pytest.approx(retrieval_s)


@pytest.mark.parametrize("interval_in_failures", [0.05, 0.3, 1.0])
def test_frequent_failures_cost_what_the_formula_says(interval_in_failures: float) -> None:
    """Remote storage, and so long from a failure to the next work that the store is free by then."""
    often = dataclasses.replace(
        Parameters(), failures_per_host_day=DAY_S / 480 * interval_in_failures / 16, restart_s=480.0
    )
    strategy = dataclasses.replace(by_name(often, 16)["remote storage"], store_s=200.0)
    rate = often.failures_per_host_day * 16 / DAY_S
    simulation = Simulation(strategy, place(16, 2), often, seed=7)
    found = simulation.run(FAILURES)
    recoveries = found.from_store
    expected = formulas.expected_loss_s(rate, often.iteration_s, strategy.store_interval_s, 200.0)
    # Work goes on only where a recovery has ended; the first time of training has had none before it.
    assert found.lost_s / (recoveries + 1) == pytest.approx(expected, rel=0.05)


def test_two_hosts_that_fail_one_by_one() -> None:
    """The memory of a host that failed is empty until a new version counts."""
    often = dataclasses.replace(
        Parameters(), failures_per_host_day=DAY_S / 200, restart_s=0.0, software_restart_s=0.0
    )
    strategy = Strategy("two", True, 1, 30.0, 0.0, math.inf, 0.0, 0.0, 0.0)
    found = played(strategy, 2, often)
    rate = often.failures_per_host_day * 2 / DAY_S
    expected = formulas.store_share_of_two_hosts(rate, often.iteration_s, strategy.commit_s)
    assert 1 - found.memory_share == pytest.approx(expected, abs=0.02)
    assert found.from_own_memory == 0


@pytest.mark.parametrize("lost", [2, 3])
def test_hosts_that_fail_together_are_recovered_from_memory_as_often_as_counted(lost: int) -> None:
    together = dataclasses.replace(Parameters(), failures_per_host_day=1e-4, hosts_per_failure=lost)
    expected = float(recovery_probability(place(16, 2), lost))
    found = played(by_name(together, 16)["ours"], 16, together)
    assert found.memory_share == pytest.approx(
        expected, abs=error_of_mean(math.sqrt(expected * (1 - expected)))
    )


def test_software_failures_leave_all_memory() -> None:
    software = dataclasses.replace(Parameters(), memory_lost_share=0.0)
    found = played(by_name(software, 16)["ours"], 16, software)
    assert (found.from_peers, found.from_store) == (0, 0)
    assert found.restart_s == pytest.approx(FAILURES * 420.0, rel=0.01)


@pytest.mark.parametrize("hosts", [16, 1000])
@pytest.mark.parametrize("name", ["remote storage", "GEMINI's rule", "ours"])
def test_all_time_is_accounted_for(hosts: int, name: str) -> None:
    stalled = dataclasses.replace(Parameters(), stall_s=1.5, failures_per_host_day=0.2)
    found = played(by_name(stalled, hosts)[name], hosts, stalled, failures=2000)
    spent = found.useful_s + found.lost_s + found.stalled_s + found.retrieval_s + found.restart_s
    assert spent == pytest.approx(found.wall_s)
    assert (found.stalled_s > 0) == (name == "ours")
    assert 0 <= found.effective_share < 1


def test_the_same_seed_gives_the_same_figures() -> None:
    documents = [command.simulate(Parameters(), [16, 64], [1.0], 500, seed) for seed in (3, 3, 4)]
    assert documents[0] == documents[1]
    assert documents[0]["rows"] != documents[2]["rows"]


def test_targets_and_report() -> None:
    document = json.loads(json.dumps(command.simulate(Parameters(), [16, 1000], [1.0, 4.0], 2000, 0)))
    assert [is_reached for _, is_reached in command.targets(document)] == [True] * 4
    stream = io.StringIO()
    command.show(document, Console(file=stream, width=160))
    text = stream.getvalue()
    for name, _, source in Parameters().described():
        assert name in text
        assert source.partition(":")[0] in ("paper", "follows", "assumed")
    assert text.count("reached: ") == 4
    assert command.targets({**document, "rows": document["rows"][-3:]}) == []


def test_constants_come_from_a_file_with_their_source(tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    path.write_text('{"commit_s": {"value": 0.02, "source": "measured: here"}}')
    found = read_parameters(path)
    assert found.commit_s == 0.02
    assert ("commit_s", 0.02, "measured: here") in found.described()
    assert dataclasses.replace(found, commit_s=0.1, sources={}) == Parameters()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"comit_s": {"value": 1, "source": "x"}}, "there is no constant 'comit_s'"),
        ({"commit_s": 1}, "'commit_s' needs"),
        ({"commit_s": {"value": 1, "source": ""}}, "'commit_s' needs"),
    ],
)
def test_constants_without_a_source_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=message):
        read_parameters(path)
