"""File systems that lose bytes when a file is closed: the save fails and leaves nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import lossy_mount

import waystation
from waystation import errors, safetensors

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
def test_where_nothing_is_lost_everything_is_right(layout: str, tmp_path: Path) -> None:
    with lossy_mount.mounted(tmp_path / "disk", "nothing") as disk:
        target = disk / ("state.safetensors" if layout == "safetensors" else "checkpoint")
        save(target, layout)
        loaded = load(target, layout)
        assert all(np.array_equal(loaded[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize(
    ("layout", "pattern"),
    [
        ("native", "*.safetensors"),
        ("native", "tree.json"),
        ("native", "chunks.bin"),
        ("native", "record.json"),
        ("native", "checkpoint.json"),
        ("native", "owner.json"),
        ("ocdbt", "*"),
        ("ocdbt", "manifest.ocdbt"),
        ("ocdbt", "_METADATA"),
        ("zarr", "*"),
        ("zarr", "*zarr*"),
        ("safetensors", "*"),
    ],
)
def test_a_file_that_is_lost_when_it_is_closed_fails_the_save(
    layout: str, pattern: str, tmp_path: Path
) -> None:
    with lossy_mount.mounted(tmp_path / "disk", pattern) as disk:
        target = disk / ("state.safetensors" if layout == "safetensors" else "checkpoint")
        with pytest.raises(errors.Unavailable) as caught:
            save(target, layout)
        assert caught.value.errno == 5
        assert str(disk) in caught.value.context["path"]
        assert os.listdir(disk) == []
