"""Processes that make different calls: each is told who called what, and the next calls work again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.coordination import scenarios_out_of_step as scenarios
from tests.support.long import IS_LONG, only_long
from tests.support.programs import Raised, running

pytestmark = pytest.mark.long

FRAMEWORKS = ["torch", "torch-file", "jax"]
PROGRAMS = [(framework, count) for framework in FRAMEWORKS for count in (2, 3)]
if not IS_LONG:  # each framework, and either number of processes
    PROGRAMS = [PROGRAMS[0], PROGRAMS[3], PROGRAMS[4]]


@pytest.fixture(scope="module", params=PROGRAMS, ids=str)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process saw in each of the cases."""
    framework, count = request.param
    directory = tmp_path_factory.mktemp("out-of-step")
    with running(scenarios.all_cases, count=count, framework=framework, directory=directory) as programs:
        for expected in ("closed", "looked"):
            assert [programs.report(index) for index in range(count)] == [expected] * count
            for index in range(count):
                programs.send(index, "go on")
        return programs.values()


def of(seen: list[dict[str, Any]], case: str) -> list[Any]:
    """What the processes saw in a case, after which they were in step."""
    assert [process[f"after {case}"] for process in seen] == [[b"saved", b"loaded", b"saved"]] * len(seen)
    return [process[case] for process in seen]


def require_out_of_step(errors: list[Raised], *told: str) -> None:
    """All raise the one error that tells these calls, and whose they are."""
    assert all(isinstance(error, Raised) for error in errors), errors
    assert {error.type for error in errors} == {"InvalidInput"}, errors
    assert len({error.message for error in errors}) == 1, errors
    assert errors[0].message.startswith("the processes are out of step.")
    for call in told:
        assert call in errors[0].message, errors[0].message


@pytest.mark.share(3)
@pytest.mark.long
@only_long
def test_calls_that_open_other_numbers_of_sessions(seen: list[dict[str, Any]]) -> None:
    others = {2: "process 0", 3: "processes 0, 2"}[len(seen)]
    found = of(seen, "other_numbers_of_sessions")
    require_out_of_step(found, f"{others}: save '/a'; process 1: load '/b'. Every process")


@pytest.mark.share(3)
def test_nobody_waits_for_a_slow_process_and_it_is_not_called_out_of_step(seen: list[dict[str, Any]]) -> None:
    require_out_of_step(of(seen, "slow_process"), "process 0: save '/a'; process 1: load '/b'. Every process")


def test_the_failure_of_a_call_that_others_have_not_made(seen: list[dict[str, Any]]) -> None:
    (failed, told), *others = of(seen, "failure_of_another_call")
    assert (failed.type, failed.message) == ("NotFound", "nothing to save at '/a'")
    require_out_of_step([told, *(error for error, _ in others)], "process 0: save '/a'; process", "load '/b'")


def test_a_process_that_is_calls_behind_comes_along(seen: list[dict[str, Any]]) -> None:
    *late, different = zip(*of(seen, "calls_behind"), strict=True)
    for errors in late:
        assert {error.type for error in errors} == {"Unavailable"}, errors
    require_out_of_step(list(different), "process 1: load '/b'", "save '/a'")


def test_nothing_else_stays_in_the_store(seen: list[dict[str, Any]]) -> None:
    assert [process["left"] for process in seen] == [[]] * len(seen)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.share(3)
def test_a_process_that_dies_meanwhile_is_called_dead(framework: str, tmp_path: Path) -> None:
    with running(
        scenarios.killed, 2, count=3, framework=framework, directory=tmp_path, recoverable=True
    ) as programs:
        assert programs.report(2) == "ready"
        programs.signal(2)
        for index in range(2):
            assert programs.report(index) == "done"
        for index in range(2):
            programs.send(index, "go on")
        ended = programs.end()
    first, second = zip(*(process.value for process in ended[:2]), strict=True)
    for error in first:  # which of both is noticed first is a matter of time
        assert error.type in ("InvalidInput", "Unavailable"), error
    for error in second:
        assert error.type == "Unavailable", error
        assert error.context["process"] == 2


# In its first round, while it compares what it wants, and while it leaves.
MOST_CALLS = 12


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.share(2)
def test_killed_before_any_call_while_processes_are_out_of_step(framework: str, tmp_path: Path) -> None:
    for call in range(MOST_CALLS) if IS_LONG else range(FRAMEWORKS.index(framework), MOST_CALLS, 6):
        with running(
            scenarios.killed_while_telling,
            call,
            count=3,
            framework=framework,
            directory=tmp_path,
            recoverable=True,
        ) as programs:
            for index in (0, 2):
                assert programs.report(index) == "done"
            for index in (0, 2):
                programs.send(index, "go on")
            values = [programs.value(index) for index in (0, 2)]
        for seen in values:
            for error in seen.values():
                _require_told(error)
        assert isinstance(values[0]["second"], bytes) == isinstance(values[1]["second"], bytes)


def _require_told(outcome: Any) -> None:
    """An error says who called what, or that process 1 is dead; or nobody has died, and all go on."""
    if isinstance(outcome, bytes):
        assert outcome == b"ccc"
    elif outcome.type == "InvalidInput":
        assert "process 0: save '/a'; process 1: load '/b'" in outcome.message
    else:
        assert (outcome.type, outcome.context["process"]) == ("Unavailable", 1)
