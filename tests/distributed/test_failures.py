"""What goes wrong in one process is everybody's error, and leaves the disk as it was."""

from __future__ import annotations

from typing import Any

import pytest
from tests.distributed import torch_scenarios
from tests.support.programs import Raised, running


@pytest.fixture(scope="module", params=[2, 3])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process saw in each of the scenarios."""
    directory = tmp_path_factory.mktemp("failures")
    (directory / "checkpoints").mkdir()
    with running(
        torch_scenarios.survivable, count=request.param, framework="torch", directory=directory
    ) as programs:
        values = programs.values()
    assert not [value for value in values if isinstance(value, Raised)], values
    return values


def errors(seen: list[dict[str, Any]], case: str, kind: str) -> list[Raised]:
    """The errors of all processes, which are of one kind and message."""
    found = [process[case] for process in seen]
    assert all(isinstance(error, Raised) and error.type == kind for error in found), found
    assert len({error.message for error in found}) == 1, found
    return found


@pytest.mark.share(2)
def test_each_process_writes_its_own_files(seen: list[dict[str, Any]]) -> None:
    files = [name for name in seen[0]["good"] if name.endswith(".safetensors")]
    assert files == [f"p{process:05}-000.safetensors" for process in range(len(seen))]
    assert "model.safetensors.index.json" not in seen[0]["good"]
    assert not [name for name in seen[0]["good"] if name.endswith(".part")]


def test_existing_destination(seen: list[dict[str, Any]]) -> None:
    errors(seen, "exists", "Conflict")
    errors(seen, "exists async", "Conflict")


def test_other_structure_in_one_process(seen: list[dict[str, Any]]) -> None:
    for error in errors(seen, "other structure", "StructureMismatch"):
        assert "only process 1" in error.message
        assert "extra: int" in error.message
    for error in errors(seen, "other shape", "StructureMismatch"):
        assert "plain: torch float32[3]" in error.message
        assert "plain: torch float32[64, 48]" in error.message


@pytest.mark.parametrize("case", torch_scenarios.OTHER_OPTIONS)
def test_other_options_in_one_process(seen: list[dict[str, Any]], case: str) -> None:
    for error in errors(seen, f"other {case}", "StructureMismatch"):
        assert "the same options" in error.message
        assert "only process 1" in error.message


def test_leaf_that_one_process_cannot_save(seen: list[dict[str, Any]]) -> None:
    found = errors(seen, "bad leaf", "UnsupportedLeaf")
    for index, error in enumerate(found):
        assert "builtins.object" in error.message
        assert error.context["array"] == "['plain']"
        assert error.context.get("process") == (None if index == 1 else 1)


@pytest.mark.parametrize("case", ["full disk", "full disk async"])
def test_disk_that_is_full_for_one_process(seen: list[dict[str, Any]], case: str) -> None:
    for index, error in enumerate(errors(seen, case, "Unavailable")):
        assert "p00001-000.safetensors" in str(error.context)
        assert error.context.get("process") == (None if index == 1 else 1)


def test_missing_checkpoint_and_wrong_structure_at_load(seen: list[dict[str, Any]]) -> None:
    errors(seen, "missing", "CheckpointNotFound")
    errors(seen, "wrong structure", "StructureMismatch")


def test_nothing_is_left_behind(seen: list[dict[str, Any]]) -> None:
    assert [process["left"] for process in seen] == [["good"]] * len(seen)


def test_everything_works_afterwards(seen: list[dict[str, Any]]) -> None:
    for process in seen:
        assert process["overwritten"] is None
        assert (process["deleted"], process["deleted again"]) == (True, False)
        assert process["equal"]
        assert process["as saved"]
        assert process["host"] == ([0, 1, 2, 3, 4], 7)
