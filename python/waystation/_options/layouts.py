"""Layouts, and what only some kinds of storage have."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, ClassVar

from waystation._options import checks
from waystation._options.base import OptionGroup


class CheckpointLayout(enum.Enum):
    """The kind of files that a load accepts.

    ORBAX means native checkpoints and those of Orbax, which a load distinguishes by itself. SAFETENSORS
    means a published model: a safetensors file, or a directory of such files. It loads as a state, a flat
    dict of its tensors; `save` and `save_async` then save a state of arrays as such files. AUTO means all of
    these. `array.saving.use_ocdbt` selects the layout of other saves.
    """

    ORBAX = "orbax"
    SAFETENSORS = "safetensors"
    AUTO = "auto"


def layout_of(value: Any) -> Any:
    """The layout that a member or its value means; what means none is returned as it is."""
    try:
        return CheckpointLayout(getattr(value, "value", value))
    except ValueError:
        return value


class AtomicityMode(enum.StrEnum):
    """How a checkpoint becomes visible in one act."""

    AUTO = "auto"
    COMMIT_FILE = "commit_file"
    ATOMIC_RENAME = "atomic_rename"


def _atomicity_mode(value: Any) -> Any:
    try:
        return AtomicityMode(getattr(value, "value", value))
    except ValueError:
        return value


@dataclass(kw_only=True)
class AtomicityOptions(OptionGroup):
    """How a checkpoint becomes visible atomically.

    Attributes:
        mode: Of saves, all are equivalent: on a file system a directory with another name is renamed, and in
            Orbax's layouts it then holds the commit file that readers with COMMIT_FILE ask for. With
            COMMIT_FILE, loads refuse checkpoints of Orbax that lack this file, as saves that write in place
            have not ended without it.
        allow_legacy_atomic_rename: Accepted for compatibility with Orbax, and without effect: on file
            systems, checkpoints of Orbax are read with or without its commit file.
    """

    mode: AtomicityMode = AtomicityMode.AUTO
    allow_legacy_atomic_rename: bool = False
    _conversions: ClassVar = {"mode": _atomicity_mode}
    _checks: ClassVar = {
        "mode": checks.member_of(AtomicityMode),
        "allow_legacy_atomic_rename": checks.boolean,
    }


@dataclass(kw_only=True)
class SafetensorsOptions(OptionGroup):
    """How Orbax reads safetensors files (see `CheckpointLayout.SAFETENSORS`).

    Accepted for compatibility with Orbax, and without effect: the engine chooses.

    Attributes:
        max_over_read_ratio: Bytes that may be read for each byte that is needed.
        read_chunk_bytes: Size of one read.
    """

    max_over_read_ratio: float | None = None
    read_chunk_bytes: int | None = None
    _checks: ClassVar = {
        "max_over_read_ratio": checks.ratio_or_none,
        "read_chunk_bytes": checks.positive_or_none,
    }


@dataclass(kw_only=True)
class GcsDeletionOptions(OptionGroup):
    """How checkpoints on Google Cloud Storage are deleted.

    Attributes:
        todelete_full_path: Where to move them instead. It has no effect on file systems; other paths are
            refused.
    """

    todelete_full_path: str | None = None
    _checks: ClassVar = {"todelete_full_path": checks.text_or_none}


_Gcs = GcsDeletionOptions


@dataclass(kw_only=True)
class DeletionOptions(OptionGroup):
    """How checkpoints are deleted.

    Attributes:
        gcs_deletion_options: On Google Cloud Storage.
    """

    GcsDeletionOptions = _Gcs

    gcs_deletion_options: _Gcs = field(default_factory=_Gcs)


class CheckpointingImpl(enum.Enum):
    """Who saves the arrays of a program on Pathways. In other programs it says nothing."""

    COLOCATED_PYTHON = "colocated_python"
    PERSISTENCE = "persistence"
    NO_DISPATCHER = "no_dispatcher"

    @classmethod
    def from_options(
        cls, *, use_colocated_python: bool = False, use_persistence_array_handler: bool = False
    ) -> CheckpointingImpl:
        """The member for two switches, of which the first counts where both are set."""
        if use_colocated_python:
            return cls.COLOCATED_PYTHON
        return cls.PERSISTENCE if use_persistence_array_handler else cls.NO_DISPATCHER


def _checkpointing_impl(value: Any) -> Any:
    # The values of Orbax's members are numbers that it does not promise to keep; the names are public.
    name = value.name if isinstance(value, enum.Enum) else value
    known = isinstance(name, str) and name.upper() in CheckpointingImpl.__members__
    return CheckpointingImpl[name.upper()] if known else value


def _impl_or_none(value: Any) -> str | None:
    return None if value is None else checks.member_of(CheckpointingImpl)(value)


@dataclass(kw_only=True)
class PathwaysOptions(OptionGroup):
    """How programs of one controller save.

    Attributes:
        checkpointing_impl: Accepted for compatibility with Orbax: a `CheckpointingImpl` of Orbax or of this
            package, or its name. It concerns programs on Pathways; other programs save in their own
            processes.
    """

    checkpointing_impl: CheckpointingImpl | None = None
    _conversions: ClassVar = {"checkpointing_impl": _checkpointing_impl}
    _checks: ClassVar = {"checkpointing_impl": _impl_or_none}
