"""Every option of Waystation, in groups, with its default and meaning.

While a user edits a `Context` groups are mutable; what is passed down to the layers below is a frozen copy,
so that a running save never sees a later change. The names of Orbax are kept, beside our own where those
are better; `docs/orbax.md` says where defaults and meanings differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from waystation._options import checks
from waystation._options.array_loading import ArrayLoadingOptions
from waystation._options.array_saving import (
    ARRAY_METADATA_STORE,
    ArraySavingOptions,
    StorageOptions,
)
from waystation._options.base import OptionGroup
from waystation._options.files import EngineOptions, FileOptions
from waystation._options.layouts import (
    AtomicityMode,
    AtomicityOptions,
    CheckpointingImpl,
    CheckpointLayout,
    DeletionOptions,
    PathwaysOptions,
    SafetensorsOptions,
    layout_of,
)
from waystation._options.memory import MemoryOptions, StatusCallback
from waystation._options.processes import AsyncOptions, MultiprocessingOptions
from waystation._options.stores import ObjectStoreOptions, StoreSettings, settings_of_s3fs
from waystation._options.trees import (
    CheckpointablesOptions,
    PyTreeLoadingOptions,
    PyTreeMetadataOptions,
    PyTreeOptions,
)

__all__ = [
    "ARRAY_METADATA_STORE",
    "ArrayLoadingOptions",
    "ArrayOptions",
    "ArraySavingOptions",
    "AsyncOptions",
    "AtomicityMode",
    "AtomicityOptions",
    "CheckpointLayout",
    "CheckpointablesOptions",
    "CheckpointingImpl",
    "DeletionOptions",
    "EngineOptions",
    "FileOptions",
    "MemoryOptions",
    "MultiprocessingOptions",
    "ObjectStoreOptions",
    "OptionGroup",
    "Options",
    "PathwaysOptions",
    "PyTreeLoadingOptions",
    "PyTreeMetadataOptions",
    "PyTreeOptions",
    "SafetensorsOptions",
    "StatusCallback",
    "StorageOptions",
    "StoreSettings",
    "settings_of_s3fs",
]


@dataclass(kw_only=True)
class ArrayOptions(OptionGroup):
    """Options of arrays."""

    Saving = ArraySavingOptions
    Loading = ArrayLoadingOptions

    saving: ArraySavingOptions = field(default_factory=ArraySavingOptions)
    loading: ArrayLoadingOptions = field(default_factory=ArrayLoadingOptions)


@dataclass(kw_only=True)
class Options(OptionGroup):
    """All options. The layers below receive one frozen instance."""

    array: ArrayOptions = field(default_factory=ArrayOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    file: FileOptions = field(default_factory=FileOptions)
    storage: ObjectStoreOptions = field(default_factory=ObjectStoreOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    multiprocessing: MultiprocessingOptions = field(default_factory=MultiprocessingOptions)
    asynchronous: AsyncOptions = field(default_factory=AsyncOptions)
    pytree: PyTreeOptions = field(default_factory=PyTreeOptions)
    checkpointables: CheckpointablesOptions = field(default_factory=CheckpointablesOptions)
    deletion: DeletionOptions = field(default_factory=DeletionOptions)
    atomicity: AtomicityOptions = field(default_factory=AtomicityOptions)
    safetensors: SafetensorsOptions = field(default_factory=SafetensorsOptions)
    pathways: PathwaysOptions = field(default_factory=PathwaysOptions)
    checkpoint_layout: CheckpointLayout = CheckpointLayout.ORBAX
    _conversions: ClassVar = {"checkpoint_layout": layout_of}
    _checks: ClassVar = {"checkpoint_layout": checks.member_of(CheckpointLayout)}
