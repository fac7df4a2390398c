"""Runs a program of several fresh processes once, and puts together what they report.

All processes are ready before the page cache is dealt with and the first of them starts, so that no start-up
is timed; the time of a program is from the first beginning to the last end. Whatever happens, no process of
it is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from benchmarks import measure, reservoir
from benchmarks.distributed import models
from benchmarks.distributed.process import Request
from benchmarks.processes import ROOT
from waystation._ports import free_port

ADDED = ("bytes_read", "bytes_needed", "disk_read_bytes", "disk_written_bytes", "cpu_s")
MOST = ("peak_growth_bytes",)
POLL_S = 0.02
SPARE_BYTES = 256 << 20


@dataclass(slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    ready: int
    output: Path
    log: Path


class UnfinishedError(Exception):
    """A process ended, or took too long, before it could be asked to begin."""


def run(
    request: Request,
    directory: Path,
    timeout_s: float,
    module: str = "benchmarks.distributed.process",
    latest: Sequence[str] = (),
) -> dict[str, Any]:
    """Runs a program; its outcome, or why there is none.

    Args:
        request: What its processes are asked to do.
        directory: For what they write beside the checkpoint.
        timeout_s: When to give up.
        module: What a process runs.
        latest: Facts of the processes of which the largest is that of the program.
    """
    shutil.rmtree(directory, ignore_errors=True)  # of a session that was killed
    directory.mkdir(parents=True)
    until_s = time.monotonic() + timeout_s
    processes: list[_Process] = []
    try:
        address = f"127.0.0.1:{free_port()}"
        processes.extend(
            _start(module, request, index, address, directory) for index in range(request.processes)
        )
        _wait_until_ready(processes, until_s)
        measure.settle_disks(quick=request.quick)
        facts = _settle_cache(request)
        # For all of them at once, and last: processes that did so in turn would back the same pages, and
        # what is read into the page cache would take them.
        measure.back_free_memory(2 * _state_bytes(request) + SPARE_BYTES, quick=request.quick)
        for process in processes:
            stdin: IO[bytes] | None = process.popen.stdin
            assert stdin is not None, "a pipe was asked for"
            stdin.write(b"go\n")
            stdin.close()
        _wait_for_end(processes, until_s)
        return {**facts, **_together(processes, (*MOST, *latest))}
    except (UnfinishedError, BrokenPipeError) as error:
        outcomes = [_outcome(process) for process in processes]
        bad = next((found for found in outcomes if found is not None and found["status"] != "ok"), None)
        return bad or {"status": "failed", "reason": f"{error}\n{_last_lines(processes)}"}
    finally:
        for process in processes:
            process.popen.kill()
            process.popen.wait()
            if process.popen.stdin is not None:
                process.popen.stdin.close()
            os.close(process.ready)
        reservoir.end_use()
        shutil.rmtree(directory, ignore_errors=True)


def _state_bytes(request: Request) -> int:
    return models.total_bytes(models.describe(request.model, request.quick))


def _settle_cache(request: Request) -> dict[str, Any]:
    if request.endpoint:
        return {"cache": "of the server"}
    if request.operation == "load":
        return {"cache": measure.make_cold(Path(request.path), quick=request.quick)}
    if request.operation == "load-warm":
        measure.make_warm(Path(request.path))
        return {"cache": "warm"}
    return {}


def _start(module: str, request: Request, index: int, coordinator: str, directory: Path) -> _Process:
    reader, writer = os.pipe()
    output, log = directory / f"outcome-{index}.json", directory / f"log-{index}"
    own = replace(
        request,
        process=index,
        coordinator=coordinator,
        scratch=str(directory / "warm-up"),
        output=str(output),
        ready=writer,
    )
    command = [sys.executable, "-m", module, own.to_json()]
    try:
        with log.open("wb") as stream:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                cwd=ROOT,
                pass_fds=(writer,),
            )
    finally:
        os.close(writer)
    return _Process(popen, reader, output, log)


def _wait_until_ready(processes: Sequence[_Process], until_s: float) -> None:
    waiting = {process.ready for process in processes}
    while waiting:
        readable, _, _ = select.select(list(waiting), [], [], max(0.0, until_s - time.monotonic()))
        if not readable:
            raise UnfinishedError("not ready in time")
        for descriptor in readable:
            if not os.read(descriptor, 1):
                raise UnfinishedError("a process ended before it was ready")
            waiting.discard(descriptor)


def _wait_for_end(processes: Sequence[_Process], until_s: float) -> None:
    """Waits until all have ended, or one has failed: the others may then wait for it for ever."""
    while True:
        codes = [process.popen.poll() for process in processes]
        if any(codes) or None not in codes:
            return
        if time.monotonic() > until_s:
            raise UnfinishedError("not finished in time")
        time.sleep(POLL_S)


def _outcome(process: _Process) -> dict[str, Any] | None:
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        found: dict[str, Any] = json.loads(process.output.read_text())
        return found
    return None


def _together(processes: Sequence[_Process], most: Sequence[str]) -> dict[str, Any]:
    """The outcome of the program: that of a process that failed, or the sum of all."""
    outcomes = [_outcome(process) for process in processes]
    bad = next((found for found in outcomes if found is not None and found["status"] != "ok"), None)
    if bad is not None:
        return bad
    good = [found for found in outcomes if found is not None]
    if len(good) < len(processes):
        return {"status": "failed", "reason": f"a process ended early\n{_last_lines(processes)}"}
    facts: dict[str, Any] = {
        "status": "ok",
        "seconds": max(found["end_s"] for found in good) - min(found["begin_s"] for found in good),
        "state_bytes": good[0]["state_bytes"],
        "arrays": good[0]["arrays"],
    }
    for names, combine in ((ADDED, sum), (most, max)):
        for name in names:
            values = [found[name] for found in good if found.get(name) is not None]
            if len(values) == len(good):
                facts[name] = combine(values)
    return facts


def _last_lines(processes: Sequence[_Process]) -> str:
    parts = []
    for index, process in enumerate(processes):
        with contextlib.suppress(OSError):
            parts.append(f"process {index}: {process.log.read_text(errors='replace')[-1500:].strip()}")
    return "\n".join(parts)
