"""The story that `waystation demo` tells: train, be killed, resume, resume elsewhere, read elsewhere.

Everything runs in child processes, so this one needs neither JAX nor torch. The order of events:

1. an uninterrupted run on 8 devices that never saves: the reference;
2. the same run with checkpoints, killed with SIGKILL while it saves;
3. a look at the disk: the newest whole checkpoint, and what the kill left behind;
4. resumed from it on the same mesh, in the same directory, as a restarted job would be;
5. resumed from it on 4 devices with another mesh;
6. the same checkpoint read by the safetensors package and by torch.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from rich.console import Console

import waystation
from waystation_demo import plot
from waystation_demo.output import REPORT, prepare, require_packages, write_report
from waystation_demo.programs import Killer, Programs, TrainingRun
from waystation_demo.proof import LOSS_TOLERANCE, Proof
from waystation_demo.screen import Screen, directory_entries

MESH = "2x4"
OTHER_MESH = "2x2"


@dataclass(frozen=True)
class Plan:
    """How long to train, how often to save, and which saves the kill may hit."""

    steps: int
    save_every: int

    def kill_candidates(self) -> list[int]:
        """Saves past the middle of training: there is a past to lose and a future to compare."""
        saves = range(self.save_every, self.steps, self.save_every)
        return [step for step in saves if 0.5 * self.steps <= step <= 0.7 * self.steps]


FULL = Plan(steps=100, save_every=5)
QUICK = Plan(steps=20, save_every=2)


def run(output: Path, *, quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Runs the demo, prints what happens and proves what it claims.

    Args:
        output: Directory for checkpoints, logs, the report and the plot. It must be new, empty, or left
            by an earlier demo, which is then replaced.
        quick: Trains a fifth of the steps; every claim is checked all the same.
        console: Where to print. A `Console(quiet=True)` prints nothing.

    Returns:
        The report, plain enough for JSON; also written to `output`.

    Raises:
        DemoFailed: A claim does not hold, or a child process failed.
        Conflict: `output` holds files that are not an earlier demo's.
        Unsupported: A package that the demo needs is not installed.
    """
    require_packages("jax", "optax", "safetensors")
    prepare(output)
    started = time.perf_counter()
    screen = Screen(console or Console())
    report = Story(output, QUICK if quick else FULL, screen, SystemRandom()).tell()
    report["total_s"] = time.perf_counter() - started
    write_report(output, report)
    screen.say(f"\nDone in {report['total_s']:.0f} s. Checkpoints, logs and {REPORT} are in {output}")
    return report


class Story:
    """The acts of the demo, in order; each returns what later ones need."""

    def __init__(self, output: Path, plan: Plan, screen: Screen, random: Random) -> None:
        self._output = output
        self._plan = plan
        self._screen = screen
        self._random = random
        self._programs = Programs(output, plan.steps)
        self._proof = Proof(screen.proven)

    def tell(self) -> dict[str, Any]:
        """Plays all acts and returns the report."""
        reference = self._train_reference()
        killed = self._train_until_killed(reference)
        disk, newest = self._look_at_disk(killed)
        resumed = self._resume("resumed", MESH, newest, killed)
        self._proof.same_losses("resumed on the same mesh", resumed, reference)
        self._proof.tidy(directory_entries(newest.parent, waystation.is_checkpoint))
        moved = self._resume("resumed-elsewhere", OTHER_MESH, newest, killed)
        worst = self._proof.close_losses("resumed on another mesh", moved, reference)
        readers = self._read_elsewhere(newest, killed)
        runs = [reference, killed, resumed, moved]
        self._screen.title("Timings", "of the parts, and of each save")
        self._screen.timings(runs)
        return {
            "claims": self._proof.held,
            "runs": [run.summary() for run in runs],
            "disk_after_kill": disk,
            "resumed_from": newest.name,
            "worst_relative_difference": worst,
            "tolerance": LOSS_TOLERANCE,
            "read_by": readers,
            "plot": self._draw(reference, killed, [resumed, moved]),
        }

    def _train_reference(self) -> TrainingRun:
        self._screen.title(
            "An uninterrupted run", f"{_devices(MESH)} devices, mesh {MESH}, without checkpoints"
        )
        reference = self._train("reference", MESH, save_every=0)
        self._proof.learned(reference)
        return reference

    def _train_until_killed(self, reference: TrainingRun) -> TrainingRun:
        every = f"saved every {self._plan.save_every} steps"
        self._screen.title("The same run, killed", f"{every}; SIGKILL at a random moment of a random save")
        killer = Killer(self._plan.kill_candidates(), self._random)
        killed = self._train("interrupted", MESH, killer=killer)
        self._screen.kill(killed)
        self._proof.killed(killed, self._plan.steps)
        self._proof.same_losses("until the kill", killed, reference)
        return killed

    def _look_at_disk(self, killed: TrainingRun) -> tuple[list[dict[str, Any]], Path]:
        directory = self._output / "interrupted"
        self._screen.title("What the kill left on disk", str(directory))
        entries = directory_entries(directory, waystation.is_checkpoint)
        self._screen.directory(entries)
        whole = [entry["name"] for entry in entries if entry["checkpoint"]]
        self._proof.committed(killed, [_step(name) for name in whole])
        return entries, directory / max(whole)

    def _resume(self, name: str, mesh: str, checkpoint: Path, killed: TrainingRun) -> TrainingRun:
        self._screen.title(f"Resumed on {_devices(mesh)} devices", f"mesh {mesh}, from {checkpoint.name}")
        resumed = self._train(name, mesh, resume=checkpoint)
        saved = killed.digests[_step(checkpoint.name)]
        self._proof.same_bytes(f"loaded on mesh {mesh}", resumed.digests[_step(checkpoint.name)], saved)
        return resumed

    def _read_elsewhere(self, checkpoint: Path, killed: TrainingRun) -> list[str]:
        self._screen.title("Read without Waystation", f"{checkpoint.name}, by other packages")
        saved = killed.digests[_step(checkpoint.name)]
        found = self._programs.read_elsewhere(checkpoint)
        for reader, arrays in found.items():
            if arrays is None:
                self._screen.say(f"  {reader} is not installed, so it did not read the checkpoint")
            else:
                self._proof.same_bytes(f"read by {reader}", arrays, saved)
        return [reader for reader, arrays in found.items() if arrays is not None]

    def _train(
        self,
        name: str,
        mesh: str,
        *,
        save_every: int | None = None,
        resume: Path | None = None,
        killer: Killer | None = None,
    ) -> TrainingRun:
        # A restarted job goes on in its own directory; the one on another mesh must not mix with it.
        directory = resume.parent if resume and mesh == MESH else self._output / name
        interval = self._plan.save_every if save_every is None else save_every
        run = TrainingRun(name, mesh)
        with self._screen.progress(name, self._plan.steps) as on_loss:
            self._programs.train(run, directory, interval, resume=resume, killer=killer, on_loss=on_loss)
        return run

    def _draw(self, reference: TrainingRun, killed: TrainingRun, resumed: list[TrainingRun]) -> str | None:
        if not plot.available():
            self._screen.say("\nNo plot was drawn: matplotlib is not installed (pip install matplotlib)")
            return None
        path = self._output / "loss.png"
        plot.draw(path, reference, killed, resumed)
        self._screen.say(f"\nThe loss curves are drawn in {path}")
        return str(path)


def _devices(mesh: str) -> int:
    return math.prod(int(size) for size in mesh.split("x"))


def _step(checkpoint_name: str) -> int:
    return int(checkpoint_name.removeprefix("step_"))
