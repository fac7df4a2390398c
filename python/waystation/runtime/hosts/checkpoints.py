"""Saves and loads arrays of a host, together with the other hosts that hold shards of them.

To `waystation.save` and `load` the hosts that hold an array are one program of several processes: the
coordination service of their island carries the rounds, and each host moves the bytes of its own shards
between its devices and storage. Where arrays are on different hosts, or islands, each of these programs saves
a part: the whole state, with something else in the places of what is not its own. One host has begun the
whole and makes the parts one checkpoint. A load is one of some arrays for each then, all of the same
checkpoint, which one host has compared with all that is wanted: each makes sure afterwards that it is still
that one. A host has plain containers in the place of the program's classes, which it need not know.

What hosts must do in one order, to open the sessions of their rounds and to take hold of the arrays of a
save, is done when a transfer begins, in the order of the island; all else runs in a thread of the transfer.
No collective runs there. A load with `array.loading.load_and_broadcast = True` has collectives, so it ends
before the next message begins.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from waystation import checkpoint, storage
from waystation._errors import Conflict, NotFound, Unavailable, Unsupported
from waystation._options.in_effect import current_options
from waystation.checkpoint.joining import Joining
from waystation.checkpoint.load import require_match
from waystation.checkpoint.loading import Loading
from waystation.checkpoint.paths import locate
from waystation.checkpoint.stored import AUTO
from waystation.frameworks.carried import AbstractKeys
from waystation.frameworks.jax_dtypes import jax_dtype
from waystation.layouts.native.records import RECORD_LIMIT_BYTES
from waystation.runtime.host_options import HostOptions
from waystation.runtime.messages import BeginJoining, EndJoining, Identify, Load, Save
from waystation.runtime.state_trees import StateTree, require_small
from waystation.transfers.handle import AsyncResponse
from waystation.tree import flatten, format_key_path

_RECORD = "checkpoint.json"  # other layouts have none, and are not told apart
_BROADCAST = "array.loading.load_and_broadcast"
Loaded: TypeAlias = tuple[dict[int, jax.Array], tuple[Any, ...]]
_OF_OTHERS = False  # in the places of leaves that another part of a checkpoint has


class Checkpoints:
    """The checkpoints that this host has to do with."""

    def __init__(self) -> None:
        self._joinings: dict[str, Joining] = {}

    def begin_save(self, instruction: Save, arrays: Mapping[int, jax.Array]) -> AsyncResponse[None]:
        """Begins a save, which ends when it is committed.

        From then on arrays may be donated: what is saved is what they are now.

        Args:
            instruction: What is to be saved.
            arrays: The arrays, by the numbers of their leaves.

        Raises:
            WaystationError: It cannot be saved.
        """
        manner = instruction.manner
        leaves = {**dict(instruction.tree.values), **arrays}
        state = instruction.tree.build(leaves, _OF_OTHERS)
        paths = flatten(state)[1].key_paths() if manner.options.storage else ()
        with _together(manner.options.context(paths), instruction.processes):
            return checkpoint.save_async(
                instruction.path,
                state,
                overwrite=manner.overwrite,
                custom_metadata=manner.custom_metadata,
            )

    def begin_load(
        self, instruction: Load, shardings: Mapping[int, jax.sharding.Sharding]
    ) -> AsyncResponse[Loaded]:
        """Begins to load arrays, and the values that are wanted.

        Args:
            instruction: What is to be loaded.
            shardings: Of the arrays, by the numbers of their leaves.

        Returns:
            What has, or raises, when it has ended: the arrays, by these numbers, and the values in the order
            in which they are wanted.

        Raises:
            Conflict: Another checkpoint has taken the place of the one that was identified.
            InvalidInput: The values are too large to travel through the controller.
            WaystationError: There is no such checkpoint, or it has other arrays.
        """
        wanted = _wanted(instruction.tree)
        for leaf, _, value, _ in instruction.arrays:
            wanted[leaf] = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=shardings[leaf])
        abstract = instruction.tree.build(wanted, checkpoint.PLACEHOLDER)
        with _together(instruction.options.context(), instruction.processes):
            loading = Loading(
                locate(instruction.path),
                [AUTO],
                current_options(),
                is_in_background=not may_broadcast(instruction),
            )
            # In the context, by whose settings a store is reached.
            return loading.in_background(
                lambda progress: _loaded(instruction, loading.run(abstract, progress))
            )

    def identify(self, instruction: Identify) -> str:
        """What tells a checkpoint from any other.

        Raises:
            StructureMismatch: It has something else than is wanted.
            WaystationError: There is none.
        """
        identity = _identity(instruction.path, instruction.options)
        wanted = _wanted(instruction.tree)
        wanted |= {leaf: jax.ShapeDtypeStruct(shape, dtype) for leaf, shape, dtype in instruction.arrays}
        with instruction.options.context():
            require_match(instruction.path, instruction.tree.build(wanted, checkpoint.PLACEHOLDER))
        return identity

    def begin_joining(self, instruction: BeginJoining) -> str:
        """Begins a checkpoint of parts; returns their directory.

        Raises:
            WaystationError: It cannot be saved there.
        """
        if storage.is_in_store(instruction.path):
            raise Unsupported(
                f"the arrays of '{instruction.path}' are on several sets of hosts, which save them together "
                "to a file system only; save to a directory, or put them on one slice",
                path=instruction.path,
            )
        with instruction.manner.options.context():
            joining = Joining(instruction.path, overwrite=instruction.manner.overwrite)
        self._joinings[joining.directory] = joining
        return joining.directory

    def end_joining(self, instruction: EndJoining) -> None:
        """Makes the parts the checkpoint, or removes them.

        Raises:
            Unavailable: The process that has begun it was lost.
            WaystationError: It cannot be committed.
        """
        joining = self._joinings.pop(instruction.directory, None)
        if joining is None:
            raise Unavailable(
                f"the parts in '{instruction.directory}' were not made a checkpoint: the host that had begun "
                "it was lost meanwhile; save again"
            )
        with checkpoint.Context():
            if instruction.parts is None:
                joining.discard()
            else:
                joining.commit(instruction.parts, instruction.owners)


def may_broadcast(instruction: Load) -> bool:
    """Whether hosts may send each other what one of them has read, by collectives of their island."""
    return dict(instruction.options.values).get(_BROADCAST) is True


def _loaded(instruction: Load, state: Any) -> Loaded:
    """What hosts keep, and tell, of a state that was loaded."""
    _check_identity(instruction)
    leaves, structure = flatten(state)
    values = [number for number, _ in instruction.tree.values]
    if values:
        places = structure.key_paths()
        require_small({format_key_path(places[number]): leaves[number] for number in values})
    arrays = {leaf: leaves[leaf] for leaf, _, _, _ in instruction.arrays}
    return arrays, tuple(_told(leaves[number]) for number in values)


def _wanted(tree: StateTree) -> dict[int, Any]:
    """The values that are wanted, by the numbers of their leaves."""
    return {
        number: jax.ShapeDtypeStruct(value.shape, jax_dtype(value.dtype))
        if isinstance(value, AbstractKeys)
        else value
        for number, value in tree.values
    }


def _told(value: Any) -> Any:
    """A value as it travels: of PRNG keys their data."""
    return np.asarray(jax.random.key_data(value)) if isinstance(value, jax.Array) else value


def _together(context: checkpoint.Context, processes: tuple[int, ...]) -> checkpoint.Context:
    """The context, for these processes as a program of their own."""
    if jax.process_count() > 1:
        context.multiprocessing.active_processes = frozenset(processes)
        context.multiprocessing.primary_host = processes[0]
        # Hosts of several slices may save at the same time, each set of them in an order of its own.
        context.multiprocessing.barrier_sync_key_prefix = "runtime-" + "-".join(map(str, processes))
    return context


def _identity(path: str, options: HostOptions) -> str:
    """The digest of its record, which vouches for all the rest; empty where it has none."""
    with options.context():
        try:
            record = storage.read_file(os.path.join(locate(path), _RECORD), limit_bytes=RECORD_LIMIT_BYTES)
        except NotFound:
            return ""
    return hashlib.sha256(record).hexdigest()


def _check_identity(instruction: Load) -> None:
    identity = instruction.identity
    if identity is not None and _identity(instruction.path, instruction.options) != identity:
        raise Conflict(
            f"checkpoint '{instruction.path}' was replaced while hosts loaded from it; load again",
            path=instruction.path,
        )
