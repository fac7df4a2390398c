"""Training of one program over all devices of an island, against plain JAX (table 1 of the Pathways paper).

The same step, from the same parameters, over the same devices: losses are compared by their bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.processes import Outcome
from benchmarks.rounds import Case, Results
from benchmarks.runtime.dispatch import CONTROLLERS, OURS
from benchmarks.runtime.request import Request
from benchmarks.runtime.shapes import Shape
from benchmarks.targets import Line, compare

NAME = "training"
TITLE = "Steps of training, by model; hosts x devices of each"
STEPS, QUICK_STEPS = 50, 3
SHARE = 0.97
_PROCESS = "benchmarks.runtime.training_process"


def parts(shapes: Sequence[str], quick: bool) -> Sequence[str]:
    """The first shape."""
    del quick
    return shapes[:1]


def measure(request: Request) -> Iterator[Outcome]:
    """All models, by both, in turns."""
    from benchmarks.runtime import models
    from benchmarks.runtime.controllers import Controllers
    from benchmarks.runtime.turns import Timed
    from waystation import runtime

    shape = Shape.parse(request.part)
    steps = QUICK_STEPS if request.quick else STEPS
    found = models.QUICK_MODELS if request.quick else models.MODELS
    with ExitStack() as ends:
        cluster = ends.enter_context(runtime.connect(hosts=0))
        controllers = ends.enter_context(Controllers(shape, _PROCESS))
        ours = _Training(cluster, shape)
        for repetition in range(-1, request.rounds):  # the first one is not counted: it compiles
            for name, model in found.items():
                asked = {"operation": "train", "width": model.width, "batch": model.batch, "count": steps}
                systems: list[tuple[str, Any]] = [
                    (OURS, lambda model=model: ours.run(model, steps)),
                    (CONTROLLERS, lambda asked=asked: _plain(controllers.ask(asked))),
                ]
                for system, train in systems if repetition % 2 else systems[::-1]:
                    seconds, losses = train()
                    timed = Timed(f"{name}, {shape}", system, "step", lambda count: 0.0)
                    if repetition >= 0:
                        yield timed.outcome(repetition, steps, seconds, losses=losses)


def _plain(answers: list[dict[str, Any]]) -> tuple[float, list[str]]:
    seconds = max(each["end_s"] for each in answers) - min(each["begin_s"] for each in answers)
    return seconds, answers[0]["losses"]


class _Training:
    def __init__(self, cluster: Any, shape: Shape) -> None:
        from jax.sharding import PartitionSpec as P

        from benchmarks.runtime import models
        from benchmarks.runtime.computations import AXIS

        cluster.add_island(NAME, hosts=shape.hosts, devices_per_host=shape.devices_per_host)
        self._client = client = cluster.start_client()
        self._slice = client.make_virtual_device_set().add_slice(shape.devices, island=NAME)
        self._whole, self._spread = P(), P(AXIS)
        self._step = client.jit(
            models.step,
            self._slice,
            in_shardings=(self._whole, self._spread, self._spread),
            out_shardings=self._whole,
            donate_argnums=0,
        )

    def run(self, model: Any, steps: int) -> tuple[float, list[str]]:
        from benchmarks.runtime import models

        def put(array: Any, how: Any) -> Any:
            return self._client.put(array, self._slice, how).block_until_ready()

        parameters: Any = [put(each, self._whole) for each in models.start(model)]
        given, wanted = (put(each, self._spread) for each in models.batch(model))
        losses = []
        begin_s = time.monotonic()
        for _ in range(steps):
            parameters, loss = self._step(parameters, given, wanted)
            self._client.flush()
            losses.append(loss)
        parameters[0].block_until_ready()
        seconds = time.monotonic() - begin_s
        return seconds, [float(each).hex() for each in losses]


def evaluate(results: Results) -> Iterator[Line]:
    """The same losses, and throughput."""
    for case in results.cases(NAME):
        if case.system != OURS:
            continue
        theirs = Case(NAME, case.subject, CONTROLLERS, case.operation)
        pairs = [
            (ours["losses"], plain["losses"])
            for ours in results.runs(experiment=NAME, subject=case.subject, system=OURS)
            for plain in results.runs(experiment=NAME, subject=case.subject, system=CONTROLLERS)
            if ours["round"] == plain["round"]
        ]
        alike = sum(ours == plain for ours, plain in pairs)
        text = f"{case.subject}: losses of all steps the same, bit by bit, in rounds"
        yield Line(text, f"{len(pairs)}", f"{alike}", f"{alike}", alike == len(pairs) > 0)
        text = f"{case.subject}: of plain JAX's throughput"
        yield compare(text, results.series(case), results.series(theirs), SHARE)


def remarks(results: Results) -> Iterator[str]:
    """Where a step is too short for what is asked."""
    for case in results.cases(NAME):
        series = results.series(case)
        if case.system == CONTROLLERS and series is not None and series.median < 0.05:
            yield f"{case.subject}: a step takes {series.median * 1e3:.1f} ms, and 50 were meant"
