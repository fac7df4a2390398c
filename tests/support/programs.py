"""Runs a function in several real processes, connected by `jax.distributed` or `torch.distributed`.

The processes are forked from a server that has imported both frameworks and started nothing, so that
each is there within milliseconds. They can be killed at any time; what each returned or raised, its exit
code and its output are collected. No process outlives the `with` block.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.ports import claimed_ports

HANG_S = 120.0  # far beyond what anything here takes
DEPARTURE_S = 10.0  # as long as one that is stopped is waited for

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.support.at_exit", "tests.support.preloaded", __name__])


def without_privileges(code: str) -> str:
    """Runs Python code in a process to which the permission bits of files apply; returns its output."""
    command = [sys.executable, "-c", f"import numpy as np, waystation\n{code}"]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass
class Place:
    """Where a function runs.

    Attributes:
        index: Which of the processes this is.
        count: How many there are.
        framework: `jax`, `torch` (its store is TCP), or `torch-file` (its store is a file).
        directory: Of the test.
        ports: Free at the start, the same for all; one for each `connect`.
        options: For `jax.distributed.initialize`; with `recoverable`, JAX lets survivors of a death live.
        departures: In process 0, what the others say when they have left JAX; in these, where they say it.
    """

    index: int
    count: int
    framework: str
    directory: Path
    ports: list[int]
    options: dict[str, Any]
    connection: Connection
    departures: list[Connection]

    def connect(self) -> None:
        """Connects the processes by their framework."""
        if self.framework == "jax":
            import jax

            options = dict(self.options)
            jax.config.update("jax_enable_recoverability", options.pop("recoverable", False))
            address = f"127.0.0.1:{self.ports.pop(0)}"
            jax.distributed.initialize(address, self.count, self.index, **options)
            if self.index == 0:
                state = global_state()
                state.service = _LeavingLast(state.service, self.departures)
            return
        import torch.distributed

        # Another port or file each time: some processes may still find the old one.
        port = self.ports.pop(0)
        method = f"tcp://127.0.0.1:{port}"
        if self.framework == "torch-file":
            method = f"file://{self.directory}/store-{port}"
        torch.distributed.init_process_group(
            "gloo", init_method=method, rank=self.index, world_size=self.count
        )

    def disconnect(self) -> None:
        """Undoes `connect`."""
        if self.framework == "jax":
            import jax

            is_connected = jax.distributed.is_initialized()
            jax.distributed.shutdown()
            if is_connected and self.index != 0:
                self.departures[0].send(None)
            return
        import torch.distributed

        torch.distributed.destroy_process_group()

    def report(self, value: Any) -> None:
        """Sends something to the test, while running."""
        self.connection.send(("report", value))

    def receive(self) -> Any:
        """Waits for something that the test sends."""
        return self.connection.recv()


def global_state() -> Any:
    """What JAX knows of its processes."""
    from jax._src import distributed

    return distributed.global_state


@dataclass
class _LeavingLast:
    """JAX's service, which ends after the others have left.

    By itself it ends once all have come to the end, and may cancel the answer that says so to the last of
    them, which JAX then aborts.
    """

    service: Any
    departures: list[Connection]

    def shutdown(self) -> None:
        until = time.monotonic() + DEPARTURE_S
        for departure in self.departures:
            if departure.poll(max(0, until - time.monotonic())):
                with contextlib.suppress(EOFError):  # it has died
                    departure.recv()
        self.service.shutdown()


@dataclass
class Raised:
    """An error that ended a function."""

    type: str
    message: str
    context: dict[str, Any]
    notes: list[str]


@dataclass
class Ended:
    """How one process ended.

    Attributes:
        exit_code: As `multiprocessing` has it: negative is the signal that killed it.
        value: What the function returned, or a `Raised`; None if it did not come to that.
        output: What it wrote to stdout and stderr.
    """

    exit_code: int
    value: Any
    output: str


@dataclass
class _Process:
    process: Any
    connection: Connection
    log: Path
    value: Any = None
    reports: list[Any] = field(default_factory=list)


class Programs:
    """The processes of one run, from the outside."""

    def __init__(self, processes: list[_Process]) -> None:
        self._processes = processes

    @property
    def are_running(self) -> bool:
        """Whether one of the processes has not ended."""
        return any(of.process.exitcode is None for of in self._processes)

    def report(self, index: int) -> Any:
        """The next thing that a process reports."""
        of = self._processes[index]
        until = time.monotonic() + HANG_S
        while not of.reports:
            if not of.connection.poll(max(0, until - time.monotonic())) or not _take(of):
                raise AssertionError(f"process {index} reports nothing:\n{self._output(index)}")
        return of.reports.pop(0)

    def reported(self, index: int) -> list[Any]:
        """What a process has reported and nobody has taken, without waiting for more."""
        of = self._processes[index]
        while of.connection.poll() and _take(of):
            pass
        reports, of.reports = of.reports, []
        return reports

    def value(self, index: int) -> Any:
        """What a function has returned or raised, without waiting for the others."""
        of = self._processes[index]
        until = time.monotonic() + HANG_S
        while of.value is None:
            if not of.connection.poll(max(0, until - time.monotonic())) or not _take(of):
                raise AssertionError(f"process {index} does not end:\n{self._output(index)}")
        return of.value

    def send(self, index: int, value: Any) -> None:
        """Sends something to a process."""
        self._processes[index].connection.send(value)

    def signal(self, index: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal, by default the one that kills."""
        os.kill(self.process_id(index), number)

    def process_id(self, index: int) -> int:
        """The operating system's id of a process."""
        return int(self._processes[index].process.pid)

    def end(self) -> list[Ended]:
        """Waits for all processes."""
        until = time.monotonic() + HANG_S
        waiting = list(self._processes)
        while waiting:  # they write more than pipes hold, so all are read at once
            multiprocessing.connection.wait(
                [of.connection for of in waiting], max(0, until - time.monotonic())
            )
            assert time.monotonic() < until, f"a hang:\n{self._outputs()}"
            waiting = [of for of in waiting if not of.connection.poll() or _take(of)]
        for of in self._processes:
            of.process.join(max(0, until - time.monotonic()))
            assert of.process.exitcode is not None, f"a hang at the end:\n{self._outputs()}"
        return [
            Ended(of.process.exitcode, of.value, self._output(index))
            for index, of in enumerate(self._processes)
        ]

    def values(self) -> list[Any]:
        """What the functions returned or raised; all processes have to end well."""
        ended = self.end()
        assert [process.exit_code for process in ended] == [0] * len(ended), self._outputs()
        return [process.value for process in ended]

    def _output(self, index: int) -> str:
        return self._processes[index].log.read_text(errors="replace")

    def _outputs(self) -> str:
        return "\n".join(f"--- {index}\n{self._output(index)}" for index in range(len(self._processes)))

    def kill_all(self) -> None:
        """Leaves nothing behind."""
        for of in self._processes:
            of.process.kill()
        for of in self._processes:
            of.process.join()
            of.connection.close()


def _take(of: _Process) -> bool:
    """Takes one message; returns whether there may be more."""
    try:
        kind, value = of.connection.recv()
    except (EOFError, ConnectionResetError):
        return False
    if kind == "report":
        of.reports.append(value)
    else:
        of.value = value
    return True


@contextlib.contextmanager
def running(
    function: Callable[..., Any],
    *arguments: Any,
    count: int,
    framework: str,
    directory: Path,
    **options: Any,
) -> Iterator[Programs]:
    """Starts `function(place, *arguments)` in processes; the function is one of an importable module."""
    processes: list[_Process] = []
    programs = Programs(processes)
    with claimed_ports(3) as ports:
        for port in ports:  # an earlier run may have had the same
            (directory / f"store-{port}").unlink(missing_ok=True)
        departures = [context.Pipe(duplex=False) for _ in range(1, count)]
        try:
            for index in range(count):
                here, there = context.Pipe()
                departing = [departures[index - 1][1]] if index else [reader for reader, _ in departures]
                place = Place(index, count, framework, directory, list(ports), options, there, departing)
                log = directory / f"{function.__name__}-{ports[0]}-{index}.log"
                log.touch()
                process = context.Process(target=_run, args=(place, log, function, arguments))
                process.start()
                for connection in (there, *departing):  # or nobody would see that a process has ended
                    connection.close()
                processes.append(_Process(process, here, log))
            yield programs
        finally:
            programs.kill_all()


def _run(place: Place, log: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """What a process does."""
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    value: Any
    try:
        value = function(place, *arguments)
    except BaseException as error:
        traceback.print_exc()
        value = raised(error)
    place.connection.send(("ended", value))
    if place.framework == "jax":
        place.disconnect()  # what JAX does at the end of a program, which processes forked here miss
    sys.stdout.flush()


def raised(error: BaseException) -> Raised:
    """An error, as a test can look at it."""
    return Raised(
        type(error).__name__,
        getattr(error, "message", str(error)),
        getattr(error, "context", {}),
        list(getattr(error, "__notes__", [])),
    )
