"""Processes that die, at every point of a round: the others get a typed error that names them, or the
decision, and none of them waits for a deadline.

`make test-long` walks every store and role through every call, `make test` each of them through every third,
beginning elsewhere.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.coordination import death_scenarios as scenarios
from tests.support.long import IS_LONG
from tests.support.programs import Ended, Programs, Raised, running

# Who dies, and who decides. Process 0 holds the store of TCP.
ROLES = {"other": (2, 0), "primary": (1, 1), "host": (0, 0), "host, not primary": (0, 1)}
DECISIONS = [b"0,0,0", b"1,1,1"]
# In each round at least the part, the arrival and the verdict; at the end it counts itself out.
LEAST_CALLS = 2 * 3 + 1
WALKS = [
    *(("torch", role) for role in ROLES),
    *((framework, role) for framework in ("torch-file", "jax") for role in ("other", "primary")),
]


def _die(framework: str, role: str, call: int | None, directory: Path) -> tuple[list[Ended], int]:
    victim, primary = ROLES[role]
    with running(
        scenarios.killed_at,
        victim,
        primary,
        call,
        count=3,
        framework=framework,
        directory=directory,
        recoverable=True,  # or JAX would end the survivors before they can be asked
    ) as programs:
        for index in range(3):
            assert programs.report(index) == "known"
        for index in range(3):
            programs.send(index, "go on")
        return programs.end(), programs.process_id(victim)


def _require_names(error: Raised, victim: int, process_id: int) -> None:
    assert error.type == "Unavailable", error
    assert error.context["process"] == victim
    assert f"process {victim} (pid {process_id} on " in error.message
    assert "restart the program" in error.message


def _calls(framework: str, role: str, count: int) -> range:
    """Those of a walk, of so many that there are."""
    if IS_LONG:
        return range(count)
    return range(WALKS.index((framework, role)) % 6, count, 6)


@pytest.mark.long
@pytest.mark.parametrize(("framework", "role"), WALKS)
@pytest.mark.share(8)
def test_killed_before_any_call_of_the_store(framework: str, role: str, tmp_path: Path) -> None:
    victim, _ = ROLES[role]
    ended, _ = _die(framework, role, None, tmp_path)
    assert [process.exit_code for process in ended] == [0] * 3
    assert [process.value["outcomes"] for process in ended] == [DECISIONS] * 3
    calls = ended[victim].value["calls"]
    assert calls >= LEAST_CALLS
    for call in _calls(framework, role, calls):
        ended, process_id = _die(framework, role, call, tmp_path)
        assert [process.exit_code for index, process in enumerate(ended) if index != victim] == [0, 0]
        # How often it asks again is up to the others, so it may come to fewer calls than before.
        was_killed = ended[victim].exit_code == -signal.SIGKILL
        assert was_killed or (call >= LEAST_CALLS and ended[victim].exit_code == 0), ended[victim].output
        seen = [process.value["outcomes"] for index, process in enumerate(ended) if index != victim]
        for outcomes in seen:
            _require_names_or_decisions(outcomes, victim, process_id)
        if not role.startswith("host"):
            # With the store alive, what is decided is decided for all.
            assert _decided(seen[0]) == _decided(seen[1])


def _require_names_or_decisions(outcomes: list[Any], victim: int, process_id: int) -> None:
    decided = _decided(outcomes)
    assert decided == DECISIONS[: len(decided)]
    if len(decided) < len(DECISIONS):
        (error,) = outcomes[len(decided) :]
        _require_names(error, victim, process_id)


def _decided(outcomes: list[Any]) -> list[bytes]:
    return [outcome for outcome in outcomes if isinstance(outcome, bytes)]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("framework", ["torch", "torch-file"])
def test_killed_in_its_work(framework: str, victim: int, tmp_path: Path) -> None:
    with running(
        scenarios.killed_by_signal, victim, count=3, framework=framework, directory=tmp_path
    ) as programs:
        _kill_in_work(programs, victim)
        ended = programs.end()
        for index, process in enumerate(ended):
            if index != victim:
                _require_names(process.value, victim, programs.process_id(victim))


def _kill_in_work(programs: Programs, victim: int) -> None:
    for index in range(3):
        assert programs.report(index) == "working"
    programs.signal(victim)


@pytest.mark.parametrize("waiting", [False, True], ids=["calls", "waits"])
def test_a_host_that_does_not_answer_is_given_up(waiting: bool, tmp_path: Path) -> None:
    with running(scenarios.frozen_host, waiting, count=3, framework="torch", directory=tmp_path) as programs:
        for index in range(3):
            assert programs.report(index) == "ready"
        if waiting:
            time.sleep(0.5)  # in which they come to wait
        programs.signal(0, signal.SIGSTOP)
        for index in (1, 2) if not waiting else ():
            programs.send(index, "go on")
        for index in (1, 2):
            error = programs.value(index)
            assert error.type == "Unavailable"
            assert error.context["process"] == 0
            assert "process 0 (pid " in error.message
            assert "no answer within 1 s" in error.message


def test_who_never_came_is_named_at_the_deadline(tmp_path: Path) -> None:
    with running(
        scenarios.late_registration, count=3, framework="torch-file", directory=tmp_path
    ) as programs:
        values = programs.values()
    for index in (0, 2):
        assert values[index].type == "Unavailable"
        assert "process 1 has not come to round 1" in values[index].message


def test_nobody_stays_for_who_never_came(tmp_path: Path) -> None:
    with running(scenarios.never_comes, 1.0, count=2, framework="torch", directory=tmp_path) as programs:
        assert programs.report(0) == "working"
        error, told, took_s = programs.value(0)
        programs.send(1, "end")
        programs.values()
    assert "process 1 has not come to round 1 of a save without process 1 within 1 s" in error.message
    assert "Every process of the program has to make this call" in error.message
    assert len(told) == 1, told
    assert told[0].startswith("a save without process 1 has been waiting for process 1 for")
    assert took_s < scenarios.NOT_LONG_S


def test_an_interrupt_waits_for_nobody_who_has_not_come(tmp_path: Path) -> None:
    with running(scenarios.never_comes, 600.0, count=2, framework="torch", directory=tmp_path) as programs:
        assert programs.report(0) == "working"
        programs.signal(0, signal.SIGINT)
        error, _, took_s = programs.value(0)
        programs.send(1, "end")
        programs.values()
    assert error.type == "KeyboardInterrupt"
    assert took_s < scenarios.NOT_LONG_S


# The least that JAX allows; its own default is 100 s.
JAX_OPTIONS = {"heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 5}


def test_jax_ends_all_with_the_host(tmp_path: Path) -> None:
    with running(
        scenarios.killed_by_signal, 0, count=3, framework="jax", directory=tmp_path, **JAX_OPTIONS
    ) as programs:
        _kill_in_work(programs, 0)
        ended = programs.end()
    assert [process.exit_code for process in ended] == [-signal.SIGKILL, -signal.SIGABRT, -signal.SIGABRT]


def test_under_jax_other_deaths_are_named_and_the_survivors_end_by_themselves(tmp_path: Path) -> None:
    with running(
        scenarios.killed_by_signal, 1, count=3, framework="jax", directory=tmp_path, **JAX_OPTIONS
    ) as programs:
        _kill_in_work(programs, 1)
        ended = programs.end()
        for index in (0, 2):
            _require_names(ended[index].value, 1, programs.process_id(1))
            assert ended[index].exit_code == 0, ended[index].output
