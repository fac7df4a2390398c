"""What the demo claims, and how each claim is checked. Nothing is claimed that is not checked here.

A claim that does not hold raises `DemoFailed`, so a demo that returns has proven all of them.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from waystation.errors import WaystationError

if TYPE_CHECKING:
    from waystation_demo.programs import TrainingRun

# On another mesh XLA adds the same float32 numbers in another order, and float addition is not
# associative: a step may round its last bits differently, and training carries that on. Over 70 steps
# that came to 5e-7 of the loss. Without the optimizer's moments, with another random key or one batch
# off in the data, the loss is more than 1e-3 off within six steps.
LOSS_TOLERANCE = 1e-5


class DemoFailed(WaystationError):
    """The demo could not prove what it claims."""


class Proof:
    """Collects the claims that held."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.held: list[str] = []
        self._announce = announce

    def claim(self, holds: bool, claim: str, otherwise: str = "") -> None:
        """States a claim that was checked."""
        if not holds:
            raise DemoFailed(f"this claim does not hold: {claim}" + (f" ({otherwise})" if otherwise else ""))
        self.held.append(claim)
        self._announce(claim)

    def learned(self, reference: TrainingRun) -> None:
        """The training is a real one."""
        first, last = _ends(reference.losses)
        claim = f"the model learns: its loss falls from {first:.2f} to {last:.2f} nats per byte"
        self.claim(last < 0.75 * first, claim)

    def killed(self, run: TrainingRun, steps: int) -> None:
        """The process really died on the way."""
        died = run.exit_code == -signal.SIGKILL and max(run.losses) < steps
        claim = f"SIGKILL ended training at step {max(run.losses)} of {steps}"
        self.claim(died, claim, f"exit code {run.exit_code}")

    def committed(self, run: TrainingRun, whole_steps: Collection[int]) -> None:
        """Every save that was reported as done is a checkpoint now."""
        lost = [save["step"] for save in run.saves if save["step"] not in whole_steps]
        claim = f"each of the {len(run.saves)} saves that had finished is a whole checkpoint"
        self.claim(bool(run.saves) and not lost, claim, f"lost steps: {lost}")

    def tidy(self, entries: list[dict[str, Any]]) -> None:
        """Saves after the restart removed what the killed one had left."""
        left = [entry["name"] for entry in entries if not entry["checkpoint"]]
        self.claim(not left, "after the restart no unfinished attempt is left on disk", f"left: {left}")

    def same_bytes(self, what: str, found: Mapping[str, str], saved: Mapping[str, str]) -> None:
        """All arrays have the bytes that the live ones had when they were saved."""
        different = sorted(name for name in saved.keys() | found.keys() if saved.get(name) != found.get(name))
        claim = f"{what}: all {len(saved)} arrays are bit for bit those of the killed process"
        self.claim(not different, claim, f"{len(different)} differ or are missing, first: {different[:3]}")

    def same_losses(self, what: str, run: TrainingRun, reference: TrainingRun) -> None:
        """Each loss of `run` is exactly that of the uninterrupted run."""
        wrong = [step for step, loss in run.losses.items() if loss != reference.losses[step]]
        first, last = min(run.losses), max(run.losses)
        claim = f"{what}: losses of steps {first} to {last} equal the uninterrupted run's, bit for bit"
        self.claim(not wrong, claim, f"{len(wrong)} differ, first: step {wrong[:1]}")

    def close_losses(self, what: str, run: TrainingRun, reference: TrainingRun) -> float:
        """Each loss of `run` is within tolerance of the uninterrupted run's; returns the worst."""
        worst = max(relative_differences(run, reference).values())
        claim = (
            f"{what}: losses of steps {min(run.losses)} to {max(run.losses)} are within "
            f"{LOSS_TOLERANCE:.0e} of the uninterrupted run's (worst {worst:.1e})"
        )
        self.claim(worst <= LOSS_TOLERANCE, claim)
        return worst


def relative_differences(run: TrainingRun, reference: TrainingRun) -> dict[int, float]:
    """How far each loss is from the uninterrupted run's, in units of that."""
    return {
        step: abs(loss / reference.losses[step] - 1) if math.isfinite(loss) else math.inf
        for step, loss in run.losses.items()
    }


def _ends(losses: Mapping[int, float]) -> tuple[float, float]:
    last = [loss for _, loss in sorted(losses.items())[-5:]]
    return losses[min(losses)], sum(last) / len(last)
