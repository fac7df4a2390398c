"""Timelines of hosts that do random works: what is stamped, collected in pieces, read, and written."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.long import amount

from waystation.runtime.timeline import (
    Clock,
    ControllerRecorder,
    History,
    HostRecorder,
    Source,
    Timeline,
    machine,
)
from waystation.runtime.timeline.picture import available

DEVICES = 2


class Scene:
    """A controller and a host, whose clock is another, and works of two clients that go through both."""

    def __init__(self, offset_ns: int = 0, capacity: int = 1000) -> None:
        self.now_ns = 10**13
        self.controller = ControllerRecorder(capacity, clock=lambda: self.now_ns)
        self.host = HostRecorder(capacity, clock=lambda: self.now_ns + offset_ns)
        self.controller.is_on = self.host.is_on = True
        self.histories = History(Source("")), History(Source("left/0", 1, DEVICES))
        self.histories[1].clock.observe(
            self.now_ns - 40, self.now_ns + 40, self.now_ns + offset_ns, "another machine"
        )

    def collect(self) -> None:
        for history, recorder in zip(self.histories, (self.controller, self.host), strict=True):
            history.add(recorder.collect(*history.wanted))

    def timeline(self) -> Timeline:
        self.collect()
        return Timeline.of([history.recording() for history in self.histories])

    def run(self, number: int, client: str, steps_ns: list[int], *, fails: bool = False) -> None:
        """One work, from its submission to its end; between any two stamps passes some time."""
        work: Any = SimpleNamespace(
            number=number,
            key=SimpleNamespace(client=client),
            program=f"program of {client}",
            error=ValueError() if fails else None,
        )
        passing = iter(steps_ns)

        def wait() -> None:
            self.now_ns += next(passing)

        controller, host = self.controller, self.host
        controller.submitted(work)
        wait()
        controller.scheduled(work, "left")
        wait()
        controller.admitted(work, "left")
        wait()
        controller.dispatched(work, "left")
        wait()
        host.received(number)
        wait()
        turn_ns = host.now()
        wait()
        waits_ns = host.now()
        wait()
        host.brought(number, "right/0", 64, waits_ns)
        calls_ns = host.now()
        wait()
        host.begun(number, turn_ns)
        for device in range(DEVICES):
            wait()
            host.computed(number, "step", device, calls_ns, 0)
        sends_ns = host.now()
        wait()
        host.sent(number, "right/0", 32, sends_ns)
        wait()
        host.ended(number)
        wait()
        controller.completed(work)


STEPS = st.lists(st.integers(0, 10**6), min_size=14, max_size=14)
WORKS = st.lists(st.tuples(st.sampled_from(["a", "b"]), STEPS, st.booleans()), min_size=1, max_size=12)


@settings(max_examples=amount(50), deadline=None)
@given(works=WORKS, offset_ns=st.integers(-(10**12), 10**12), pieces=st.booleans())
def test_phases_come_in_order_and_nothing_overlaps_on_a_device(
    works: list[tuple[str, list[int], bool]], offset_ns: int, pieces: bool
) -> None:
    scene = Scene(offset_ns)
    for number, (client, steps_ns, fails) in enumerate(works):
        scene.run(number, client, steps_ns, fails=fails)
        if pieces:
            scene.collect()
    timeline = scene.timeline()
    assert len(timeline.works) == len(timeline.host_phases) == len(works)
    assert not timeline.lost
    for number, (client, _, fails) in enumerate(works):
        check_phases(timeline, number, client, is_failed=fails)
    for device in range(DEVICES):
        check_device(timeline, device)
    shares = timeline.shares()
    assert not shares or abs(sum(shares.values()) - 1) < 1e-9
    check_document(timeline.document())


def check_phases(timeline: Timeline, number: int, client: str, *, is_failed: bool) -> None:
    work = timeline.works[number]
    phases = next(each for each in timeline.host_phases if each.work == number)
    island = work.islands["left"]
    assert (work.client, work.program, work.is_failed) == (client, f"program of {client}", is_failed)
    times = [work.submitted_ns, island.scheduled_ns, island.admitted_ns, island.dispatched_ns]
    times += [*phases.known, work.completed_ns]
    assert len(times) == 9
    assert None not in times
    assert times == sorted(time for time in times if time is not None)
    transfers = [each for each in timeline.transfers if each.work == number]
    assert {(each.is_sent, each.size_bytes) for each in transfers} == {(False, 64), (True, 32)}
    assert phases.begun_ns is not None
    assert phases.ended_ns is not None
    for each in transfers:
        assert phases.begun_ns <= each.begin_ns <= each.end_ns <= phases.ended_ns


def check_device(timeline: Timeline, device: int) -> None:
    spans = [(each.begin_ns, each.end_ns) for each in timeline.computations if each.device == device]
    flat = [moment for span in spans for moment in span]
    assert flat == sorted(flat)


def check_document(document: dict[str, Any]) -> None:
    """As the Trace Event Format has it: the fields of each phase, nested slices, arrows with both ends."""
    document = json.loads(json.dumps(document))
    assert document["displayTimeUnit"] == "ms"
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    opened: dict[tuple[Any, ...], int] = {}
    arrows: dict[int, list[str]] = {}
    named = set()
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert event["ts"] >= 0
        assert event["cat"]
        track = event["pid"], event["tid"]
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0
                slices.setdefault(track, []).append((event["ts"], event["ts"] + event["dur"]))
            case "b" | "e":
                place = event["cat"], event["id"], event["name"]
                opened[place] = opened.get(place, 0) + (1 if event["ph"] == "b" else -1)
                assert opened[place] in {0, 1}
            case "s" | "f":
                assert event["ph"] == "s" or event["bp"] == "e"
                arrows.setdefault(event["id"], []).append(event["ph"])
            case other:
                pytest.fail(f"no event has phase {other}")
    assert not any(opened.values())
    assert all(ends == ["s", "f"] for ends in arrows.values())
    for (process, track), spans in slices.items():
        assert ("process_name", process, 0) in named
        assert ("thread_name", process, track) in named
        check_nesting(spans)


def check_nesting(spans: list[tuple[float, float]]) -> None:
    around: list[float] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1] <= begin + 1e-3:
            around.pop()
        assert not around or end <= around[-1] + 1e-3
        around.append(end)


def test_what_was_overwritten_is_counted() -> None:
    scene = Scene(capacity=10)
    for number in range(4):
        scene.run(number, "a", [1000] * 14)
    timeline = scene.timeline()
    assert timeline.lost == {"": 4 * 5 - 10, "left/0": 4 * 7 - 10}
    assert [each.work for each in timeline.computations] == [2, 3, 3]
    check_document(timeline.document())


def test_a_history_is_bounded() -> None:
    scene = Scene()
    scene.histories = History(Source(""), 12), History(Source("left/0", 1, DEVICES), 15)
    for number in range(6):
        scene.run(number, "a", [1000] * 14)
        scene.collect()
    assert scene.timeline().lost == {"": 4 * 5, "left/0": 4 * 7}


def test_nothing_is_stamped_while_it_is_off_nor_what_had_begun_before() -> None:
    scene = Scene()
    scene.host.is_on = scene.controller.is_on = False
    scene.run(1, "a", [1] * 14)
    turn_ns = scene.host.now()
    scene.host.is_on = True
    scene.host.begun(1, turn_ns)
    timeline = scene.timeline()
    assert not timeline.works
    assert not timeline.host_phases
    assert not timeline.computations


def test_shares_are_of_the_time_of_devices_and_a_part_of_it_is_cut() -> None:
    scene = Scene()
    for number, (client, time_ns) in enumerate([("a", 10**9), ("b", 2 * 10**9)]):
        begin_ns = scene.host.now()
        scene.now_ns += time_ns
        scene.host.computed(number, "step", 0, begin_ns, 0)
        work: Any = SimpleNamespace(number=number, key=SimpleNamespace(client=client), program="p")
        scene.controller.submitted(work)
    timeline = scene.timeline()
    assert timeline.device_seconds() == {"a": 1.0, "b": 2.0}
    assert timeline.shares() == {"a": pytest.approx(1 / 3), "b": pytest.approx(2 / 3)}
    assert timeline.between(0.5, 1.5).shares() == {"a": 0.5, "b": 0.5}
    assert timeline.devices == (("left/0", 0), ("left/0", 1))


def test_the_shortest_round_trip_says_how_clocks_lie() -> None:
    clock = Clock()
    clock.observe(1000, 1100, 5050, "another machine")
    clock.observe(2000, 2010, 6008, "another machine")
    clock.observe(3000, 3900, 7100, "another machine")
    assert (clock.offset_ns, clock.uncertainty_ns) == (4003, 5)
    clock.observe(4000, 4100, 4020, machine())
    assert (clock.offset_ns, clock.uncertainty_ns) == (0, 0)


@pytest.mark.skipif(not available(), reason="matplotlib is not installed")
def test_it_is_drawn(tmp_path: Path) -> None:
    scene = Scene()
    for number in range(8):
        scene.run(number, "ab"[number % 2], [1000 * number + 1] * 14)
    scene.timeline().draw(tmp_path / "timeline.png", title="two clients")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    Timeline.of([]).draw(tmp_path / "empty.png")
