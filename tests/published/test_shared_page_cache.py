"""When processes that load a model together read it through a page cache that they share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import waystation
from waystation.safetensors.headers import read_headers
from waystation.safetensors.request import options_of
from waystation.safetensors.torch_collective import View, share_page_cache

FILES = "digest of files"
VIEW = View(FILES, is_able=True, available_bytes=1000)


def test_processes_of_one_kernel_with_the_same_files_share() -> None:
    assert share_page_cache([VIEW, VIEW, VIEW], 1000)


@pytest.mark.parametrize(
    "other",
    [
        VIEW._replace(files="of others"),
        VIEW._replace(is_able=False),
        VIEW._replace(available_bytes=999),
    ],
)
def test_one_that_differs_is_enough_not_to(other: View) -> None:
    assert not share_page_cache([VIEW, other], 1000)
    assert not share_page_cache([other, VIEW], 1000)


def test_what_a_process_says(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, path)
    headers = read_headers([str(path)])
    view = View.of(headers, options_of(None, None), is_on_host=True)
    assert view == View(*json.loads(json.dumps(view)))
    save_file({"a": torch.ones(3)}, tmp_path / "copy.safetensors")
    copied = read_headers([str(tmp_path / "copy.safetensors")])
    for others in (copied, [*headers, *headers], []):
        assert View.of(others, options_of(None, None), is_on_host=True).files != view.files
    assert View.of(headers, options_of(None, None), is_on_host=True).files == view.files
    assert 0 < view.available_bytes < 1 << 50
    assert view.is_able
    assert not View.of(headers, options_of(None, None), is_on_host=False).is_able


@pytest.mark.parametrize(("mode", "is_able"), [("buffered", True), ("direct-ring", False)])
def test_a_prescribed_way_to_read_is_kept(tmp_path: Path, mode: str, is_able: bool) -> None:
    context = waystation.Context()
    context.engine.read_mode = mode
    with context:
        assert View.of([], options_of(None, None), is_on_host=True).is_able is is_able
