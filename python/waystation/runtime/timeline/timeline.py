"""A timeline as programs have it: what was done for each work, on one clock, the controller's.

Of a work that was under way when recording began or ended, or of which stamps were overwritten, some times
are not known: they are None, and `lost` says how many stamps are missing. On a device calls do not overlap:
one begins when it was dispatched and the one before it has ended, and may then still wait for others of its
collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from waystation.runtime.timeline import recorder as kinds
from waystation.runtime.timeline.history import Recording, Source
from waystation.runtime.timeline.ring import Row, rows_of


@dataclass(frozen=True, slots=True)
class Computation:
    """A call of a function on one device.

    Attributes:
        host: The host.
        device: The number of the device in it.
        work: The work that it was part of.
        client: Whose that was; empty if it is not known.
        program: Its program, likewise.
        name: The function.
        unseen: How many calls before it are in its time: their results were gone before they could be seen.
        begin_ns: When it began, in nanoseconds of the controller's clock.
        end_ns: When it ended, likewise.
    """

    host: str
    device: int
    work: int
    client: str
    program: str
    name: str
    unseen: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A block between hosts, at one of them.

    Attributes:
        host: Where this was seen.
        peer: The other host.
        work: The work that it was part of.
        is_sent: Whether it was sent: read from its device, and offered. Else it was waited for.
        size_bytes: Its bytes.
        begin_ns: When that began, in nanoseconds of the controller's clock.
        end_ns: When it ended.
    """

    host: str
    peer: str
    work: int
    is_sent: bool
    size_bytes: int
    begin_ns: int
    end_ns: int


@dataclass(slots=True)
class HostPhases:
    """A work on one host, by when it came there, in nanoseconds of the controller's clock.

    Attributes:
        host: The host.
        work: The work.
        received_ns: Its message had come.
        begun_ns: It was its turn.
        dispatched_ns: All that it says was dispatched; blocks from other hosts were waited for before that.
        ended_ns: All of it was done.
    """

    host: str
    work: int
    received_ns: int | None = None
    begun_ns: int | None = None
    dispatched_ns: int | None = None
    ended_ns: int | None = None

    @property
    def known(self) -> tuple[int, ...]:
        """The times that are known, in the order in which they must come."""
        times = self.received_ns, self.begun_ns, self.dispatched_ns, self.ended_ns
        return tuple(time for time in times if time is not None)


@dataclass(slots=True)
class IslandPhases:
    """A work on one island, as the controller saw it, in nanoseconds of its clock.

    Attributes:
        scheduled_ns: It had its place in the order.
        admitted_ns: It was first in line, and had its memory.
        dispatched_ns: What its hosts are told had been made.
    """

    scheduled_ns: int | None = None
    admitted_ns: int | None = None
    dispatched_ns: int | None = None


@dataclass(slots=True)
class WorkPhases:
    """A work, as the controller saw it.

    Attributes:
        number: Its number.
        client: Whose it was; empty if it is not known.
        program: Its program, likewise.
        submitted_ns: When it came, in nanoseconds of the controller's clock.
        completed_ns: When it had ended everywhere.
        is_failed: Whether it had failed.
        islands: What came between, by island.
    """

    number: int
    client: str = ""
    program: str = ""
    submitted_ns: int | None = None
    completed_ns: int | None = None
    is_failed: bool = False
    islands: dict[str, IslandPhases] = field(default_factory=lambda: defaultdict(IslandPhases))


@dataclass(frozen=True, slots=True)
class Timeline:
    """See above.

    Attributes:
        works: As the controller saw them, by number.
        host_phases: As hosts saw them, in order of time.
        computations: What devices did, likewise.
        transfers: What went between hosts, likewise.
        sources: Who has made stamps.
        uncertainty_ns: By how much times of a host may be wrong against the controller's, by host: its clock
            is another one on another machine.
        lost: How many stamps are missing, by host; the controller's is empty.
    """

    works: dict[int, WorkPhases]
    host_phases: tuple[HostPhases, ...]
    computations: tuple[Computation, ...]
    transfers: tuple[Transfer, ...]
    sources: tuple[Source, ...]
    uncertainty_ns: dict[str, int]
    lost: dict[str, int]

    @classmethod
    def of(cls, recordings: Sequence[Recording]) -> Timeline:
        """The timeline of what recorders have stamped."""
        works = _works(recordings)
        phases: list[HostPhases] = []
        computations: list[Computation] = []
        transfers: list[Transfer] = []
        for recording in recordings:
            if recording.source.name:
                told = _Host(recording, works)
                phases += told.phases.values()
                computations += told.computations
                transfers += told.transfers
        lost: dict[str, int] = defaultdict(int)
        for recording in recordings:
            lost[recording.source.name] += recording.lost
        return cls(
            works=works,
            host_phases=tuple(sorted(phases, key=lambda each: each.known[:1])),
            computations=tuple(sorted(computations, key=lambda each: each.begin_ns)),
            transfers=tuple(sorted(transfers, key=lambda each: each.begin_ns)),
            sources=tuple(recording.source for recording in recordings),
            uncertainty_ns={each.source.name: each.uncertainty_ns for each in recordings if each.source.name},
            lost={name: count for name, count in lost.items() if count},
        )

    @property
    def clients(self) -> tuple[str, ...]:
        """Whose computations there are, in the order of their names."""
        return tuple(sorted({each.client for each in self.computations}))

    @property
    def devices(self) -> tuple[tuple[str, int], ...]:
        """Host and number of all devices, in order."""
        counts: dict[str, int] = defaultdict(int)
        for source in self.sources:
            if source.name:
                counts[source.name] = max(counts[source.name], source.device_count)
        for each in self.computations:
            counts[each.host] = max(counts[each.host], each.device + 1)
        names = sorted(counts, key=_in_order)
        return tuple((name, device) for name in names for device in range(counts[name]))

    @property
    def begin_ns(self) -> int:
        """The first moment of it, in nanoseconds of the controller's clock; 0 if there is none."""
        return min(self._moments(), default=0)

    @property
    def end_ns(self) -> int:
        """The last moment of it."""
        return max(self._moments(), default=0)

    def between(self, begin_s: float, end_s: float) -> Timeline:
        """What devices and transfers did in a part of it; what reaches beyond is cut.

        Args:
            begin_s: When the part begins, in seconds after the first moment.
            end_s: When it ends.
        """
        begin_ns, end_ns = (self.begin_ns + round(seconds * 1e9) for seconds in (begin_s, end_s))

        def cut(items: Iterable[Any]) -> tuple[Any, ...]:
            return tuple(
                replace(each, begin_ns=max(begin_ns, each.begin_ns), end_ns=min(end_ns, each.end_ns))
                for each in items
                if each.begin_ns < end_ns and each.end_ns > begin_ns
            )

        return replace(self, computations=cut(self.computations), transfers=cut(self.transfers))

    def device_seconds(self) -> dict[str, float]:
        """For how long devices computed for each client, all devices added up, in seconds."""
        taken: dict[str, int] = dict.fromkeys(self.clients, 0)
        for each in self.computations:
            taken[each.client] += each.end_ns - each.begin_ns
        return {client: nanoseconds / 1e9 for client, nanoseconds in taken.items()}

    def shares(self) -> dict[str, float]:
        """Which part of all that devices computed was for each client; they add up to 1."""
        taken = self.device_seconds()
        whole = sum(taken.values())
        return {client: seconds / whole for client, seconds in taken.items()} if whole else {}

    def document(self) -> dict[str, Any]:
        """The Trace Event Format, in the values of JSON; see `trace_events`."""
        from waystation.runtime.timeline.trace_events import document

        return document(self)

    def write(self, path: str | Path) -> None:
        """Writes the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open."""
        import json

        Path(path).write_text(json.dumps(self.document(), separators=(",", ":")))

    def draw(self, path: str | Path, *, title: str = "") -> None:
        """Draws devices as rows and clients as colors, as a PNG, like figures 9 to 12 of the Pathways paper.

        Args:
            path: Where.
            title: What the picture is called.

        Raises:
            Unsupported: matplotlib is not installed.
        """
        from waystation.runtime.timeline.picture import draw

        draw(Path(path), self, title)

    def _moments(self) -> Iterable[int]:
        for work in self.works.values():
            yield from (time for time in (work.submitted_ns, work.completed_ns) if time is not None)
        for phases in self.host_phases:
            yield from phases.known
        for computation in self.computations:
            yield from (computation.begin_ns, computation.end_ns)
        for transfer in self.transfers:
            yield from (transfer.begin_ns, transfer.end_ns)


def _works(recordings: Sequence[Recording]) -> dict[int, WorkPhases]:
    found: dict[int, WorkPhases] = {}
    for recording in recordings:
        if recording.source.name:
            continue
        names = recording.names
        for row in rows_of(recording.rows):
            work = found.setdefault(row.work, WorkPhases(row.work))
            match row.kind:
                case kinds.SUBMITTED:
                    work.client, work.program = names[row.subject], names[row.other]
                    work.submitted_ns = row.end_ns
                case kinds.SCHEDULED:
                    work.islands[names[row.subject]].scheduled_ns = row.end_ns
                case kinds.ADMITTED:
                    work.islands[names[row.subject]].admitted_ns = row.end_ns
                case kinds.DISPATCHED:
                    work.islands[names[row.subject]].dispatched_ns = row.end_ns
                case kinds.COMPLETED:
                    work.completed_ns, work.is_failed = row.end_ns, bool(row.amount)
    return found


class _Host:
    """What one host has stamped, on the controller's clock."""

    def __init__(self, recording: Recording, works: dict[int, WorkPhases]) -> None:
        self._host = recording.source.name
        self._names = recording.names
        self._works = works
        self.phases: dict[int, HostPhases] = {}
        self.computations: list[Computation] = []
        self.transfers: list[Transfer] = []
        for row in rows_of(recording.rows):
            begin_ns, end_ns = (time - recording.offset_ns for time in (row.begin_ns, row.end_ns))
            self._take(row, begin_ns, end_ns)

    def _take(self, row: Row, begin_ns: int, end_ns: int) -> None:
        if row.kind in {kinds.RECEIVED, kinds.BEGUN, kinds.ENDED}:
            phases = self.phases.setdefault(row.work, HostPhases(self._host, row.work))
            if row.kind == kinds.RECEIVED:
                phases.received_ns = end_ns
            elif row.kind == kinds.BEGUN:
                phases.begun_ns, phases.dispatched_ns = begin_ns, end_ns
            else:
                phases.ended_ns = end_ns
        elif row.kind == kinds.COMPUTED:
            work = self._works.get(row.work) or WorkPhases(row.work)
            labels = work.client, work.program, self._names[row.subject], row.other
            self.computations.append(Computation(self._host, row.amount, row.work, *labels, begin_ns, end_ns))
        elif row.kind in {kinds.BROUGHT, kinds.SENT}:
            peer, is_sent = self._names[row.subject], row.kind == kinds.SENT
            self.transfers.append(Transfer(self._host, peer, row.work, is_sent, row.amount, begin_ns, end_ns))


def _in_order(host: str) -> tuple[str, int]:
    island, _, number = host.rpartition("/")
    return (island, int(number)) if number.isdecimal() else (host, -1)
