"""How long a computation must be to hide the controller (figure 6 of the Pathways paper).

Every computation is a program of its own. Devices are cores here, and busy ones: what the controller takes of
a core is missing to a computation, where nothing else of the machine is idle. So parity is reached later than
with accelerators, whose hosts have cores of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from benchmarks.processes import Outcome
from benchmarks.rounds import Case, Results
from benchmarks.runtime.dispatch import CONTROLLERS, OURS
from benchmarks.runtime.request import Request
from benchmarks.runtime.shapes import Shape
from benchmarks.targets import Line

NAME = "hiding"
TITLE = "Computations that take a while, each a program of its own, by hosts x devices of each"
DURATIONS_MS = (0.1, 0.33, 1.0, 2.3, 5.0, 10.0, 35.0)
QUICK_MS = (1.0,)
AS_GOOD = 0.95
"""This share of the throughput without a controller counts as the same."""
_TURNS = 50_000


def parts(shapes: Sequence[str], quick: bool) -> Sequence[str]:
    """One device, which leaves a core to the controller where there are two; and the shapes."""
    return list(dict.fromkeys(["1x1", *([] if quick else shapes)]))


def operation(milliseconds: float) -> str:
    """What computations of a duration are called."""
    return f"{milliseconds:g} ms"


def measure(request: Request) -> Iterator[Outcome]:
    """All durations on one shape."""
    from benchmarks.runtime.clients import OwnIsland
    from benchmarks.runtime.controllers import Controllers
    from benchmarks.runtime.turns import Timed, in_rounds
    from waystation import runtime

    shape = Shape.parse(request.part)
    with ExitStack() as ends:
        ours = ends.enter_context(OwnIsland(ends.enter_context(runtime.connect(hosts=0)), shape))
        controllers = ends.enter_context(Controllers(shape))
        turn_s = turn_seconds(controllers)
        timed = []
        for milliseconds in QUICK_MS if request.quick else DURATIONS_MS:
            turns = round(milliseconds / 1e3 / turn_s)
            timed += [
                Timed(
                    request.part,
                    OURS,
                    operation(milliseconds),
                    lambda count, turns=turns: ours.busy(count, turns),  # type: ignore[misc]
                ),
                Timed(
                    request.part,
                    CONTROLLERS,
                    operation(milliseconds),
                    lambda count, turns=turns: controllers.run("busy", count, turns=turns),  # type: ignore[misc]
                ),
            ]
        yield from in_rounds(timed, request.rounds, request.budget_s)


def turn_seconds(controllers: object) -> float:
    """How long a device is busy for one turn, in seconds: by the quickest of several calls."""
    from benchmarks.runtime.controllers import Controllers

    assert isinstance(controllers, Controllers)
    controllers.run("busy", 1, turns=1)
    return min(controllers.run("busy", 1, turns=_TURNS) for _ in range(5)) / _TURNS


def ratios(results: Results) -> dict[str, dict[str, float]]:
    """Our throughput as a share of multi-controller JAX's, by shape and operation."""
    found: dict[str, dict[str, float]] = {}
    for case in results.cases(NAME):
        ours = results.series(Case(NAME, case.subject, OURS, case.operation))
        theirs = results.series(Case(NAME, case.subject, CONTROLLERS, case.operation))
        if case.system == OURS and ours is not None and theirs is not None:
            found.setdefault(case.subject, {})[case.operation] = theirs.median / ours.median
    return found


def evaluate(results: Results) -> Iterator[Line]:
    """Nothing is asked of it."""
    del results
    yield from ()


def remarks(results: Results) -> Iterator[str]:
    """From which duration on the controller is hidden."""
    for shape, by_operation in ratios(results).items():
        hidden = None
        for name, ratio in reversed(by_operation.items()):
            if ratio < AS_GOOD:
                break
            hidden = name
        found = f"from {hidden} on" if hidden else f"by none up to {next(reversed(by_operation))}"
        yield f"{shape}: {AS_GOOD:.0%} of multi-controller JAX's throughput is reached {found}"
