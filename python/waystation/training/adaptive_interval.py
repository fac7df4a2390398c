"""How long to compute between two saves, so that a program that fails now and then ends soonest.

With a save that costs δ seconds and a mean time M between failures (which come at random: exponentially
distributed), a program that computes for τ seconds between saves runs, for each second of work,

    M · e^(R/M) · (e^((τ + δ)/M) - 1) / τ        seconds, R being the time that a restart takes

(Daly 2006, equation 20). Both formulas below are approximations of the τ that makes this least; R does not
matter to it.

- Young, J. W.: A first order approximation to the optimum checkpoint interval. Communications of the ACM
  17(9), 1974: τ = √(2δM). Good where δ is far less than M.
- Daly, J. T.: A higher order estimate of the optimum checkpoint interval for restart dumps. Future Generation
  Computer Systems 22(3), 2006, equation 37: τ = √(2δM) · (1 + √(δ/2M)/3 + (δ/2M)/9) - δ where δ < 2M, else M.

A save in the background costs what it blocks, and what it slows the program down while it runs. What it takes
until it is committed makes a failure lose more, but by the same amount whatever τ is, so it does not move the
optimum; only no interval is shorter than that. Pure arithmetic; nothing here looks at a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from waystation._arguments import NUMBER, require_type
from waystation._errors import InvalidInput
from waystation.training.costs import SaveCost

Formula = Literal["young", "daly"]


def young_interval(cost_s: float, mean_time_between_failures_s: float) -> float:
    """Young's first-order approximation of the best time between saves, in seconds."""
    return math.sqrt(2 * cost_s * mean_time_between_failures_s)


def daly_interval(cost_s: float, mean_time_between_failures_s: float) -> float:
    """Daly's higher-order approximation of the best time between saves, in seconds."""
    if cost_s >= 2 * mean_time_between_failures_s:
        return mean_time_between_failures_s
    ratio = cost_s / (2 * mean_time_between_failures_s)
    first = young_interval(cost_s, mean_time_between_failures_s)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def expected_seconds(
    interval_s: float, cost_s: float, mean_time_between_failures_s: float, restart_s: float = 0.0
) -> float:
    """How long a program runs for each second of its work: what the best interval makes least."""
    mean_s = mean_time_between_failures_s
    return mean_s * math.exp(restart_s / mean_s) * math.expm1((interval_s + cost_s) / mean_s) / interval_s


@dataclass(frozen=True)
class AdaptiveInterval:
    """How the time between two saves follows from what a save costs.

    Attributes:
        mean_time_between_failures_s: Of the whole program: that of one host, divided by their number.
        overhead_limit: The largest share of the time that saves may take, whatever failures cost; None: any.
        background_weight: What a second of saving in the background costs the program, in seconds of its
            own: 0 if it does not notice, 1 if it stands still.
        minimum_interval_s: Never save more often than this.
        formula: `daly`, or `young` for the first-order one.
    """

    mean_time_between_failures_s: float
    overhead_limit: float | None = None
    background_weight: float = 0.0
    minimum_interval_s: float = 0.0
    formula: Formula = "daly"

    def __post_init__(self) -> None:
        limit = self.overhead_limit
        for name in ("mean_time_between_failures_s", "background_weight", "minimum_interval_s"):
            require_type(name, getattr(self, name), NUMBER, "a number")
        require_type("overhead_limit", limit, (NUMBER, type(None)), "a number or None")
        problems = {
            "mean_time_between_failures_s must be positive": not self.mean_time_between_failures_s > 0,
            "overhead_limit must be between 0 and 1": limit is not None and not 0 < limit < 1,
            "background_weight must be from 0 to 1": not 0 <= self.background_weight <= 1,
            "minimum_interval_s must not be negative": not self.minimum_interval_s >= 0,
            "formula must be 'young' or 'daly'": self.formula not in ("young", "daly"),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise InvalidInput(f"{problem}: {self}")

    def seconds(self, cost: SaveCost) -> float:
        """The time from the end of one save's blocking part to the beginning of the next save."""
        cost_s = cost.blocking_s + self.background_weight * cost.background_s
        formula = young_interval if self.formula == "young" else daly_interval
        wanted_s = formula(cost_s, self.mean_time_between_failures_s)
        if self.overhead_limit is not None:
            wanted_s = max(wanted_s, cost_s * (1 - self.overhead_limit) / self.overhead_limit)
        return max(wanted_s, cost.background_s, self.minimum_interval_s)
