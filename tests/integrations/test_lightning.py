"""The plugin for Lightning: what Lightning does to the directory of checkpoints while saves go on."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import waystation
from waystation.errors import UnsupportedLeaf
from waystation.integrations import dcp


@pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="Lightning is not installed")
def test_the_directory_of_a_first_checkpoint_is_there_for_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from waystation.integrations.lightning import WaystationCheckpointIO

    def save_later(*arguments: Any, **options: Any) -> Any:
        # As a background save that has not come to its first file when Lightning makes the link.
        os.symlink("epoch=0.ckpt", tmp_path / "run" / "last.ckpt")
        return genuine(*arguments, **options)

    genuine = dcp.async_save
    monkeypatch.setattr(dcp, "async_save", save_later)
    plugin = WaystationCheckpointIO()
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "run" / "epoch=0.ckpt")
    plugin.teardown()
    assert torch.equal(plugin.load_checkpoint(tmp_path / "run" / "last.ckpt")["w"], torch.ones(3))
    assert waystation.is_checkpoint(tmp_path / "run" / "epoch=0.ckpt")


@pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="Lightning is not installed")
def test_a_file_of_lightning_is_replaced(tmp_path: Path) -> None:
    from waystation.integrations.lightning import WaystationCheckpointIO

    torch.save({"w": torch.zeros(3)}, tmp_path / "last.ckpt")
    plugin = WaystationCheckpointIO()
    assert torch.equal(plugin.load_checkpoint(tmp_path / "last.ckpt")["w"], torch.zeros(3))
    for number in range(2):
        plugin.save_checkpoint({"w": torch.full((3,), float(number))}, tmp_path / "last.ckpt")
        plugin.teardown()
        assert torch.equal(
            plugin.load_checkpoint(tmp_path / "last.ckpt")["w"], torch.full((3,), float(number))
        )
    assert [place.name for place in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="Lightning is not installed")
def test_what_only_pickle_could_save_is_told_with_what_to_do(tmp_path: Path) -> None:
    from waystation.integrations.lightning import WaystationCheckpointIO

    (tmp_path / "last.ckpt").write_text("a file")
    for name, path in (
        ("hyper_parameters", "new.ckpt"),
        ("hyper_parameters", "last.ckpt"),
        ("other", "new.ckpt"),
    ):
        with pytest.raises(UnsupportedLeaf, match=name) as caught:
            WaystationCheckpointIO().save_checkpoint({name: {"where": {1, 2}}}, tmp_path / path)
        assert ("save_hyperparameters(ignore=" in str(caught.value)) == (name == "hyper_parameters")
    assert (tmp_path / "last.ckpt").read_text() == "a file"
