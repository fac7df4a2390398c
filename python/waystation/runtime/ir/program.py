"""The high form of a program: one node for each sharded computation, whatever the number of shards.

`Arg → Compute → Compute → Result` are four nodes over 4 devices and over 2,048. Nothing here says where a
device is: values live on slices, whose devices are virtual. Nodes are in the order in which they are to be
issued; values are numbered, defined once and immutable. `verify` holds programs to that; these classes only
describe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeAlias

from waystation._errors import Unsupported
from waystation.frameworks.dtypes import numpy_dtype
from waystation.grid import Shape
from waystation.runtime.errors import InvalidProgram
from waystation.runtime.ir.shardings import Sharding


def item_bytes(dtype: str) -> int:
    """Bytes of an element in memory.

    Raises:
        InvalidProgram: There is no dtype of that name that values of a program can have.
    """
    try:
        found = numpy_dtype(dtype)
    except Unsupported:
        found = None
    if found is None:
        raise InvalidProgram(f"arrays of dtype '{dtype}' cannot be values of a program")
    return found.itemsize


@dataclass(frozen=True)
class Value:
    """An array that a node makes.

    Attributes:
        number: Its identity in the program.
        shape: Shape of the whole array.
        dtype: Name of its dtype.
        slice: The slice that it lives on.
        sharding: How it lies there.
    """

    number: int
    shape: Shape
    dtype: str
    slice: int
    sharding: Sharding

    @cached_property
    def shard_bytes(self) -> int:
        """Bytes that it takes on each device.

        Raises:
            InvalidProgram: Its dtype has no fixed size.
        """
        return math.prod(self.sharding.shard_shape(self.shape)) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Arg:
    """An array that the caller gives.

    Attributes:
        label: The caller's name for it.
        result: The array.
        donated: The caller gives it up: the program may free or overwrite it.
    """

    kind: ClassVar[str] = "arg"
    label: str
    result: Value
    donated: bool = False

    @property
    def operands(self) -> tuple[int, ...]:
        """The values that it uses: none."""
        return ()

    @property
    def results(self) -> tuple[Value, ...]:
        """The values that it defines."""
        return (self.result,)


@dataclass(frozen=True, slots=True)
class Compute:
    """A compiled function over all devices of a slice.

    Attributes:
        label: A name for people.
        function: The hash of the function, by which hosts know its code.
        slice: Where it runs.
        operands: The values that it uses.
        operand_shardings: How each of them has to lie.
        results: The values that it makes, on its slice.
        donated: Places of operands whose memory it takes over; these are used nowhere after it.
        dynamic: The shapes of its results are bounds until it has run, so what depends on them is
            dispatched only then.
    """

    kind: ClassVar[str] = "compute"
    label: str
    function: str
    slice: int
    operands: tuple[int, ...]
    operand_shardings: tuple[Sharding, ...]
    results: tuple[Value, ...]
    donated: tuple[int, ...] = ()
    dynamic: bool = False


@dataclass(frozen=True, slots=True)
class HostCall:
    """A Python function that each host of a slice runs over its own shards, as a save does.

    Attributes:
        label: A name for people.
        function: The hash of the function, by which hosts know its code.
        slice: Whose hosts run it.
        operands: The values that it reads.
        operand_shardings: How each of them has to lie.
        results: The values that it makes, on its slice.
        dynamic: As for `Compute`.
    """

    kind: ClassVar[str] = "host_call"
    label: str
    function: str
    slice: int
    operands: tuple[int, ...]
    operand_shardings: tuple[Sharding, ...]
    results: tuple[Value, ...]
    dynamic: bool = False

    @property
    def donated(self) -> tuple[int, ...]:
        """Places of operands whose memory it takes over: none."""
        return ()


@dataclass(frozen=True, slots=True)
class Reshard:
    """A copy of a value with another sharding, or on another slice.

    Attributes:
        operand: The value.
        result: The copy, of the same shape and dtype.
    """

    kind: ClassVar[str] = "reshard"
    operand: int
    result: Value

    @property
    def operands(self) -> tuple[int, ...]:
        """The values that it uses."""
        return (self.operand,)

    @property
    def results(self) -> tuple[Value, ...]:
        """The values that it defines."""
        return (self.result,)


@dataclass(frozen=True, slots=True)
class Free:
    """The memory of values is given back.

    Attributes:
        operands: The values.
    """

    kind: ClassVar[str] = "free"
    operands: tuple[int, ...]

    @property
    def results(self) -> tuple[Value, ...]:
        """The values that it defines: none."""
        return ()


@dataclass(frozen=True, slots=True)
class Result:
    """What the caller gets.

    Attributes:
        operands: The values.
    """

    kind: ClassVar[str] = "result"
    operands: tuple[int, ...]

    @property
    def results(self) -> tuple[Value, ...]:
        """The values that it defines: none."""
        return ()


Call: TypeAlias = Compute | HostCall
Node: TypeAlias = Arg | Compute | HostCall | Reshard | Free | Result


@dataclass(frozen=True, slots=True)
class SliceShape:
    """A slice, as far as a program knows it.

    Attributes:
        number: Its identity.
        shape: How its devices lie.
    """

    number: int
    shape: Shape

    @property
    def device_count(self) -> int:
        """The number of its devices."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Program:
    """A graph of calls over slices.

    Attributes:
        name: A name for people.
        slices: The slices that it runs on.
        nodes: Its nodes, each after those whose values it uses; the last one is the only `Result`.
    """

    name: str
    slices: tuple[SliceShape, ...]
    nodes: tuple[Node, ...]

    @cached_property
    def values(self) -> dict[int, Value]:
        """All values, by number."""
        return {value.number: value for node in self.nodes for value in node.results}

    @cached_property
    def arguments(self) -> tuple[Arg, ...]:
        """The nodes of what the caller gives, in order."""
        return tuple(node for node in self.nodes if isinstance(node, Arg))

    @property
    def next_number(self) -> int:
        """A number that no value has, nor any above it."""
        return max(self.values, default=-1) + 1


def describe(program: Program, place: int) -> str:
    """Names a node for people."""
    node = program.nodes[place]
    label = f" '{node.label}'" if isinstance(node, Arg | Compute | HostCall) else ""
    return f"program '{program.name}', node {place} ({node.kind}{label})"
