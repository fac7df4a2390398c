"""How arrays are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from waystation._options import checks
from waystation._options.base import Alias, OptionGroup


@dataclass(kw_only=True)
class LoadAndBroadcastOptions(OptionGroup):
    """Which process reads for which others, and how much memory the transfer uses.

    Attributes:
        replica_axis_index: The axis, by name or number, of the meshes of JAX arrays along which one process
            reads for the others. None means all axes.
        primary_replica_id: Which of the devices along that axis belong to processes that read.
        broadcast_memory_limit_bytes: Maximum memory, of the host and of the devices that carry the bytes,
            that a process uses at a time for transfers, beyond the arrays themselves. None means 32 MiB.
            Values below 1 MiB count as 1 MiB, and values above the default make nothing faster.
        broadcast_memory_scaling_factor: Accepted for compatibility with Orbax, and without effect: the limit
            is 32 MiB if none is set, which is below any share of the memory.
    """

    replica_axis_index: str | int | None = None
    primary_replica_id: int | None = 0
    broadcast_memory_limit_bytes: int | None = None
    broadcast_memory_scaling_factor: float | None = 0.75
    _checks: ClassVar = {
        "replica_axis_index": checks.axis_or_none,
        "primary_replica_id": checks.natural_or_none,
        "broadcast_memory_limit_bytes": checks.positive_or_none,
        "broadcast_memory_scaling_factor": checks.fraction_or_none,
    }


_Broadcast = LoadAndBroadcastOptions


@dataclass(kw_only=True)
class ArrayLoadingOptions(OptionGroup):
    """How arrays are read.

    Attributes:
        verify: Verify the checksum of every block that is read. None means True, except for mapped arrays
            (`mmap`), which are not read before they are used.
        mmap: Map data files into memory instead of reading them, for arrays that are stored whole and
            aligned and requested unchanged. The file must not change while an array lives. Pages are private
            copies on write.
        enable_padding_and_truncation: If an abstract array has as many axes as the stored one but other
            lengths, load the common part, from the start of every axis, with zeros beyond. Otherwise this is
            an error. PRNG keys are always refused.
        raise_array_data_missing_error: In Orbax's layouts, refuse an array with missing chunks. Otherwise
            they are zeros, as in zarr.
        in_place: Read into the tensors and NumPy arrays of the abstract state and return them, as
            `torch.distributed.checkpoint.load` does, without memory for a second copy. Other arrays, such as
            those of JAX and tensors on the meta device, are created anew. A failed load may have changed
            some of the arrays.
        allow_lossy_casts: Load values that the requested dtype cannot represent: floats as integers
            (truncated, clipped to their range, NaN as 0), numbers as bools (whether they are not 0), the
            real part of complex numbers, integers modulo the range, floats that overflow as infinity.
            Without this option each of these raises `LossyCast`. Rounding to the nearest value is always
            allowed.
        restore_on_host: Without an abstract state, load every array as a NumPy array.
        sharding_for: Function that is called without an abstract state for every JAX array, with its key
            path (`params.w`) and its metadata (`shape`, `dtype`, and as `sharding` the saved one if the
            available devices have it, else None). It returns the sharding to load the array with, or None
            for the default device. None loads arrays with their saved shardings.
        load_and_broadcast: One process reads what several need (replicated arrays, plain tensors of a torch
            program) and sends it to the others by collectives of the framework. False lets every process
            read what it needs. None lets a load try both and continue with the faster one, except in the
            background or in a subset of the processes (`multiprocessing.active_processes`), where every
            process reads. The value must be the same in all processes that load.
        load_and_broadcast_options: Which process reads for which others.
        replica_axis: Short for `load_and_broadcast_options.replica_axis_index`.
        broadcast_concurrent_bytes: Short for `load_and_broadcast_options.broadcast_memory_limit_bytes`.
        use_load_and_broadcast: Orbax's name of `load_and_broadcast`.
        on_statistics: Function that is called with the `LoadStatistics` of every checkpointable loaded, in
            the thread that loads, when the arrays are complete. If it raises, the load raises the same
            error, with a note that the checkpoint is whole.
    """

    LoadAndBroadcastOptions = _Broadcast

    verify: bool | None = None
    mmap: bool = False
    enable_padding_and_truncation: bool = False
    raise_array_data_missing_error: bool = True
    in_place: bool = False
    allow_lossy_casts: bool = False
    restore_on_host: bool = False
    sharding_for: Callable[[str, Any], Any] | None = None
    load_and_broadcast: bool | None = None
    load_and_broadcast_options: _Broadcast = field(default_factory=_Broadcast)
    replica_axis: Alias[str | int | None] = Alias("load_and_broadcast_options.replica_axis_index", None)
    broadcast_concurrent_bytes: Alias[int | None] = Alias(
        "load_and_broadcast_options.broadcast_memory_limit_bytes", None
    )
    use_load_and_broadcast: Alias[bool | None] = Alias("load_and_broadcast", None)
    on_statistics: Callable[[Any], object] | None = None
    _checks: ClassVar = {
        "verify": checks.boolean_or_none,
        "mmap": checks.boolean,
        "enable_padding_and_truncation": checks.boolean,
        "raise_array_data_missing_error": checks.boolean,
        "in_place": checks.boolean,
        "allow_lossy_casts": checks.boolean,
        "restore_on_host": checks.boolean,
        "sharding_for": checks.callable_or_none,
        "load_and_broadcast": checks.boolean_or_none,
        "on_statistics": checks.callable_or_none,
    }
