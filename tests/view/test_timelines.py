"""Timelines that the window draws: of the runtime, of launches, and what anybody else may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation.errors import InvalidInput, NotFound
from waystation.memory import Recovery
from waystation.view import timelines
from waystation.view.timelines import read_timeline


def written(path: Path, events: Any) -> str:
    path.write_text(json.dumps(events))
    return str(path)


def test_spans_of_every_kind(tmp_path: Path) -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "host b"}},
        {"ph": "M", "name": "process_sort_index", "pid": 2, "args": {"sort_index": 2}},
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "controller"}},
        {"ph": "M", "name": "process_sort_index", "pid": 1, "args": {"sort_index": 1}},
        {"ph": "M", "name": "thread_name", "pid": 2, "tid": 10, "args": {"name": "device 0"}},
        {"ph": "X", "name": "outer", "ts": 10, "dur": 100, "pid": 2, "tid": 10},
        {"ph": "X", "name": "inner", "ts": 20, "dur": 5, "pid": 2, "tid": 10},
        {"ph": "B", "name": "begun", "ts": 200, "pid": 2, "tid": 10},
        {"ph": "E", "ts": 230, "pid": 2, "tid": 10},
        {"ph": "b", "cat": "client a", "name": "work", "id": "0x1", "ts": 0, "pid": 1, "tid": 10},
        {"ph": "b", "cat": "client a", "name": "other", "id": "0x2", "ts": 5, "pid": 1, "tid": 10},
        {"ph": "e", "cat": "client a", "name": "work", "id": "0x1", "ts": 50, "pid": 1, "tid": 10},
        {"ph": "e", "cat": "client a", "name": "other", "id": "0x2", "ts": 60, "pid": 1, "tid": 10},
        {"ph": "i", "name": "moment", "ts": 300, "pid": 2, "tid": 10},
        {"ph": "s", "name": "arrow", "id": 1, "ts": 1, "pid": 1, "tid": 1},
    ]
    path = written(tmp_path / "t.json", {"traceEvents": events, "otherData": {"lost_stamps": 3}})
    document = read_timeline(path).document()
    assert [(track["process"], track["name"]) for track in document["tracks"]] == [
        ("controller", "client a"),
        ("host b", "device 0"),
    ]
    client, device = document["tracks"]
    names = document["names"]
    assert [names[name] for name in device["names"]] == ["outer", "inner", "begun", "moment"]
    assert device["begin_us"] == [10, 20, 200, 300]
    assert device["duration_us"] == [100, 5, 30, 0]
    assert device["lanes"] == [0, 1, 0, 0]
    assert device["events"] == [5, 6, 7, 13]
    assert (client["begin_us"], client["duration_us"], client["lanes"]) == ([0, 5], [50, 55], [0, 1])
    assert (document["begin_us"], document["end_us"], document["left_out"]) == (0, 300, 0)
    assert document["about"] == {"lost_stamps": 3}


def test_recoveries_of_a_launch(tmp_path: Path) -> None:
    recovery = Recovery(
        step=40,
        failed_at_s=100.0,
        ended_at_s=100.5,
        started_at_s=100.6,
        begun_at_s=103.0,
        prepared_at_s=104.0,
        loading_at_s=104.5,
        loaded_at_s=105.0,
        stepped_at_s=106.0,
        transfer_s=0.25,
    )
    told = {name: getattr(recovery, name) for name in Recovery.__dataclass_fields__}
    line = json.dumps({**told, "phases_s": recovery.phases_s, "launch": "a"})
    (tmp_path / "lines.jsonl").write_text(f"{line}\n{line}\n")
    (tmp_path / "launch.json").write_text(json.dumps({"recoveries": [told], "starts": 2}))
    for name, count in (("lines.jsonl", 2), ("launch.json", 1)):
        found = read_timeline(str(tmp_path / name))
        assert len(found.tracks) == count
        track = found.tracks[0]
        assert (track.process, track.name) == ("memory tier", "recovery 1: step 40")
        drawn = {
            found.names[name]: duration / 1e6
            for name, duration in zip(track.names, track.duration_us, strict=True)
        }
        assert drawn == pytest.approx(recovery.phases_s)


def test_what_is_no_timeline_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"{}", b"[]", b"[1, 2]", b"\xff", b"hello", b'{"recoveries": [{}]}', b"[" * 100_000):
        (tmp_path / "t.json").write_bytes(content)
        with pytest.raises(InvalidInput, match="is no timeline"):
            read_timeline(str(tmp_path / "t.json"))
    with pytest.raises(NotFound):
        read_timeline(str(tmp_path / "absent.json"))
    many = written(tmp_path / "many.json", [{"ph": "X", "ts": 0}] * (timelines.MOST_EVENTS + 1))
    with pytest.raises(InvalidInput, match="at most 500000 are drawn"):
        read_timeline(many)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
NAMES = ("ph", "name", "cat", "ts", "dur", "pid", "tid", "id", "args")
PHASES = st.sampled_from(["X", "B", "E", "b", "e", "i", "M", "s", "C"]) | ANY


@given(
    st.lists(
        st.fixed_dictionaries({"ph": PHASES}, optional=dict.fromkeys(NAMES[1:], ANY | st.floats(0, 100)))
        | ANY,
        max_size=12,
    )
)
def test_no_event_is_trusted(events: list[Any]) -> None:
    found = timelines._drawn(events, {}).document()
    columns = ("begin_us", "duration_us", "names", "lanes", "events")
    for track in found["tracks"]:
        assert len({len(track[column]) for column in columns}) == 1
        assert all(duration >= 0 for duration in track["duration_us"])
        assert all(isinstance(events[number], dict) for number in track["events"])
    assert found["events"] + found["left_out"] <= len(events)


def test_lanes_are_bounded() -> None:
    lanes = timelines._lanes([(0.0, 1000.0 - number) for number in range(1000)])
    assert lanes[:3] == [0, 1, 2]
    assert max(lanes) == timelines._MOST_LANES - 1
