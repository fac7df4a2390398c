"""`python -m benchmarks.scale`: what the tables cost in jobs of up to 100,000 processes.

The jobs are imagined (`scale_job.py`) and have no data, but everything that is measured is the code that
saves and loads (`scale_stages.py`): the primary reads what each process says, merges it and writes the
tables; one process opens them and plans its load. Every stage runs in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine, scale_chart
from benchmarks.command import add_report_argument, results_path, wide_console
from benchmarks.processes import ROOT
from benchmarks.report import format_bytes
from benchmarks.scale_stages import PLANS, TABLES
from benchmarks.session import default_directory

Cell = Callable[[dict[str, Any]], str]

SCHEMA = 1
SIZES = (16, 256, 1024, 4096, 16384, 65536, 100000)
TARGET_PLAN_S = 1.0
TARGET_PLAN_BYTES = 64 << 20
TARGET_GROWTH = 1.5  # of the time to merge one chunk, from 4,096 processes to 100,000


def main() -> None:
    arguments = _parse()
    console = wide_console()
    if arguments.report is not None:
        document = arguments.report
    else:
        document = _measure(arguments, console)
    show(document, console)
    for path in arguments.chart:
        scale_chart.draw(document, path)
        console.print(f"chart: {path}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="numbers of processes")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each stage (default: 3)")
    parser.add_argument("--directory", type=Path, help="where tables go (default: beside results)")
    add_report_argument(parser)
    parser.add_argument("--chart", type=Path, nargs="+", default=[], help="draw the figures (.svg or .png)")
    arguments = parser.parse_args()
    if any(size < 16 or size % 16 for size in arguments.sizes):
        parser.error("numbers of processes must be multiples of 16, from 16 on")
    return arguments


def _measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    parent: Path = arguments.directory or default_directory()
    parent.mkdir(parents=True, exist_ok=True)
    directory = parent / f"scale-{os.getpid()}"
    document: dict[str, Any] = {"schema": SCHEMA, "machine": machine.describe(parent), "jobs": []}
    results = results_path("scale")
    results.parent.mkdir(parents=True, exist_ok=True)
    try:
        for size in arguments.sizes:
            console.print(f"{size:,} processes …")
            document["jobs"].append(_measure_job(size, arguments.repetitions, directory))
            results.write_text(json.dumps(document, indent=1) + "\n")
            shutil.rmtree(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if arguments.directory is None:
            parent.rmdir()
    console.print(f"results: {results}")
    return document


def _measure_job(processes: int, repetitions: int, directory: Path) -> dict[str, Any]:
    job = {"processes": processes, **_run("write-parts", processes, directory)}
    for stage in ("merge", *PLANS):
        job[stage] = [_run(stage, processes, directory) for _ in range(repetitions)]
    return job


def _run(stage: str, processes: int, directory: Path) -> dict[str, Any]:
    """A stage in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale_stages", stage, str(processes), str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the stage {stage} of {processes} processes failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---- what is shown -----------------------------------------------------------------------------


def seconds(runs: Sequence[dict[str, Any]], *steps: str) -> float:
    """The median of the time that these steps take together, or all of them."""
    totals = [float(sum(run["seconds"][step] for step in steps or run["seconds"])) for run in runs]
    return statistics.median(totals)


def show(document: dict[str, Any], console: Console) -> None:
    """Prints the tables and the targets."""
    for title, columns in (("Merging on the primary", _MERGE), ("Planning one load", _PLAN)):
        table = Table(title=title)
        for heading, _ in columns:
            table.add_column(heading, justify="right")
        for job in document["jobs"]:
            table.add_row(*(cell(job) for _, cell in columns))
        console.print(table)
    for text, is_reached in targets(document):
        console.print(f"{'[green]reached[/]' if is_reached else '[red]not reached[/]'}: {text}")


def targets(document: dict[str, Any]) -> list[tuple[str, bool]]:
    """What was wanted, with the figures, and whether it is reached."""
    jobs = {job["processes"]: job for job in document["jobs"]}
    largest = document["jobs"][-1]
    stages = [largest[stage] for stage in PLANS]
    slowest = max(seconds(runs) for runs in stages)
    most = max(run["table_bytes_read"] for runs in stages for run in runs)
    name = f"planning one load of {largest['processes']:,} processes"
    found = [
        (f"{name} in under {TARGET_PLAN_S:.0f} s: {slowest:.2f} s", slowest < TARGET_PLAN_S),
        (
            f"{name} with under {TARGET_PLAN_BYTES >> 20} MiB of tables: {most / (1 << 20):.2f} MiB",
            most < TARGET_PLAN_BYTES,
        ),
    ]
    if 4096 in jobs and largest["processes"] > 4096:
        growth = _merge_per_chunk(largest) / _merge_per_chunk(jobs[4096])
        text = f"{growth:.2f} x the time per chunk of 4,096 (at most {TARGET_GROWTH})"
        found.append((f"merging {largest['processes']:,} processes takes {text}", growth <= TARGET_GROWTH))
    return found


def _merge_per_chunk(job: dict[str, Any]) -> float:
    return seconds(job["merge"], "decode", "merge") / float(job["merge"][0]["chunks"])


def _time(runs: Sequence[dict[str, Any]], *steps: str) -> str:
    found = seconds(runs, *steps)
    return f"{found:.2f} s" if found >= 1 else f"{found * 1000:.3g} ms"


def _most(runs: Sequence[dict[str, Any]], name: str) -> str:
    return format_bytes(max(run[name] for run in runs))


def _table_size(name: str) -> Cell:
    return lambda job: format_bytes(job["merge"][0]["table_bytes"][name])


_MERGE: list[tuple[str, Cell]] = [
    ("processes", lambda job: f"{job['processes']:,}"),
    ("state", lambda job: format_bytes(job["state_bytes"])),
    ("chunks", lambda job: f"{job['merge'][0]['chunks']:,}"),
    ("parts", lambda job: format_bytes(job["part_bytes"])),
    ("read parts", lambda job: _time(job["merge"], "read")),
    ("decode", lambda job: _time(job["merge"], "decode")),
    ("merge", lambda job: _time(job["merge"], "merge")),
    ("encode", lambda job: _time(job["merge"], "encode")),
    ("write, synced", lambda job: _time(job["merge"], "write")),
    ("memory above", lambda job: _most(job["merge"], "peak_bytes")),
    ("in runs", lambda job: f"{job['merge'][0]['arrays_in_runs']} arrays"),
    *((name, _table_size(name)) for name in TABLES),
]
_PLAN: list[tuple[str, Cell]] = [
    ("processes", lambda job: f"{job['processes']:,}"),
    ("tables are read", lambda job: "in pages" if job["plan"][0]["is_paged"] else "whole"),
    ("as many load, cold", lambda job: _time(job["plan-cold"])),
    ("warm", lambda job: _time(job["plan"])),
    ("tables read", lambda job: _most(job["plan-cold"], "table_bytes_read")),
    ("files", lambda job: f"{job['plan'][0]['files']:,}"),
    ("half as many, cold", lambda job: _time(job["plan-half-cold"])),
    ("warm", lambda job: _time(job["plan-half"])),
    ("tables read", lambda job: _most(job["plan-half-cold"], "table_bytes_read")),
    ("memory above", lambda job: _most(job["plan-half-cold"], "peak_bytes")),
]

if __name__ == "__main__":
    main()
