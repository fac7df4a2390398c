"""Shares while programs compete."""

from waystation.runtime.timeline import Computation, Timeline, WorkPhases
from waystation.runtime.timeline.competition import competing, competing_shares


def timeline(*computations: tuple[str, int, int, int, int]) -> Timeline:
    """Of a client, when each work was submitted, began, ended on its device, and was completed."""
    works, found = {}, []
    for number, (client, submitted_ns, begin_ns, end_ns, completed_ns) in enumerate(computations):
        works[number] = WorkPhases(number, client, "p", submitted_ns, completed_ns)
        found.append(Computation("left/0", 0, number, client, "p", "f", 0, begin_ns, end_ns))
    return Timeline(works, (), tuple(found), (), (), {}, {})


def test_only_what_both_wanted_counts() -> None:
    told = timeline(("a", 0, 0, 10, 12), ("b", 8, 10, 20, 21), ("a", 9, 20, 30, 31), ("b", 22, 30, 90, 91))
    assert competing(told, "left", ("a", "b")) == [(8, 21), (22, 31)]
    assert competing_shares(told, "left", ("a", "b")) == {"a": 0.5, "b": 0.5}


def test_without_competition_there_are_no_shares() -> None:
    told = timeline(("a", 0, 0, 10, 10), ("b", 10, 10, 20, 20))
    assert competing(told, "left", ("a", "b")) == []
    assert competing_shares(told, "left", ("a", "b")) == {}
    assert competing_shares(told, "right", ("a", "b")) == {}
