"""`waystation doctor`: what the machine and a file system offer, with a verdict and advice on each."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import typer

from waystation import _native, storage
from waystation.cli import formatting
from waystation.cli.findings import (
    MEMORY_PLACE,
    Finding,
    Verdict,
    device_findings,
    file_system_findings,
    gpu_direct_findings,
    machine_findings,
    memory_tier_findings,
    program_findings,
)
from waystation.cli.output import Output
from waystation.errors import InvalidInput, WaystationError

FOUND_PROBLEM = 1

SHARED_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

# Large enough to fill the queues of fast disks, small enough for seconds on slow ones.
PROBE_BYTES = 512 << 20

_MARKS: dict[Verdict, tuple[str, str]] = {
    "good": ("✓", "green"),
    "info": ("·", "dim"),
    "note": ("!", "yellow"),
    "bad": ("✗", "red"),
}


def run(output: Output, path: Path, *, tune: bool) -> None:
    """Looks, measures if asked to, prints the findings, and exits with 1 if something is bad.

    Raises:
        InvalidInput: There is no directory.
    """
    directory = str(path.expanduser().absolute())
    if not storage.is_directory(directory):
        what = "a file" if storage.is_there(directory) else "not there"
        raise InvalidInput(
            f"'{directory}' is {what}; give a directory: 'doctor' tries in it what its file system can do",
            path=directory,
        )
    probe = _native.probe(directory)
    if tune:
        with output.working("measuring how fast this file system is"):
            calibration: dict[str, Any] | None = _native.calibrate(
                directory, probe_bytes=PROBE_BYTES, force=True
            )
    else:
        calibration = _native.calibration(directory)
    arena = _native.arena_statistics()
    devices, problem = _devices()
    groups = {
        "programs": program_findings(),
        "machine": [
            *machine_findings(probe, arena),
            *device_findings(devices, problem),
            *gpu_direct_findings(devices, _native.gpu_direct_problem() if devices else None),
        ],
        "memory tier": memory_tier_findings(_memory_file_system(), probe["kernel"], _shared_huge_pages()),
        f"file system of {directory}": [
            *file_system_findings(probe),
            _calibration_finding(calibration, directory),
        ],
    }
    if output.as_json:
        measured = {"probe": probe, "calibration": calibration, "arena": arena, "devices": devices}
        output.document({"findings": _documents(groups), **measured})
    else:
        _show(output, groups)
    if any(finding.verdict == "bad" for findings in groups.values() for finding in findings):
        raise typer.Exit(FOUND_PROBLEM)


def _memory_file_system() -> dict[str, Any] | None:
    """What the file system in memory is, if this host has one where it is usual."""
    try:
        found: dict[str, Any] = _native.probe(MEMORY_PLACE)["filesystem"]
    except WaystationError:
        return None
    return found


def _shared_huge_pages() -> str | None:
    """The kernel's setting of huge pages for files in memory: the word in brackets."""
    with contextlib.suppress(OSError):
        chosen = re.search(r"\[(\w+)\]", SHARED_HUGE_PAGES.read_text())
        return None if chosen is None else chosen.group(1)
    return None


def _devices() -> tuple[list[dict[str, Any]], str | None]:
    """The CUDA devices, or why they could not be asked. Starts the driver, which this command may."""
    try:
        return _native.devices(), None
    except WaystationError as error:
        return [], error.message


def _calibration_finding(calibration: dict[str, Any] | None, directory: str) -> Finding:
    if calibration is None:
        advice = f"run 'waystation doctor --tune {directory}' once to measure what is fastest here"
        return Finding("measured speed", "note", "not measured; usual settings are used", advice)
    parts = [_way(verb, calibration[side]) for verb, side in (("writes", "write"), ("reads", "read"))]
    return Finding("measured speed", "good", "; ".join(parts))


def _way(verb: str, side: dict[str, Any]) -> str:
    best = side["best"]
    if best is None:
        return f"{verb} could not be measured"
    same = [
        trial["bytes_per_s"]
        for trial in side["measured"]
        if all(trial[key] == best[key] for key in ("mode", "block_bytes", "depth", "threads"))
    ]
    speeds = sorted(same[0]) if same else []
    speed = f"{formatting.size(int(speeds[len(speeds) // 2]))}/s " if speeds else ""
    return (
        f"{verb} {speed}by {best['mode']}, blocks of {formatting.size(best['block_bytes'])}, "
        f"{best['depth']} in flight, {formatting.count(best['threads'], 'thread')}"
    )


def _documents(groups: dict[str, list[Finding]]) -> list[dict[str, Any]]:
    return [
        {"name": finding.name, "verdict": finding.verdict, "finding": finding.text, "advice": finding.advice}
        for findings in groups.values()
        for finding in findings
    ]


def _show(output: Output, groups: dict[str, list[Finding]]) -> None:
    width = max(len(finding.name) for findings in groups.values() for finding in findings)
    for number, (title, findings) in enumerate(groups.items()):
        if number:
            output.line()
        output.line(title, style="bold")
        for finding in findings:
            mark, style = _MARKS[finding.verdict]
            output.line(f"  {mark} {finding.name:<{width}}  {finding.text}", style=style)
            if finding.advice:
                output.line(f"    {'':<{width}}  → {finding.advice}")
