"""One session: a process for each part of each experiment, whose runs are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import rounds
from benchmarks.rounds import Case
from benchmarks.runtime.request import Experiment, Request
from benchmarks.runtime.shapes import Shape

EVERYTHING = "all systems"


@dataclass(slots=True, kw_only=True)
class Session(rounds.Session):
    """See the class it extends.

    Attributes:
        experiments: What is measured.
        shapes: On which hosts and devices, where that can be chosen.
        rounds: How often.
        budget_s: How long to measure one thing in a round.
    """

    experiments: Sequence[Experiment]
    shapes: Sequence[Shape]
    rounds: int
    budget_s: float

    def parts(self) -> list[tuple[Experiment, str]]:
        """What there is to run: a process each."""
        names = list(map(str, self.shapes))
        return [(each, part) for each in self.experiments for part in each.parts(names, self.quick)]

    def run(self) -> None:
        """Measures everything."""
        for experiment, part in self.parts():
            request = Request(
                output=self.output,
                experiment=experiment.NAME,
                part=part,
                rounds=self.rounds,
                budget_s=self.budget_s,
                quick=self.quick,
            )
            outcome = self.spawn("benchmarks.runtime.process", request)
            runs = outcome.pop("runs", [])
            for each in runs:
                members = [str(each.pop(name)) for name in ("subject", "system", "operation")]
                self.document["runs"].append(
                    {"experiment": experiment.NAME, **dict(zip(_NAMES, members, strict=True)), **each}
                )
            if outcome["status"] != "ok":
                self.record(Case(experiment.NAME, part, EVERYTHING, "-"), 0, outcome)
                continue
            self.write()
            self.on_run(f"{experiment.NAME}: {part}", {"status": "ok", "runs": len(runs)})


_NAMES = ("subject", "system", "operation")
