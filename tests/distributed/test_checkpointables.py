"""Several checkpointables, saved by several processes: one attempt, one set of rounds, one outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.distributed import checkpointable_scenarios as scenarios
from tests.support.programs import Raised, running


def values(function: Any, *arguments: Any, framework: str, directory: Path, count: int = 2) -> list[Any]:
    with running(function, *arguments, count=count, framework=framework, directory=directory) as programs:
        found = programs.values()
    assert not [value for value in found if isinstance(value, Raised)], found
    return found


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("is_local", [False, True], ids=["shared", "local"])
@pytest.mark.share(4)
def test_saved_and_loaded(framework: str, is_local: bool, tmp_path: Path) -> None:
    seen = values(scenarios.save_and_load, is_local, framework=framework, directory=tmp_path)
    for index, process in enumerate(seen):
        assert process["one"] == (True, {"name": "x"}, 10 + index)
        assert process["two"] == (True, {"name": "x"}, 20 + index)
        assert process["background"] is True
        assert (process["deleted"], process["again"]) == (True, False)
        assert process["absent"].type == "CheckpointableNotFound"
        assert process["left"] == ["model", "config"]
    files = [name for name in seen[0]["listed"] if name.startswith("data/process_")]
    assert files == [f"data/process_{index}-of-2.json" for index in range(1 if is_local else 2)]
    assert not [name for name in seen[0]["listed"] if name.endswith(".part")]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process saw of failures of one."""
    with running(
        scenarios.fail, count=3, framework="torch", directory=tmp_path_factory.mktemp("failures")
    ) as programs:
        for index in range(3):
            assert programs.report(index) == "damaged"
        for index in range(3):
            programs.send(index, "go on")
        found = programs.values()
    assert not [value for value in found if isinstance(value, Raised)], found
    return found


@pytest.mark.parametrize("phase", ["save", "background"])
@pytest.mark.parametrize("suffix", ["", " async"])
def test_a_handler_that_fails_in_one_process(failed: list[dict[str, Any]], phase: str, suffix: str) -> None:
    for index, process in enumerate(failed):
        error = process[phase + suffix]
        assert error.type == "HandlerFailed", error
        assert "checkpointable 'data'" in error.message
        assert "told to fail" in error.message
        assert error.context.get("process") == (None if index == 1 else 1)


def test_processes_that_save_different_things(failed: list[dict[str, Any]]) -> None:
    for process in failed:
        assert process["other handlers"].type == "StructureMismatch"
        assert "'data': handled by" in process["other handlers"].message
        assert process["other state"].type == "StructureMismatch"
        assert "checkpointable 'optimizer', x: int" in process["other state"].message


def test_nothing_is_left_behind(failed: list[dict[str, Any]]) -> None:
    assert [process["left"] for process in failed] == [[]] * 3


def test_damage_that_one_process_finds(failed: list[dict[str, Any]]) -> None:
    for process in failed:
        assert process["damaged"].type == "Corrupt"
        assert "process_1-of-3.json" in process["damaged"].message
        assert process["fine"] is True


def test_processes_that_load_different_things(failed: list[dict[str, Any]]) -> None:
    for process in failed:
        assert process["other names"].type == "InvalidInput"
        assert "load different checkpointables" in process["other names"].message


def test_the_rounds_do_not_grow_with_the_checkpointables(tmp_path: Path) -> None:
    first, second = values(scenarios.count_rounds, framework="torch", directory=tmp_path)
    assert first == second
    states, readers = first[::2], first[1::2]
    assert len(set(states)) == 1
    assert len(set(readers)) == 1
    assert readers[0] == states[0] + 1  # in which handlers are called
