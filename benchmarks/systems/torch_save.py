"""`torch.save` and `torch.load`: one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.systems.base import TorchSystem

_FILE_NAME = "state.pt"


class TorchSave(TorchSystem):
    """Its file is synced, which `torch.save` leaves to its user; loads are of weights only, the default."""

    name = "torch-save"
    writer = "torch-save"
    distribution = "torch"
    syncs = False  # the directory is not
    is_usual = False

    _library: Any

    def prepare(self, way: str) -> None:
        del way
        import torch

        self._library = torch

    def save(self, path: Path, state: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)
        with (path / _FILE_NAME).open("wb") as file:
            self._library.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, path: Path, template: Any) -> Any:
        del template
        return self._library.load(path / _FILE_NAME, weights_only=True)

    def load_into(self, path: Path, own: Any) -> None:
        loaded = self.arrays(self.load(path, None))
        for name, tensor in self.arrays(own).items():
            tensor.copy_(loaded[name])
