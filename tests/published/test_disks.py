"""Models whose files are on several disks: all of them are read at once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.published import models
from tests.support import disks

from waystation import errors
from waystation.layouts.native import read_job
from waystation.safetensors import load, open  # noqa: A004

ARRAYS = {f"w{number}": np.full((64, 1024), number, np.float32) for number in range(12)}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[Path]]:
    """Three files: one in memory, two on a disk."""
    models.write_set(tmp_path / "model", ARRAYS, 3)
    first, *others = sorted((tmp_path / "model").glob("*.safetensors"))
    with disks.in_memory() as elsewhere:
        shutil.move(first, elsewhere)
        yield [elsewhere / first.name, *others]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What happens to jobs, in order: the paths that one starts to read, and the end of one."""
    seen: list[tuple[str, Any]] = []
    start, finish = read_job.start, read_job.finish

    def started(read: Any, words: Any, owners: Any, options: Any, *more: Any, **keywords: Any) -> Any:
        seen.append(("start", ([path for path, *_ in read], options.engine.depth)))
        return start(read, words, owners, options, *more, **keywords)

    def finished(job: Any, statistics: Any) -> None:
        seen.append(("finish", None))
        finish(job, statistics)

    monkeypatch.setattr(read_job, "start", started)
    monkeypatch.setattr(read_job, "finish", finished)
    return seen


def test_every_disk_is_read_from_the_start(files: list[Path], events: list[tuple[str, Any]]) -> None:
    loaded = load(files, framework="numpy")
    assert {name: array.tobytes() for name, array in loaded.items()} == {
        name: array.tobytes() for name, array in ARRAYS.items()
    }
    assert [kind for kind, _ in events] == ["start", "start", "finish", "finish"]
    assert sorted(path for _, found in events[:2] for path in found[0]) == sorted(map(str, files))
    assert sorted(len(found[0]) for _, found in events[:2]) == [1, 2]


def test_jobs_share_what_one_may_take(files: list[Path], events: list[tuple[str, Any]]) -> None:
    for chosen in (files, files[1:]):
        load(chosen, framework="numpy", memory_limit=16 << 20)
    first, second, alone = [found[1] for kind, found in events if kind == "start"]
    assert first == second == alone // 2


@pytest.mark.parametrize("changed", [0, 2])
def test_what_changes_on_one_of_them_is_an_error(files: list[Path], changed: int) -> None:
    opened = open(files)
    data = files[changed].read_bytes()
    files[changed].write_bytes(data[:-8])
    with pytest.raises(errors.Conflict) as caught:
        load(opened, framework="numpy")
    assert caught.value.context["path"] == str(files[changed])
