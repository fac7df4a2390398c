"""Timelines that the window draws: files in the Trace Event Format, and recoveries of the memory tier.

A file is what `Cluster.write_timeline` writes, or any other program for Perfetto; or what a launch keeps of
the recoveries of its program: its document, or the lines of `….recoveries.jsonl`. All become events, and
these tracks: names, and columns of numbers that a page can draw by the hundred thousand. Events come from
files, so whatever has no meaning in the format is counted and left out, and nothing of it is trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from waystation import storage
from waystation._errors import InvalidInput
from waystation.tree import parse_json

LIMIT_BYTES = 256 << 20
MOST_EVENTS = 500_000
_MOST_LANES = 32
_MOST_US = 1e18  # thirty thousand years

Event = dict[str, Any]


@dataclass(slots=True)
class Track:
    """What is drawn beside one name. The columns are of equal length, in the order of `begin_us`.

    Attributes:
        process: The name of its process.
        name: Its own.
        order: By which tracks are sorted.
        begin_us: When each event began, in microseconds.
        duration_us: How long it took; 0 of what has no duration.
        names: The number of its name among those of the timeline.
        lanes: The line on which it is drawn, so that none covers another.
        events: The number of its event in the file.
    """

    process: str
    name: str
    order: tuple[float, float, str, str]
    begin_us: list[float] = field(default_factory=list)
    duration_us: list[float] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)


@dataclass(slots=True)
class DrawnTimeline:
    """A timeline as the page has it.

    Attributes:
        tracks: In order.
        names: Of events, each once.
        left_out: Events that have no meaning, or lack their other half.
        about: What the file says of itself.
        source: All events of the file, by number.
    """

    tracks: list[Track]
    names: list[str]
    left_out: int
    about: dict[str, Any]
    source: list[Event]

    def document(self) -> dict[str, Any]:
        """As JSON has it, without the events of the file."""
        spans = [
            (begin, begin + duration)
            for track in self.tracks
            for begin, duration in zip(track.begin_us, track.duration_us, strict=True)
        ]
        return {
            "begin_us": min((begin for begin, _ in spans), default=0.0),
            "end_us": max((end for _, end in spans), default=0.0),
            "events": len(spans),
            "left_out": self.left_out,
            "about": self.about,
            "names": self.names,
            "tracks": [
                {
                    "process": track.process,
                    "name": track.name,
                    "begin_us": track.begin_us,
                    "duration_us": track.duration_us,
                    "names": track.names,
                    "lanes": track.lanes,
                    "events": track.events,
                }
                for track in self.tracks
            ],
        }


def read_timeline(path: str) -> DrawnTimeline:
    """Reads a file of events, or of recoveries.

    Raises:
        NotFound: There is none.
        InvalidInput: It holds neither, or more than can be drawn.
        Corrupt: It is larger than 256 MiB.
    """
    content = storage.read_file(path, limit_bytes=LIMIT_BYTES)
    events, about = _events_in(content, path)
    if len(events) > MOST_EVENTS:
        raise InvalidInput(
            f"'{path}' has {len(events)} events, and at most {MOST_EVENTS} are drawn; open it in Perfetto, "
            "or record for a shorter time",
            path=path,
        )
    return _drawn(events, about)


def _events_in(content: bytes, path: str) -> tuple[list[Event], dict[str, Any]]:
    try:
        found: Any = parse_json(content, path, allow_nan=True)
    except (ValueError, InvalidInput):
        found = _lines(content)
    if isinstance(found, dict) and isinstance(found.get("traceEvents"), list):
        about = found.get("otherData")
        return found["traceEvents"], about if isinstance(about, dict) else {}
    if isinstance(found, dict) and isinstance(found.get("recoveries"), list):
        found = found["recoveries"]
    elif isinstance(found, dict):
        found = [found]
    if isinstance(found, list) and found and all(_is_recovery(each) for each in found):
        return list(_events_of_recoveries(found)), {"recoveries": len(found)}
    if isinstance(found, list) and any(isinstance(each, dict) and "ph" in each for each in found):
        return found, {}
    raise InvalidInput(
        f"'{path}' is no timeline: it holds neither events of the Trace Event Format, as "
        "'cluster.write_timeline' writes them, nor recoveries, as 'waystation launch' keeps them",
        path=path,
    )


def _lines(content: bytes) -> list[Any] | None:
    try:
        return [json.loads(line) for line in content.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return None


# ---- recoveries --------------------------------------------------------------------------------

_MOMENTS = ("begun_at_s", "prepared_at_s", "loading_at_s", "loaded_at_s", "stepped_at_s")


def _is_recovery(found: Any) -> bool:
    return isinstance(found, dict) and all(_number(found.get(name)) is not None for name in _MOMENTS)


def _events_of_recoveries(recoveries: list[dict[str, Any]]) -> Iterator[Event]:
    """A track for each recovery, with its phases as `waystation.memory.Recovery` has them."""
    for number, found in enumerate(recoveries):
        yield {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "memory tier"}}
        title = f"recovery {number + 1}: step {found.get('step')}"
        yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": title}}
        begun, prepared, loading, loaded, stepped = (float(found[name]) for name in _MOMENTS)
        transfer, brought = (_number(found.get(name)) or 0.0 for name in ("transfer_s", "brought_s"))
        failed, ended = _number(found.get("failed_at_s")), _number(found.get("ended_at_s"))
        phases = [
            ("decide", begun, prepared - transfer),
            ("transfer", prepared - transfer, prepared),
            ("shards of other hosts", loading, loading + brought),
            ("restore", loading, loaded),
            ("first step", loaded, stepped),
        ]
        if failed is not None and ended is not None:
            phases = [("detect", failed, ended), ("start", ended, begun), *phases]
        for name, begin, end in phases:
            if end > begin:
                yield {
                    "ph": "X",
                    "name": name,
                    "cat": "recovery",
                    "ts": begin * 1e6,
                    "dur": (end - begin) * 1e6,
                    "pid": 1,
                    "tid": number,
                    "args": {"step": found.get("step"), "seconds": end - begin},
                }


# ---- tracks ------------------------------------------------------------------------------------


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return float(value) if is_number and math.isfinite(value) else None
    except OverflowError:
        return None


def _time(value: Any) -> float | None:
    """A time in microseconds; None if it is none, or further away than anything can be."""
    found = _number(value)
    return None if found is None or abs(found) > _MOST_US else found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value) if value is not None else ""


@dataclass(slots=True)
class _Span:
    track: tuple[str, str]
    begin_us: float
    duration_us: float
    name: str
    event: int


def _drawn(events: list[Event], about: dict[str, Any]) -> DrawnTimeline:
    reader = _Reader()
    for number, event in enumerate(events):
        reader.take(number, event)
    names: dict[str, int] = {}
    tracks: dict[tuple[str, str], Track] = {}
    for span in sorted(reader.spans, key=lambda span: (span.begin_us, -span.duration_us)):
        track = tracks.get(span.track)
        if track is None:
            track = tracks[span.track] = reader.track(span.track)
        track.begin_us.append(span.begin_us)
        track.duration_us.append(span.duration_us)
        track.names.append(names.setdefault(span.name, len(names)))
        track.events.append(span.event)
    for track in tracks.values():
        track.lanes = _lanes(zip(track.begin_us, track.duration_us, strict=True))
    ordered = sorted(tracks.values(), key=lambda track: track.order)
    return DrawnTimeline(ordered, list(names), reader.left_out + reader.open_count, about, events)


def _lanes(spans: Iterable[tuple[float, float]]) -> list[int]:
    """The first line that is free, for each, in the order of their beginnings: what is nested is below. Of
    what does not fit on so many lines, the last one has all."""
    ends: list[float] = []
    lanes = []
    for begin, duration in spans:
        free = next((lane for lane, end in enumerate(ends) if end <= begin), len(ends))
        lane = min(free, _MOST_LANES - 1)
        ends[lane : lane + 1] = [begin + duration]
        lanes.append(lane)
    return lanes


class _Reader:
    """Makes spans of events.

    Attributes:
        spans: They.
        left_out: Events without a meaning.
    """

    def __init__(self) -> None:
        self.spans: list[_Span] = []
        self.left_out = 0
        self._names: dict[tuple[str, ...], str] = {}
        self._orders: dict[tuple[str, ...], float] = {}
        self._open: dict[tuple[str, ...], list[tuple[int, float, str]]] = {}

    @property
    def open_count(self) -> int:
        """Events that have begun, and of which no end was seen."""
        return sum(map(len, self._open.values()))

    def track(self, key: tuple[str, str]) -> Track:
        """The track of a process and thread, or of a category."""
        process, thread = key
        name = self._names.get(key, thread if thread.startswith(" ") else f"thread {thread}").strip()
        order = self._orders.get((process,), math.inf), self._orders.get(key, math.inf), process, thread
        return Track(self._names.get((process,), f"process {process}"), name, order)

    def take(self, number: int, event: Any) -> None:
        """Takes the next event of the file."""
        if not isinstance(event, dict):
            self.left_out += 1
            return
        phase, key = event.get("ph"), (_text(event.get("pid")), _text(event.get("tid")))
        begin_us = _time(event.get("ts"))
        if phase == "M":
            self._name(event, key)
        elif phase in ("s", "t", "f", "C"):
            pass  # arrows and counters are not drawn
        elif begin_us is None:
            self.left_out += 1
        elif phase == "X":
            duration_us = _time(event.get("dur")) or 0.0
            self._add(key, begin_us, begin_us + max(0.0, duration_us), number, _text(event.get("name")))
        elif phase in ("i", "I", "n"):
            self._add(key, begin_us, begin_us, number, _text(event.get("name")))
        elif phase in ("B", "b"):
            opened = number, begin_us, _text(event.get("name"))
            self._open.setdefault(self._pair(event, key), []).append(opened)
        elif phase in ("E", "e") and self._open.get(self._pair(event, key)):
            opened = self._open[self._pair(event, key)].pop()
            track = key if phase == "E" else (key[0], f" {_text(event.get('cat'))}")
            self._add(track, opened[1], begin_us, opened[0], opened[2])
        else:
            self.left_out += 1

    def _pair(self, event: Event, key: tuple[str, str]) -> tuple[str, ...]:
        """What the two halves of an event have in common."""
        if event["ph"] in ("B", "E"):
            return key
        identity = event.get("id", event.get("id2"))
        return key[0], _text(event.get("cat")), _text(identity)

    def _add(self, key: tuple[str, str], begin_us: float, end_us: float, number: int, name: str) -> None:
        self.spans.append(_Span(key, begin_us, max(0.0, end_us - begin_us), name, number))

    def _name(self, event: Event, key: tuple[str, str]) -> None:
        told = event.get("args")
        told = told if isinstance(told, dict) else {}
        place = key[:1] if str(event.get("name")).startswith("process_") else key
        if event.get("name") in ("process_name", "thread_name"):
            self._names[place] = _text(told.get("name"))
        elif event.get("name") in ("process_sort_index", "thread_sort_index"):
            self._orders[place] = _number(told.get("sort_index")) or 0.0
