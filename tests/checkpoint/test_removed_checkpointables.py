"""A checkpointable whose directory somebody has removed: the others can be loaded, as in Orbax."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import waystation
from waystation import errors
from waystation.training.errors import DamagedCheckpointWarning

LAYOUTS = pytest.mark.parametrize("use_ocdbt", [None, True, False], ids=["native", "ocdbt", "files"])


def _saved(path: Path, use_ocdbt: bool | None, removed: str) -> Path:
    """A checkpoint of three states, without the directory of one."""
    context = waystation.Context()
    context.array.saving.use_ocdbt = use_ocdbt
    with context:
        waystation.save_checkpointables(
            path, {name: {"x": np.full(3, number)} for number, name in enumerate(("ema", "opt", "state"))}
        )
    shutil.rmtree(path / removed)
    return path


@LAYOUTS
def test_the_others_are_loaded(use_ocdbt: bool | None, tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", use_ocdbt, "opt")
    assert sorted(waystation.load_checkpointables(path)) == ["ema", "state"]
    assert sorted(waystation.load_checkpointables_async(path).result()) == ["ema", "state"]
    assert sorted(waystation.checkpointables_metadata(path).metadata) == ["ema", "state"]
    assert waystation.load(path)["x"].tolist() == [2, 2, 2]
    assert waystation.load(path, checkpointable_name="ema")["x"].tolist() == [0, 0, 0]
    assert waystation.load_checkpointables(path, {"state": None})["state"]["x"].tolist() == [2, 2, 2]


@LAYOUTS
def test_what_has_been_removed_is_not_found(use_ocdbt: bool | None, tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", use_ocdbt, "opt")
    for ask in (
        lambda: waystation.load(path, checkpointable_name="opt"),
        lambda: waystation.load_checkpointables(path, {"opt": None, "state": None}),
        lambda: waystation.metadata(path, checkpointable_name="opt"),
        lambda: waystation.delete(path, checkpointable_name="opt"),
    ):
        with pytest.raises(errors.CheckpointableNotFound, match="opt") as caught:
            ask()
        assert isinstance(caught.value, errors.InvalidLayoutError | KeyError)
    assert not waystation.delete(path, checkpointable_name="opt", missing_ok=True)
    assert waystation.delete(path, checkpointable_name="ema")
    with pytest.raises(errors.InvalidInput, match="last checkpointable"):
        waystation.delete(path, checkpointable_name="state")


def test_a_warning_and_verify_tell(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _saved(tmp_path / "c", None, "opt")
    with caplog.at_level(logging.WARNING, "waystation"):
        waystation.load_checkpointables(path)
    assert "the directories of opt have been removed" in caplog.text
    (damage,) = waystation.verify(path).damages
    assert os.path.join(path, "opt") in damage.path


def test_no_other_state_takes_the_place_of_the_default_one(tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", None, "state")
    with pytest.raises(errors.CheckpointableNotFound, match="has been removed; it has: ema, opt"):
        waystation.load(path)
    assert sorted(waystation.load_checkpointables(path)) == ["ema", "opt"]


def test_a_checkpointable_that_lacks_a_file_is_damaged(tmp_path: Path) -> None:
    path = _saved(tmp_path / "c", None, "opt")
    (path / "ema" / "tree.json").unlink()
    with pytest.raises(errors.Corrupt, match="missing"):
        waystation.load_checkpointables(path)


def test_steps_without_a_part_are_steps(tmp_path: Path) -> None:
    with waystation.training.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save_checkpointables(
                step, {"state": {"x": np.full(2, step)}, "opt": {"m": np.ones(2)}}
            )
    shutil.rmtree(tmp_path / "2" / "opt")
    with waystation.training.Checkpointer(tmp_path) as checkpointer:
        loaded = checkpointer.load_checkpointables()
        assert list(loaded) == ["state"]
        assert loaded["state"]["x"].tolist() == [2, 2]
    shutil.rmtree(tmp_path / "2" / "state")
    with (
        waystation.training.Checkpointer(tmp_path) as checkpointer,
        pytest.warns(DamagedCheckpointWarning),
    ):
        assert checkpointer.load()["x"].tolist() == [1, 1]
