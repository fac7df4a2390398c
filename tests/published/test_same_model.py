"""What tells whether processes have opened the same files, and which tensors they sample."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.support import web

from waystation.safetensors import same_model
from waystation.safetensors.headers import read_headers


def mark(*paths: str | Path) -> str:
    return same_model.mark_of(read_headers([str(path) for path in paths]))


def test_files_are_told_by_what_they_are_and_not_by_their_paths(tmp_path: Path) -> None:
    path, link, copy = tmp_path / "model.safetensors", tmp_path / "link", tmp_path / "copy"
    save_file({"a": np.ones(3)}, path)
    link.symlink_to(path)
    shutil.copy2(path, copy)
    assert mark(path) == mark(link) == mark(path)
    assert len({mark(path), mark(copy), mark(path, copy), mark(copy, path), mark()}) == 5


@pytest.mark.parametrize("manners", [{}, {"sends_tags": False, "sends_times": False}])
def test_objects_are_told_by_their_locations_and_versions(tmp_path: Path, manners: dict[str, bool]) -> None:
    """Two objects of one length, which a server may not tell apart."""
    for name in ("a", "b"):
        save_file({"w": np.full(3, ord(name))}, tmp_path / name)
        os.utime(tmp_path / name, (1e9, 1e9))
    with web.site(tmp_path, **manners) as site:
        assert mark(f"{site.url}/a") == mark(f"{site.url}/a") != mark(f"{site.url}/b")


def test_what_is_sampled_of_stores_is_sampled_of_files_too() -> None:
    for count in (0, 1, 63, 64, 65, 200, 256, 257, 1000, 4099):
        names = [f"{number:04}" for number in range(count)]
        many = same_model._spread(names, same_model._MOST_SAMPLES)
        few = same_model._spread(names, same_model._MOST_SAMPLES_OF_STORES)
        assert set(few) <= set(many)
        assert (len(few), len(many)) == (min(count, 64), min(count, 256))
        assert {*names[:1], *names[-1:]} <= set(few)
