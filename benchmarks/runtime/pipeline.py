"""Pipelines of tiny stages, each on a host of its own (figure 7 of the Pathways paper).

*Sequential* dispatch gives a stage to its host when the one before has ended, as if its shapes depended on
data; *parallel* dispatch gives all hosts their stages at once. Both wait for a traversal before the next
begins, so that what is measured is how long one takes. A program of 32 traversals is one message for each
host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.processes import Outcome
from benchmarks.rounds import Case, Results
from benchmarks.runtime.request import Request
from benchmarks.targets import Line, compare

NAME = "pipeline"
TITLE = "Stages of pipelines, each on a host of its own"
OURS = "Waystation"
SEQUENTIAL, PARALLEL, MANY = "sequential dispatch", "parallel dispatch", "32 traversals in one program"
AHEAD = "parallel dispatch, without waiting"
COUNTS = (1, 2, 4, 8)
QUICK_COUNTS = (2,)
JUDGED = 4
PARALLEL_RATIO, MANY_RATIO = 1.5, 4.0


def parts(shapes: Sequence[str], quick: bool) -> Sequence[str]:
    """One, whatever the shapes: an island of as many hosts as the longest pipeline has stages."""
    del shapes
    return ["-".join(map(str, QUICK_COUNTS if quick else COUNTS))]


def subject(stages: int) -> str:
    """What so many stages are called."""
    return f"{stages} stage{'s' * (stages != 1)}"


def measure(request: Request) -> Iterator[Outcome]:
    """All lengths, in all ways."""
    from benchmarks.runtime.pipelines import TRAVERSALS, Pipelines
    from benchmarks.runtime.turns import Timed, in_rounds
    from waystation import runtime
    from waystation.runtime.controller import Dispatch

    counts = [int(each) for each in request.part.split("-")]
    with runtime.connect(hosts=0) as cluster:
        pipelines = Pipelines(cluster, max(counts))
        timed = []
        for stages in counts:
            alone = pipelines.program(stages, 1, Dispatch.PARALLEL)
            waiting = pipelines.program(stages, 1, Dispatch.SEQUENTIAL)
            many = pipelines.program(stages, TRAVERSALS, Dispatch.PARALLEL)
            name = subject(stages)
            timed += [
                Timed(name, OURS, SEQUENTIAL, waiting.one_by_one, waiting.computations),
                Timed(name, OURS, PARALLEL, alone.one_by_one, alone.computations),
                Timed(name, OURS, AHEAD, alone.ahead, alone.computations),
                Timed(name, OURS, MANY, many.one_by_one, many.computations),
            ]
        yield from in_rounds(timed, request.rounds, request.budget_s)


def evaluate(results: Results) -> Iterator[Line]:
    """What is to be reached with four stages."""
    name = subject(JUDGED)

    def line(text: str, ours: str, theirs: str, factor: float) -> Line:
        mine, other = (results.series(Case(NAME, name, OURS, way)) for way in (ours, theirs))
        return compare(f"{name}: {text}", mine, other, factor)

    yield line("parallel dispatch, of sequential", PARALLEL, SEQUENTIAL, PARALLEL_RATIO)
    yield line("one message for 32 traversals, of one for each", MANY, PARALLEL, MANY_RATIO)


def remarks(results: Results) -> Iterator[str]:
    """Nothing is said of it."""
    del results
    yield from ()
