"""`python -m benchmarks.runtime_scale`: one controller at the scale of thousands of hosts; tables, and the
JSON.

Real actors of this machine are measured at a few sizes, what steps cost is read off them, and the model,
which runs the real scheduler, is checked at a size that it has not seen. Then: how long a computation
must be to hide the controller, from 16 hosts to 2,048, beside what the Pathways paper reports; and what
the real lowering and the real scheduler take for so many hosts, measured, not modelled.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.command import add_report_argument, positive, results_path, wide_console
from benchmarks.processes import ROOT
from benchmarks.runtime_scale.constants import Constants
from benchmarks.runtime_scale.fit import Measurement, fit, predict
from benchmarks.runtime_scale.hiding import AS_GOOD, PAPER_S, share, smallest_computation_s
from benchmarks.runtime_scale.lowering import lowered

SCHEMA = 1
FITTED = (1, 2, 4, 8)
CHECKED = 16
HOSTS = (16, 32, 64, 128, 256, 512, 1024, 2048)
Document = dict[str, Any]


def main() -> None:
    arguments = _parse()
    console = wide_console()
    if arguments.report is not None:
        document = arguments.report
    else:
        document = _measure(arguments, console)
        results = results_path("runtime-scale", quick=arguments.quick)
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(document, indent=1) + "\n")
        console.print(f"results: {results}")
    show(document, console)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runtime_scale", description=__doc__)
    parser.add_argument("--fitted", nargs="+", type=positive, default=FITTED, help="sizes that are fitted")
    parser.add_argument("--checked", type=positive, default=CHECKED, help="the size that is predicted")
    parser.add_argument("--hosts", nargs="+", type=positive, default=HOSTS, help="sizes that are modelled")
    parser.add_argument("--programs", type=positive, default=2000, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="two real hosts at most: does everything work?")
    add_report_argument(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.fitted, arguments.checked, arguments.hosts, arguments.programs = (1, 2), 2, (16, 64), 100
    if len(set(arguments.fitted)) < 2:
        parser.error("--fitted needs two sizes or more: a line is put through them")
    return arguments


def _measure(arguments: argparse.Namespace, console: Console) -> Document:
    # Ray and JAX are needed for this alone.
    from benchmarks.runtime_scale.measured import measure

    measurements = []
    for found in measure(dict.fromkeys([*arguments.fitted, arguments.checked]), arguments.programs):
        measurements.append(found)
        console.print(f"{found.hosts} hosts: {found.seconds * 1e3:.3f} ms for each program")
    constants = fit([found for found in measurements if found.hosts in arguments.fitted])
    return {
        "schema": SCHEMA,
        "machine": machine.describe(ROOT),
        "quick": arguments.quick,
        "fitted": list(arguments.fitted),
        "measurements": [asdict(found) for found in measurements],
        "constants": asdict(constants),
        "modelled": [_modelled(constants, hosts) for hosts in arguments.hosts],
        "lowered": [lowered(hosts) for hosts in arguments.hosts],
    }


def _modelled(constants: Constants, hosts: int) -> Document:
    paper_s = PAPER_S.get(hosts)
    return {
        "hosts": hosts,
        "relayed_s": smallest_computation_s(constants, hosts),
        "flat_s": smallest_computation_s(constants, hosts, fan_out=None),
        "paper_s": paper_s,
        "share_at_paper": None if paper_s is None else share(constants, hosts, paper_s),
    }


def show(document: Document, console: Console) -> None:
    """Prints the tables."""
    constants = Constants(**document["constants"])
    table = Table("hosts", "", "measured", "modelled", "modelled / measured", title="Programs, ms for each")
    for entry in document["measurements"]:
        found = Measurement(**entry)
        role = "fitted" if found.hosts in document["fitted"] else "not seen by the fit"
        for text, in_flight, measured_s in (
            (f"{found.in_flight} in flight", found.in_flight, found.seconds),
            ("one at a time", 1, found.alone_s),
        ):
            modelled_s = predict(constants, found, in_flight)
            ratio = modelled_s / measured_s
            table.add_row(f"{found.hosts} ({role})", text, _ms(measured_s), _ms(modelled_s), f"{ratio:.2f}")
    console.print(table)
    table = Table("step", "microseconds", title="Costs read off")
    for name, seconds in document["constants"].items():
        table.add_row(name.removesuffix("_s"), f"{seconds * 1e6:.0f}")
    console.print(table)
    title = f"Modelled: the shortest computation with {AS_GOOD:.0%} of what no controller gives, ms"
    table = Table("hosts", "by relays", "without relays", "the paper", "our throughput there", title=title)
    for row in document["modelled"]:
        at_paper = "" if row["share_at_paper"] is None else f"{row['share_at_paper']:.0%}"
        paper = "" if row["paper_s"] is None else _ms(row["paper_s"])
        table.add_row(f"{row['hosts']:,}", _ms(row["relayed_s"]), _ms(row["flat_s"]), paper, at_paper)
    console.print(table)
    table = Table(
        "hosts", "shards", "bytes of the program", "lowered in", "scheduled in", "messages",
        title="Measured: a program of three computations and a reshard",
    )  # fmt: skip
    for row in document["lowered"]:
        table.add_row(
            f"{row['hosts']:,}", f"{row['shards']:,}", f"{row['program_bytes']:,}",
            f"{_ms(row['lower_s'])} ms", f"{row['schedule_s'] * 1e6:.0f} µs", f"{row['messages']:,}",
        )  # fmt: skip
    console.print(table)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


if __name__ == "__main__":
    main()
