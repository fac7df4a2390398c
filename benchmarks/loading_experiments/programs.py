"""Runs a program of several fresh processes once, and puts together what they report.

The processes are forked from a server that has imported the frameworks and started nothing: an experiment is
hundreds of them, and start-up is in none of the figures. All are ready before the page cache is dealt with
and the first of them starts; the time of a program is from the first beginning to the last end. What runs
beside it (`Beside`) begins before it and ends before any bytes are checked. Whatever happens, no process of
it is left.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.loading_experiments import process
from benchmarks.loading_experiments.process import Request
from waystation._ports import free_port

Facts = dict[str, Any]
Beside = Callable[[Sequence[int]], AbstractContextManager[Facts]]
"""Given the ids of the processes; what it yields is added to the outcome once it has ended."""

context = multiprocessing.get_context("forkserver")

SUMMED = ("held_bytes", "disk_read_bytes", "peak_growth_bytes", "cpu_s")


class UnfinishedError(Exception):
    """A process ended, failed, or took too long; `outcome` says how."""

    def __init__(self, outcome: Facts) -> None:
        super().__init__(outcome["reason"])
        self.outcome = outcome


@dataclass(slots=True)
class _Process:
    handle: Any
    connection: Connection
    log: Path


@contextlib.contextmanager
def alone(process_ids: Sequence[int]) -> Iterator[Facts]:
    """Nothing runs beside the program."""
    del process_ids
    yield {}


def prepare_server() -> None:
    """Has the server import what the processes need; to be called before the first of them is started."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # or JAX looks for accelerators
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    context.set_forkserver_preload(["benchmarks.loading_experiments.preloaded"])


def run(request: Request, directory: Path, timeout_s: float, beside: Beside = alone) -> Facts:
    """Runs a program; its outcome, or why there is none.

    Args:
        request: What its processes are asked to do.
        directory: For what they write.
        timeout_s: When to give up.
        beside: What runs at the same time.
    """
    shutil.rmtree(directory, ignore_errors=True)  # of a session that was killed
    directory.mkdir(parents=True)
    until_s = time.monotonic() + timeout_s
    processes: list[_Process] = []
    try:
        address = f"127.0.0.1:{free_port()}"
        for index in range(request.processes):
            asked = replace(request, process=index, coordinator=address, store=directory / "store")
            processes.append(_start(asked, directory / f"log-{index}"))
        _expect(processes, "ready", until_s)
        measure.settle_disks(quick=request.model.quick)
        cache = _settle_cache(request)
        read_before = device_read_bytes(request.directory)
        with beside([own.handle.pid for own in processes]) as found:
            _tell(processes)
            _expect(processes, "ended", until_s)
            read_after = device_read_bytes(request.directory)
        _tell(processes)
        together = _together(_outcomes(processes, until_s))
        if read_before is not None and read_after is not None:
            together["device_read_bytes"] = read_after - read_before
        return {"cache": cache, "state_bytes": request.model.nbytes, **together, **found}
    except UnfinishedError as error:
        return error.outcome
    finally:
        for own in processes:
            own.handle.kill()
            own.handle.join()
            own.connection.close()
        shutil.rmtree(directory, ignore_errors=True)


def device_read_bytes(path: Path) -> int | None:
    """What the device that holds a path has read since it is there; None where it has no such counter."""
    number = path.stat().st_dev
    counters = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    with contextlib.suppress(OSError):
        return int(counters.read_text().split()[2]) * 512
    return None


def _start(request: Request, log: Path) -> _Process:
    here, there = context.Pipe()
    log.touch()
    handle = context.Process(target=process.main, args=(request, there, log), daemon=True)
    handle.start()
    there.close()
    return _Process(handle, here, log)


def _settle_cache(request: Request) -> str:
    if request.cold:
        return measure.make_cold(request.directory, quick=request.model.quick)
    measure.make_warm(request.directory)
    return "warm"


def _tell(processes: Sequence[_Process]) -> None:
    for own in processes:
        with contextlib.suppress(BrokenPipeError):  # whoever has ended is noticed when it is waited for
            own.connection.send("go on")


def _expect(processes: Sequence[_Process], word: str, until_s: float) -> None:
    """Waits until all have said a word."""
    for message in _messages(processes, until_s):
        if message != word:
            raise UnfinishedError(message)


def _outcomes(processes: Sequence[_Process], until_s: float) -> list[Facts]:
    found: list[Facts] = list(_messages(processes, until_s))
    bad = next((outcome for outcome in found if outcome["status"] != "ok"), None)
    if bad is not None:
        raise UnfinishedError(bad)
    return found


def _messages(processes: Sequence[_Process], until_s: float) -> Iterator[Any]:
    """One message of each, as they come.

    Raises:
        UnfinishedError: One has ended without, or the time is up.
    """
    waiting = {own.connection: own for own in processes}
    while waiting:
        ready = wait(list(waiting), max(0.0, until_s - time.monotonic()))
        if not ready:
            raise UnfinishedError(_failure("not finished in time", processes))
        for connection in ready:
            assert isinstance(connection, Connection)
            own = waiting.pop(connection)
            try:
                yield connection.recv()
            except (EOFError, ConnectionResetError):
                own.handle.join()
                reason = f"a process ended early, with {own.handle.exitcode}"
                raise UnfinishedError(_failure(reason, processes)) from None


def _failure(reason: str, processes: Sequence[_Process]) -> Facts:
    lines = [
        f"process {index}: {own.log.read_text(errors='replace')[-1500:].strip()}"
        for index, own in enumerate(processes)
    ]
    return {"status": "failed", "reason": "\n".join([reason, *lines])}


def _together(found: Sequence[Facts]) -> Facts:
    """The outcome of a program whose processes have all ended well."""
    begin_s = min(outcome["begin_s"] for outcome in found)
    facts: Facts = {
        "status": "ok",
        "begin_s": begin_s,
        "seconds": max(outcome["end_s"] for outcome in found) - begin_s,
        "loaded_s": max(outcome["loaded_s"] for outcome in found) - begin_s,
    }
    for name in SUMMED:
        values = [outcome[name] for outcome in found if outcome.get(name) is not None]
        if len(values) == len(found):
            facts[name] = sum(values)
    return facts
