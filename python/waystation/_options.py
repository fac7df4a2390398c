"""Every option of Waystation, in groups, with its default and meaning.

Groups are plain dataclasses. While a user edits a `Context` they are mutable; what is passed down to
the layers below is a frozen copy, so that a running save never sees a later change. Unknown names
and values out of range are errors at the moment of assignment.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from waystation._errors import InvalidInput

_GIB = 1 << 30


class OptionGroup:
    """Base of option groups: checks values on assignment and can be frozen."""

    __slots__ = ("_frozen",)
    _checks: ClassVar[dict[str, Callable[[Any], str | None]]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_frozen", False):
            raise InvalidInput(
                f"option '{name}' cannot be changed while its context is in use; "
                "change a copy: Context(context)"
            )
        known = {entry.name for entry in dataclasses.fields(self)}  # type: ignore[arg-type]
        if name not in known:
            raise InvalidInput(f"unknown option '{name}'; this group has: {', '.join(sorted(known))}")
        check = self._checks.get(name)
        problem = check(value) if check else None
        if problem:
            raise InvalidInput(f"option '{name}' must be {problem}, not {value!r}")
        object.__setattr__(self, name, value)

    def frozen(self) -> Self:
        """A deep copy that refuses changes."""
        duplicate = copy.deepcopy(self)
        duplicate._freeze()
        return duplicate

    def thawed(self) -> Self:
        """A deep copy that can be changed."""
        duplicate = copy.deepcopy(self)
        duplicate._thaw()
        return duplicate

    def _freeze(self) -> None:
        self._set_frozen(True)

    def _thaw(self) -> None:
        self._set_frozen(False)

    def _set_frozen(self, value: bool) -> None:
        for entry in dataclasses.fields(self):  # type: ignore[arg-type]
            child = getattr(self, entry.name)
            if isinstance(child, OptionGroup):
                child._set_frozen(value)
        object.__setattr__(self, "_frozen", value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        values = {
            entry.name: child.__deepcopy__(memo) if isinstance(child, OptionGroup) else child
            for entry in dataclasses.fields(self)  # type: ignore[arg-type]
            for child in (getattr(self, entry.name),)
        }
        return type(self)(**values)


def _positive(value: Any) -> str | None:
    return None if _is_int(value) and value > 0 else "a positive integer"


def _positive_or_none(value: Any) -> str | None:
    return None if value is None or (_is_int(value) and value > 0) else "a positive integer or None"


def _bytes_or_none(value: Any) -> str | None:
    return None if value is None or (_is_int(value) and value >= 0) else "a number of bytes or None"


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "True or False"


def _boolean_or_none(value: Any) -> str | None:
    return None if value is None or isinstance(value, bool) else "True, False or None"


def _name_or_none(value: Any) -> str | None:
    return None if value is None or isinstance(value, str) else "the name of a dtype or None"


def _path_or_none(value: Any) -> str | None:
    return None if value is None or isinstance(value, str) else "a path as a string or None"


def _axes_or_none(value: Any) -> str | None:
    fits = value is None or (isinstance(value, tuple) and all(_is_int(axis) for axis in value))
    return None if fits else "a tuple of axes or None"


def _axis_or_none(value: Any) -> str | None:
    fits = value is None or isinstance(value, str) or _is_int(value)
    return None if fits else "the name or the number of an axis, or None"


def _callable_or_none(value: Any) -> str | None:
    return None if value is None or callable(value) else "a function or None"


def _seconds(value: Any) -> str | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return None if fits else "a positive number of seconds"


def _natural(value: Any) -> str | None:
    return None if _is_int(value) and value >= 0 else "an integer from 0"


def _natural_or_none(value: Any) -> str | None:
    return None if value is None or _natural(value) is None else "an integer from 0 or None"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _mode(value: Any) -> str | None:
    modes = (None, "direct-ring", "direct-threads", "buffered")
    return None if value in modes else f"one of {modes}"


@dataclass(slots=True)
class ArrayLoadingOptions(OptionGroup):
    """How arrays are read.

    Attributes:
        verify: Check the checksum of every block that is read. None means yes, except for arrays
            that are mapped (`mmap`), which are not read at all before they are used.
        mmap: Map data files into memory instead of reading them, where an array is stored whole,
            aligned, and wanted as it is. The file must then never change while an array lives; pages
            are private copies on write.
        enable_padding_and_truncation: Where an abstract array has as many axes as the stored one but
            other extents, load what both have in common, from the start of every axis, with zeros
            beyond. Otherwise that is an error. PRNG keys are always refused.
        restore_on_host: Without an abstract state, load every array as a NumPy array, whatever it was.
        sharding_for: Called without an abstract state for every JAX array, with its key path
            (`params.w`) and what `metadata` shows of it (`shape`, `dtype`, and as `sharding` the saved one
            if the present devices have it, else None). Returns the sharding to load it with, or None for
            the default device. None loads arrays with their saved shardings.
        load_and_broadcast: Of what several processes need (replicated arrays, plain tensors of a torch
            program), one reads from storage and sends it to the others by collectives of the framework.
            None lets a load try both and go on with what is faster, except in the background; there, as
            with False, every process reads what it needs. Must be the same in all processes.
        replica_axis: The axis, by name or number, of the meshes of JAX arrays along which one process reads
            for the others: the one whose devices are first along it. None takes all axes.
        broadcast_concurrent_bytes: Most bytes of memory, of the host and of the devices that carry them,
            that a process has on their way to others at a time, beyond the arrays themselves. Less than
            1 MiB counts as 1 MiB, and more than the default makes nothing faster.
        on_statistics: Called with the `LoadStatistics` of every load, in the thread that loads, when the
            arrays are there. What it raises, the load raises.
    """

    verify: bool | None = None
    mmap: bool = False
    enable_padding_and_truncation: bool = False
    restore_on_host: bool = False
    sharding_for: Callable[[str, Any], Any] | None = None
    load_and_broadcast: bool | None = None
    replica_axis: str | int | None = None
    broadcast_concurrent_bytes: int = 32 << 20
    on_statistics: Callable[[Any], object] | None = None
    _checks: ClassVar = {
        "verify": _boolean_or_none,
        "mmap": _boolean,
        "enable_padding_and_truncation": _boolean,
        "restore_on_host": _boolean,
        "sharding_for": _callable_or_none,
        "load_and_broadcast": _boolean_or_none,
        "replica_axis": _axis_or_none,
        "broadcast_concurrent_bytes": _positive,
        "on_statistics": _callable_or_none,
    }


@dataclass(slots=True)
class StorageOptions(OptionGroup):
    """How an array is stored.

    Attributes:
        dtype: Cast to this dtype (a logical name, such as `bfloat16`) on the way; None keeps its own.
        chunk_bytes: Cut what a process writes of an array into chunks of at most so many bytes, so that
            a load by another sharding reads little that it does not need. None does not cut, or into 32 MiB
            where `chunk_axes` are given.
        chunk_axes: Cut along these axes only; negative ones count from the last. None cuts along those
            that are sharded already first, then along the longest.
    """

    dtype: str | None = None
    chunk_bytes: int | None = None
    chunk_axes: tuple[int, ...] | None = None
    _checks: ClassVar = {
        "dtype": _name_or_none,
        "chunk_bytes": _positive_or_none,
        "chunk_axes": _axes_or_none,
    }


@dataclass(slots=True)
class ArraySavingOptions(OptionGroup):
    """How arrays are written.

    Attributes:
        storage_options: Of every array.
        storage_options_for: Called with the key path of an array (`params.w`) and its description
            (`shape`, `dtype`); returns the options of that array, or None. What is None there is as
            `storage_options` has it. It must return the same in every process.
        use_replica_parallel: Share the writing of what several processes hold among them. None means
            yes.
        min_slice_bytes_for_replica_parallel: Cut such a part into slices of at least so many bytes;
            smaller ones go whole to one of their holders. None means 1 MiB.
        max_replicas_for_replica_parallel: Cut such a part into at most so many slices. None means as many
            as it has holders.
    """

    storage_options: StorageOptions = field(default_factory=StorageOptions)
    storage_options_for: Callable[[str, Any], StorageOptions | None] | None = None
    use_replica_parallel: bool | None = None
    min_slice_bytes_for_replica_parallel: int | None = None
    max_replicas_for_replica_parallel: int | None = None
    _checks: ClassVar = {
        "storage_options_for": _callable_or_none,
        "use_replica_parallel": _boolean_or_none,
        "min_slice_bytes_for_replica_parallel": _positive_or_none,
        "max_replicas_for_replica_parallel": _positive_or_none,
    }


@dataclass(slots=True)
class ArrayOptions(OptionGroup):
    """Options of arrays."""

    saving: ArraySavingOptions = field(default_factory=ArraySavingOptions)
    loading: ArrayLoadingOptions = field(default_factory=ArrayLoadingOptions)
    _checks: ClassVar = {}


@dataclass(slots=True)
class MemoryOptions(OptionGroup):
    """How much host memory saves and loads may take beside the state.

    Attributes:
        read_concurrent_bytes: Most bytes of host memory that a load takes beyond its result: arrays on
            their way to other devices, values on their way to another dtype, and the engine's own. Less
            than 2 MiB counts as 2 MiB; an array goes in pieces where it is larger. None sets no bound.
        write_concurrent_bytes: Most bytes of host memory that a save takes beyond the state: memory of
            devices on its way to the disk, the engine's blocks, and the copies of an asynchronous save. Less
            than 1 MiB counts as 1 MiB; an array goes in pieces where it is larger. None leaves 64 MiB to the
            engine, and to copies what `snapshot_bytes` says. Arrays that have to be made anew to be stored
            (a cast, the 4-bit dtypes of JAX) are not counted.
        snapshot_bytes: Most bytes that an asynchronous save copies before it returns, of leaves that
            could change afterwards (NumPy, torch, GPU). Beyond that the call blocks until the rest is
            written. None means half of the memory that is available.
        caller_keeps: The caller promises not to change NumPy arrays and torch tensors until the
            save has finished: nothing is copied.
    """

    read_concurrent_bytes: int | None = None
    write_concurrent_bytes: int | None = None
    snapshot_bytes: int | None = None
    caller_keeps: bool = False
    _checks: ClassVar = {
        "read_concurrent_bytes": _positive_or_none,
        "write_concurrent_bytes": _positive_or_none,
        "snapshot_bytes": _bytes_or_none,
        "caller_keeps": _boolean,
    }


@dataclass(slots=True)
class FileOptions(OptionGroup):
    """How files are laid out and made durable.

    Attributes:
        file_bytes_target: A data file is rolled over once it has this size; an array is never
            split by it.
        path_permission_mode: Permission bits of new directories, None for the process's default.
    """

    file_bytes_target: int = 2 * _GIB
    path_permission_mode: int | None = None
    _checks: ClassVar = {"file_bytes_target": _positive, "path_permission_mode": _bytes_or_none}


@dataclass(slots=True)
class EngineOptions(OptionGroup):
    """Overrides of what the engine finds out by calibration; None leaves it the choice.

    Attributes:
        write_mode: `direct-ring`, `direct-threads` or `buffered`.
        read_mode: The same, for reading.
        block_bytes: Size of one request.
        depth: Requests in flight.
        threads: Worker threads.
        staging_bytes: Memory of a write for blocks on their way to the disk; at least one block of 256 KiB.
        throttle_path: The file of a throttle: all jobs of all processes of this machine that name it get no
            more bytes and requests a second together than it says. It models a slow store in benchmarks
            (`benchmarks/distributed`), and counts data files only.
    """

    write_mode: str | None = None
    read_mode: str | None = None
    block_bytes: int | None = None
    depth: int | None = None
    threads: int | None = None
    staging_bytes: int | None = None
    throttle_path: str | None = None
    _checks: ClassVar = {
        "write_mode": _mode,
        "read_mode": _mode,
        "block_bytes": _positive_or_none,
        "depth": _positive_or_none,
        "threads": _positive_or_none,
        "staging_bytes": _positive_or_none,
        "throttle_path": _path_or_none,
    }


@dataclass(slots=True)
class MultiprocessingOptions(OptionGroup):
    """How the processes of a program act together.

    Attributes:
        primary_host: The process that decides, and writes what every process has a value of its own of.
            None: every process has a storage of its own that the others do not see, to which it writes
            all that it holds, and from which it loads.
        deadline_s: How long a process waits for the others in one step of an operation, in seconds.
    """

    primary_host: int | None = 0
    deadline_s: float = 1200.0
    _checks: ClassVar = {"primary_host": _natural_or_none, "deadline_s": _seconds}


@dataclass(slots=True)
class Options(OptionGroup):
    """All options. The layers below receive one frozen instance."""

    array: ArrayOptions = field(default_factory=ArrayOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    file: FileOptions = field(default_factory=FileOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    multiprocessing: MultiprocessingOptions = field(default_factory=MultiprocessingOptions)
    _checks: ClassVar = {}
