"""Published models to GPU memory: `python -m benchmarks.gpu`.

The same file is loaded from storage that has to be read, from the page cache, and from tmpfs, by Waystation
and by other libraries, into torch and JAX. In every round the limits are measured as well: the bus, by plain
copies of pinned memory, and each place, by plain reads into memory that is used again and again. Every
measurement is a process of its own; rounds are interleaved. What is not installed is listed with its reason.
Without a CUDA device nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import machine, states
from benchmarks.command import results_path, wide_console
from benchmarks.gpu_worker import BUS, READ_WAYS, STORAGE, SYSTEMS, leaves_of, write_model
from benchmarks.processes import ROOT
from waystation import _native

TIMES_SAFETENSORS = 4.8
SHARE_OF_LIMIT = 0.9
TMPFS = Path("/dev/shm")
_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Figures:
    """Seconds of all rounds.

    Attributes:
        nbytes: Of the file.
        seconds: By place and system.
        missing: Systems that were not measured, and why.
    """

    nbytes: int
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, place: str, system: str, outcome: dict[str, Any]) -> None:
        """Counts one measurement."""
        if "seconds" in outcome:
            self.seconds.setdefault(place, {}).setdefault(system, []).append(outcome["seconds"])
        else:
            self.missing[system] = outcome["missing"]

    def speed(self, place: str, system: str) -> float | None:
        """Median bytes a second."""
        own = self.seconds.get(place, {}).get(system)
        return None if not own else self.nbytes / statistics.median(own)

    def limit(self, place: str) -> float | None:
        """The lower of what the bus and the place can do."""
        both = [speed for name in (BUS, STORAGE) if (speed := self.speed(place, name)) is not None]
        return min(both) if len(both) == 2 else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target, and what was reached."""

    name: str
    reached: float
    wanted: float

    @property
    def is_met(self) -> bool:
        """Whether it was reached."""
        return self.reached >= self.wanted


def verdicts(figures: Figures) -> list[Verdict]:
    """The targets that can be judged by what was measured."""
    found = []
    for place in figures.seconds:
        for framework in ("torch", "jax"):
            ours = figures.speed(place, f"waystation-{framework}")
            if ours is None:
                continue
            limit, theirs = figures.limit(place), figures.speed(place, f"safetensors-{framework}")
            if limit is not None:
                name = f"{framework} {place}: share of the limit"
                found.append(Verdict(name, ours / limit, SHARE_OF_LIMIT))
            if theirs is not None:
                name = f"{framework} {place}: times safetensors"
                found.append(Verdict(name, ours / theirs, TIMES_SAFETENSORS))
    return found


def measured(arguments: argparse.Namespace, figures: Figures, files: dict[str, Path]) -> Iterator[str]:
    """Runs all rounds; yields a line on each measurement."""
    for round_number in range(arguments.rounds):
        for place in arguments.places:
            is_first = round_number == 0 and place == arguments.places[0]
            systems = [BUS, STORAGE, *arguments.systems]
            for turn in range(len(systems)):  # every round begins with another
                system = systems[(turn + round_number) % len(systems)]
                if system in figures.missing:
                    continue
                outcome = _measure(arguments, system, files[place], place, is_first=is_first)
                figures.add(place, system, outcome)
                yield f"{place} {system}: {outcome.get('seconds', outcome.get('missing'))}"


def _measure(
    arguments: argparse.Namespace, system: str, path: Path, place: str, *, is_first: bool
) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu_worker", system, str(path), place]
    command += ["--state", arguments.state, "--copies", str(arguments.copies)]
    command += ["--quick"] * arguments.quick + ["--check"] * is_first
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"missing": f"took longer than {_TIMEOUT_S:.0f} s"}
    if done.returncode:
        return {"missing": f"failed: {done.stderr.strip()[-300:]}"}
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--state", default="llama", choices=list(states.STATES))
    parser.add_argument("--copies", type=int, default=2, help="how many times as large the model is")
    parser.add_argument("--quick", action="store_true", help="a small model: does everything work?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--places", nargs="+", default=list(READ_WAYS), choices=list(READ_WAYS))
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--directory", type=Path, help="storage to read from (default: the temporary one)")
    parser.add_argument("--results", type=Path, help="where the results are kept")
    arguments = parser.parse_args()
    devices = _native.devices()
    if not devices:
        print("no CUDA device here: nothing measured", file=sys.stderr)
        return 0
    leaves = leaves_of(arguments.state, arguments.copies, quick=arguments.quick)
    console = wide_console()
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory) as storage,
        tempfile.TemporaryDirectory(dir=TMPFS if TMPFS.is_dir() else None) as memory,
    ):
        files = {
            place: Path(memory if place == "tmpfs" else storage, "model.safetensors")
            for place in arguments.places
        }
        for path in set(files.values()):
            write_model(path, leaves)
        figures = Figures(next(iter(files.values())).stat().st_size)
        for line in measured(arguments, figures, files):
            console.print(line, highlight=False)
        described = machine.describe(Path(storage))
    path = arguments.results or results_path("gpu", quick=arguments.quick)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": described, "devices": devices, "nbytes": figures.nbytes}
    path.write_text(
        json.dumps({**document, "seconds": figures.seconds, "missing": figures.missing}, indent=2)
    )
    report(figures, devices[0]["name"])
    console.print(f"results: {path}")
    return 0 if all(verdict.is_met for verdict in verdicts(figures)) else 1


def report(figures: Figures, device: str) -> None:
    """Prints the figures, what was missing, and the verdict on each target."""
    console = wide_console()
    for place, systems in figures.seconds.items():
        title = f"{figures.nbytes / 1e9:.2f} GB to {device}, {place}"
        table = Table("system", "GB/s", "worst GB/s", "x limit", title=title, title_justify="left")
        limit = figures.limit(place)
        for system, seconds in systems.items():
            speed = figures.nbytes / statistics.median(seconds)
            share = "" if limit is None else f"{speed / limit:.2f}"
            table.add_row(system, f"{speed / 1e9:.2f}", f"{figures.nbytes / max(seconds) / 1e9:.2f}", share)
        console.print(table)
    for system, reason in figures.missing.items():
        console.print(f"{system} was not measured: {reason}", highlight=False, markup=False)
    for verdict in verdicts(figures):
        mark = "met" if verdict.is_met else "MISSED"
        console.print(
            f"{mark}: {verdict.name}: {verdict.reached:.2f} (target {verdict.wanted})", highlight=False
        )


if __name__ == "__main__":
    sys.exit(main())
