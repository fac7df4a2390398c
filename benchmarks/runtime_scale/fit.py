"""From what real actors took to what the model's steps cost.

Core times are read off: those of the client and the controller grow with the number of hosts along a
line, those of a host do not. The network is what is left of the time of a single program. Nothing is
fitted to the throughput, so the model can be wrong about it: `predict` says what it should have been.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.runtime_scale.cluster import Island
from benchmarks.runtime_scale.constants import Constants

_HALVINGS = 24


@dataclass(frozen=True, slots=True)
class Measurement:
    """Real actors on one machine, running a program that computes nothing to speak of.

    Attributes:
        hosts: How many there are.
        cores: Of the machine.
        in_flight: How many programs the client keeps in flight.
        seconds: For each program, with so many in flight.
        alone_s: For each program, with none beside it.
        controller_cpu_s: Core time of client and controller for each program.
        host_cpu_s: Core time of one host for each program.
        enqueue_s: Core time of one host for each program that it begins by itself.
    """

    hosts: int
    cores: int
    in_flight: int
    seconds: float
    alone_s: float
    controller_cpu_s: float
    host_cpu_s: float
    enqueue_s: float


def fit(measurements: list[Measurement]) -> Constants:
    """The constants that explain measurements of two or more sizes."""
    sizes = np.array([measured.hosts for measured in measurements], float)
    controller = np.array([measured.controller_cpu_s for measured in measurements])
    send_s, submit_s = np.polyfit(sizes, controller, 1)
    constants = Constants(
        submit_s=max(float(submit_s), 0.0),
        send_s=max(float(send_s), 0.0),
        begin_s=float(np.mean([measured.host_cpu_s for measured in measurements])),
        hop_s=0.0,
        enqueue_s=float(np.median([measured.enqueue_s for measured in measurements])),
    )
    smallest = min(measurements, key=lambda measured: measured.hosts)
    low_s, high_s = 0.0, smallest.alone_s
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        if predict(_with_hop(constants, middle_s), smallest, in_flight=1) < smallest.alone_s:
            low_s = middle_s
        else:
            high_s = middle_s
    return _with_hop(constants, low_s)


def predict(constants: Constants, like: Measurement, in_flight: int, programs: int = 100) -> float:
    """What the model takes for each program on such a machine, in seconds."""
    island = Island(constants, like.hosts, like.enqueue_s, cores=like.cores, fan_out=None)
    return island.run(programs, in_flight) / programs


def _with_hop(constants: Constants, hop_s: float) -> Constants:
    return Constants(constants.submit_s, constants.send_s, constants.begin_s, hop_s, constants.enqueue_s)
