"""Programs of several processes decide, save, collect and load steps as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.programs import running
from tests.training import sequences

import waystation

FRAMEWORKS = ["jax", "torch"]
COUNT = 2


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_primary_decides_for_all(tmp_path: Path, framework: str) -> None:
    root = tmp_path / "run"
    with running(
        sequences.save_and_collect, root, count=COUNT, framework=framework, directory=tmp_path
    ) as programs:
        first, second = programs.values()
    assert first == second, "though each asks a policy that says something else"
    assert [step for step, saved in enumerate(first["saved"]) if saved] == [0, 3, 6, 9, 12]
    assert first["steps"] == first["again"] == [3, 9, 12]
    assert (first["loaded"], first["in the background"]) == (12, 3)
    assert first["metrics"] == [{"score": 0}, {"score": -6}, {"score": -9}]
    assert all(time is not None for time in first["times"])
    assert sorted(path.name for path in root.iterdir() if path.name.isdigit()) == ["12", "3", "9"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_saves_in_flight_may_end_in_any_order(tmp_path: Path, framework: str) -> None:
    root = tmp_path / "run"
    with running(
        sequences.save_several_at_once, root, count=COUNT, framework=framework, directory=tmp_path
    ) as programs:
        assert programs.values() == [[1, 2]] * COUNT
    assert sorted(path.name for path in root.iterdir() if path.name.isdigit()) == ["1", "2"]


@pytest.mark.share(4)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("of", [0, 1], ids=["file-of-the-primary", "file-of-the-other"])
def test_all_pass_over_what_one_finds_damaged(tmp_path: Path, framework: str, of: int) -> None:
    root = tmp_path / "run"
    with running(
        sequences.save_several_at_once, root, count=COUNT, framework=framework, directory=tmp_path
    ) as programs:
        programs.values()
    (file,) = (root / "2" / "state").glob(f"p0000{of}-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with running(
        sequences.load_past_damage, root, count=COUNT, framework=framework, directory=tmp_path
    ) as programs:
        first, second = programs.values()
    assert first == second
    assert (first["step"], first["damaged"], first["latest"], first["then"]) == (1, [2], 1, 2)
    assert len(first["warned"]) == 1
    assert "step 2 ('2')" in first["warned"][0]
    assert waystation.verify(root / "2").damages == []


def flip(file: Path) -> None:
    """Flips a bit near the end, as a failing disk might."""
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


@pytest.mark.share(4)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("checkpointables", [False, True], ids=["state", "checkpointables"])
def test_all_pass_over_damage_in_the_background_too(
    tmp_path: Path, framework: str, checkpointables: bool
) -> None:
    root = tmp_path / "run"
    arguments: dict[str, Any] = {"count": COUNT, "framework": framework, "directory": tmp_path}
    with running(sequences.save_steps, root, 5, **arguments) as programs:
        programs.values()
    flip(root / "4" / "state" / "tree.json")  # found when it is opened
    (file,) = (root / "3" / "state").glob("p00001-*.safetensors")
    flip(file)  # found by one process, in the background
    (file,) = (root / "2" / "state").glob("p00000-*.safetensors")
    file.unlink()
    with running(
        sequences.load_past_damage_in_the_background, root, checkpointables, **arguments
    ) as programs:
        first, second = programs.values()
    assert first == second
    assert (first["step"], first["other"], first["latest"]) == (1, 0, 1)
    assert first["damaged"] == [2, 3, 4]
    assert (first["asked"], first["none"]) == ("Corrupt", "StepNotFoundError")
    (warned,) = first["warned"]
    assert "step 4 ('4'), step 3 ('3'), step 2 ('2')" in warned


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_errors_are_the_same_in_all_processes(tmp_path: Path, framework: str) -> None:
    with running(
        sequences.raise_the_same, tmp_path / "run", count=COUNT, framework=framework, directory=tmp_path
    ) as programs:
        first, second = programs.values()
    assert first == second
    assert first == [
        "StepNotFoundError",
        "StepAlreadyExistsError",
        "StepNotFoundError",
        "StepNotFoundError",
        "StructureMismatch",
        "[]",
    ]


def test_each_process_may_have_a_disk_of_its_own(tmp_path: Path) -> None:
    for steps, before in (([1, 2, 3], []), ([4], [2, 3])):
        with running(
            sequences.train_on_own_disks, tmp_path, steps, count=COUNT, framework="torch", directory=tmp_path
        ) as programs:
            first, second = programs.values()
        assert first == second
        assert first["before"] == before
        assert first["steps"] == [steps[-1] - 1, steps[-1]]
        assert first["metrics"] == [{"score": step} for step in first["steps"]]
        assert first["loaded"] == steps[-1]
        assert first["there"] == [str(step) for step in first["steps"]]


def test_a_step_that_one_disk_has_lost_does_not_count(tmp_path: Path) -> None:
    for steps, expected in (([1, 2], 2), ([], 1)):
        with running(
            sequences.train_on_own_disks, tmp_path, steps, count=COUNT, framework="torch", directory=tmp_path
        ) as programs:
            found = programs.values()
        assert [entry["loaded"] for entry in found] == [expected] * COUNT
        waystation.delete(tmp_path / "disk 1" / str(expected))
