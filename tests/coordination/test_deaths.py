"""Processes that die, at every point of a round: the others get a typed error that names them, or the
decision, and none of them waits for a deadline."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from tests.coordination import scenarios
from tests.support.programs import Ended, Programs, Raised, running

# Who dies, and who decides. Process 0 holds the store of TCP.
ROLES = {"other": (2, 0), "primary": (1, 1), "host": (0, 0), "host, not primary": (0, 1)}


def _die(framework: str, role: str, call: int | None, directory: Path) -> tuple[list[Ended], int]:
    victim, primary = ROLES[role]
    with running(
        scenarios.killed_at, victim, primary, call, count=3, framework=framework, directory=directory
    ) as programs:
        return programs.end(), programs.process_id(victim)


def _require_names(error: Raised, victim: int, process_id: int) -> None:
    assert error.type == "Unavailable", error
    assert error.context["process"] == victim
    assert f"process {victim} (pid {process_id} on " in error.message
    assert "restart the program" in error.message


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("framework", ["torch", "torch-file"])
def test_killed_before_any_call_of_the_store(framework: str, role: str, tmp_path: Path) -> None:
    victim, _ = ROLES[role]
    whole, _ = _die(framework, role, None, tmp_path)
    decisions = [b"0,0,0", b"1,1,1", b"2,2,2"]
    assert [process.value[0] for process in whole] == [decisions] * 3
    calls = whole[victim].value[1]
    assert calls > 10
    for call in range(calls - 1):
        ended, process_id = _die(framework, role, call, tmp_path)
        assert ended[victim].exit_code == -signal.SIGKILL, ended[victim].output
        survivors = [process for index, process in enumerate(ended) if index != victim]
        assert [process.exit_code for process in survivors] == [0, 0], [p.output for p in survivors]
        seen = [process.value[0] for process in survivors]
        for outcomes in seen:
            assert outcomes[:-1] == decisions[: len(outcomes) - 1]
            if isinstance(outcomes[-1], Raised):
                _require_names(outcomes[-1], victim, process_id)
            else:
                assert outcomes == decisions
        if not (framework == "torch" and role.startswith("host")):
            # With the store alive, what is decided is decided for all.
            assert _decided(seen[0]) == _decided(seen[1])


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


def test_a_host_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with running(scenarios.frozen_host, count=3, framework="torch", directory=tmp_path) as programs:
        for index in range(3):
            assert programs.report(index) == "ready"
        programs.signal(0, signal.SIGSTOP)
        for index in (1, 2):
            programs.send(index, "go on")
        for index in (1, 2):
            assert programs.value(index).type == "Unavailable"
        programs.signal(0)
        for process in programs.end()[1:]:
            assert process.value.type == "Unavailable"
            assert process.value.context["process"] == 0
            assert "no answer within 1 s" in process.value.message


def test_who_never_came_is_named_at_the_deadline(tmp_path: Path) -> None:
    with running(
        scenarios.late_registration, count=3, framework="torch-file", directory=tmp_path
    ) as programs:
        values = programs.values()
    for index in (0, 2):
        assert values[index].type == "Unavailable"
        assert "process 1 has not come to round 1" in values[index].message


@pytest.mark.parametrize("victim", [0, 1])
def test_jax_ends_the_survivors(victim: int, tmp_path: Path) -> None:
    # The least that JAX allows; its own default is 100 s.
    with running(
        scenarios.killed_by_signal,
        victim,
        count=3,
        framework="jax",
        directory=tmp_path,
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=5,
    ) as programs:
        _kill_in_work(programs, victim)
        ended = programs.end()
    assert ended[victim].exit_code == -signal.SIGKILL
    for index, process in enumerate(ended):
        assert index == victim or process.exit_code != 0, process.output
