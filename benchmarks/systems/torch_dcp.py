"""`torch.distributed.checkpoint` in one process, without collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.states import Leaf
from benchmarks.systems.base import TorchSystem, Wait


class TorchDcp(TorchSystem):
    """Loads in place: tensors in untouched memory are made inside the timed region, as others must too."""

    name = "torch-dcp"
    writer = "torch-dcp"
    distribution = "torch"
    saves_async = True
    syncs = False  # it syncs its data file, not the directory

    _library: Any

    def prepare(self, way: str) -> None:
        del way
        import torch.distributed.checkpoint

        self._library = torch.distributed.checkpoint

    def template(self, leaves: list[Leaf]) -> list[Leaf]:
        return leaves

    def save(self, path: Path, state: Any) -> None:
        self._library.save(state, checkpoint_id=path, no_dist=True)

    def save_async(self, path: Path, state: Any) -> Wait:
        future = self._library.async_save(state, checkpoint_id=path, no_dist=True)
        wait: Wait = future.result
        return wait

    def load(self, path: Path, template: Any) -> Any:
        state = self.empty(template)
        self._library.load(state, checkpoint_id=path, no_dist=True)
        return state

    def load_into(self, path: Path, own: Any) -> None:
        self._library.load(own, checkpoint_id=path, no_dist=True)
