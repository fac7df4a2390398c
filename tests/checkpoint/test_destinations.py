"""Where saves go: free paths and empty directories are taken; anything else is refused, and stays."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.disks import mounted

import waystation
from waystation import errors, partial
from waystation.checkpoint.joining import Joining, part_path

LAYOUTS = {"native": None, "zarr": False, "ocdbt": True}
layouts = pytest.mark.parametrize("use_ocdbt", LAYOUTS.values(), ids=LAYOUTS)
overwriting = pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])

STATE = {"weights": [1, 2], "step": 7}


@contextlib.contextmanager
def layout(use_ocdbt: bool | None) -> Any:
    context = waystation.Context()
    context.array.saving.use_ocdbt = use_ocdbt
    with context:
        yield


def save_async(path: Path, *, overwrite: bool) -> None:
    waystation.save_async(path, STATE, overwrite=overwrite).result()


def save_checkpointables(path: Path, *, overwrite: bool) -> None:
    waystation.save_checkpointables(path, {"state": STATE, "notes": {"a": "b"}}, overwrite=overwrite)


def save(path: Path, *, overwrite: bool) -> None:
    waystation.save(path, STATE, overwrite=overwrite)


@layouts
@overwriting
@pytest.mark.parametrize("call", [save, save_async, save_checkpointables])
def test_an_empty_directory_is_taken(
    tmp_path: Path, call: Callable[..., None], use_ocdbt: bool | None, overwrite: bool
) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir(mode=0o700)
    with layout(use_ocdbt):
        call(path, overwrite=overwrite)
    assert waystation.load(path) == STATE
    assert stat.S_IMODE(path.stat().st_mode) == 0o700, "a private directory stays private"
    assert os.listdir(tmp_path) == ["checkpoint"]


class Intruder:
    """A checkpointable that puts a file into the destination while it is saved."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def save(self, directory: Any) -> Awaitable[None]:
        async def write() -> None:
            await directory.await_creation()
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_text("mine")

        return write()

    async def load(self, directory: Path) -> Awaitable[None]:
        raise AssertionError("nothing loads it")


@layouts
@overwriting
@pytest.mark.parametrize("is_there", [True, False], ids=["empty", "absent"])
def test_what_another_puts_there_meanwhile_stays(
    tmp_path: Path, use_ocdbt: bool | None, overwrite: bool, is_there: bool
) -> None:
    path = tmp_path / "checkpoint"
    if is_there:
        path.mkdir()
    intruder = Intruder(path / "file")
    with layout(use_ocdbt), pytest.raises(errors.Conflict, match="stands in the way") as caught:
        waystation.save_checkpointables(path, {"state": STATE, "other": intruder}, overwrite=overwrite)
    assert caught.value.context["path"] == str(path)
    assert (path / "file").read_text() == "mine"
    assert os.listdir(path) == ["file"]
    assert os.listdir(tmp_path) == ["checkpoint"]


class Faster:
    """A checkpointable that gives a whole checkpoint the path of the destination while it is saved."""

    def __init__(self, checkpoint: Path, path: Path) -> None:
        self._checkpoint, self._path = checkpoint, path

    async def save(self, directory: Any) -> Awaitable[None]:
        async def write() -> None:
            await directory.await_creation()
            self._checkpoint.rename(self._path)

        return write()

    async def load(self, directory: Path) -> Awaitable[None]:
        raise AssertionError("nothing loads it")


@layouts
@overwriting
def test_a_checkpoint_that_came_meanwhile_is_replaced_if_asked_for(
    tmp_path: Path, use_ocdbt: bool | None, overwrite: bool
) -> None:
    path = tmp_path / "checkpoint"
    waystation.save(tmp_path / "other", [1])
    state = {"state": STATE, "other": Faster(tmp_path / "other", path)}
    with layout(use_ocdbt):
        if overwrite:
            waystation.save_checkpointables(path, state, overwrite=True)
        else:
            with pytest.raises(errors.Conflict, match="overwrite=True replaces a checkpoint"):
                waystation.save_checkpointables(path, state)
    assert waystation.load(path) == (STATE if overwrite else [1])
    assert os.listdir(tmp_path) == ["checkpoint"]


@overwriting
def test_what_is_no_empty_directory_is_refused_with_advice(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("notes")
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    before = sorted(tmp_path.rglob("*"))
    for name, advice in (
        ("full", "not empty.*save to a path inside it"),
        ("file", "no directory.*remove it, or choose another path"),
        ("link", "no directory.*remove it, or choose another path"),
    ):
        for call in (save, save_async, save_checkpointables):
            with pytest.raises(errors.Conflict, match=advice) as caught:
                call(tmp_path / name, overwrite=overwrite)
            assert "overwrite=True" not in str(caught.value), "it would not help"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_mount_point_is_not_taken(tmp_path: Path) -> None:
    with mounted(tmp_path / "mount", "size=8m") as place:
        with pytest.raises(errors.Conflict, match=r"mount point.*inside it"):
            waystation.save(place, STATE)
        waystation.save(place / "inside", STATE)


def test_the_working_directory_is_not_taken_away(tmp_path: Path) -> None:
    code = """
import waystation
try:
    waystation.save(".", [1])
except waystation.errors.Conflict as error:
    print(error)
waystation.save("./inside", [1])
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    assert "is the working directory of this process" in ended.stdout
    assert os.listdir(tmp_path) == ["inside"]


def test_parts_take_an_empty_directory_too(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    partial.save(tmp_path / "parts", {"a": 1})
    partial.save(tmp_path / "parts", {"b": 2})
    partial.finalize(tmp_path / "parts")
    assert waystation.load(tmp_path / "parts") == {"a": 1, "b": 2}
    for overwrite in (False, True):
        path = tmp_path / f"joined{overwrite}"
        path.mkdir()
        joining = Joining(path, overwrite=overwrite)
        waystation.save(part_path(joining.directory, 0), {"a": 1})
        joining.commit(1)
        assert waystation.load(path) == {"a": 1}


@layouts
def test_nothing_is_saved_inside_a_checkpoint(tmp_path: Path, use_ocdbt: bool | None) -> None:
    whole = tmp_path / "run"
    with layout(use_ocdbt):
        waystation.save(whole, STATE)
    for inside in (whole / "step_1", whole / "steps" / "step_1", whole / "state" / "step_1"):
        for save in (save_async, save_checkpointables):
            with pytest.raises(errors.Conflict, match=f"inside the checkpoint '{whole}'.*beside it"):
                save(inside, overwrite=True)
        with pytest.raises(errors.Conflict, match="inside the checkpoint"):
            partial.save(inside, STATE)
        assert not inside.exists()
    waystation.save(tmp_path / "beside", STATE)
    assert waystation.load(whole) == STATE


def test_other_programs_files_above_do_not_make_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text('{"model": "mine"}')
    waystation.save(tmp_path / "runs" / "step_1", STATE)
    assert waystation.load(tmp_path / "runs" / "step_1") == STATE


def test_what_a_handler_writes_with_a_save_is_not_inside_a_checkpoint(tmp_path: Path) -> None:
    step = tmp_path / "7.orbax-checkpoint-tmp-1"
    step.mkdir()
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    waystation.save(step / "mine", STATE)
    assert waystation.load(step / "mine") == STATE


@pytest.mark.parametrize("name", [chr(0xD800), chr(0xDCFF)], ids=["no file has it", "bytes"])
def test_a_path_that_is_not_utf_8_is_refused(tmp_path: Path, name: str) -> None:
    path = f"{tmp_path}/{name}"
    for call in (
        lambda: waystation.save(path, STATE),
        lambda: waystation.load(path),
        lambda: waystation.metadata(path),
        lambda: waystation.delete(path),
    ):
        with pytest.raises(errors.UnusablePath, match=r"not a usable path: it is not UTF-8; rename"):
            call()
    assert not waystation.is_checkpoint(path)
    assert not os.listdir(tmp_path)


def test_ctrl_c_while_the_attempt_begins_leaves_nothing(tmp_path: Path) -> None:
    code = """
import os, signal, sys
import waystation

told = []

def interrupt(event, arguments):
    if event == "open" and str(arguments[0]).endswith("owner.json") and not told:
        told.append(arguments[0])
        signal.raise_signal(signal.SIGINT)

sys.addaudithook(interrupt)
try:
    waystation.save("run/step", [1])
except KeyboardInterrupt:
    print("interrupted", os.path.basename(os.path.dirname(told[0])), os.listdir("."))
waystation.save("run/step", [2])
print(os.listdir("run"), waystation.load("run/step"))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    first, second = ended.stdout.splitlines()
    assert first.startswith("interrupted step.waystation-tmp-")
    assert first.endswith(" []")
    assert second == "['step'] [2]"
