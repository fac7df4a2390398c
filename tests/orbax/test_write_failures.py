"""What goes wrong with the disk while a save in Orbax's layouts runs: typed errors, the disk as it was."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.test_bad_input import tree, without_privileges
from tests.orbax import oracle, writing
from tests.support import disks

import waystation
from waystation import errors

LAYOUTS: dict[str, dict[str, Any]] = {
    "files": {"use_ocdbt": False},
    "files-plain": {"use_ocdbt": False, "use_compression": False},
    "ocdbt": {"use_ocdbt": True},
    "ocdbt-plain": {"use_ocdbt": True, "use_compression": False},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def save(path: Path, state: Any, layout: dict[str, Any], *, overwrite: bool, in_background: bool) -> None:
    with writing.layout_of(layout):
        if in_background:
            waystation.save_async(path, state, overwrite=overwrite).result()
        else:
            waystation.save(path, state, overwrite=overwrite)


@layouts
@pytest.mark.parametrize("in_background", [False, True])
def test_no_room_for_the_data(layout: dict[str, Any], in_background: bool, tmp_path: Path) -> None:
    state = {"x": np.random.default_rng(0).integers(0, 255, 16 << 20, np.uint8)}
    with disks.mounted(tmp_path / "disk", "size=8m") as disk:
        writing.save(disk / "old", {"x": np.arange(10)}, **layout)
        before = tree(disk)
        for overwrite in (False, True):
            target = disk / ("old" if overwrite else "new")
            with pytest.raises(errors.DiskFull) as caught:
                save(target, state, layout, overwrite=overwrite, in_background=in_background)
            assert str(disk) in caught.value.context["path"]
            assert tree(disk) == before
        writing.save(disk / "new", {"x": state["x"][: 1 << 20]}, **layout)
        oracle.assert_same(oracle.load(disk / "new"), {"x": state["x"][: 1 << 20]})


def failure_of_saving(path: Path, state: Any, layout: dict[str, Any]) -> errors.DiskFull | None:
    try:
        writing.save(path, state, **layout)
    except errors.DiskFull as error:
        return error
    return None


@layouts
def test_no_room_for_any_one_of_the_files(layout: dict[str, Any], tmp_path: Path) -> None:
    """One file system after another with room for one file or directory more, until there is enough."""
    state = {"a": np.arange(3), "b": {"c": np.arange(5), "name": "words"}}
    paths = set()
    for count in range(3, 60):
        with disks.mounted(tmp_path / f"disk {count}", f"nr_inodes={count}") as disk:
            (disk / "file").touch()
            failure = failure_of_saving(disk / "runs" / "new", state, layout)
            if failure is None:
                oracle.assert_same(oracle.load(disk / "runs" / "new"), state)
                break
            paths.add(Path(failure.context["path"]).name)
            assert list(disk.iterdir()) == [disk / "file"], failure
    assert len(paths) > 8, paths


@layouts
def test_a_file_system_that_is_read_only(layout: dict[str, Any], tmp_path: Path) -> None:
    with disks.mounted(tmp_path / "disk", "size=8m") as disk:
        writing.save(disk / "old", {"x": np.arange(10)}, **layout)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for in_background in (False, True):
            for target in ("new", "old"):
                with pytest.raises(errors.PermissionDenied) as caught:
                    save(disk / target, {"x": 1}, layout, overwrite=True, in_background=in_background)
                assert isinstance(caught.value, PermissionError)
        oracle.assert_same(oracle.load(disk / "old"), {"x": np.arange(10)})


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux, when run as root")
@layouts
@pytest.mark.share(4)
def test_a_directory_that_may_not_be_written_to(layout: dict[str, Any], tmp_path: Path) -> None:
    writing.save(tmp_path / "old", {"x": np.arange(10)}, **layout)
    closed = tmp_path / "closed"
    closed.mkdir()
    shutil.copytree(tmp_path / "old", closed / "old")
    closed.chmod(0o500)
    before = tree(tmp_path)
    code = f"""
from pathlib import Path
context = waystation.Context()
for name, value in {layout!r}.items():
    setattr(context.array.saving, name, value)
with context:
    for target in ("new", "old", "below/new"):
        for in_background in (False, True):
            given = (Path({str(closed)!r}) / target, {{"x": np.ones(1000)}})
            try:
                if in_background:
                    waystation.save_async(*given, overwrite=True).result()
                else:
                    waystation.save(*given, overwrite=True)
            except waystation.errors.PermissionDenied as error:
                assert isinstance(error, PermissionError)
                print(error.context["path"].startswith({str(closed)!r}))
"""
    assert without_privileges(code) == "True\n" * 6
    assert tree(tmp_path) == before
