"""File systems that lose bytes when a file is closed or written back: the save fails and leaves nothing."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.distributed import call_scenarios
from tests.support import lossy_mount
from tests.support.programs import Raised, running

import waystation
from waystation import errors, partial, safetensors, training

STATE = {"large": np.arange(300_000, dtype=np.float64), "small": np.ones(7)}


def save(target: Path, layout: str, *, overwrite: bool = False) -> None:
    context = waystation.Context()
    if layout == "safetensors":
        safetensors.save(STATE, target)
        return
    if layout != "native":
        context.array.saving.use_ocdbt = layout == "ocdbt"
    with context:
        waystation.save(target, STATE, overwrite=overwrite)


def load(target: Path, layout: str) -> Any:
    return safetensors.load(target, framework="numpy") if layout == "safetensors" else waystation.load(target)


@pytest.mark.parametrize("layout", ["native", "ocdbt", "zarr", "safetensors"])
@pytest.mark.share(4)
def test_where_nothing_is_lost_everything_is_right(layout: str, tmp_path: Path) -> None:
    with lossy_mount.mounted(tmp_path / "disk", "nothing") as disk:
        target = disk / ("state.safetensors" if layout == "safetensors" else "checkpoint")
        save(target, layout)
        loaded = load(target, layout)
        assert all(np.array_equal(loaded[name], STATE[name]) for name in STATE)


files = pytest.mark.parametrize(
    ("layout", "pattern"),
    [
        ("native", "*.safetensors"),
        ("native", "tree.json"),
        ("native", "chunks.bin"),
        ("native", "record.json"),
        ("native", "checkpoint.json"),
        ("ocdbt", "*"),
        ("ocdbt", "manifest.ocdbt"),
        ("ocdbt", "_METADATA"),
        ("zarr", "*"),
        ("zarr", "*zarr*"),
        ("safetensors", "*"),
    ],
)


def assert_refused(save: Callable[[], object], disk: Path) -> None:
    before = os.listdir(disk)
    with pytest.raises(errors.Unavailable) as caught:
        save()
    assert caught.value.errno == 5
    assert str(disk) in caught.value.context["path"]
    assert os.listdir(disk) == before


@pytest.mark.share(12)
@files
def test_a_file_that_is_lost_when_it_is_closed_fails_the_save(
    layout: str, pattern: str, tmp_path: Path
) -> None:
    with lossy_mount.mounted(tmp_path / "disk", pattern) as disk:
        target = disk / ("state.safetensors" if layout == "safetensors" else "checkpoint")
        assert_refused(lambda: save(target, layout), disk)


def test_an_owner_record_that_is_lost_fails_the_save(tmp_path: Path) -> None:
    with lossy_mount.mounted(tmp_path / "disk", "owner.json") as disk:
        assert_refused(lambda: save(disk / "checkpoint", "native"), disk)


@pytest.mark.share(3)
@files
def test_a_file_of_whose_loss_only_its_writer_is_told_fails_the_save(
    layout: str, pattern: str, tmp_path: Path
) -> None:
    with lossy_mount.mounted(tmp_path / "disk", pattern, told="sync") as disk:
        target = disk / ("state.safetensors" if layout == "safetensors" else "checkpoint")
        assert_refused(lambda: save(target, layout), disk)


def test_files_that_make_room_for_others_are_synced_by_their_writers(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = [np.full(10 + number, number) for number in range(200)]
    context = waystation.Context()
    context.array.saving.use_ocdbt = False
    with lossy_mount.mounted(tmp_path / "disk", "c.0", told="sync") as disk, context:
        # A quarter of the descriptors that are left may wait for the sync: 200 files make room several times.
        limit = len(os.listdir("/proc/self/fd")) + 120
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            assert_refused(lambda: waystation.save(disk / "checkpoint", state), disk)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("pattern", ["*.safetensors", "checkpoint.json"])
def test_a_step_of_which_a_file_is_lost_is_none(pattern: str, tmp_path: Path) -> None:
    with (
        lossy_mount.mounted(tmp_path / "disk", pattern, told="sync") as disk,
        training.Checkpointer(disk / "run") as checkpointer,
    ):
        for save_step in (
            lambda: checkpointer.save(1, STATE),
            lambda: checkpointer.save_async(2, STATE).result(),
        ):
            assert_refused(save_step, disk)
            assert checkpointer.latest is None


@pytest.mark.parametrize("pattern", ["*.safetensors", "tree.json"])
def test_a_part_of_which_a_file_is_lost_is_none(pattern: str, tmp_path: Path) -> None:
    with lossy_mount.mounted(tmp_path / "disk", pattern, told="sync") as disk:
        with pytest.raises(errors.Unavailable):
            partial.save(disk / "checkpoint", STATE)
        with pytest.raises(errors.NotFound):
            partial.finalize(disk / "checkpoint")


@pytest.mark.parametrize(
    ("layout", "pattern"), [("native", "p00000-*"), ("native", "p00001-*"), ("zarr", "c.1.0"), ("ocdbt", "*")]
)
@pytest.mark.share(2)
def test_a_file_of_any_process_that_is_lost_fails_the_save_of_all(
    layout: str, pattern: str, tmp_path: Path
) -> None:
    with (
        lossy_mount.mounted(tmp_path / "disk", pattern, told="sync") as disk,
        running(
            call_scenarios.save,
            str(disk / "checkpoint"),
            layout,
            count=2,
            framework="torch",
            directory=tmp_path,
        ) as programs,
    ):
        values = programs.values()
        assert all(isinstance(value, Raised) and value.type == "Unavailable" for value in values), values
        assert os.listdir(disk) == []
