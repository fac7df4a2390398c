"""How arrays are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from waystation._options import checks
from waystation._options.base import Alias, OptionGroup


@dataclass(kw_only=True)
class LoadAndBroadcastOptions(OptionGroup):
    """Which process reads for which others, and how much is on its way.

    Attributes:
        replica_axis_index: The axis, by name or number, of the meshes of JAX arrays along which one process
            reads for the others. None takes all axes.
        primary_replica_id: Which of the devices along that axis belong to processes that read.
        broadcast_memory_limit_bytes: Most bytes of memory, of the host and of the devices that carry them,
            that a process has on their way to others at a time, beyond the arrays themselves. None means
            32 MiB. Less than 1 MiB counts as 1 MiB, and more than the default makes nothing faster.
        broadcast_memory_scaling_factor: Taken for Orbax's sake: the limit is 32 MiB where none is set,
            which is below any share of the memory.
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
        verify: Check the checksum of every block that is read. None means yes, except for arrays
            that are mapped (`mmap`), which are not read at all before they are used.
        mmap: Map data files into memory instead of reading them, where an array is stored whole,
            aligned, and wanted as it is. The file must then never change while an array lives; pages
            are private copies on write.
        enable_padding_and_truncation: Where an abstract array has as many axes as the stored one but
            other extents, load what both have in common, from the start of every axis, with zeros
            beyond. Otherwise that is an error. PRNG keys are always refused.
        raise_array_data_missing_error: Of Orbax's layouts: refuse an array of which chunks are missing. Else
            they are zeros, as zarr has it.
        in_place: Read into the tensors and NumPy arrays of the abstract state themselves, and return these,
            as `torch.distributed.checkpoint.load` does: no memory for a second copy of them is needed. Other
            arrays, such as those of JAX and tensors on the meta device, are made anew. A load that fails
            may have changed a part of them.
        allow_lossy_casts: Load values that the wanted dtype does not hold as it has them: floats as integers
            (truncated, kept within their range, NaN as 0), numbers as bools (whether they are not 0), the
            real part of complex numbers, integers modulo the range, floats that overflow as infinity.
            Otherwise each of these raises `LossyCast`. Rounding to the nearest value is always allowed.
        restore_on_host: Without an abstract state, load every array as a NumPy array, whatever it was.
        sharding_for: Called without an abstract state for every JAX array, with its key path
            (`params.w`) and what `metadata` shows of it (`shape`, `dtype`, and as `sharding` the saved one
            if the present devices have it, else None). Returns the sharding to load it with, or None for
            the default device. None loads arrays with their saved shardings.
        load_and_broadcast: Of what several processes need (replicated arrays, plain tensors of a torch
            program), one reads from storage and sends it to the others by collectives of the framework.
            None lets a load try both and go on with what is faster, except in the background; there, as
            with False, every process reads what it needs. So it does if not all processes load
            (`multiprocessing.active_processes`). Must be the same in all that do.
        load_and_broadcast_options: Which process reads for which others.
        replica_axis: Short for `load_and_broadcast_options.replica_axis_index`.
        broadcast_concurrent_bytes: Short for `load_and_broadcast_options.broadcast_memory_limit_bytes`.
        use_load_and_broadcast: Orbax's name of `load_and_broadcast`.
        on_statistics: Called with the `LoadStatistics` of every load, in the thread that loads, when the
            arrays are there. What it raises, the load raises.
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
