"""The model of the runtime at scale: what must hold of it whatever steps cost, and its fit of what it made
itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.runtime_scale.cluster import FAN_OUT, Island
from benchmarks.runtime_scale.constants import Constants
from benchmarks.runtime_scale.events import Action, Clock, Machine, Process
from benchmarks.runtime_scale.fit import Measurement, fit, predict
from benchmarks.runtime_scale.hiding import AS_GOOD, share, smallest_computation_s
from benchmarks.runtime_scale.lowering import lowered
from tests.support.long import only_long

CONSTANTS = Constants(submit_s=1e-4, send_s=5e-5, begin_s=2e-4, hop_s=3e-4, enqueue_s=2e-5)
ROOT = Path(__file__).resolve().parents[2]


def test_cores_are_shared_and_a_process_does_one_thing_at_a_time() -> None:
    clock = Clock()
    ended: list[tuple[float, str]] = []

    def end(name: str) -> Action:
        return lambda: ended.append((clock.now_s, name))

    machine = Machine(clock, cores=2)
    first, second = Process(machine), Process(machine)
    for process, name in ((first, "a"), (first, "b"), (second, "c")):
        process.do(1.0, end(name))
    Process(machine).do(1.0, end("d"))
    clock.run()
    assert sorted(ended) == [(1.0, "a"), (1.0, "c"), (2.0, "b"), (2.0, "d")]


def test_long_computations_hide_the_controller_and_short_ones_do_not() -> None:
    assert share(CONSTANTS, 64, 0.5) > AS_GOOD
    assert share(CONSTANTS, 64, 1e-4) < 0.2
    found = smallest_computation_s(CONSTANTS, 64)
    assert share(CONSTANTS, 64, found) >= AS_GOOD
    assert share(CONSTANTS, 64, found / 2) < AS_GOOD


@pytest.mark.long
@only_long
def test_without_relays_the_controller_pays_for_every_host() -> None:
    flat = [smallest_computation_s(CONSTANTS, hosts, fan_out=None) for hosts in (32, 256)]
    relayed = [smallest_computation_s(CONSTANTS, hosts) for hosts in (32, 256)]
    assert flat[1] > 5 * flat[0]
    assert flat[1] > 256 * CONSTANTS.send_s * AS_GOOD
    assert relayed[1] < flat[1] / 4


@pytest.mark.parametrize(("hosts", "relays"), [(FAN_OUT, 0), (FAN_OUT + 1, 2), (FAN_OUT**2 + 1, 17 + 2)])
def test_every_host_gets_every_program_once(hosts: int, relays: int) -> None:
    island = Island(CONSTANTS, hosts, 1e-3)
    island.run(programs=5, in_flight=2)
    assert island.message_count == 5 * (hosts + relays)


def test_the_same_seed_is_the_same_run() -> None:
    runs = [Island(CONSTANTS, 8, 1e-3, seed=seed).run(20, 4) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def made(hosts: int) -> Measurement:
    """What real actors would have taken, if steps cost them `CONSTANTS`."""
    took = {}
    for in_flight in (1, 8):
        island = Island(CONSTANTS, hosts, CONSTANTS.enqueue_s, cores=2, fan_out=None, seed=7)
        took[in_flight] = island.run(200, in_flight) / 200
    return Measurement(
        hosts=hosts,
        cores=2,
        in_flight=8,
        seconds=took[8],
        alone_s=took[1],
        controller_cpu_s=CONSTANTS.submit_s + hosts * CONSTANTS.send_s,
        host_cpu_s=CONSTANTS.begin_s,
        enqueue_s=CONSTANTS.enqueue_s,
    )


def test_a_fit_finds_the_costs_and_predicts_a_size_that_it_has_not_seen() -> None:
    found = fit([made(hosts) for hosts in (1, 2, 4, 8)])
    for name in ("submit_s", "send_s", "begin_s", "hop_s", "enqueue_s"):
        assert getattr(found, name) == pytest.approx(getattr(CONSTANTS, name), rel=0.1)
    unseen = made(16)
    assert predict(found, unseen, unseen.in_flight) == pytest.approx(unseen.seconds, rel=0.1)
    assert predict(found, unseen, 1) == pytest.approx(unseen.alone_s, rel=0.1)


def test_programs_and_messages_are_as_many_for_any_number_of_hosts() -> None:
    few, many = lowered(4), lowered(512)
    assert (many["shards"], many["lists"]) == (2048, 512)
    assert abs(many["program_bytes"] - few["program_bytes"]) < 64, "the digits of larger numbers"
    assert many["messages"] == few["messages"] == 1


@pytest.mark.long
@only_long  # half a minute of Ray, which the command of `runtime` uses as well
def test_the_command_works_and_shows_what_it_has_kept(tmp_path: Path) -> None:
    module = [sys.executable, "-m", "benchmarks.runtime_scale"]
    done = subprocess.run(
        [*module, "--quick"], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    kept = Path(next(line for line in done.stdout.splitlines() if line.startswith("results: "))[9:])
    document = json.loads(kept.read_text())
    kept.unlink()
    assert [entry["hosts"] for entry in document["measurements"]] == [1, 2]
    report = tmp_path / "report.json"
    report.write_text(json.dumps(document))
    again = subprocess.run(
        [*module, "--report", str(report)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert again.stdout.strip() in done.stdout
