"""Timelines: when the controller and the hosts of a cluster did what for each run, to be read and drawn.

`ring` and `recorder` keep stamps where they are made, as plain integers; `clocks` says how the clocks of
machines lie to each other; `history` keeps what was collected; `timeline` is what people and programs read,
`trace_events` its form for Perfetto and chrome://tracing, `picture` its picture. Knows neither Ray nor JAX.
"""

from waystation.runtime.timeline.clocks import Clock, machine
from waystation.runtime.timeline.history import History, Recording, Source
from waystation.runtime.timeline.recorder import ControllerRecorder, HostRecorder, Stamps
from waystation.runtime.timeline.timeline import Computation, HostPhases, Timeline, Transfer, WorkPhases

__all__ = [
    "Clock",
    "Computation",
    "ControllerRecorder",
    "History",
    "HostPhases",
    "HostRecorder",
    "Recording",
    "Source",
    "Stamps",
    "Timeline",
    "Transfer",
    "WorkPhases",
    "machine",
]
