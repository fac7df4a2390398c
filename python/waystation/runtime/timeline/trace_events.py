"""A timeline in the Trace Event Format, the JSON that Perfetto and chrome://tracing open.

Written after the public description of the format ("Trace Event Format", Google, 2016). Each host is a
process: a track for each device, one for what it dispatches, with what it waits for within, and one for what
it sends. The controller is another: a track for each client, with the life of each of its works, and one for
what it dispatches, from which an arrow leads to the first computation of that work on each host. What can
overlap is asynchronous (`b`, `e`), everything else complete (`X`). Times are in microseconds, from the first
moment of the timeline on.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waystation.runtime.timeline.timeline import Computation, Timeline, WorkPhases

Event = dict[str, Any]

CONTROLLER = 1  # its number as a process; hosts follow
_DISPATCH, _SENDS, _DEVICES = 1, 2, 10  # tracks of a host
_CLIENTS = 10  # of the controller, whose dispatch has the number of a host's
# Colors that the viewers of the format know by name.
_COLORS = (
    *("thread_state_running", "thread_state_iowait", "rail_response", "rail_animation", "rail_idle"),
    *("thread_state_runnable", "cq_build_passed", "cq_build_failed", "good", "bad", "terrible", "olive"),
)


def document(timeline: Timeline) -> dict[str, Any]:
    """The whole document."""
    return {
        "traceEvents": list(_Writer(timeline).events()),
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": "monotonic clock of the controller's machine, from the first moment on",
            "first_moment_ns": timeline.begin_ns,
            "clock_uncertainty_ns": timeline.uncertainty_ns,
            "lost_stamps": timeline.lost,
        },
    }


class _Writer:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._begin_ns = timeline.begin_ns
        hosts = dict.fromkeys(host for host, _ in timeline.devices)
        hosts.update(dict.fromkeys(each.host for each in timeline.host_phases))
        self._processes = {host: number for number, host in enumerate(hosts, CONTROLLER + 1)}
        clients = sorted({work.client for work in timeline.works.values()})
        self._clients = {client: number for number, client in enumerate(clients, _CLIENTS)}
        named = sorted({*clients, *timeline.clients})
        self._colors = {client: _COLORS[place % len(_COLORS)] for place, client in enumerate(named)}

    def events(self) -> Iterator[Event]:
        """All events."""
        yield from self._tracks()
        for work in self._timeline.works.values():
            yield from self._life(work)
            yield from self._dispatches(work)
        for phases in self._timeline.host_phases:
            if phases.begun_ns is None or phases.dispatched_ns is None:
                continue
            process = self._processes[phases.host]
            waited_ns = None if phases.received_ns is None else phases.begun_ns - phases.received_ns
            told = {"work": phases.work, "waited_us": None if waited_ns is None else waited_ns / 1e3}
            name = self._program(phases.work)
            yield self._complete(
                process, _DISPATCH, name, "dispatch", phases.begun_ns, phases.dispatched_ns, told
            )
        for each in self._timeline.transfers:
            arguments = {"work": each.work, "bytes": each.size_bytes, "host": each.peer}
            track = _SENDS if each.is_sent else _DISPATCH
            name = f"to {each.peer}" if each.is_sent else f"from {each.peer}"
            process = self._processes[each.host]
            yield self._complete(process, track, name, "transfer", each.begin_ns, each.end_ns, arguments)
        yield from self._computations()

    def _tracks(self) -> Iterator[Event]:
        yield from self._named(CONTROLLER, "controller", {_DISPATCH: "dispatch"})
        for client, track in self._clients.items():
            yield _metadata("thread_name", CONTROLLER, track, name=f"client {client or '(unknown)'}")
        devices: dict[str, list[int]] = {}
        for host, device in self._timeline.devices:
            devices.setdefault(host, []).append(device)
        for host, process in self._processes.items():
            tracks = {_DISPATCH: "dispatch", _SENDS: "sends"}
            tracks |= {_DEVICES + device: f"device {device}" for device in devices.get(host, [])}
            yield from self._named(process, f"host {host}", tracks)

    def _named(self, process: int, name: str, tracks: dict[int, str]) -> Iterator[Event]:
        yield _metadata("process_name", process, 0, name=name)
        yield _metadata("process_sort_index", process, 0, sort_index=process)
        for track, title in tracks.items():
            yield _metadata("thread_name", process, track, name=title)
            yield _metadata("thread_sort_index", process, track, sort_index=track)

    def _life(self, work: WorkPhases) -> Iterator[Event]:
        """A work at the controller, with what it waited for within."""
        if work.submitted_ns is None or work.completed_ns is None:
            return
        track = self._clients[work.client]
        arguments = {"work": work.number, "client": work.client, "failed": work.is_failed}
        name, identity = work.program or f"work {work.number}", hex(work.number)
        event = functools.partial(self._asynchronous, f"client {work.client}", track)
        yield event("b", name, identity, work.submitted_ns, arguments)
        for island, phases in sorted(work.islands.items()):
            times = work.submitted_ns, phases.scheduled_ns, phases.admitted_ns, phases.dispatched_ns
            ends = *times[1:], work.completed_ns
            for what, begin_ns, end_ns in zip(
                ("order", "memory", "message", "hosts"), times, ends, strict=True
            ):
                if begin_ns is not None and end_ns is not None:
                    part = f"{identity} {island}"
                    yield event("b", f"{what}: {island}", part, begin_ns, {})
                    yield event("e", f"{what}: {island}", part, end_ns, {})
        yield event("e", name, identity, work.completed_ns, {})

    def _dispatches(self, work: WorkPhases) -> Iterator[Event]:
        for island, phases in sorted(work.islands.items()):
            if phases.admitted_ns is None or phases.dispatched_ns is None:
                continue
            arguments = {"work": work.number, "client": work.client, "island": island}
            yield self._complete(
                CONTROLLER,
                _DISPATCH,
                work.program or f"work {work.number}",
                "dispatch",
                phases.admitted_ns,
                phases.dispatched_ns,
                arguments,
                self._colors.get(work.client),
            )

    def _computations(self) -> Iterator[Event]:
        first: dict[tuple[int, str], Computation] = {}
        for each in self._timeline.computations:
            first.setdefault((each.work, each.host), each)
            arguments = {"work": each.work, "client": each.client, "program": each.program}
            if each.unseen:
                arguments["calls"] = each.unseen + 1
            process, color = self._processes[each.host], self._colors.get(each.client)
            yield self._complete(
                process,
                _DEVICES + each.device,
                each.name,
                "compute",
                each.begin_ns,
                each.end_ns,
                arguments,
                color,
            )
        for (number, host), each in first.items():
            work = self._timeline.works.get(number)
            phases = None if work is None else work.islands.get(host.rpartition("/")[0])
            if phases is None or phases.admitted_ns is None:
                continue
            flow = {"name": "dispatch", "cat": "dispatch", "id": zlib.crc32(f"{number} {host}".encode())}
            at = {"ts": self._time(phases.admitted_ns), "pid": CONTROLLER, "tid": _DISPATCH}
            yield {"ph": "s", **flow, **at}
            there = {"ts": self._time(each.begin_ns), "pid": self._processes[host]}
            yield {"ph": "f", "bp": "e", **flow, **there, "tid": _DEVICES + each.device}

    def _complete(
        self,
        process: int,
        track: int,
        name: str,
        category: str,
        begin_ns: int,
        end_ns: int,
        arguments: dict[str, Any],
        color: str | None = None,
    ) -> Event:
        event = {
            "ph": "X",
            "name": name,
            "cat": category,
            "ts": self._time(begin_ns),
            "dur": (end_ns - begin_ns) / 1e3,
            "pid": process,
            "tid": track,
            "args": arguments,
        }
        return event if color is None else {**event, "cname": color}

    def _asynchronous(
        self,
        category: str,
        track: int,
        phase: str,
        name: str,
        identity: str,
        time_ns: int,
        arguments: dict[str, Any],
    ) -> Event:
        place = {"pid": CONTROLLER, "tid": track, "id": identity, "ts": self._time(time_ns)}
        return {"ph": phase, "name": name, "cat": category, **place, "args": arguments}

    def _program(self, number: int) -> str:
        work = self._timeline.works.get(number)
        return (work.program if work is not None else "") or f"work {number}"

    def _time(self, time_ns: int) -> float:
        return (time_ns - self._begin_ns) / 1e3


def _metadata(what: str, process: int, track: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": arguments}
