"""Calls become a program: a record of what was called with what, and the program that it makes.

Plain bookkeeping, without JAX. A recorder numbers values as they come; slices get numbers of the program in
the order in which they are first used, so that the same calls over other slices of the same shapes make the
same program. Building a program costs more than recording it: `structure` is what a cache knows it by.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from waystation.grid import Shape
from waystation.runtime.ir import Arg, Compute, Node, Program, Result, Sharding, SliceShape, Value
from waystation.runtime.ir.program import item_bytes
from waystation.runtime.tracing.releases import Registration


@dataclass(frozen=True)
class Kind:
    """What is known of an array before it is there.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype.
        sharding: How it lies on its slice.
    """

    shape: Shape
    dtype: str
    sharding: Sharding

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its elements, each counted once.

        Raises:
            InvalidProgram: Its dtype has no fixed size.
        """
        return math.prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Callee:
    """A function made ready for arguments of certain kinds on a slice; known by its identity.

    Attributes:
        label: Its name, for people.
        registration: Keeps it registered.
        slice_number: The slice that it runs on.
        slice_shape: How the devices of that lie.
        operands: How each operand has to lie.
        results: What it makes.
        donated: Places of operands whose memory it takes over.
        number: Tells it from any other of this process, also when it is gone.
    """

    label: str
    registration: Registration
    slice_number: int
    slice_shape: Shape
    operands: tuple[Sharding, ...]
    results: tuple[Kind, ...]
    donated: tuple[int, ...]
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def key(self) -> str:
        """The key that it was registered by."""
        return self.registration.key


class _Argument(NamedTuple):
    label: str
    number: int
    place: int
    kind: Kind


class _Call(NamedTuple):  # made, hashed and compared for every call
    callee: int  # its number
    place: int
    operands: tuple[int, ...]
    first_result: int


class Recorder:
    """Records calls.

    Args:
        name: The name of the program.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.slices: list[int] = []
        self.arguments: list[_Argument] = []
        self.calls: list[_Call] = []
        self.callees: list[Callee] = []  # of each call
        self._shapes: list[Shape] = []
        self._places: dict[int, int] = {}  # of slices
        self._next = 0

    def argument(self, label: str, kind: Kind, slice_number: int, slice_shape: Shape) -> int:
        """Records an array that is there before; returns its number."""
        number = self._next
        self._next += 1
        place = self._place(slice_number, slice_shape)
        self.arguments.append(_Argument(label, number, place, kind))
        return number

    def call(self, callee: Callee, operands: Sequence[int]) -> range:
        """Records a call; returns the numbers of its results."""
        first = self._next
        self._next = after = first + len(callee.results)
        place = self._place(callee.slice_number, callee.slice_shape)
        self.calls.append(_Call(callee.number, place, tuple(operands), first))
        self.callees.append(callee)
        return range(first, after)

    def structure(self, results: Sequence[int]) -> Hashable:
        """What decides which program this makes, as long as none of its functions is gone."""
        shapes = tuple(self._shapes)
        return self.name, tuple(self.arguments), tuple(self.calls), shapes, tuple(results)

    def program(self, results: Sequence[int]) -> Program:
        """The program of all calls, which returns these values: different ones, and no arguments."""
        nodes: list[Node] = [
            Arg(each.label, _value(each.number, each.kind, each.place)) for each in self.arguments
        ]
        for call, callee in zip(self.calls, self.callees, strict=True):
            made = tuple(
                _value(call.first_result + at, kind, call.place) for at, kind in enumerate(callee.results)
            )
            nodes.append(
                Compute(
                    callee.label,
                    callee.key,
                    call.place,
                    call.operands,
                    callee.operands,
                    made,
                    callee.donated,
                )
            )
        slices = tuple(SliceShape(place, shape) for place, shape in enumerate(self._shapes))
        return Program(self.name, slices, (*nodes, Result(tuple(results))))

    def _place(self, slice_number: int, shape: Shape) -> int:
        place = self._places.get(slice_number)
        if place is None:
            place = self._places[slice_number] = len(self.slices)
            self.slices.append(slice_number)
            self._shapes.append(shape)
        return place


def _value(number: int, kind: Kind, place: int) -> Value:
    return Value(number, kind.shape, kind.dtype, place, kind.sharding)
