"""How the directories of steps are named, and found again."""

from __future__ import annotations

import os
from typing import Any

from waystation import storage
from waystation._errors import InvalidInput
from waystation.layouts.orbax import names
from waystation.training.step_metadata import CheckpointMetadata as Metadata
from waystation.training.step_names import NameFormat, composite_name_format, standard_name_format

__all__ = [
    "TMP_DIR_SUFFIX",
    "Metadata",
    "NameFormat",
    "any_checkpoint_step",
    "build_step_path",
    "checkpoint_steps",
    "checkpoint_steps_paths",
    "composite_name_format",
    "find_step_path",
    "get_save_directory",
    "is_checkpoint_finalized",
    "is_tmp_checkpoint",
    "latest_step_metadata",
    "standard_name_format",
    "step_from_checkpoint_name",
    "tmp_checkpoints",
]

# What programs look for in names that they pass over, as flax does. What killed saves have left has it in its
# name: with Orbax (`.orbax-checkpoint-tmp`), and with Waystation.
TMP_DIR_SUFFIX = "-tmp"
PathLike = str | os.PathLike[str]


def step_from_checkpoint_name(name: str) -> int:
    """The step whose directory has a name such as `5`, `0005` or `ckpt_5`.

    Raises:
        ValueError: It is not the name of one.
    """
    digits = name.rpartition("_")[2]
    if not digits.isdecimal():
        raise InvalidInput(f"'{name}' is not the name of a step: it does not end in a number")
    return int(digits)


def checkpoint_steps_paths(checkpoint_dir: PathLike) -> list[Any]:
    """The directories of committed steps, whatever stands before their numbers."""
    root = storage.located(checkpoint_dir)
    found = []
    for entry in storage.entries_or_none(root):
        path = os.path.join(root, entry.name)
        is_step = entry.name.rpartition("_")[2].isdecimal() and entry.kind != "file"
        if is_step and not is_tmp_checkpoint(path):
            found.append(storage.as_path(path))
    return found


def checkpoint_steps(checkpoint_dir: PathLike) -> list[int]:
    """The committed steps, in any order."""
    return [step_from_checkpoint_name(path.name) for path in checkpoint_steps_paths(checkpoint_dir)]


def any_checkpoint_step(checkpoint_dir: PathLike) -> int | None:
    """One of them; None if there is none."""
    return next(iter(checkpoint_steps(checkpoint_dir)), None)


def is_tmp_checkpoint(path: PathLike, *args: Any, **kwargs: Any) -> bool:
    """Whether a path is that of a save that has not ended."""
    name = os.path.basename(os.fspath(path))
    return names.is_temporary(name) or storage.names.attempt_target(name) is not None


def is_checkpoint_finalized(path: PathLike, *args: Any, **kwargs: Any) -> bool:
    """Whether a directory is there and no save that has not ended."""
    return storage.is_there(storage.located(path)) and not is_tmp_checkpoint(path)


def tmp_checkpoints(checkpoint_dir: PathLike) -> list[str]:
    """The names of directories of saves that have not ended."""
    root = storage.located(checkpoint_dir)
    return [
        entry.name
        for entry in storage.entries_or_none(root)
        if entry.kind != "file" and is_tmp_checkpoint(entry.name)
    ]


def get_save_directory(
    step: int,
    directory: PathLike,
    name: str | None = None,
    step_prefix: str | None = None,
    override_directory: PathLike | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: NameFormat | None = None,
) -> Any:
    """The directory of a step, or of an item of it.

    Args:
        step: The step.
        directory: That of the sequence.
        name: Of an item.
        step_prefix: What stands before the number.
        override_directory: Another directory of the step.
        step_format_fixed_length: To how many digits the number is padded.
        step_name_format: The format, instead of these.
    """
    if override_directory is not None:
        path = storage.located(override_directory)
    else:
        own = step_name_format or standard_name_format(
            step_prefix=step_prefix, step_format_fixed_length=step_format_fixed_length
        )
        path = os.path.join(storage.located(directory), own.build_name(step))
    return storage.as_path(path if name is None else os.path.join(path, name))


def build_step_path(base_path: PathLike, name_format: NameFormat, step: int) -> Any:
    """The directory that a step is to have."""
    return storage.as_path(os.path.join(storage.located(base_path), name_format.build_name(step)))


def find_step_path(
    base_path: PathLike, name_format: NameFormat, *, step: int, include_uncommitted: bool = False
) -> Any:
    """The directory of a step that is there.

    Raises:
        ValueError: It is not there.
    """
    if include_uncommitted:
        path = build_step_path(base_path, name_format, step)
        if storage.is_there(os.fspath(path)):
            return path
    return name_format.find_step(storage.located(base_path), step).path


def latest_step_metadata(root_path: PathLike, name_format: NameFormat) -> Metadata[None] | None:
    """The committed checkpoint of the greatest step; None if there is none."""
    found = list(name_format.find_all(storage.located(root_path)))
    return max(found, key=lambda info: info.step, default=None)
