"""What fresh processes of the benchmarks do, in processes that are forked where everything is imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import jax
from benchmarks.distributed import process, programs
from benchmarks.processes import Outcome, Request, attempt
from tests.support.programs import Place, context, running


def measured(module: str, requests: Sequence[Request], directory: Path) -> list[Outcome]:
    """What one process of a module measures, request after request."""
    with running(_measure, module, requests, count=1, framework="torch", directory=directory) as programs:
        (outcomes,) = programs.values()
    found: list[Outcome] = outcomes
    return found


def spawn(module: str, request: Request, timeout_s: float) -> Outcome:
    """As `benchmarks.processes.spawn`, whose place it takes in tests that are about what is spawned when."""
    del timeout_s
    directory = Path(request.output).parent
    directory.mkdir(parents=True, exist_ok=True)
    (outcome,) = measured(module, [request], directory)
    return outcome


def _measure(place: Place, module: str, requests: Sequence[Request]) -> list[Any]:
    del place
    work = importlib.import_module(module).run
    return [attempt(work, request) for request in requests]


# ---- programs of several processes ---------------------------------------------------------------


class _Forked:
    """A forked process, as far as `benchmarks.distributed.programs` asks a `Popen`."""

    def __init__(self, process: Any, stdin: IO[bytes]) -> None:
        self._process = process
        self.stdin = stdin

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def start(
    module: str, request: process.Request, index: int, coordinator: str, directory: Path
) -> programs._Process:
    """As `programs._start`, whose place it takes."""
    (ready, ready_there), (stdin_there, stdin) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    output, log = directory / f"outcome-{index}.json", directory / f"log-{index}"
    own = replace(
        request,
        process=index,
        coordinator=coordinator,
        scratch=str(directory / "warm-up"),
        output=str(output),
    )
    forked = context.Process(target=_answer, args=(module, own, ready_there, stdin_there, log))
    forked.start()
    for there in (ready_there, stdin_there):
        there.close()
    popen: Any = _Forked(forked, os.fdopen(os.dup(stdin.fileno()), "wb", buffering=0))
    descriptor = os.dup(ready.fileno())
    for here in (ready, stdin):
        here.close()
    return programs._Process(popen, descriptor, output, log)


def _answer(module: str, request: process.Request, ready: Connection, stdin: Connection, log: Path) -> None:
    with log.open("wb", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.dup2(stdin.fileno(), 0)
    sys.stdin = os.fdopen(0)
    work = importlib.import_module(module).run
    own = replace(request, ready=ready.fileno())
    process.end_with(own, lambda: work(own))
    jax.distributed.shutdown()  # what JAX does at the end of a program, which processes forked here miss
