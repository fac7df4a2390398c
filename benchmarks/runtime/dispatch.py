"""What it costs to have computations run that take next to nothing (figure 5 of the Pathways paper).

OpByOp is a call for each computation, Chained a program of 128 computations, Fused a computation that is a
chain of 128. Multi-controller JAX has no Chained: nobody is asked. Its Fused is what the devices can do: they
are told once, by nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from benchmarks.processes import Outcome
from benchmarks.rounds import Case, Results
from benchmarks.runtime.request import Request
from benchmarks.runtime.shapes import Shape
from benchmarks.targets import Line, compare

NAME = "dispatch"
TITLE = "Computations of next to nothing, by hosts x devices of each"
OURS, CONTROLLERS, RAY = "Waystation", "multi-controller JAX", "Ray"
OP_BY_OP, ALONE, WAITING, CHAINED, UNJOINED, FUSED = (
    "OpByOp", "OpByOp, a program each", "OpByOp, waiting for each", "Chained", "Chained, not joined", "Fused",
)  # fmt: skip
FUSED_SHARE, CHAINED_SHARE, NAIVE_RATIO = 0.98, 1.0, 3.0


def parts(shapes: Sequence[str], quick: bool) -> Sequence[str]:
    """The shapes."""
    del quick
    return shapes


def measure(request: Request) -> Iterator[Outcome]:
    """All systems on one shape."""
    from benchmarks.runtime.clients import OwnIsland
    from benchmarks.runtime.computations import CHAIN
    from benchmarks.runtime.controllers import Controllers
    from benchmarks.runtime.ray_actors import RayActors
    from benchmarks.runtime.turns import Timed, in_rounds
    from waystation import runtime

    shape = Shape.parse(request.part)
    with ExitStack() as ends:
        # The cluster comes first: it starts the Ray whose actors are measured beside.
        ours = ends.enter_context(OwnIsland(ends.enter_context(runtime.connect(hosts=0)), shape))
        controllers = ends.enter_context(Controllers(shape))
        actors = ends.enter_context(RayActors(shape))
        timed = [
            # As many as make whole programs, each the same as the one before.
            Timed(request.part, OURS, OP_BY_OP, ours.op_by_op, CHAIN),
            Timed(request.part, CONTROLLERS, OP_BY_OP, lambda count: controllers.run("single", count), CHAIN),
            Timed(request.part, RAY, OP_BY_OP, actors.op_by_op, CHAIN),
            Timed(request.part, OURS, CHAINED, ours.chained, CHAIN),
            Timed(request.part, OURS, UNJOINED, ours.chained_unjoined, CHAIN),
            Timed(request.part, RAY, CHAINED, actors.chained, CHAIN),
            Timed(request.part, OURS, FUSED, ours.fused, CHAIN),
            Timed(request.part, CONTROLLERS, FUSED, lambda count: controllers.run("fused", count), CHAIN),
            Timed(request.part, RAY, FUSED, actors.fused, CHAIN),
            Timed(request.part, OURS, ALONE, ours.op_by_op_alone),
            Timed(request.part, RAY, WAITING, actors.op_by_op_waiting),
        ]
        yield from in_rounds(timed, request.rounds, request.budget_s)


def evaluate(results: Results) -> Iterator[Line]:
    """What is to be reached on each shape."""
    shapes = dict.fromkeys(case.subject for case in results.cases(NAME))
    for shape in shapes:

        def line(text: str, ours: str, theirs: str, system: str, factor: float, shape: str = shape) -> Line:
            mine = results.series(Case(NAME, shape, OURS, ours))
            other = results.series(Case(NAME, shape, system, theirs))
            return compare(f"{shape}: {text}", mine, other, factor)

        yield line("Fused: of multi-controller JAX", FUSED, FUSED, CONTROLLERS, FUSED_SHARE)
        yield line("Chained: of multi-controller JAX's OpByOp", CHAINED, OP_BY_OP, CONTROLLERS, CHAINED_SHARE)
        unjoined = "Chained, not joined: of multi-controller JAX's OpByOp"
        yield line(unjoined, UNJOINED, OP_BY_OP, CONTROLLERS, CHAINED_SHARE)
        yield line("OpByOp: faster than Ray's", OP_BY_OP, OP_BY_OP, RAY, NAIVE_RATIO)


def remarks(results: Results) -> Iterator[str]:
    """What is left of what the devices can do."""
    for limit in results.cases(NAME):
        if (limit.system, limit.operation) != (CONTROLLERS, FUSED):
            continue
        best = results.series(limit)
        shares = {
            case.operation: series.median / best.median
            for case in results.cases(NAME)
            if best and case.subject == limit.subject and case.system == OURS
            if (series := results.series(case))
        }
        shown = "; ".join(f"{operation}: {1 / times:.3f}" for operation, times in shares.items())
        yield f"{limit.subject}: Waystation's throughput, as a part of what the devices can do: {shown}"
