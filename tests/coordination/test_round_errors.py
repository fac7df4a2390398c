"""Messages name exactly the processes that matter, and stay readable with many of them."""

import pytest

from waystation.coordination.round_errors import deaths, disagreement, lateness, named


def describe(index: int) -> str:
    return f"process {index} (pid {4000 + index} on a)"


@pytest.mark.parametrize(
    ("processes", "told"),
    [
        ([3], "process 3"),
        ([1, 0], "processes 0, 1"),
        ([4, 2, 3, 0, 9], "processes 0, 2 to 4, 9"),
        (range(1000), "processes 0 to 999"),
    ],
)
def test_processes_are_told_in_spans(processes: list[int], told: str) -> None:
    assert named(processes) == told


def test_who_agrees_is_no_error() -> None:
    assert disagreement({0: ("save 'a'", 0), 1: ("save 'a'", 0)}) is None


def test_everybody_wants_something_else() -> None:
    error = disagreement({index: (f"save '/step/{index}'", 0) for index in range(1000)})
    assert error is not None
    assert "process 0: save '/step/0'; process 1: save '/step/1'" in error.message
    assert "process 7: save '/step/7'; and 992 others. Every process has to" in error.message


def test_deaths() -> None:
    one = deaths("round 2 of a save", {1: "has died"}, describe)
    assert one.message == (
        "round 2 of a save cannot go on: process 1 (pid 4001 on a) has died. See the output of that process, "
        "and restart the program"
    )
    assert one.context == {"process": 1}
    many = deaths("round 2 of a save", dict.fromkeys(range(8, 500), "has died"), describe)
    assert many.message.count("pid") == 4
    assert "; and so have others, in all processes 8 to 499. See the output of those proc" in many.message
    assert many.context == {"process": "8 to 499"}


def test_lateness() -> None:
    one = lateness("round 1 of a load", [2], 0, 60.0, describe)
    assert one.message == (
        "process 2 (pid 4002 on a) has not come to round 1 of a load within 60 s; see what keeps it, or "
        "allow more time (multiprocessing.deadline_s)"
    )
    first = lateness("round 1 of a load", [2], 0, 60.0, describe, in_first_round=True)
    assert first.message.startswith(
        f"{one.message}\nEvery process of the program has to make this call: see "
    )
    assert "'if rank == 0'" in first.message
    two = lateness("round 1 of a load", [2, 3], 0, 0.5, describe)
    assert two.message.startswith("process 2 (pid 4002 on a) and process 3 (pid 4003 on a) have not come to")
    assert two.context == {"process": "2, 3"}
    many = lateness("round 1 of a load", range(1, 64), 0, 60.0, describe)
    assert many.message.startswith("processes 1 to 63 have not come to round 1")
    nobody = lateness("round 1 of a load", [], 5, 60.0, describe)
    assert nobody.message.startswith("process 5 (pid 4005 on a) has not decided in round 1")
