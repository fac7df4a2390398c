"""Rounds of real processes: what is agreed, what fails, and that nothing stays behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.coordination import death_scenarios, scenarios
from tests.support.long import IS_LONG
from tests.support.programs import Raised, running

pytestmark = pytest.mark.long

FRAMEWORKS = ["torch", "torch-file", "jax"]
PROGRAMS = [(framework, count) for framework in FRAMEWORKS for count in (2, 4)]
if not IS_LONG:  # each framework, and either number of processes
    PROGRAMS = [PROGRAMS[0], PROGRAMS[3], PROGRAMS[4]]


@pytest.fixture(scope="module", params=PROGRAMS, ids=str)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process saw in each of the scenarios."""
    framework, count = request.param
    directory = tmp_path_factory.mktemp("survivable")
    with running(scenarios.survivable, count=count, framework=framework, directory=directory) as programs:
        for expected in ("closed", "looked"):
            assert [programs.report(index) for index in range(count)] == [expected] * count
            for index in range(count):
                programs.send(index, "go on")
        return programs.values()


def of(seen: list[dict[str, Any]], case: str) -> list[Any]:
    return [process[case] for process in seen]


def errors(seen: list[dict[str, Any]], case: str) -> list[Raised]:
    found = of(seen, case)
    assert all(isinstance(outcome, Raised) for outcome in found), found
    return found


@pytest.mark.share(3)
def test_rounds_decide_the_same_for_everybody(seen: list[dict[str, Any]]) -> None:
    count = len(seen)
    decision = b"+".join(b"%d" % index for index in range(count))
    assert of(seen, "index") == list(range(count))
    for index, (decisions, broadcast, made, gathered) in enumerate(of(seen, "rounds")):
        assert decisions == [decision] * 12
        assert broadcast == b"from the primary"
        assert made == (index == 0)
        assert gathered == ([b"%d" % process for process in range(count)] if index == 0 else None)


@pytest.mark.share(3)
def test_any_process_can_be_the_primary(seen: list[dict[str, Any]]) -> None:
    last = len(seen) - 1
    for index, (is_primary, gathered, decided) in enumerate(of(seen, "other_primary")):
        assert is_primary == (index == last)
        assert (gathered is not None) == is_primary
        assert decided == b"made by %d" % last


@pytest.mark.share(3)
def test_named_sequences_need_no_common_order(seen: list[dict[str, Any]]) -> None:
    decision = b" ".join(b"%d" % index for index in range(len(seen)))
    assert of(seen, "named_sequences") == [{"first": decision, "other/ß": decision}] * len(seen)


def test_some_of_the_processes_agree_without_the_others(seen: list[dict[str, Any]]) -> None:
    count = len(seen)
    last = count - 1
    for index, found in enumerate(of(seen, "sessions_of_some")):
        assert found["alone"] == (0, 1, (index,))
        assert found["decided alone"] == b"x"
        for name, told in (
            ("absent", rf"process 99 is to take part, but there are only processes 0 to {last}"),
            ("other", rf"{index}, is not among multiprocessing.active_processes|the primary, 0, is not"),
        ):
            assert found[name].type == "InvalidInput"
            assert re.search(told, found[name].message), found[name].message
        if index == 1:
            assert "the primary, 0, is not among" in found["primary"].message
        if index not in (0, last):
            assert "failed" not in found
            continue
        for number in range(2):
            place, members, processes, is_primary, decided, gathered = found[f"pair {number}"]
            assert (place, members, processes) == ((0, last).index(index), 2, (0, last))
            assert is_primary == (index == last)
            assert decided == b"0+%d" % last
            assert gathered == ([b"0", b"%d" % last] if is_primary else None)
        assert (found["failed"].type, found["failed"].message) == ("NotFound", "not there")
        if index != last:
            assert found["failed"].context["process"] == last
        assert f"process 0: work of 0; process {last}: work of {last}" in found["out of step"].message


def test_a_deadline_of_some_names_the_process_by_its_index_in_the_program(
    seen: list[dict[str, Any]],
) -> None:
    last = len(seen) - 1
    found = of(seen, "deadline_of_some")
    for index in (0, last):
        assert found[index].type == "Unavailable"
        assert found[index].context["process"] == last
        assert f"process {last}" in found[index].message


def test_large_parts_and_decisions_arrive_whole(seen: list[dict[str, Any]]) -> None:
    assert of(seen, "large_values") == [(True, True, True)] * len(seen)


def test_an_error_in_any_process_is_everybody_s(seen: list[dict[str, Any]]) -> None:
    for failing in range(len(seen)):
        for index, outcomes in enumerate(of(seen, "error_in_work")):
            error = outcomes[failing]
            assert (error.type, error.message) == ("DiskFull", "no room on 'ß\udcff'")
            own = {"path": "/x\udcff", "errno": 28, "array": "w"}
            if index == failing:
                assert error.context == own
                assert error.notes == []
            else:
                assert error.context == {**own, "process": failing}
                assert error.notes[0].startswith(f"In process {failing}:\nTraceback (most recent call last):")
                assert "raise DiskFull" in error.notes[0]


def test_an_error_waits_for_nobody(seen: list[dict[str, Any]]) -> None:
    for error in errors(seen, "error_in_slow_company"):
        assert (error.type, error.message) == ("NotFound", "nothing there")


def test_an_error_of_the_decision_is_everybody_s(seen: list[dict[str, Any]]) -> None:
    for index, error in enumerate(errors(seen, "error_in_decision")):
        assert (error.type, error.message) == ("NotFound", "the primary finds nothing")
        assert error.context == ({"step": 3} if index == 0 else {"step": 3, "process": 0})


def test_errors_of_other_libraries_arrive_with_their_type(seen: list[dict[str, Any]]) -> None:
    for index, error in enumerate(errors(seen, "foreign_error")):
        if index == 1:
            assert error.type == "KeyError"
        else:
            assert (error.type, error.message) == ("ProcessFailed", "process 1 raised KeyError: 'absent'")


def test_of_several_errors_each_process_raises_its_own(seen: list[dict[str, Any]]) -> None:
    for index, error in enumerate(errors(seen, "several_errors")):
        assert (error.type, error.message) == ("NotFound", f"nothing in {index}")


def test_an_interrupt_cancels_the_others(seen: list[dict[str, Any]]) -> None:
    for index, error in enumerate(errors(seen, "interrupt")):
        assert error.type == ("KeyboardInterrupt" if index == 1 else "Cancelled")
        assert index == 1 or error.message == "process 1 was stopped by KeyboardInterrupt"


def test_an_error_between_rounds_is_told_on_closing(seen: list[dict[str, Any]]) -> None:
    for error in errors(seen, "error_between_rounds"):
        assert (error.type, error.message) == ("NotFound", "between rounds")


def test_a_look_raises_what_another_process_fails_with(seen: list[dict[str, Any]]) -> None:
    for error in errors(seen, "look"):
        assert (error.type, error.message) == ("NotFound", "while others look")


def test_an_interrupt_after_the_decision_ends_the_next_round(seen: list[dict[str, Any]]) -> None:
    for index, error in enumerate(errors(seen, "interrupt_after_the_decision")):
        assert error.type == ("KeyboardInterrupt" if index == 1 else "Cancelled")


def test_a_second_interrupt_keeps_nobody_from_hearing_of_the_first(seen: list[dict[str, Any]]) -> None:
    for index, error in enumerate(errors(seen, "second_interrupt")):
        assert error.type == ("KeyboardInterrupt" if index == 1 else "Cancelled")


def test_who_closes_a_session_together_waits_for_all(seen: list[dict[str, Any]]) -> None:
    assert [each["closed_together"] for each in seen] == [len(seen)] * len(seen)
    assert all(each["closed_together_after_the_others"] is True for each in seen)


def test_processes_out_of_step_are_shown_what_each_wanted(seen: list[dict[str, Any]]) -> None:
    others = {2: "process 0", 4: "processes 0, 2, 3"}[len(seen)]
    for error in errors(seen, "out_of_step"):
        assert error.type == "InvalidInput"
        assert f"out of step. {others}: save '/a'; process 1: load '/b'. Every process" in error.message


def test_processes_have_to_agree_on_the_primary(seen: list[dict[str, Any]]) -> None:
    for error in errors(seen, "out_of_step_primaries"):
        assert error.type == "InvalidInput"
        assert ": save '/a' with primary 0; process 1: save '/a' with primary 1." in error.message


def test_a_deadline_names_who_has_not_come(seen: list[dict[str, Any]]) -> None:
    for index, error in enumerate(errors(seen, "deadline")):
        assert error.type == "Unavailable"
        assert error.context["process"] == 1, index
        assert "process 1" in error.message
        assert "has not come to round 1 of a round with a deadline within 1 s" in error.message


def test_a_deadline_names_the_primary_that_does_not_decide(seen: list[dict[str, Any]]) -> None:
    for error in errors(seen, "slow_decision"):
        assert error.type == "Unavailable"
        assert error.context["process"] == 0
        assert "has not decided in round 1 of a slow decision within 1 s" in error.message


def test_sessions_in_threads_do_not_disturb_each_other(seen: list[dict[str, Any]]) -> None:
    for outcomes in of(seen, "concurrent_sessions"):
        for number, outcome in enumerate(outcomes):
            if number == 3:
                assert (outcome.type, outcome.message) == ("NotFound", "in session 3")
            else:
                assert outcome == b",".join(b"%d-7-%d" % (number, index) for index in range(len(seen)))


def test_a_closed_session_has_no_more_rounds(seen: list[dict[str, Any]]) -> None:
    for error in errors(seen, "after_the_end"):
        assert error.type == "InvalidInput"
        assert "this session has ended" in error.message


def test_there_is_one_coordinator_for_all_threads(seen: list[dict[str, Any]]) -> None:
    assert of(seen, "one_for_all_threads") == [True] * len(seen)


def test_nothing_stays_in_the_store(seen: list[dict[str, Any]]) -> None:
    assert of(seen, "left") == [[]] * len(seen)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_round_costs_the_others_the_same_however_many_there_are(framework: str, tmp_path: Path) -> None:
    others: dict[int, dict[str, int]] = {}
    for count in (2, 4):
        with running(
            death_scenarios.counted, count=count, framework=framework, directory=tmp_path
        ) as programs:
            for index in range(count):
                assert programs.report(index) == "done"
            for index in range(count):
                programs.send(index, "go on")
            calls = programs.values()
        # The last to arrive makes one call more, whoever that is.
        others[count] = {key: value for key, value in calls[-1].items() if key != "set_once"}
        assert calls[0]["read"] == 10
        assert sum(calls[0].values()) <= 80
        assert all(process.get("set_once", 0) <= 10 for process in calls[1:])
    removals = {} if framework == "jax" else {"delete": 10}
    assert others[2] == others[4] == {"set": 10, "add": 10, "get": 10, **removals}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_processes_can_be_connected_again(framework: str, tmp_path: Path) -> None:
    with running(scenarios.initialized_again, count=2, framework=framework, directory=tmp_path) as programs:
        first, second = programs.values()
    assert first == ([[b"0", b"1"]] * 3, 3)
    assert second == ([None] * 3, 3)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_arrives_though_its_process_ends(framework: str, failing: int, tmp_path: Path) -> None:
    with running(
        scenarios.fail_and_exit, failing, count=3, framework=framework, directory=tmp_path
    ) as programs:
        for error in programs.values():
            assert (error.type, error.message) == ("NotFound", "fails and exits")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_decision_arrives_though_everybody_ends(framework: str, tmp_path: Path) -> None:
    with running(scenarios.succeed_and_exit, count=3, framework=framework, directory=tmp_path) as programs:
        assert programs.values() == [b"012"] * 3
