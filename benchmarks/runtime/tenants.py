"""Programs that share an island: throughput of all together, and whether each has its share.

Throughput (figure 8 of the Pathways paper): clients that each keep programs of one computation in flight,
against multi-controller JAX, which runs the same computations of a single program. Shares (figure 9): four
clients with weights, whose parts of the device time are counted while all four compete, from the timeline.
Clients are threads of one process, with a connection each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from benchmarks.processes import Outcome
from benchmarks.rounds import Case, Results
from benchmarks.runtime.dispatch import CONTROLLERS, OURS
from benchmarks.runtime.hiding import operation, turn_seconds
from benchmarks.runtime.request import Request
from benchmarks.runtime.shapes import Shape
from benchmarks.targets import Line, compare

NAME = "tenants"
TITLE = "Clients that share an island of one host with one device"
SHARES = "shares"
CLIENTS, QUICK_CLIENTS = (1, 2, 4, 8, 16), (2,)
DURATIONS_MS, QUICK_MS = (0.33, 1.0, 2.3, 10.0), (1.0,)
WEIGHTS = ((1, 1, 1, 1), (1, 2, 4, 8))
SHARED_MS = 1.0
MOST_OFF = 0.05
SHAPE = Shape(1, 1)
_SHARE_BUDGETS = 3  # so many times as long as the others are measured
_LEAST_S = 1.0  # until all have begun


def parts(shapes: Sequence[str], quick: bool) -> Sequence[str]:
    """Throughput, and shares, whatever the shapes."""
    del shapes, quick
    return ["throughput", SHARES]


def subject(clients: int) -> str:
    """What so many clients are called."""
    return f"{clients} client{'s' * (clients != 1)}"


def weights_text(weights: Sequence[int]) -> str:
    """Weights as people write them."""
    return ":".join(map(str, weights))


def measure(request: Request) -> Iterator[Outcome]:
    """Throughput, or shares."""
    yield from (_shares if request.part == SHARES else _throughput)(request)


def _throughput(request: Request) -> Iterator[Outcome]:
    from benchmarks.runtime.controllers import Controllers
    from benchmarks.runtime.sharing import Tenants
    from benchmarks.runtime.turns import Timed, in_rounds
    from waystation import runtime

    counts = QUICK_CLIENTS if request.quick else CLIENTS
    with ExitStack() as ends:
        cluster = ends.enter_context(runtime.connect(hosts=0))
        tenants = ends.enter_context(Tenants(cluster, SHAPE, max(counts)))
        controllers = ends.enter_context(Controllers(SHAPE))
        turn_s = turn_seconds(controllers)
        timed = []
        for milliseconds in QUICK_MS if request.quick else DURATIONS_MS:
            turns = round(milliseconds / 1e3 / turn_s)
            name = operation(milliseconds)
            timed.append(
                Timed(
                    subject(1),
                    CONTROLLERS,
                    name,
                    lambda count, turns=turns: controllers.run("busy", count, turns=turns),  # type: ignore[misc]
                )
            )
            timed += [
                Timed(
                    subject(clients),
                    OURS,
                    name,
                    lambda count, clients=clients, turns=turns: tenants.run(clients, count, turns),  # type: ignore[misc]
                    clients,
                )
                for clients in counts
            ]
        yield from in_rounds(timed, request.rounds, request.budget_s)


def _shares(request: Request) -> Iterator[Outcome]:
    from benchmarks.runtime.controllers import Controllers
    from benchmarks.runtime.sharing import Tenants
    from benchmarks.runtime.turns import Timed
    from waystation import runtime

    with Controllers(SHAPE) as controllers:
        turns = round(SHARED_MS / 1e3 / turn_seconds(controllers))
    with runtime.connect(hosts=0) as cluster, Tenants(cluster, SHAPE, len(WEIGHTS[0])) as tenants:
        for repetition in range(request.rounds):
            for weights in WEIGHTS:
                seconds = max(_LEAST_S, request.budget_s * _SHARE_BUDGETS)
                count, shares = tenants.share(weights, seconds, turns)
                asked = [weight / sum(weights) for weight in weights]
                off = max(abs(share / wanted - 1) for share, wanted in zip(shares, asked, strict=True))
                timed = Timed(SHARES, OURS, weights_text(weights), lambda count: 0.0)
                yield timed.outcome(repetition, count, seconds, shares=shares, off=off)


def evaluate(results: Results) -> Iterator[Line]:
    """Throughput with any number of clients, and shares."""
    for case in results.cases(NAME):
        if case.system != OURS or case.subject == SHARES:
            continue
        theirs = results.series(Case(NAME, subject(1), CONTROLLERS, case.operation))
        text = f"{case.subject}, programs of {case.operation}: together, of multi-controller JAX"
        yield compare(text, results.series(case), theirs, 1.0)
    for weights in WEIGHTS:
        off = results.series(Case(NAME, SHARES, OURS, weights_text(weights)), "off")
        text, needed = f"shares {weights_text(weights)}: off by", f"≤ {MOST_OFF:.0%}"
        if off is None:
            yield Line(text, needed, "not measured", "", None)
        else:
            yield Line(text, needed, f"{off.median:.1%}", f"{off.worst:.1%}", off.median <= MOST_OFF)


def remarks(results: Results) -> Iterator[str]:
    """The shares that clients had."""
    for run in results.runs(experiment=NAME, subject=SHARES):
        if run["status"] == "ok":
            found = ", ".join(f"{share:.3f}" for share in run["shares"])
            yield f"weights {run['operation']}, round {run['round']}: parts of the device time {found}"
