"""What the reports of benchmarks that are made of several experiments have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from rich.console import Console
from rich.text import Text

from benchmarks.rounds import Results
from benchmarks.targets import Line


class Evaluated(Protocol):
    """A module of one experiment."""

    def evaluate(self, results: Results) -> Iterator[Line]:
        """The targets."""
        ...


def targets_of(experiments: Mapping[str, Evaluated], results: Results) -> list[Line]:
    """The targets of all experiments that were run."""
    present = {run["experiment"] for run in results.document["runs"]}
    return [
        line for name, module in experiments.items() if name in present for line in module.evaluate(results)
    ]


def show_failures(results: Results, console: Console) -> None:
    """Prints what failed or is missing, equal ones once."""
    shown: dict[tuple[str, str, str], int] = {}
    for run in results.document["runs"]:
        if run["status"] != "ok":
            key = (run["status"], f"{run['experiment']}: {run['system']}", run["reason"])
            shown[key] = shown.get(key, 0) + 1
    for (status, what, reason), count in shown.items():
        style = "yellow" if status == "missing" else "red"
        console.print(Text(f"{status}: {what}, {count} runs: {reason}", style=style))
