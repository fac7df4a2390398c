"""Checkpoints of Lightning: `Trainer(plugins=[WaystationCheckpointIO()])`, with `lightning` or
`pytorch_lightning`.

Lightning gives a plugin one dict for each checkpoint, and a path that the plugin may make a file or a
directory of; here it becomes a checkpoint of Waystation. The strategies for one device and for DDP save in
one process and load in each. Those for FSDP2 and tensor parallelism save by `torch.distributed.checkpoint`,
see `waystation.integrations.dcp`.

Invariant: a checkpoint is removed only when all saves before have ended, so that one is always there.
"""

from __future__ import annotations

import importlib
import os
import sys
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from waystation import storage
from waystation._errors import UnsupportedLeaf
from waystation.checkpoint import delete, is_checkpoint
from waystation.checkpoint import load as load_state
from waystation.integrations import dcp, state_dicts

__all__ = ["WaystationCheckpointIO"]

_HYPER_PARAMETERS = "hyper_parameters"  # in the keys under which Lightning saves those of modules and data


def _base() -> Any:
    """Lightning's interface, of that distribution which the program uses."""
    names = ["lightning.fabric.plugins", "lightning_fabric.plugins"]
    names.sort(key=lambda name: name.partition(".")[0] not in sys.modules)
    for name in names[:-1]:
        try:
            return importlib.import_module(name).CheckpointIO
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
    return importlib.import_module(names[-1]).CheckpointIO


if TYPE_CHECKING:  # checkers follow no class that is found out
    from lightning_fabric.plugins import CheckpointIO as _CheckpointIO
else:
    _CheckpointIO = _base()


class WaystationCheckpointIO(_CheckpointIO):
    """Saves what Lightning keeps in a checkpoint, and loads it.

    Tensors are verified when they are loaded, and a kill during a save leaves the checkpoint that was there.
    What a checkpoint holds besides tensors, numbers, strings and containers of these, such as an object among
    `hyper_parameters`, is refused.

    Args:
        asynchronous: Go on training while a checkpoint is written. The next save, and the end of the run,
            wait
            for it, and raise what it failed with. Give False with `ModelCheckpoint(save_last="link")`:
            Lightning links to a checkpoint before it is written, and a kill would leave a link to nothing.
    """

    def __init__(self, *, asynchronous: bool = True) -> None:
        super().__init__()
        self._asynchronous = asynchronous
        self._saving: Future[Any] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves a checkpoint; see `CheckpointIO.save_checkpoint`.

        A file at the path is replaced, as Lightning replaces it: a `last.ckpt` of a run that it has begun.

        Raises:
            Conflict: There is a directory at the path that is no checkpoint of Waystation.
            UnsupportedLeaf: Something in it can only be pickled; names its place.
        """
        del storage_options
        self._wait()
        if not storage.is_in_store(storage.located(path)) and storage.is_file(path):
            self._replace_file(checkpoint, os.fspath(path))
            return
        # Lightning expects it to be there once this returns, and puts links into it (`save_last="link"`).
        storage.make_directory(os.path.dirname(storage.located(path)), parents=True)
        self._begin(checkpoint, path)
        if not self._asynchronous:
            self._wait()

    def _begin(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        try:
            future: Any = dcp.async_save(checkpoint, checkpoint_id=path, no_dist=True)
        except UnsupportedLeaf as error:
            if _HYPER_PARAMETERS not in str(error.context.get("array")):
                raise
            raise UnsupportedLeaf(
                f"{error.message}; save it as a string, or leave it out by "
                "self.save_hyperparameters(ignore=[...]) in the module",
                **error.context,
            ) from error
        self._saving = future

    def _replace_file(self, checkpoint: dict[str, Any], path: str) -> None:
        """Saves in the place of a file, which goes once the checkpoint is whole. So it waits."""
        beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.new")
        self._begin(checkpoint, beside)
        self._wait()
        storage.remove_file(path)
        storage.renames(path).new(beside, path)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Loads a checkpoint; see `CheckpointIO.load_checkpoint`. It never runs what a file holds.

        A file is one that Lightning has saved, which Lightning loads.
        """
        self._wait()
        if not is_checkpoint(path):
            theirs: dict[str, Any] = _theirs().load_checkpoint(
                path, map_location=map_location, weights_only=weights_only, **more
            )
            return theirs
        with state_dicts.taking_part(no_dist=True):
            loaded: dict[str, Any] = load_state(path)
        if isinstance(map_location, str | torch.device) and torch.device(map_location).type != "cpu":
            moved: dict[str, Any] = _moved(loaded, torch.device(map_location))
            return moved
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint, once the save that takes its place has ended."""
        self._wait()
        if is_checkpoint(path):
            with state_dicts.taking_part(no_dist=True):
                delete(path)
        else:
            _theirs().remove_checkpoint(path)

    def teardown(self) -> None:
        """Waits for the last save."""
        self._wait()

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()


def _theirs() -> Any:
    return importlib.import_module(_CheckpointIO.__module__.rpartition(".")[0]).TorchCheckpointIO()


def _moved(value: Any, device: torch.device) -> Any:
    """A value with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(child, device) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(child, device) for child in value)
    return value
