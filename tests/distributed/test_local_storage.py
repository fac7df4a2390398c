"""Programs each of whose processes has a disk of its own: what is written, read and refused."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from tests.distributed import jax_scenarios, local_scenarios
from tests.distributed.cases import State, states
from tests.support import held_memory
from tests.support.long import amount
from tests.support.programs import Programs, Raised, running

import waystation
from waystation.checkpoint.verify import verify
from waystation.errors import InvalidInput

COUNT = 2


def run(function: Any, directory: Path, *arguments: Any, count: int = COUNT) -> list[Any]:
    """What each process returns."""
    with running(function, *arguments, count=count, framework="torch", directory=directory) as programs:
        values = programs.values()
    assert not [value for value in values if isinstance(value, Raised)], values
    return values


@pytest.mark.parametrize("count", [2, 3])
def test_each_process_saves_and_loads_all_that_it_holds(tmp_path: Path, count: int) -> None:
    for index, seen in enumerate(run(local_scenarios.round_trip, tmp_path, count=count)):
        data = [name for name in seen["files"] if name.endswith(".safetensors")]
        assert data == [f"p{index:05}-000.safetensors"]
        assert seen["as asked"]
        assert seen["as saved"]
        assert seen["overwritten"]
        assert seen["chunks"]
        assert seen["left"] == ["checkpoint"]
        assert (seen["deleted"], seen["deleted again"]) == (True, False)
        assert seen["missing"].type == "CheckpointNotFound"
        assert seen["left at the end"] == [f"named by {index}"]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(local_scenarios.refusals, tmp_path_factory.mktemp("refusals"))


def errors(seen: list[dict[str, Any]], case: str, kind: str) -> Raised:
    """The error of all processes, which is of one kind and, but for paths, one message."""
    found = [process[case] for process in seen]
    assert all(isinstance(error, Raised) and error.type == kind for error in found), found
    assert len({re.sub(r"disk \d", "disk", error.message) for error in found}) == 1, found
    first: Raised = found[0]
    return first


def test_processes_with_the_same_directory(refused: list[dict[str, Any]]) -> None:
    error = errors(refused, "same directory", "Conflict")
    assert "processes 0 and 1 both have" in error.message
    assert "give each another path" in error.message
    assert [process["left in it"] for process in refused] == [[], []]


def test_a_failure_in_one_process_leaves_nothing_in_any(refused: list[dict[str, Any]]) -> None:
    errors(refused, "full disk", "Unavailable")
    assert [process["after it"] for process in refused] == [[], []]


def test_checkpoints_that_are_not_there_or_not_the_same(refused: list[dict[str, Any]]) -> None:
    errors(refused, "nowhere", "CheckpointNotFound")
    errors(refused, "exists", "Conflict")
    lacking = errors(refused, "one lacks it", "Corrupt").message
    assert "process 0: a part of save" in lacking
    assert "(of process 0 of 2)" in lacking
    assert "process 1: no checkpoint" in lacking
    differing = errors(refused, "two saves", "Corrupt").message
    assert differing.count("a part of save") == 2
    assert [process["deleted"] for process in refused] == [True, True]


def test_what_is_on_the_disks_of_others(refused: list[dict[str, Any]]) -> None:
    error = errors(refused, "other sharding", "InvalidInput")
    assert error.context["array"] == "rows"
    assert error.context["process"] == 0
    assert "[32:64, 0:24]" in error.message
    assert "the storage of process 1 has it" in error.message


def test_a_part_cannot_be_loaded_as_if_it_were_shared(refused: list[dict[str, Any]]) -> None:
    error = errors(refused, "not local", "InvalidInput")
    assert "primary_host = None" in error.message
    assert [process["at last"] for process in refused] == [True, True]


@pytest.mark.parametrize("moved_ranks", [True, False])
def test_disks_that_come_back_with_other_processes(tmp_path: Path, moved_ranks: bool) -> None:
    """What counts is whether the data are there, not which process wrote them."""
    run(local_scenarios.save_once, tmp_path)
    with running(
        local_scenarios.load_elsewhere, moved_ranks, count=COUNT, framework="torch", directory=tmp_path
    ) as programs:
        found = programs.values()
    if moved_ranks:
        assert found == [True, True]
        return
    for error in found:
        assert error.type == "InvalidInput"
        assert "the storage of process 1 has it" in error.message
        assert error.context["process"] == 0


@pytest.mark.skipif(not held_memory.is_granted(), reason="this system does not let this user hold memory")
def test_a_part_that_cannot_be_committed_is_completed_later(tmp_path: Path) -> None:
    """A failure after the decision leaves nothing undone: the same program goes on from there."""
    with running(
        local_scenarios.one_cannot_commit, count=COUNT, framework="torch", directory=tmp_path
    ) as programs:
        assert programs.report(1) == "in the way"
        programs.send(0, "release")
        found = programs.values()
    for index, seen in enumerate(found):
        assert not isinstance(seen, Raised), seen
        for case in ("save", "in the way"):
            assert (seen[case].type, seen[case].context.get("process", 1)) == ("Conflict", 1), seen
            assert "stands in the way" in seen[case].message
        assert any("processes completes the checkpoint" in note for note in seen["save"].notes)
        assert seen["rank"] == (index, 0)
        assert seen["left"] == ["checkpoint"]


def test_one_part_by_itself(tmp_path: Path) -> None:
    """One host's part is a checkpoint to look at and to load from, as far as it goes."""
    run(local_scenarios.save_once, tmp_path)
    path = tmp_path / "disk 1" / "checkpoint"
    known = waystation.metadata(path)
    assert known.local is not None
    assert (known.local.process, known.local.process_count) == (1, 2)
    assert known.metadata["rows"].shape == (64, 48)
    found = verify(path)
    assert (found.damages, found.strays, found.local) == ([], [], known.local)
    assert found.bytes_read > 32 * 48 * 4
    context = waystation.Context()
    context.array.loading.restore_on_host = True
    with context, pytest.raises(InvalidInput, match=r"\[0:32, 0:48\]") as caught:
        waystation.load(path)
    assert caught.value.context["array"] == "rows"


def test_one_process_alone(tmp_path: Path) -> None:
    context = waystation.Context()
    context.multiprocessing.primary_host = None
    with context:
        waystation.save(tmp_path / "a", {"x": np.arange(3), "step": 1})
        waystation.save(tmp_path / "a", {"x": np.arange(4), "step": 2}, overwrite=True)
        assert waystation.load(tmp_path / "a")["x"].tolist() == [0, 1, 2, 3]
        with pytest.raises(waystation.errors.NotFound):
            waystation.load(tmp_path / "b")
    assert waystation.load(tmp_path / "a")["step"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.fixture(scope="module")
def jax_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Two processes of two devices each, waiting for what to do."""
    directory = tmp_path_factory.mktemp("jax")
    with running(jax_scenarios.serve, 2, count=2, framework="jax", directory=directory) as programs:
        yield programs


@settings(
    max_examples=amount(6, 300),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(state=states(4, 4))
def test_random_shardings_of_jax_programs(jax_programs: Programs, tmp_path: Path, state: State) -> None:
    """Each process finds all that its devices held on its own disk, bit by bit."""
    path = tmp_path / f"example {next(_numbers)}"
    for action in ("save_to_disk", "load_from_disk"):
        for index in range(2):
            jax_programs.send(index, (action, path, state))
        ended = [jax_programs.report(index) for index in range(2)]
        assert ended == [None, None], "\n".join(str(how) for how in ended)
    assert sorted(entry.name for entry in path.iterdir()) == ["disk 0", "disk 1"]
    shutil.rmtree(path)


_numbers = itertools.count()
