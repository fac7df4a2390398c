"""`python -m benchmarks.storage`: object stores; tables, targets, and the JSON.

A model, and many small arrays, saved to a local server of S3's protocol and loaded from it: by Waystation,
by the raw client, and by other libraries, in turns, each in a fresh process; over links whose round trips
take 0, 20 and 100 ms. The server (VersityGW) shares the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import command, rounds
from benchmarks.analysis import Ratio
from benchmarks.processes import Outcome
from benchmarks.report import show_machine, show_targets
from benchmarks.rounds import Case, Document, Results, mean_and_deviation
from benchmarks.storage import server
from benchmarks.storage.process import Request
from benchmarks.storage.systems import SYSTEMS
from benchmarks.systems import UnavailableError
from benchmarks.targets import Line

STATES = ("llama", "small")
LATENCIES_MS = (0, 20, 100)
OURS, LIMIT = "waystation", "raw"
# Each small array is an object of its own to the raw client, so that is no limit there.
NEEDED_OF_LIMIT, NEEDED_OF_DCP, NEEDED_OF_RUNAI = 0.9, 2.0, 1.0


def main() -> None:
    arguments = _parse()
    console = command.wide_console()
    show(command.document_of(arguments, lambda: measure(arguments, console)), console)


def _parse() -> argparse.Namespace:
    parser = command.experiments_parser(
        "benchmarks.storage", __doc__, STATES, timeout_s=900.0, timed="one run"
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME")
    parser.add_argument(
        "--latencies-ms", nargs="+", type=int, default=LATENCIES_MS, metavar="MS", help="of a round trip"
    )
    return command.parsed(parser, rounds=(3, 1))


def measure(arguments: argparse.Namespace, console: Console) -> Document:
    """Runs everything, round after round; returns the document, which is also kept."""
    with command.measuring(
        arguments,
        "storage",
        console,
        Session,
        lambda session: arguments.rounds * session.count(arguments.experiments),
        lambda document: evaluate(Results(document)),
        systems=arguments.systems,
        latencies_ms=arguments.latencies_ms,
    ) as session:
        for repetition in range(arguments.rounds):
            for state in arguments.experiments:
                for latency_ms in arguments.latencies_ms:
                    session.measure(state, latency_ms, repetition)
    return session.document


@dataclass(slots=True, kw_only=True)
class Session(rounds.Session):
    """See the class it extends.

    Attributes:
        systems: Those that are measured.
        latencies_ms: Of round trips to the server.
    """

    systems: Sequence[str] = field(default_factory=list)
    latencies_ms: Sequence[int] = LATENCIES_MS

    def count(self, chosen: Sequence[str]) -> int:
        """How many runs a round has."""
        kinds = [SYSTEMS[name] for name in self.systems]
        operations = sum(bool(kind.save_ways) + bool(kind.load_ways) for kind in kinds)
        return len(chosen) * len(self.latencies_ms) * operations

    def measure(self, state: str, latency_ms: int, repetition: int) -> None:
        """One round of one state over one link: each writer saves, and all that read that load it."""
        writers = [name for name in SYSTEMS if any(SYSTEMS[each].writer == name for each in self.systems)]
        shift = repetition % len(writers)
        for writer in writers[shift:] + writers[:shift]:
            readers = [
                name for name in self.systems if SYSTEMS[name].writer == writer and SYSTEMS[name].load_ways
            ]
            turn = repetition % max(1, len(readers))
            with self._server(latency_ms) as endpoint:
                saved = self._run(state, latency_ms, writer, "save", endpoint, repetition)
                for reader in readers[turn:] + readers[:turn]:
                    if saved:
                        self._run(state, latency_ms, reader, "load", endpoint, repetition)

    @contextlib.contextmanager
    def _server(self, latency_ms: int) -> Iterator[str]:
        """A server with an empty bucket; where it is reached, or nothing where there is none."""
        directory = self.directory / "server"
        directory.mkdir(parents=True)
        try:
            with contextlib.ExitStack() as stack:
                try:
                    port = stack.enter_context(server.running(directory))
                    port = stack.enter_context(server.delayed(port, latency_ms / 1000))
                except UnavailableError as error:
                    self._missing["server"] = {"status": "missing", "reason": str(error)}
                    port = 0
                yield f"http://127.0.0.1:{port}" if port else ""
        finally:
            shutil.rmtree(directory)

    def _run(
        self, state: str, latency_ms: int, system: str, operation: str, endpoint: str, repetition: int
    ) -> bool:
        request = Request(
            system=system,
            operation=operation,
            state=state,
            path="checkpoint",
            endpoint=endpoint,
            output=self.output,
            quick=self.quick,
            verify_all=repetition == 0,
        )
        outcome: Outcome | None = self._missing.get("server")
        if outcome is None:
            outcome = self.spawn("benchmarks.storage.process", request)
        return self.record(_case(state, latency_ms, system, operation), repetition, outcome)


def _case(state: str, latency_ms: int, system: str, operation: str) -> Case:
    return Case(state, f"{latency_ms} ms", system, operation)


# ---- what it shows -----------------------------------------------------------------------------


def show(document: dict[str, Any], console: Console) -> None:
    """Prints the tables and the targets."""
    results = Results(document)
    show_machine(document, console)
    for state in dict.fromkeys(run["experiment"] for run in document["runs"]):
        for operation in ("save", "load"):
            console.print(_table(results, state, operation))
    for run in document["runs"]:
        if run["status"] != "ok":
            console.print(
                f"[yellow]{run['subject']}, {run['system']}, {run['operation']}: {run['reason']}[/]"
            )
    show_targets(list(evaluate(results)), console)


def _table(results: Results, state: str, operation: str) -> Table:
    table = Table(title=f"{state}: {operation}, a local server of S3's protocol", title_justify="left")
    for heading in ("round trip", "system", "s", "worst, s", "GB/s", "CPU, s per GB", "of the raw client"):
        table.add_column(heading)
    for case in results.cases(state):
        series, size = results.series(case), results.series(case, "state_bytes")
        if case.operation != operation or series is None or size is None:
            continue
        cpu = results.series(case, "cpu_s")
        limit = results.series(Case(state, case.subject, LIMIT, operation))
        gigabytes = size.median / 1e9
        table.add_row(
            case.subject,
            case.system,
            mean_and_deviation(list(series.values.values())),
            f"{max(series.values.values()):.2f}",
            f"{gigabytes / series.median:.2f}",
            f"{cpu.median / gigabytes:.2f}" if cpu else "",
            f"{Ratio.of(series, limit).median:.2f}x" if limit else "",
        )
    return table


def evaluate(results: Results) -> Iterator[Line]:
    """Against the limit, and against each peer, over each link."""
    subjects = list(dict.fromkeys(run["subject"] for run in results.document["runs"]))
    for subject in subjects:
        for operation in ("save", "load"):
            yield _against(results, "llama", subject, operation, OURS, LIMIT, NEEDED_OF_LIMIT)
            for state in STATES:
                yield _against(results, state, subject, operation, OURS, "torch-dcp", NEEDED_OF_DCP)
        yield _against(results, "llama", subject, "load", "waystation-safetensors", "runai", NEEDED_OF_RUNAI)


def _against(
    results: Results, state: str, subject: str, operation: str, ours: str, theirs: str, needed: float
) -> Line:
    text = f"{state}, {subject}: {operation} by {ours} as fast as by {theirs}"
    own = results.series(Case(state, subject, ours, operation))
    other = results.series(Case(state, subject, theirs, operation))
    if own is None or other is None:
        return Line(text, f"≥ {needed:g}x", "not measured", "", None)
    ratio = Ratio.of(own, other)
    return Line(text, f"≥ {needed:g}x", f"{ratio.median:.2f}x", f"{ratio.worst:.2f}x", ratio.median >= needed)


if __name__ == "__main__":
    main()
