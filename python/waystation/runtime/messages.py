"""What a host is told, and what it answers. Plain values: they travel between processes, without Ray or JAX.

A host does *messages* in the order of its island. A message has instructions; one that runs a program names
a list of the low form, which the host was given before, and the handles of its arguments and results.
*Handles* name buffers: arrays, of which a host holds the shards of its own devices. They are the
controller's, never given twice, and mean nothing to hosts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from waystation._errors import WaystationError
from waystation.grid import Shape
from waystation.runtime.host_options import DEFAULT_OPTIONS, HostOptions, SaveManner
from waystation.runtime.ir import LowProgram, Value
from waystation.runtime.resources import Placement
from waystation.runtime.state_trees import StateTree

Block: TypeAlias = np.ndarray[Any, np.dtype[Any]]
# What a host answers in words, or the values of a checkpoint that are no arrays of hosts.
Said: TypeAlias = str | tuple[Any, ...]


def key_of(code: bytes) -> str:
    """The key of a function, made of its bytes."""
    return hashlib.sha256(code).hexdigest()[:32]


def host_function_key(name: str, pickled: bytes) -> str:
    """The key of a function of Python: of two that have one name, each has its own."""
    return f"{name} {key_of(pickled)}"


def host_function_name(key: str) -> str:
    """The name of a function of Python, for people."""
    return key.rpartition(" ")[0] or key


@dataclass(frozen=True, slots=True)
class HostList:
    """What one host does for one subgraph of a program; it gets it once.

    Attributes:
        fingerprint: What it is known by; no other list of its cluster ever is.
        low: The program in the low form, of which only this host's list is there.
        arguments: The values that are there before it runs, of those that have shards on this host.
        results: Those of the values that it makes that stay.
    """

    fingerprint: str
    low: LowProgram
    arguments: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Run a list of the low form.

    Attributes:
        list: The fingerprint of the list.
        arguments: The buffer of each argument of the list, in its order.
        results: The handle of each result, likewise.
        consumed: Arguments that end with it.
        peers: Name and transport address of each host that it receives from.
    """

    list: str
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    consumed: tuple[int, ...] = ()
    peers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Put:
    """Make a buffer of a small array, of which each device takes its shard.

    Attributes:
        handle: Its handle.
        array: The whole array.
        value: How it lies on its slice.
        placement: Where that is.
    """

    handle: int
    array: Block
    value: Value
    placement: Placement


@dataclass(frozen=True, slots=True)
class Get:
    """Answer with the shards of a buffer that this host holds, each distinct one once."""

    handle: int


@dataclass(frozen=True, slots=True)
class Spill:
    """Bring the shards of a buffer to host memory."""

    handle: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Bring the shards of a buffer back from host memory."""

    handle: int


@dataclass(frozen=True, slots=True)
class Save:
    """Save buffers, together with the other hosts that hold shards of them.

    Attributes:
        path: Where the checkpoint goes.
        tree: The state that they are in. Leaves that are neither here nor there are of other hosts.
        arrays: Number of the leaf, and buffer, of each array.
        processes: The numbers of these hosts in their island.
        manner: How it is saved.
    """

    path: str
    tree: StateTree
    arrays: tuple[tuple[int, int], ...]
    processes: tuple[int, ...]
    manner: SaveManner


@dataclass(frozen=True, slots=True)
class Load:
    """Make buffers of a checkpoint, together with the other hosts that get shards of them; the first of them
    answers with the values that are wanted.

    Attributes:
        path: Where the checkpoint is.
        tree: The abstract state that they are in.
        arrays: Number of the leaf, handle, and where and how it is to lie, of each array.
        processes: The numbers of these hosts in their island.
        identity: What `Identify` has answered, if others load too: no other checkpoint may have taken the
            place of that one.
        options: How it is loaded.
    """

    path: str
    tree: StateTree
    arrays: tuple[tuple[int, int, Value, Placement], ...]
    processes: tuple[int, ...]
    identity: str | None = None
    options: HostOptions = DEFAULT_OPTIONS


@dataclass(frozen=True, slots=True)
class BeginJoining:
    """Begin a checkpoint whose parts are saved by several sets of hosts; answer with the directory of these.

    Attributes:
        path: Where the checkpoint goes.
        manner: How it is saved.
    """

    path: str
    manner: SaveManner


@dataclass(frozen=True, slots=True)
class EndJoining:
    """Make such parts the checkpoint.

    Attributes:
        directory: What `BeginJoining` has answered.
        parts: How many there are; None if it has failed, and nothing is to be left of it.
        owners: Of which part each leaf of the state is.
    """

    directory: str
    parts: int | None
    owners: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Identify:
    """Answer with what tells a checkpoint from any other, which has to have what is wanted.

    Attributes:
        path: Where the checkpoint is.
        tree: The abstract state.
        arrays: Number of the leaf, shape and dtype of each array.
        options: How it will be loaded.
    """

    path: str
    tree: StateTree
    arrays: tuple[tuple[int, Shape, str], ...]
    options: HostOptions = DEFAULT_OPTIONS


Instruction: TypeAlias = (
    Run | Put | Get | Spill | Restore | Save | Load | BeginJoining | EndJoining | Identify
)
# What only moves bytes between devices and storage: other messages neither wait for it nor are waited for.
TRANSFERS = (Save, Load, BeginJoining, EndJoining, Identify)


def is_transfer(instructions: Sequence[Instruction]) -> bool:
    """Whether instructions move bytes between devices and storage, beside what makes room for them."""
    return any(isinstance(each, TRANSFERS) for each in instructions)


@dataclass(frozen=True, slots=True)
class Message:
    """What a host is told in one go.

    Attributes:
        work: The number of the work that it is part of, in the whole cluster and for ever.
        program: Its program, for people.
        instructions: In order.
    """

    work: int
    program: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What one `Get` gives on one host.

    Attributes:
        shape: Shape of the whole array.
        blocks: Where in the array each shard begins, and its elements.
    """

    shape: Shape
    blocks: tuple[tuple[Shape, Block], ...]


@dataclass(frozen=True, slots=True)
class Done:
    """A host has done its message of a work.

    Attributes:
        work: The number of the work.
        device_seconds: For how long its devices were at it.
        error: What went wrong; None if nothing did.
        fetched: The arrays that it was asked for.
        said: What else it has answered.
    """

    work: int
    device_seconds: float
    error: WaystationError | None = None
    fetched: tuple[Fetched, ...] = ()
    said: Said = ""
