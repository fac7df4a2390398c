"""`python -m benchmarks.wasted_time`: what failures cost with remote storage, by GEMINI's rule, and by ours.

A simulation, so its figures are worth what its constants are: they are printed first, each with its source.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import add_report_argument, json_path, results_path, wide_console
from benchmarks.wasted_time.formulas import wasted_s
from benchmarks.wasted_time.measured import constants_of
from benchmarks.wasted_time.parameters import Parameters, read_parameters, strategies
from benchmarks.wasted_time.simulation import Outcome, Simulation
from waystation.memory import place

SCHEMA = 1
HOSTS = (16, 64, 256, 1000, 4000, 10_000)
RATES = (0.5, 1.0, 4.0)
TARGET_HOSTS = 16
TARGET_WASTED = 13.0
TARGET_RETRIEVAL = 100.0


def main() -> None:
    arguments = _parse()
    console = wide_console()
    if arguments.report is not None:
        document = arguments.report
    else:
        measured = None if arguments.measured is None else constants_of(arguments.measured)
        parameters = read_parameters(arguments.parameters, measured)
        document = simulate(parameters, arguments.hosts, arguments.rates, arguments.failures, arguments.seed)
        results = results_path("wasted-time")
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(document, indent=1) + "\n")
        console.print(f"results: {results}")
    show(document, console)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wasted_time", description=__doc__)
    parser.add_argument("--hosts", nargs="+", type=int, default=HOSTS, help="numbers of hosts")
    parser.add_argument(
        "--rates", nargs="+", type=float, default=RATES, help="failures, in multiples of the constant"
    )
    parser.add_argument(
        "--parameters", type=json_path, metavar="FILE", help="a JSON file of constants, each with its source"
    )
    parser.add_argument(
        "--measured",
        type=json_path,
        metavar="FILE",
        help="results of python -m benchmarks.memory, instead of what is assumed",
    )
    parser.add_argument("--failures", type=int, default=5000, help="of each run (default: 5000)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same figures")
    add_report_argument(parser, "simulate nothing")
    return parser.parse_args()


def simulate(
    parameters: Parameters, hosts: list[int], rates: list[float], failures: int, seed: int
) -> dict[str, Any]:
    """The document: the constants, and a row for each strategy, number of hosts and rate of failures."""
    rows = []
    for count in hosts:
        placement = place(count, parameters.copies)
        for rate in rates:
            scaled = dataclasses.replace(
                parameters, failures_per_host_day=rate * parameters.failures_per_host_day
            )
            for strategy in strategies(scaled, count):
                outcome = Simulation(strategy, placement, scaled, seed).run(failures)
                rows.append({"hosts": count, "rate": rate, "strategy": strategy.name, **_figures(outcome)})
    constants = [
        {"name": name, "value": value, "source": source} for name, value, source in parameters.described()
    ]
    return {"schema": SCHEMA, "seed": seed, "constants": constants, "rows": rows}


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {
        **dataclasses.asdict(outcome),
        "wasted_per_failure_s": outcome.wasted_per_failure_s,
        "retrieval_per_failure_s": outcome.retrieval_per_failure_s,
        "effective_share": outcome.effective_share,
        "memory_share": outcome.memory_share,
    }


def show(document: dict[str, Any], console: Console) -> None:
    """Prints the constants, the figures and the targets."""
    constants = Table("constant", "value", "source", title="Constants")
    for entry in document["constants"]:
        constants.add_row(entry["name"], f"{entry['value']:.6g}", entry["source"])
    console.print(constants)
    console.print(_figures_table(document))
    for text, is_reached in targets(document):
        console.print(f"{'[green]reached[/]' if is_reached else '[red]not reached[/]'}: {text}")
    console.print("Simulated: a ratio is as good as the constants above; those assumed are not measured yet.")


def _figures_table(document: dict[str, Any]) -> Table:
    table = Table(title="Wasted time: work lost and state retrieved, for each failure")
    headings = "hosts|failures x|strategy|wasted|x less|retrieval|x faster|from memory|useful time"
    for heading in headings.split("|"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    remote: dict[str, Any] = {}
    for row in document["rows"]:
        if row["strategy"] == "remote storage":
            remote = row
        table.add_row(
            f"{row['hosts']:,}",
            f"{row['rate']:g}",
            row["strategy"],
            f"{row['wasted_per_failure_s']:.1f} s",
            f"{_ratio(remote, row, 'wasted_per_failure_s'):.1f}",
            f"{row['retrieval_per_failure_s']:.2f} s",
            f"{_ratio(remote, row, 'retrieval_per_failure_s'):.0f}",
            f"{row['memory_share']:.2%}",
            f"{row['effective_share']:.2%}",
        )
    return table


def _ratio(remote: dict[str, Any], row: dict[str, Any], name: str) -> float:
    return float(remote[name]) / float(row[name])


def targets(document: dict[str, Any]) -> list[tuple[str, bool]]:
    """What is wanted at 16 hosts and the plain rate of failures, with the figures."""
    rows = {
        row["strategy"]: row for row in document["rows"] if (row["hosts"], row["rate"]) == (TARGET_HOSTS, 1.0)
    }
    if not rows:
        return []
    values = {entry["name"]: entry["value"] for entry in document["constants"]}
    remote, found = rows["remote storage"], []
    # The same by the formula, as a check of both.
    store_s = values["state_bytes"] / values["store_bytes_per_s"]
    formula_s = wasted_s(store_s, store_s, store_s)
    for name in ("GEMINI's rule", "ours"):
        wasted = _ratio(remote, rows[name], "wasted_per_failure_s")
        retrieval = _ratio(remote, rows[name], "retrieval_per_failure_s")
        beginning = f"{name}, {TARGET_HOSTS} hosts"
        less = f"wasted time over {TARGET_WASTED:g} x lower than with remote storage"
        faster = f"retrieval over {TARGET_RETRIEVAL:g} x faster"
        found += [
            (
                f"{beginning}: {less} ({formula_s:.0f} s by the formula): {wasted:.1f} x",
                wasted > TARGET_WASTED,
            ),
            (f"{beginning}: {faster}: {retrieval:.0f} x", retrieval > TARGET_RETRIEVAL),
        ]
    return found


if __name__ == "__main__":
    main()
