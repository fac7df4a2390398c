"""Damaged steps are passed over for the newest whole one, and named."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from tests.support.places import on_this_machine, part_of

import waystation
from waystation import errors
from waystation.storage import AnyPath
from waystation.training import Checkpointer, preservation_policies, save_decision_policies
from waystation.training.errors import DamagedCheckpointWarning

EVERY_STEP = save_decision_policies.FixedIntervalPolicy(1)


def state(step: int) -> dict[str, Any]:
    return {"a": np.full(100_000, step, np.int32), "step": step}


def save_steps(root: AnyPath, *steps: int) -> None:
    with Checkpointer(root, save_decision_policy=EVERY_STEP) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step))


def flip(path: Path, offset: int) -> None:
    """Flips a bit, as a failing disk might."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def damage_data(step: AnyPath) -> None:
    (file,) = part_of(step).glob("*.safetensors")
    flip(file, -1000)


def lose_data(step: AnyPath) -> None:
    (file,) = part_of(step).glob("*.safetensors")
    file.unlink()


def cut_data(step: AnyPath) -> None:
    (file,) = part_of(step).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:5000])


def damage_tree(step: AnyPath) -> None:
    flip(part_of(step) / "tree.json", 20)


def lose_tables(step: AnyPath) -> None:
    (part_of(step) / "chunks.bin").unlink()


def lose_record(step: AnyPath) -> None:
    (part_of(step) / "record.json").unlink()


def replace_tree(step: AnyPath) -> None:
    (part_of(step) / "tree.json").unlink()
    (part_of(step) / "tree.json").mkdir()


def replace_record(step: AnyPath) -> None:
    (part_of(step) / "record.json").unlink()
    (part_of(step) / "record.json").mkdir()


DAMAGES = [
    *(damage_data, lose_data, cut_data, damage_tree, lose_tables, lose_record),
    *(replace_tree, replace_record),
]


@pytest.mark.share(3)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_the_newest_whole_step_is_loaded(directory: AnyPath, damage: Callable[[AnyPath], None]) -> None:
    save_steps(directory, 1, 2, 3, 4)
    for step in (3, 4):
        damage(directory / str(step))
    with Checkpointer(directory, save_decision_policy=EVERY_STEP) as checkpointer:
        with pytest.warns(DamagedCheckpointWarning, match=r"step 4 \('4'\), step 3 \('3'\)"):
            loaded = checkpointer.load()
        assert loaded["step"] == 2
        assert (loaded["a"] == 2).all()
        assert checkpointer.latest is not None
        assert checkpointer.latest.step == 2
        assert [info.step for info in checkpointer.damaged] == [3, 4]
        assert checkpointer.load()["step"] == 2, "it is known now, so that nothing is warned of again"
        with pytest.raises(errors.WaystationError):
            checkpointer.load(4)
        # The program goes on from step 2, and saves again what was damaged.
        assert checkpointer.should_save(3)
        assert checkpointer.save(3, state(3))
        assert checkpointer.save(4, state(4))
        assert checkpointer.damaged == []
        assert (checkpointer.load()["a"] == 4).all()
    assert waystation.verify(directory / "4").damages == []


def test_a_damaged_record_is_found_on_opening(directory: AnyPath) -> None:
    save_steps(directory, 1, 2)
    flip(on_this_machine(directory / "2") / "checkpoint.json", 30)
    with pytest.warns(DamagedCheckpointWarning, match=r"step 2 \('2'\)") as caught:
        checkpointer = Checkpointer(directory, save_decision_policy=EVERY_STEP)
    assert caught[0].filename == __file__
    with checkpointer:
        assert checkpointer.latest is not None
        assert checkpointer.latest.step == 1
        assert checkpointer.load()["step"] == 1
        assert checkpointer.save(2, state(2))
        assert checkpointer.load()["step"] == 2


def test_damage_is_found_in_the_background_too(directory: AnyPath) -> None:
    save_steps(directory, 1, 2)
    damage_data(directory / "2")
    with Checkpointer(directory) as checkpointer, pytest.warns(DamagedCheckpointWarning, match="step 2"):
        assert checkpointer.load_async().result()["step"] == 1


def test_the_warning_points_at_the_program(directory: AnyPath) -> None:
    save_steps(directory, 1, 2)
    damage_data(directory / "2")
    with Checkpointer(directory) as checkpointer, pytest.warns(DamagedCheckpointWarning) as caught:
        checkpointer.load()
    assert caught[0].filename == __file__


def test_metadata_passes_over_what_cannot_be_opened(directory: AnyPath) -> None:
    save_steps(directory, 1, 2)
    damage_tree(directory / "2")
    with Checkpointer(directory) as checkpointer:
        with pytest.warns(DamagedCheckpointWarning, match="step 2"):
            assert checkpointer.metadata().step == 1
        with pytest.raises(errors.Corrupt):
            checkpointer.metadata(2)


def test_where_nothing_is_whole_that_is_said(directory: AnyPath) -> None:
    save_steps(directory, 1, 2)
    for step in (1, 2):
        damage_data(directory / str(step))
    with Checkpointer(directory) as checkpointer:
        for _ in range(2):
            with pytest.raises(errors.Corrupt, match=r"every checkpoint .* is damaged: step 1 .*, step 2 "):
                checkpointer.load()


def test_a_wrong_call_is_no_damage(directory: AnyPath) -> None:
    save_steps(directory, 1, 2)
    with Checkpointer(directory) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(errors.StructureMismatch):
            checkpointer.load(None, {"b": np.zeros(3)})
        with pytest.raises(errors.NotFound):
            checkpointer.load(checkpointable_name="other")
        assert checkpointer.latest is not None
        assert checkpointer.latest.step == 2


def test_the_only_good_step_is_not_collected(directory: AnyPath) -> None:
    save_steps(directory, 1, 2, 3)
    lose_record(directory / "3")
    policy = preservation_policies.CustomSteps([3])
    with Checkpointer(directory, preservation_policy=policy, save_decision_policy=EVERY_STEP) as checkpointer:
        assert [info.step for info in checkpointer.checkpoints] == [1, 2, 3], "nothing has looked into it yet"
        checkpointer.save(4, state(4))
        assert [info.step for info in checkpointer.checkpoints] == [3, 4], "what the policy keeps is damaged"
        checkpointer.save(5, state(5))
        assert [info.step for info in checkpointer.checkpoints] == [3, 5]


def test_a_lost_record_is_told_of_on_opening_and_by_a_save(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "2" / "checkpoint.json").unlink()
    (tmp_path / "notes").mkdir()
    with pytest.warns(DamagedCheckpointWarning, match="lost their checkpoint.json: 2;") as caught:
        checkpointer = Checkpointer(tmp_path, save_decision_policy=EVERY_STEP)
    assert caught[0].filename == __file__
    with checkpointer:
        assert checkpointer.load()["step"] == 1
        with pytest.raises(errors.InvalidLayoutError, match=r"has lost checkpoint\.json"):
            checkpointer.delete(2)
        with pytest.warns(DamagedCheckpointWarning, match="lost") as caught:
            checkpointer.reload()
        assert caught[0].filename == __file__


RESUMING = """
import sys, warnings
import numpy as np
from waystation.training import Checkpointer, save_decision_policies
from waystation.training.errors import DamagedCheckpointWarning

root, count = sys.argv[1], int(sys.argv[2])
warnings.simplefilter("always", DamagedCheckpointWarning)
with Checkpointer(root, save_decision_policy=save_decision_policies.FixedIntervalPolicy(1)) as checkpointer:
    begin = 0 if checkpointer.latest is None else checkpointer.load()["step"] + 1
    print("from", begin, flush=True)
    for step in range(begin, begin + count):
        checkpointer.save(step, {"a": np.full(1000, step), "step": step})
"""


def resume(root: Path, count: int) -> subprocess.CompletedProcess[str]:
    """A run that is started again, unattended, and makes so many steps."""
    return subprocess.run(
        [sys.executable, "-c", RESUMING, str(root), str(count)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


def test_a_run_goes_on_over_steps_that_are_no_checkpoints_and_removes_nothing_of_them(tmp_path: Path) -> None:
    assert resume(tmp_path, 4).stdout == "from 0\n"
    (tmp_path / "3" / "checkpoint.json").unlink()
    shutil.rmtree(tmp_path / "2")
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "notes").write_text("somebody's own")
    (tmp_path / "4").write_text("a file")
    (tmp_path / "5").symlink_to("nothing")
    (tmp_path / "3.waystation-aside-0").mkdir()  # of an earlier time
    kept = {path.relative_to(tmp_path / "3"): path.read_bytes() for path in (tmp_path / "3").rglob("*.*")}

    done = resume(tmp_path, 5)
    assert done.stdout == "from 2\n"
    assert "have lost their checkpoint.json: 3;" in done.stderr
    for step, number in ((2, 0), (3, 1), (4, 0), (5, 0)):
        aside = f"'{tmp_path / str(step)}.waystation-aside-{number}'"
        assert f"what was at '{tmp_path / str(step)}' is no checkpoint; to save step {step}" in done.stderr
        assert f"it was renamed to {aside}" in done.stderr

    assert (tmp_path / "2.waystation-aside-0" / "notes").read_text() == "somebody's own"
    lost = tmp_path / "3.waystation-aside-1"
    assert {path.relative_to(lost): path.read_bytes() for path in lost.rglob("*.*")} == kept
    assert (tmp_path / "4.waystation-aside-0").read_text() == "a file"
    assert (tmp_path / "5.waystation-aside-0").is_symlink()
    again = resume(tmp_path, 1)
    assert (again.stdout, again.stderr) == ("from 7\n", ""), "what was set aside is told of once"


def test_saves_in_the_background_and_through_other_calls_set_aside_too(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, save_decision_policy=EVERY_STEP) as checkpointer:
        for step in range(2):
            (tmp_path / str(step)).mkdir()
            (tmp_path / str(step) / "own").touch()
        with pytest.warns(DamagedCheckpointWarning, match="0 there, it was renamed to") as caught:
            response = checkpointer.save_async(0, state(0))
        assert caught[0].filename == __file__
        assert response is not None
        assert response.result()
        with pytest.warns(DamagedCheckpointWarning, match="1 there, it was renamed to") as caught:
            checkpointer.save(1, state(1))
        assert caught[0].filename == __file__
        assert [info.step for info in checkpointer.checkpoints] == [0, 1]
    for step in range(2):
        assert (tmp_path / f"{step}.waystation-aside-0" / "own").exists()
    with pytest.raises(errors.Conflict, match="not a checkpoint and not empty"):
        waystation.save(tmp_path / "0.waystation-aside-0", state(0))


def write_torch(root: Path, *steps: int) -> None:
    for step in steps:
        distributed_checkpoint.save({"a": torch.ones(3)}, checkpoint_id=root / str(step), no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoints_of_torch_are_told_of_on_opening_and_by_a_save(tmp_path: Path) -> None:
    write_torch(tmp_path, 10, 20)
    with pytest.warns(
        UserWarning, match=r"are checkpoints of torch\.distributed\.checkpoint: 10, 20;"
    ) as caught:
        checkpointer = Checkpointer(tmp_path, save_decision_policy=EVERY_STEP)
    assert caught[0].filename == __file__
    with checkpointer:
        assert checkpointer.latest is None
        told = rf"{tmp_path}/20' is no checkpoint of Waystation, but a checkpoint of torch\.distributed"
        with pytest.warns(DamagedCheckpointWarning, match=told):
            checkpointer.save(20, state(20))
    Checkpointer(tmp_path).close()  # the run has gone on from there: without a warning
