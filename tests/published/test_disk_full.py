"""A disk that fills up, at whatever page or entry, leaves readers the earlier model or the new one, whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import disks

from waystation import errors
from waystation.safetensors import load, save, write_checksums

PAGE_BYTES = 4096
MOST_PAGES = 80

# Arrays, and how many bytes of them a file takes.
MODELS = {
    "one file": (2, 1 << 20),
    "several files": (5, 6000),
    "many files": (9, 1),
}


def arrays(what: str, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    count, _ = MODELS[what]
    return {f"w{number}": np.full((30, 50), 100 * seed + number, np.float32) for number in range(count)}


def put(directory: Path, what: str, seed: int) -> None:
    save(arrays(what, seed), directory, max_file_bytes=MODELS[what][1], overwrite=True)


def seen(directory: Path) -> dict[str, bytes] | None:
    """What a reader finds."""
    if not directory.exists():
        return None
    return {name: array.tobytes() for name, array in load(directory, framework="numpy").items()}


def expected(what: str, seed: int) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays(what, seed).items()}


def leave(disk: Path, pages: int) -> None:
    """Fills the disk up to some pages."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    with ballast.open("wb") as file:
        free = os.statvfs(disk).f_bavail - pages
        if free > 0:
            os.posix_fallocate(file.fileno(), 0, free * PAGE_BYTES)


@pytest.mark.share(3)
@pytest.mark.parametrize("after", MODELS)
@pytest.mark.parametrize("before", ["nothing", *MODELS])
def test_every_page_may_be_the_last(tmp_path: Path, before: str, after: str) -> None:
    failed = 0
    with disks.mounted(tmp_path / "disk", "size=2m") as disk:
        for pages in range(MOST_PAGES):
            model = disk / str(pages)
            if before != "nothing":
                put(model, before, 1)
            old = seen(model)
            leave(disk, pages)
            try:
                put(model, after, 2)
            except errors.DiskFull:
                failed += 1
                found = seen(model)
                assert found in (old, expected(after, 2))
                left = [path.name for path in disk.iterdir()]
                assert set(left) <= {str(pages), "ballast"}, "an attempt was left"
                if model.exists():
                    assert all(path.suffix in (".safetensors", ".json") for path in model.iterdir())
                (disk / "ballast").unlink()
                put(model, after, 2)  # with room it succeeds, whatever was left
            else:
                (disk / "ballast").unlink()
            assert seen(model) == expected(after, 2)
            for path in model.iterdir():
                path.unlink()
            model.rmdir()
            if failed < pages:  # two saves had room enough
                break
        else:
            pytest.fail("no save had room enough")
    assert failed >= 3


@pytest.mark.parametrize("before", ["nothing", *MODELS])
def test_every_entry_may_be_the_last(tmp_path: Path, before: str) -> None:
    failed = 0
    with disks.mounted(tmp_path / "disk", "size=4m,nr_inodes=60") as disk:
        model = disk / "model"
        for entries in range(30):
            if before != "nothing":
                put(model, before, 1)
            old = seen(model)
            fillers = os.statvfs(disk).f_favail - entries
            for number in range(fillers):
                (disk / f"filler{number}").touch()
            try:
                put(model, "several files", 2)
            except errors.DiskFull:
                failed += 1
                assert seen(model) in (old, expected("several files", 2))
            for number in range(fillers):
                (disk / f"filler{number}").unlink()
            put(model, "several files", 2)
            assert seen(model) == expected("several files", 2)
            assert [path.name for path in disk.iterdir()] == ["model"], "an attempt was left"
            for path in model.iterdir():
                path.unlink()
            model.rmdir()
            if failed < entries:
                break
        else:
            pytest.fail("no save had entries enough")
    assert failed >= 3


def test_checksums_that_find_no_room_leave_the_earlier_ones(tmp_path: Path) -> None:
    with disks.mounted(tmp_path / "disk", "size=2m") as disk:
        put(disk / "model", "one file", 1)
        (path,) = write_checksums(disk / "model")
        before = Path(path).read_bytes()
        leave(disk, 0)
        with pytest.raises(errors.DiskFull):
            write_checksums(disk / "model")
        assert Path(path).read_bytes() == before
        (disk / "ballast").unlink()
        assert write_checksums(disk / "model") == [path]
        assert sorted(os.listdir(disk / "model")) == ["checksums.waystation.json", "model.safetensors"]
