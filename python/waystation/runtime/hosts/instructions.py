"""What a host can be told to do. Plain values: they travel in messages, and need neither Ray nor JAX.

A *handle* names a buffer: an array of the island, of which a host holds the shards of its own devices. All
hosts of an island are told the same, apart from the bytes of shards that they are given. Handles are opaque:
whoever tells hosts to make a buffer chooses its handle.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from waystation.grid import Shape

Handle: TypeAlias = int | str
# Names and sizes of the axes of a mesh, major to minor.
Axes: TypeAlias = tuple[tuple[str, int], ...]
# For each axis of an array the axes of the mesh that divide it, major to minor.
Spec: TypeAlias = tuple[tuple[str, ...], ...]
Block: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def key_of(exported: bytes) -> str:
    """The key of an exported function."""
    return hashlib.sha256(exported).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Exec:
    """Call a registered function on all devices of the island.

    Attributes:
        function: The key that it was registered by.
        operands: The buffers that it is called with, in the order of its flattened arguments.
        results: The handles of what it returns, flattened likewise.
        name: The computation's name, for messages; the function's own if it is empty.
    """

    function: str
    operands: tuple[Handle, ...]
    results: tuple[Handle, ...]
    name: str = ""


@dataclass(frozen=True, slots=True)
class Put:
    """Make a buffer of a small array, of which each device takes its shard.

    Attributes:
        handle: Its handle.
        array: The whole array.
        axes: The mesh of all devices of the island.
        spec: How the mesh divides the array.
    """

    handle: Handle
    array: Block
    axes: Axes
    spec: Spec


@dataclass(frozen=True, slots=True)
class Get:
    """Answer with the shards of a buffer that this host holds, each distinct one once in the island."""

    handle: Handle


@dataclass(frozen=True, slots=True)
class Free:
    """Forget buffers; those that are still used are freed once they no longer are."""

    handles: tuple[Handle, ...]


Instruction: TypeAlias = Exec | Put | Get | Free


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
class Message:
    """What a host is told in one go.

    Attributes:
        program: The program that it belongs to, for messages to people.
        instructions: In order.
    """

    program: str
    instructions: tuple[Instruction, ...]
