"""Which processes of a JAX program load a published model together, and what they read for each other.

They load in rounds of a session: they agree on what is loaded, and at the end on whether each has its part. A
load that this process makes alone waits for nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from waystation import coordination
from waystation._arguments import require_boolean_or_none
from waystation._options import Options
from waystation.coordination import Session
from waystation.coordination.single import SingleSession
from waystation.frameworks import dtypes
from waystation.frameworks.base import Codec, Target
from waystation.grid import intersect, volume
from waystation.safetensors.open_files import OpenFiles
from waystation.transfers import fit
from waystation.transfers.buffers import Incoming


def open_session(
    codec: Codec, options: Options, *, sharding: Any, has_function: bool, together: bool | None
) -> Session:
    """Opens a session of the processes that load together; of this process alone if it loads for itself.

    Args:
        codec: Of what is loaded.
        options: `multiprocessing` counts.
        sharding: The one for all arrays, or None.
        has_function: Whether a function chooses shardings, which nobody knows before the files are open.
        together: What the caller says; None: all whose devices a sharding is over, and with a function all.
    """
    require_boolean_or_none("together", together)
    alone = SingleSession()
    if together is False:
        return alone
    holders: set[int] = set()
    if codec.resharding is not None and (sharding is not None or has_function):
        holders = codec.resharding.processes_of(sharding)
    are_several = len(holders) > 1
    coordinator = coordination.current()
    if (together is None and not are_several) or coordinator.process_count == 1:
        return alone
    multiprocessing = options.multiprocessing
    processes = multiprocessing.active_processes or (holders if are_several else None)
    if processes is not None and coordinator.process_index not in processes:
        return alone
    primary = multiprocessing.primary_host
    if primary is None or (processes is not None and primary not in processes):
        primary = 0 if processes is None else min(processes)
    return coordinator.open(
        "load a published model",
        deadline_s=multiprocessing.deadline_s,
        primary=primary,
        sequence=multiprocessing.barrier_sync_key_prefix or "",
        processes=processes,
    )


# ---- arrays that are read with one sharding, and then resharded --------------------------------
#
# A process that needs short parts of all rows of a tensor would read all of it, as would every other. Where
# processes load together, each reads as many whole rows instead, and the devices exchange the parts: so every
# byte is read once. Invariants: nothing is sent before all processes have read what they are to read; an
# array is there in both forms only while it is resharded.

_LEAST_BYTES = 1 << 20  # what is smaller is read sooner than sent


def read_contiguously(
    opened: OpenFiles, codec: Codec, arrays: Sequence[Incoming], verify: bool | None
) -> dict[int, Target]:
    """Has arrays read with a sharding that is contiguous in files, where that is better. Returns where these
    go in the end, by their leaves."""
    able = codec.resharding
    if able is None:
        return {}
    found: dict[int, Target] = {}
    least_bytes = opened.least_stretch_bytes(verify)
    for array in arrays:
        item_bytes = dtypes.of_stored(array.stored).host.itemsize
        if math.prod(array.stored.shape) * item_bytes < _LEAST_BYTES:
            continue
        reading = able.reading(array.target, item_bytes, least_bytes)
        if reading is not None:
            shape, place = reading
            found[array.leaf] = array.target
            stored = fit.reshaped(array.stored, shape)
            (array.target,) = codec.placed([stored], [array.target.dtype], [place])
    return found


def exchanged_bytes(arrays: Sequence[Incoming], targets: dict[int, Target]) -> tuple[int, int]:
    """What resharding changes for this process.

    Args:
        arrays: All that it reads, with the sharding for that.
        targets: Where some of them go in the end, by their leaves.

    Returns:
        How many bytes more it needs than it reads, as they are stored, which may be less than nothing; and
        how many others send it.
    """
    more_bytes = received_bytes = 0
    for array in arrays:
        if array.leaf not in targets:
            continue
        wanted = targets[array.leaf].boxes
        read = [
            part for box in array.target.boxes if (part := fit.stored_part(array.stored, box)) is not None
        ]
        common = [intersect(box, part) for box in wanted for part in read]
        wanted_items = sum(map(volume, wanted))
        received_items = wanted_items - sum(volume(box) for box in common if box is not None)
        stored_item_bytes = dtypes.of_stored(array.stored).host.itemsize
        more_bytes += stored_item_bytes * (wanted_items - sum(map(volume, read)))
        received_bytes += array.item_bytes * received_items
    return more_bytes, received_bytes


def reshard(codec: Codec, arrays: list[Any], targets: dict[int, Target]) -> None:
    """Gives arrays that were read so the sharding that is wanted, one after the other."""
    able = codec.resharding
    for leaf, target in targets.items():
        assert able is not None, "it was asked before"
        arrays[leaf] = able.resharded(arrays[leaf], target)
