"""Runs the demo's programs as child processes and follows what they report.

Invariants: a child never outlives the call that started it; every report that a child managed to write
whole is counted, also those from just before it was killed; a child that fails by itself, or that is
silent for so long that it must hang, raises `DemoFailed` with the end of its own error output.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from waystation_demo.proof import DemoFailed

Event = dict[str, Any]

# A child reports every step; what takes longest is compiling the first one, and importing torch.
SILENCE_LIMIT_S = 120.0


@dataclass
class TrainingRun:
    """What one run of the training program reported."""

    name: str
    mesh: str
    losses: dict[int, float] = field(default_factory=dict)  # step -> loss
    digests: dict[int, dict[str, str]] = field(default_factory=dict)  # step -> name -> SHA-256
    saves: list[Event] = field(default_factory=list)  # those that finished: step, blocking_s, total_s
    resumed: Event | None = None  # step, load_s
    exit_code: int = 0
    kill: Event | None = None  # step of the save it was meant for, delay_s since that began
    total_s: float = 0.0

    def note(self, event: Event) -> None:
        """Takes in one report."""
        match event.pop("event"):
            case "step":
                self.losses[event["step"]] = event["loss"]
            case "save_started":
                self.digests[event["step"]] = event["digests"]
            case "saved":
                self.saves.append(event)
            case "resumed":
                self.digests[event["step"]] = event.pop("digests")
                self.resumed = event

    def summary(self) -> Event:
        """For the demo's own report: everything but the digests."""
        return {key: value for key, value in vars(self).items() if key != "digests"}


class Killer:
    """Kills a child at a random moment of a random save, which is seldom done by then."""

    def __init__(self, steps: list[int], random: Random) -> None:
        self._step = random.choice(steps)
        self._random = random

    def __call__(self, event: Event, run: TrainingRun, process: subprocess.Popen[bytes]) -> None:
        """To be shown every event before `run` notes it."""
        if event["event"] != "save_started" or event["step"] != self._step:
            return
        fastest_s = min(save["total_s"] for save in run.saves)
        run.kill = {"step": self._step, "delay_s": self._random.uniform(0, fastest_s)}
        time.sleep(run.kill["delay_s"])
        process.send_signal(signal.SIGKILL)


class Programs:
    """Starts children whose logs and compiled programs share a directory.

    Args:
        directory: That directory.
        steps: How many steps to train.
        silence_limit_s: After how long without a word a child is taken to hang, and killed.
    """

    def __init__(self, directory: Path, steps: int, *, silence_limit_s: float = SILENCE_LIMIT_S) -> None:
        self._directory = directory
        self._steps = steps
        self._silence_limit_s = silence_limit_s

    def train(
        self,
        run: TrainingRun,
        checkpoints: Path,
        save_every: int,
        *,
        resume: Path | None = None,
        killer: Killer | None = None,
        on_loss: Callable[[int, float], None],
    ) -> None:
        """Runs the training program to its end, or to its death by `killer`, and fills in `run`."""
        arguments = ["-m", "waystation_demo.train", "--checkpoints", str(checkpoints), "--mesh", run.mesh]
        arguments += ["--steps", str(self._steps), "--save-every", str(save_every)]
        arguments += ["--resume", str(resume)] if resume else []

        def follow(line: str, process: subprocess.Popen[bytes]) -> None:
            event = json.loads(line)
            if killer is not None:
                killer(event, run, process)
            run.note(event)
            if "loss" in event:
                on_loss(event["step"], event["loss"])

        started = time.perf_counter()
        run.exit_code = self._run(run.name, arguments, follow)
        run.total_s = time.perf_counter() - started
        if run.exit_code != 0 and run.kill is None:
            raise self._failure(run.name, f"ended with exit code {run.exit_code}")

    def read_elsewhere(self, checkpoint: Path) -> dict[str, dict[str, str] | None]:
        """Digests of a checkpoint's arrays by name, as each program without Waystation reads them."""
        script = Path(__file__).with_name("read_elsewhere.py")
        lines: list[str] = []
        exit_code = self._run(
            "read-elsewhere", [str(script), str(checkpoint)], lambda line, _: lines.append(line)
        )
        if exit_code != 0:
            raise self._failure("read-elsewhere", f"ended with exit code {exit_code}")
        found: dict[str, dict[str, str] | None] = json.loads(lines[-1])
        return found

    def _run(
        self, name: str, arguments: list[str], follow: Callable[[str, subprocess.Popen[bytes]], None]
    ) -> int:
        # -P: neither the working directory nor that of a script may provide modules.
        command = [sys.executable, "-P", *arguments]
        with (
            self._log(name).open("w") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=self._environment()) as process,
        ):
            try:
                for line in self._lines(process):
                    follow(line, process)
                return process.wait(self._silence_limit_s)
            except (TimeoutError, subprocess.TimeoutExpired):
                silence = f"was killed, as it had reported nothing for {self._silence_limit_s:g} s"
                raise self._failure(name, silence) from None
            finally:
                process.kill()  # does nothing where the child has ended

    def _lines(self, process: subprocess.Popen[bytes]) -> Iterator[str]:
        """What a child writes, line by line; without the last line if a kill cut that short.

        Raises:
            TimeoutError: It has written nothing for too long.
        """
        assert process.stdout is not None
        output, rest = process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(output, select.POLLIN)
        while poll.poll(self._silence_limit_s * 1e3):
            written = os.read(output, 1 << 16)
            if not written:
                return
            *lines, rest = (rest + written).split(b"\n")
            yield from (line.decode() for line in lines)
        raise TimeoutError

    def _environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        return inherited | {
            # The runs share what XLA compiles: each mesh is compiled once.
            "JAX_COMPILATION_CACHE_DIR": str(self._directory / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _failure(self, name: str, what: str) -> DemoFailed:
        tail = "\n".join(self._log(name).read_text(errors="replace").splitlines()[-15:])
        return DemoFailed(f"the program '{name}' {what}:\n{tail}", path=str(self._log(name)))
