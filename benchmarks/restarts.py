"""`python -m benchmarks.restarts`: from the SIGKILL of a process to the next step, by who starts it again.

The programs are those that a user begins with: two processes of torch that form a group and add up tensors,
where the other process notices the death in its next step (gloo) or not at all (as under NCCL, whose watchdog
waits for minutes), and one of JAX that compiles a step. They run under `waystation launch --restarts 1` with
standbys and without, and under `torchrun`. That now and then does not go on: its new processes find the
addresses of the old ones, and wait; such runs are counted. In each run the first process is killed after its
first step, where there are standbys once these are ready; the clock stops when every new process has taken
its first step. The limit is the same program started by hand, without anything that could notice a death: a
launcher without standbys cannot be faster. One round before the others is not counted, so that files are in
the page cache. What standbys cost is their memory, which the table has per process (PSS, so that shared pages
count once).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.measure import settle_disks
from benchmarks.report import show_machine, show_targets
from benchmarks.rounds import Document
from benchmarks.targets import Line
from waystation._ports import free_port

TIMEOUT_S = 300.0
STUCK_S = 60.0  # after which torchrun is taken for stuck
ALONE, STANDBY, FRESH, TORCHRUN = "by hand", "standbys", "no standbys", "torchrun"
TORCHRUN_RESTARTS = "5"
NEEDED = 2.0  # times as fast as the fastest launcher without standbys

_LAUNCH = (
    "import logging; logging.basicConfig(level=logging.DEBUG, format='%(message)s'); "
    "from waystation.cli import main; main()"
)
_READY = re.compile(r"the standby of process \d+ is ready")
_PREPARED = re.compile(r"the standby of process \d+ is being prepared \(pid (\d+)\)")

PROGRAM = """
import os
import sys
import time
from pathlib import Path

{imports}
import waystation

directory, rank = Path(sys.argv[1]), os.environ["RANK"]
{step}
number = len(list(directory.glob(f"step-{{rank}}-*")))
path = directory / f"step-{{rank}}-{{number}}"
path.with_suffix(".new").write_text(f"{{time.monotonic()}} {{os.getpid()}}")
path.with_suffix(".new").rename(path)
waystation.save(directory / f"state-{{number}}", {{"step": number}})
while not (directory / f"go-{{number}}").exists():
    {rest}
    time.sleep(0.02)
"""
"""Reports when it has taken its first step, and saves, which has standbys prepared."""


class StuckError(Exception):
    """A program does not go on."""


@dataclass(frozen=True, slots=True)
class Job:
    """A program.

    Attributes:
        name: Of its framework.
        processes: How many there are.
        imports: What it begins with.
        step: Its first step.
        rest: The others.
        systems: Who starts it.
    """

    name: str
    processes: int
    imports: str
    step: str
    rest: str
    systems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """A program that runs.

    Attributes:
        processes: That were started for it.
        log: What these write.
    """

    processes: list[subprocess.Popen[bytes]]
    log: Path

    def said(self) -> str:
        """What they have written so far."""
        return self.log.read_text(errors="replace")


_TORCH = "import torch\nimport torch.distributed"
_GROUP = "torch.distributed.init_process_group('gloo')\nvalue = torch.ones(1 << 10)"
_ADD = "torch.distributed.all_reduce(value)"

JOBS = (
    Job("torch", 2, _TORCH, f"{_GROUP}\n{_ADD}", _ADD, (ALONE, STANDBY, FRESH, TORCHRUN)),
    Job("torch, unnoticed", 2, _TORCH, f"{_GROUP}\n{_ADD}", "pass", (ALONE, STANDBY, FRESH, TORCHRUN)),
    Job(
        "jax",
        1,
        "import jax\nimport jax.numpy as jnp",
        "value = jax.jit(lambda x: x @ x)(jnp.ones((64, 64))).block_until_ready()",
        "pass",
        (ALONE, STANDBY, FRESH),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.restarts", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round that counts: does it work?")
    parser.add_argument("--rounds", type=command.positive, default=5)
    parser.add_argument("--directory", type=Path, help="where the programs run")
    command.add_report_argument(parser)
    arguments = parser.parse_args()
    console = command.wide_console()
    show(command.document_of(arguments, lambda: measure(arguments, console)), console)


def measure(arguments: argparse.Namespace, console: Console) -> Document:
    """Runs all programs; returns the document, which is also kept."""
    with command.documented(arguments, "restarts", console, evaluate) as (directory, document):
        document["runs"] = []
        rounds = range(0 if arguments.quick else -1, 1 if arguments.quick else arguments.rounds)
        for repetition in rounds:
            for job in JOBS:
                for system in job.systems:
                    run = _run(directory / f"{job.name}-{system}-{repetition}", job, system)
                    shown = "does not go on" if run["seconds"] is None else f"{run['seconds']:.2f} s"
                    console.print(f"{job.name}, {system}: {shown}", highlight=False)
                    document["runs"] += [run | {"round": repetition}] if repetition >= 0 else []
    return document


def _run(directory: Path, job: Job, system: str) -> dict[str, Any]:
    """Starts a program, kills a process of it, and waits for the next step."""
    directory.mkdir()
    program = directory / "program.py"
    program.write_text(PROGRAM.format(imports=job.imports, step=job.step, rest=job.rest))
    settle_disks(quick=True)
    begun_s = time.monotonic()
    seconds: float | None
    with _started(job, system, program, directory) as started:
        first = [_step(directory, rank, 0, started) for rank in range(job.processes)]
        memory: list[int] = []
        if system == STANDBY:
            _wait(lambda: len(_READY.findall(started.said())) == job.processes, started)
            memory = [_pss(int(found)) for found in _PREPARED.findall(started.said())]
        if system == ALONE:
            seconds = max(step_s for step_s, _ in first) - begun_s
        else:
            killed_s = time.monotonic()
            os.kill(first[0][1], signal.SIGKILL)
            try:
                patience_s = STUCK_S if system == TORCHRUN else TIMEOUT_S
                last_s = max(
                    _step(directory, rank, 1, started, patience_s)[0] for rank in range(job.processes)
                )
                seconds = last_s - killed_s
            except StuckError:
                if system != TORCHRUN:
                    raise
                seconds = None
        for number in (0, 1):
            (directory / f"go-{number}").touch()
    return {"job": job.name, "system": system, "seconds": seconds, "standby_bytes": memory}


@contextlib.contextmanager
def _started(job: Job, system: str, program: Path, directory: Path) -> Iterator[Started]:
    """Starts a program; all ends with the block."""
    words = [str(program), str(directory)]
    count = str(job.processes)
    commands: list[Sequence[str]]
    match system:
        case _ if system == TORCHRUN:
            options = ["--nproc-per-node", count, "--max-restarts", TORCHRUN_RESTARTS, "--standalone"]
            commands = [[sys.executable, "-m", "torch.distributed.run", *options, *words]]
        case _ if system == ALONE:
            commands = [[sys.executable, *words]] * job.processes
        case _:
            options = ["-n", count, "--restarts", "1", *(["--no-standby"] if system == FRESH else [])]
            commands = [
                [sys.executable, "-P", "-c", _LAUNCH, "launch", *options, "--", sys.executable, *words]
            ]
    started = Started([], directory / "stderr")
    with contextlib.ExitStack() as ending, started.log.open("w") as log:
        ending.callback(_end_orphans, program)  # torchrun leaves its processes behind if it is killed
        for rank, own in enumerate(_environments(job) if system == ALONE else [{}]):
            process = subprocess.Popen(
                commands[rank],
                env={**os.environ, "JAX_PLATFORMS": "cpu", "GLOO_SOCKET_IFNAME": "lo", **own},
                cwd=directory,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            ending.callback(_end, process)
            started.processes.append(process)
        yield started


def _environments(job: Job) -> list[Mapping[str, str]]:
    port = str(free_port())
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(job.processes),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for rank in range(job.processes)
    ]


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)  # it ends by itself
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_orphans(program: Path) -> None:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(program) in (entry / "cmdline").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def _step(
    directory: Path, rank: int, start: int, started: Started, patience_s: float = TIMEOUT_S
) -> tuple[float, int]:
    """When a process has taken its first step of a start, and its id."""
    path = directory / f"step-{rank}-{start}"
    _wait(path.exists, started, patience_s)
    step_s, process_id = path.read_text().split()
    return float(step_s), int(process_id)


def _wait(condition: Callable[[], bool], started: Started, patience_s: float = TIMEOUT_S) -> None:
    until_s = time.monotonic() + patience_s
    while not condition():
        has_ended = any(process.poll() is not None for process in started.processes)
        if has_ended or time.monotonic() > until_s:
            raise StuckError(f"the program does not go on: {started.said()}")
        time.sleep(0.002)


def _pss(process_id: int) -> int:
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


# ---- what was measured -------------------------------------------------------------------------


def show(document: Document, console: Console) -> None:
    """Prints the table and the targets."""
    show_machine(document, console)
    table = Table(title="from SIGKILL to the next step of all processes", title_justify="left")
    for heading in ("program", "by", "median, s", "worst, s", "of by hand", "standby, MB", "stuck"):
        table.add_column(heading)
    for job in JOBS:
        for system in job.systems:
            seconds, count = _seconds(document, job, system), len(_runs(document, job, system))
            by_hand = statistics.median(_seconds(document, job, ALONE))
            memory = [nbytes for run in _runs(document, job, system) for nbytes in run["standby_bytes"]]
            median = statistics.median(seconds) if seconds else math.nan
            table.add_row(
                f"{job.name}, {job.processes} process{'es' if job.processes > 1 else ''}",
                system,
                f"{median:.2f}",
                f"{max(seconds, default=math.nan):.2f}",
                f"{median / by_hand:.2f}",
                f"{statistics.median(memory) / 1e6:.0f}" if memory else "",
                f"{count - len(seconds)} of {count}" if len(seconds) < count else "",
            )
    console.print(table)
    show_targets(list(evaluate(document)), console)


def evaluate(document: Document) -> Iterator[Line]:
    """How many times faster standbys are than each launcher without, where that goes on."""
    for job in JOBS:
        own = {run["round"]: run["seconds"] for run in _runs(document, job, STANDBY)}
        for system in job.systems:
            if system in (STANDBY, ALONE):
                continue
            others = [run for run in _runs(document, job, system) if run["seconds"] is not None]
            ratios = [run["seconds"] / own[run["round"]] for run in others]
            text, needed = f"restart, {job.name}: standbys against {system}", f"≥ {NEEDED:g}x"
            if not ratios:
                yield Line(text, needed, "never went on", "", None)
                continue
            median = statistics.median(ratios)
            yield Line(text, needed, f"{median:.1f}x", f"{min(ratios):.1f}x", median >= NEEDED)


def _runs(document: Document, job: Job, system: str) -> list[dict[str, Any]]:
    return [run for run in document["runs"] if (run["job"], run["system"]) == (job.name, system)]


def _seconds(document: Document, job: Job, system: str) -> list[float]:
    runs = _runs(document, job, system)
    return [float(run["seconds"]) for run in runs if run["seconds"] is not None]


if __name__ == "__main__":
    main()
