"""The story that `waystation demo --memory` tells: a host is lost, and training goes on from others' memory.

Everything runs in processes of their own, so this one needs no torch. The order of events:

1. an uninterrupted run over all hosts, which keeps nothing: the reference;
2. the same run, which keeps every step in the hosts' memory and some on disk; one host is lost, another one
   comes in its place, and training goes on from the memory of the others;
3. the same run without memory, and the same loss: training goes on from the disk;
4. how long each part of the two recoveries took.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from rich.console import Console
from rich.table import Table

from waystation_demo import plot
from waystation_demo.memory_tier.hosts import DirectoryHosts, NamespaceHosts, hosts_of
from waystation_demo.memory_tier.namespaces import why_forbidden
from waystation_demo.memory_tier.runs import HostsRun, Loss, Plan, Runs
from waystation_demo.memory_tier.timeline import (
    MEANINGS,
    SHARED_PHASES,
    Timeline,
    draw_timelines,
    timeline_of,
)
from waystation_demo.output import REPORT, prepare, require_packages, write_report
from waystation_demo.proof import Proof
from waystation_demo.screen import Screen

FULL = Plan(host_count=4, steps=60, save_every=10, width=192, layers=4)
QUICK = Plan(host_count=4, steps=30, save_every=6, width=64, layers=2)
TIERS = "memory", "disk"
LEARNED = 0.8  # of the first loss is left, at most


def run(
    output: Path,
    *,
    quick: bool = False,
    console: Console | None = None,
    plan: Plan | None = None,
    tiers: Sequence[str] = TIERS,
    are_shared: bool | None = None,
) -> dict[str, Any]:
    """Runs the demo, prints what happens and proves what it claims.

    Args:
        output: Directory for checkpoints, logs, the report and the plot. It must be new, empty, or left
            by an earlier demo, which is then replaced. All hosts write to it.
        quick: Trains a smaller model for half of the steps; every claim is checked all the same.
        console: Where to print. A `Console(quiet=True)` prints nothing.
        plan: What is trained, instead of either.
        tiers: Where training goes on from after a loss, one act for each.
        are_shared: Makes hosts of directories, also where namespaces are allowed (True), or fails where they
            are not (False).

    Returns:
        The report, plain enough for JSON; also written to `output`.

    Raises:
        DemoFailed: A claim does not hold, or a program failed.
        Conflict: `output` holds files that are not an earlier demo's.
        Unsupported: A package that the demo needs is not installed.
    """
    require_packages("torch")
    prepare(output)
    started = time.perf_counter()
    console = console or Console()
    forbidden = why_forbidden() if are_shared is None else None
    story = Story(output, plan or (QUICK if quick else FULL), console, SystemRandom())
    if are_shared is None:
        are_shared = forbidden is not None
    report = story.tell(tiers, forbidden, are_shared=are_shared)
    report["total_s"] = time.perf_counter() - started
    write_report(output, report)
    story.screen.say(f"\nDone in {report['total_s']:.0f} s. Checkpoints, logs and {REPORT} are in {output}")
    return report


class Story:
    """The acts of the demo, in order; each returns what later ones need."""

    def __init__(self, output: Path, plan: Plan, console: Console, random: Random) -> None:
        self.screen = Screen(console)
        self._output = output
        self._plan = plan
        self._console = console
        self._runs = Runs(output, plan, random)
        self._proof = Proof(self.screen.proven)
        self._are_shared = False
        step = random.choice(self._loss_candidates())
        # At the first host all processes meet, whose new launch would not know when the old one had ended.
        self._loss = Loss(random.randrange(1, plan.host_count), step)

    def _loss_candidates(self) -> list[int]:
        """Steps after which a host may be lost: past the middle, and some time after a save to disk."""
        steps, every = self._plan.steps, self._plan.save_every
        later = [step for step in range(2 * every, steps) if step % every >= every // 2]
        return [step for step in later if 0.5 * steps <= step <= 0.7 * steps]

    def tell(self, tiers: Sequence[str], forbidden: str | None, *, are_shared: bool) -> dict[str, Any]:
        """Plays all acts and returns the report.

        Args:
            tiers: Where training goes on from.
            forbidden: Why hosts cannot be made of namespaces here, if so.
            are_shared: Whether they are made of directories.
        """
        self._are_shared = are_shared
        kind = (DirectoryHosts if are_shared else NamespaceHosts).kind
        why = f" ({forbidden})" if forbidden else ""
        self.screen.say(f"{self._plan.host_count} hosts on this machine, made of {kind}{why}")
        reference = self._train_reference()
        runs = {tier: self._train_with_loss(tier, reference) for tier in tiers}
        timelines = {tier: timeline_of(run) for tier, run in runs.items()}
        self._show(timelines)
        return {
            "claims": self._proof.held,
            "hosts": kind,
            "plan": dataclasses.asdict(self._plan),
            "lost": {tier: dataclasses.asdict(run.loss) for tier, run in runs.items() if run.loss},
            "losses": {
                name: [run.losses(start) for start in run.start_numbers()]
                for name, run in {"reference": reference, **runs}.items()
            },
            "timelines": {name: dataclasses.asdict(timeline) for name, timeline in timelines.items()},
            "recoveries": [
                found for run in runs.values() for launch in run.launches for found in launch["recoveries"]
            ],
            "plot": self._draw(timelines),
        }

    def _train_reference(self) -> HostsRun:
        self.screen.title("An uninterrupted run", "a process on each host, nothing is kept")
        reference = self._train(HostsRun("reference"), save_every=0, has_memory=False)
        losses = [float.fromhex(loss) for _, loss in sorted(reference.losses(0).items())]
        claim = f"the model learns: its loss falls from {losses[0]:.2f} to {losses[-1]:.2f} nats per byte"
        self._proof.claim(losses[-1] < LEARNED * losses[0], claim)
        is_one = len(reference.digests()) == 1 and None not in reference.digests()
        self._proof.claim(is_one, "all processes have come to the same state, bit for bit")
        return reference

    def _train_with_loss(self, tier: str, reference: HostsRun) -> HostsRun:
        every, has_memory = self._plan.save_every, tier == "memory"
        kept = "every step in memory, with a copy on another host, and " if has_memory else ""
        kept += f"every {every} steps on disk"
        name = f"host-{self._loss.host}"
        self.screen.title(f"{name} is lost; back from {tier}", kept)
        run = HostsRun(tier, loss=dataclasses.replace(self._loss))
        self._train(run, save_every=every, has_memory=has_memory)
        assert run.loss is not None, "it was given"
        timeline = timeline_of(run)
        reached, restored = timeline.reached_step, timeline.restored_step
        lost = "SIGKILL to everything on it, its memory gone"
        was_lost = run.first("done", start=0, process=run.loss.host) is None
        self._proof.claim(was_lost, f"{name} was lost after step {reached}: {lost}")
        self._prove_source(run, tier, timeline)
        self._same_losses(run, reference)
        claim = f"the last state of all processes is, bit for bit, that of the uninterrupted run ({tier})"
        self._proof.claim(run.digests() == reference.digests(), claim)
        self.screen.say(f"  {reached - restored} of {reached} steps were lost")
        return run

    def _prove_source(self, run: HostsRun, tier: str, timeline: Timeline) -> None:
        """The state came from where it is said to have come from."""
        assert run.loss is not None, "it was given"
        told = run.last("restored")
        steps = {event["step"] for event in told if event is not None}
        tiers = {event["tiers"][0] for event in told if event is not None}
        wanted = "memory" if tier == "memory" else "directory"
        self._proof.claim(
            (steps, tiers, None in told) == ({timeline.restored_step}, {wanted}, False),
            f"all processes went on from step {timeline.restored_step}, which the {tier} had",
            f"steps {sorted(steps)}, of {sorted(tiers)}",
        )
        if tier != "memory":
            return
        was_new = "the agent in its place found nothing in memory, so its part came from other hosts"
        self._proof.claim(run.loss.was_new is True, was_new)
        kept_step = run.kept_step(run.loss.at_s)
        claim = f"no step was lost that any process had known to be kept (the newest: {kept_step})"
        self._proof.claim(kept_step is None or timeline.restored_step >= kept_step, claim)

    def _same_losses(self, run: HostsRun, reference: HostsRun) -> None:
        """Every loss is exactly that of the uninterrupted run, of steps that were trained again as well."""
        right = reference.losses(0)
        found = [pair for start in run.start_numbers() for pair in run.losses(start).items()]
        wrong = [step for step, loss in found if loss != right.get(step)]
        steps = {step for step, _ in found}
        claim = f"losses of steps {min(steps)} to {max(steps)} equal the uninterrupted run's, bit for bit"
        self._proof.claim(not wrong and steps == set(right), claim, f"{len(wrong)} differ: {wrong[:3]}")

    def _train(self, run: HostsRun, *, save_every: int, has_memory: bool) -> HostsRun:
        with (
            hosts_of(self._plan.host_count, are_shared=self._are_shared) as hosts,
            self.screen.progress(run.name, self._plan.steps) as on_loss,
        ):
            self._runs.run(run, hosts, save_every=save_every, has_memory=has_memory, on_loss=on_loss)
        return run

    def _show(self, timelines: dict[str, Timeline]) -> None:
        cores = len(os.sched_getaffinity(0))
        self.screen.title("Where the time went", f"seconds, on one machine with {cores} cores for all hosts")
        table = Table(box=None, padding=(0, 2))
        for heading in ("phase", *timelines, ""):
            table.add_column(heading, justify="right" if heading in timelines else "left")
        for name, meaning in MEANINGS.items():
            table.add_row(name, *(_seconds(one, name) for one in timelines.values()), f"[dim]{meaning}[/]")
        totals = [f"{one.without_shared_s():.3f}" for one in timelines.values()]
        table.add_row("sum", *totals, f"[dim]without {' and '.join(SHARED_PHASES)}[/]", style="bold")
        self._console.print(table)

    def _draw(self, timelines: dict[str, Timeline]) -> str | None:
        if not plot.available():
            self.screen.say("\nNo plot was drawn: matplotlib is not installed (pip install matplotlib)")
            return None
        path = self._output / "recovery.png"
        draw_timelines(path, timelines, self._loss.host)
        self.screen.say(f"\nThe recoveries are drawn in {path}")
        return str(path)


def _seconds(timeline: Timeline, name: str) -> str:
    has_phase = any(phase.name == name for phase in timeline.phases)
    return f"{timeline.took_s(name):.3f}" if has_phase else "-"
