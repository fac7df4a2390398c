"""The story that `waystation demo --runtime` tells: programs share islands, and one of them loses a host.

The programs run in processes of their own, which have no devices; these belong to the hosts of the cluster.
The order of events:

1. a training program alone, which nothing disturbs: the reference;
2. the same program beside a rival that wants all devices of both islands, with shares of 1 to 2;
3. the host that trains is killed with SIGKILL: its island is built again, the other stays, and training goes
   on from its last save.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from waystation_demo import plot
from waystation_demo.output import REPORT, prepare, require_packages, write_report
from waystation_demo.proof import Proof
from waystation_demo.runtime.programs import Program, Told, running
from waystation_demo.screen import Screen

if TYPE_CHECKING:
    from waystation.runtime import Cluster
    from waystation.runtime.timeline import Timeline

TRAINING, RIVAL = "training", "rival"
SHARES = {TRAINING: 1, RIVAL: 2}
ISLANDS = "east", "west"  # the first one trains
DRAWN_S = 3.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained.

    Attributes:
        steps: How many steps.
        save_every: How many steps from save to save.
        kill_at: The step after which the host is killed.
        width: Of the model.
        layers: Of the model.
        size: Of the rival's matrices.
        learned: Which part of the first loss is left in the end, at most.
        share_tolerance: How far shares of device time may be from what was asked, as parts of all of it.
    """

    steps: int
    save_every: int
    kill_at: int
    width: int
    layers: int
    size: int
    learned: float = 0.95
    share_tolerance: float = 0.1


FULL = Plan(steps=90, save_every=10, kill_at=47, width=128, layers=2, size=640)
QUICK = Plan(steps=48, save_every=6, kill_at=19, width=64, layers=2, size=448)


def run(
    output: Path,
    *,
    quick: bool = False,
    console: Console | None = None,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """Runs the demo, prints what happens and proves what it claims.

    Args:
        output: Directory for checkpoints, logs, the report and the pictures. It must be new, empty, or left
            by an earlier demo, which is then replaced. All hosts write to it.
        quick: Trains a smaller model for less than half of the steps; every claim is checked all the same.
        console: Where to print. A `Console(quiet=True)` prints nothing.
        plan: What is trained, instead of either.

    Returns:
        The report, plain enough for JSON; also written to `output`.

    Raises:
        DemoFailed: A claim does not hold, or a program failed.
        Conflict: `output` holds files that are not an earlier demo's.
        Unsupported: A package that the demo needs is not installed.
    """
    require_packages("jax", "ray")
    prepare(output)
    began_s = time.monotonic()
    story = Story(output, plan or (QUICK if quick else FULL), console or Console())
    report = story.tell()
    report["total_s"] = time.monotonic() - began_s
    write_report(output, report)
    story.screen.say(f"\nDone in {report['total_s']:.0f} s. Pictures, logs and {REPORT} are in {output}")
    return report


class Story:
    """The acts of the demo."""

    def __init__(self, output: Path, plan: Plan, console: Console) -> None:
        self.screen = Screen(console)
        self._output = output
        self._plan = plan
        self._proof = Proof(self.screen.proven)

    def tell(self) -> dict[str, Any]:
        """Tells it; returns the report."""
        from waystation import runtime

        self.screen.title("A cluster", "two islands of one host each, with two devices")
        with runtime.connect(hosts=0, name="demo") as cluster, ThreadPoolExecutor(len(ISLANDS)) as pool:
            list(
                pool.map(lambda name: cluster.add_island(name, devices_per_host=2, deadline_s=300.0), ISLANDS)
            )
            self.screen.say(f"  waystation runtime top {cluster.address}  shows it meanwhile")
            reference = self._train_alone(cluster)
            shared, shares, pictures = self._train_beside_a_rival(cluster)
        self._proof_of_losses(reference, shared)
        return {
            "claims": self._proof.held,
            "shares": shares,
            "resumed_from": shared.resumed,
            "losses": [shared.losses[step][-1] for step in sorted(shared.losses)],
            "pictures": pictures,
        }

    def _train_alone(self, cluster: Cluster) -> Told:
        self.screen.title("Alone", f"{self._plan.steps} steps on island '{ISLANDS[0]}', undisturbed")
        with self._training(cluster, "reference", save_every=0) as program:
            told = program.finish()
        first, last = told.losses[1][0], told.losses[self._plan.steps][0]
        claim = f"the model learns: its loss falls from {first:.2f} to {last:.2f} nats per byte"
        self._proof.claim(last < self._plan.learned * first, claim)
        return told

    def _train_beside_a_rival(self, cluster: Cluster) -> tuple[Told, dict[str, float], list[str]]:
        plan = self._plan
        told = " : ".join(f"{name} {share}" for name, share in SHARES.items())
        self.screen.title("Shared", f"beside a program that wants all devices, by shares {told}")
        cluster.share(SHARES)
        cluster.record_timeline()
        arguments = [cluster.address, "--name", RIVAL, "--size", str(plan.size), "--islands", *ISLANDS]
        rival = Program(RIVAL, "waystation_demo.runtime.rival", arguments, self._output)
        with (
            running(rival),
            self._training(cluster, TRAINING, save_every=plan.save_every, hold_at=plan.kill_at) as program,
        ):
            program.wait_until(lambda told: plan.kill_at in told.losses, f"step {plan.kill_at}")
            before = cluster.timeline()
            self._kill(cluster)
            told_by_training = program.finish()  # it has waited for that
            rival.finish()
            whole = cluster.timeline()
            self._check_islands(cluster, told_by_training)
        shares = self._check_shares(before)
        whole.write(self._output / "timeline.json")
        return told_by_training, shares, self._draw(before, whole)

    def _training(
        self, cluster: Cluster, name: str, *, save_every: int, hold_at: int = 0
    ) -> AbstractContextManager[Program]:
        plan = self._plan
        arguments = [cluster.address, "--name", name, "--island", ISLANDS[0]]
        arguments += ["--checkpoints", str(self._output / "checkpoints"), "--steps", str(plan.steps)]
        arguments += [
            "--save-every",
            str(save_every),
            "--hold-at",
            str(hold_at),
            "--width",
            str(plan.width),
            "--layers",
            str(plan.layers),
        ]
        return running(Program(name, "waystation_demo.runtime.train", arguments, self._output))

    def _kill(self, cluster: Cluster) -> None:
        (host,) = cluster.island(ISLANDS[0]).status().hosts
        self.screen.say(f"  SIGKILL for host '{host.name}' (process {host.process_id})")
        os.kill(host.process_id, signal.SIGKILL)

    def _check_islands(self, cluster: Cluster, told: Told) -> None:
        lost, other = (cluster.island(name).status() for name in ISLANDS)
        claim = (
            f"island '{lost.name}' lost its host and was built again; island '{other.name}' was not touched"
        )
        self._proof.claim((lost.epoch, other.epoch) == (2, 1), claim, f"epochs {lost.epoch}, {other.epoch}")
        least = self._plan.kill_at // self._plan.save_every * self._plan.save_every
        claim = f"training went on after step {told.saved_before}, its last save before that"
        is_so = told.resumed == [told.saved_before] and told.saved_before >= least
        self._proof.claim(is_so, claim, f"saved {told.saved}, resumed after {told.resumed}")

    def _check_shares(self, timeline: Timeline) -> dict[str, float]:
        from waystation.runtime.timeline.competition import competing_shares

        shares = competing_shares(timeline, ISLANDS[0], tuple(SHARES))
        whole = sum(SHARES.values())
        wrong = {
            name: shares.get(name, 0.0)
            for name, share in SHARES.items()
            if abs(shares.get(name, 0.0) - share / whole) > self._plan.share_tolerance
        }
        told = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        claim = f"while both wanted island '{ISLANDS[0]}', its device time was divided as asked: {told}"
        self._proof.claim(not wrong, claim, f"asked were {SHARES}")
        return shares

    def _proof_of_losses(self, reference: Told, shared: Told) -> None:
        """Every loss, of steps that were trained again too, is that of the undisturbed run."""
        wrong = [
            step
            for step, losses in shared.losses.items()
            if any(loss != reference.losses[step][0] for loss in losses)
        ]
        again = sum(len(losses) - 1 for losses in shared.losses.values())
        claim = (
            f"losses of all {len(reference.losses)} steps, {again} of them trained twice, equal the "
            "undisturbed run's, bit for bit"
        )
        is_so = not wrong and set(shared.losses) == set(reference.losses)
        self._proof.claim(is_so, claim, f"{len(wrong)} differ: {wrong[:3]}")

    def _draw(self, before: Timeline, whole: Timeline) -> list[str]:
        """The last moments before the kill, in which both compete, and all of it."""
        self.screen.say(f"\nThe timeline is in {self._output / 'timeline.json'}, for https://ui.perfetto.dev")
        if not plot.available():
            self.screen.say("No pictures were drawn: matplotlib is not installed (pip install matplotlib)")
            return []
        end_s = (before.end_ns - before.begin_ns) / 1e9
        part = before.between(max(0.0, end_s - DRAWN_S), end_s)
        asked = " : ".join(str(share) for share in SHARES.values())
        pictures = {
            "shares.png": (part, f"two programs on two islands, shares {asked} on each while both want it"),
            "timeline.png": (whole, f"a host of island '{ISLANDS[0]}' is killed, and training goes on"),
        }
        for name, (timeline, title) in pictures.items():
            timeline.draw(self._output / name, title=title)
            self.screen.say(f"Drawn in {self._output / name}")
        return [str(self._output / name) for name in pictures]
