"""Holds programs to the rules of the high form; errors name the node.

Three forms, each stricter: *traced* (as the tracer makes it), *resharded* (every operand lies as the call
that uses it wants it), *freed* (every value is given back exactly once: freed, donated, returned or the
caller's).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NoReturn

from waystation._errors import InvalidInput
from waystation.runtime.errors import InvalidProgram
from waystation.runtime.ir.program import (
    Arg,
    Call,
    Compute,
    Free,
    HostCall,
    Program,
    Reshard,
    Result,
    Value,
    describe,
    item_bytes,
)
from waystation.runtime.ir.shardings import Sharding


class Form(IntEnum):
    """How far a program has been lowered; each form keeps the rules of those before."""

    TRACED = 0
    RESHARDED = 1
    FREED = 2


def verify(program: Program, form: Form = Form.TRACED) -> None:
    """Checks a program.

    Raises:
        InvalidProgram: A rule is broken; the message names the node, the context has its place as `node`.
    """
    _Verifier(program, form).run()


class _Verifier:
    """One pass over the nodes, in order."""

    def __init__(self, program: Program, form: Form) -> None:
        self.program = program
        self.form = form
        self.place = 0
        self.device_counts = {part.number: part.device_count for part in program.slices}
        self.alive: dict[int, Value] = {}
        self.ended: dict[int, int] = {}  # value -> node that freed or consumed it
        self.kept: set[int] = set()  # arguments that stay the caller's

    def run(self) -> None:
        """Checks all nodes, then what is left."""
        if len(self.device_counts) != len(self.program.slices):
            raise InvalidProgram(f"program '{self.program.name}' declares a slice twice")
        if not self.program.nodes or not isinstance(self.program.nodes[-1], Result):
            raise InvalidProgram(f"program '{self.program.name}' must end with its result")
        for place, node in enumerate(self.program.nodes):
            self.place = place
            for number in node.operands:
                self.check_used(number)
            if isinstance(node, Compute | HostCall):
                self.check_call(node)
            elif isinstance(node, Reshard):
                self.check_reshard(node)
            elif isinstance(node, Free):
                self.check_free(node)
            elif isinstance(node, Result):
                self.check_result()
            for value in node.results:
                self.define(value)
            if isinstance(node, Arg) and not node.donated:
                self.kept.add(node.result.number)

    def fail(self, what: str) -> NoReturn:
        """Raises the error of the node at hand."""
        where = describe(self.program, self.place)
        raise InvalidProgram(f"{where} {what}", program=self.program.name, node=self.place)

    def check_used(self, number: int) -> None:
        """A value is used where it is defined and not ended."""
        if number in self.ended:
            self.fail(f"uses %{number} after it was given up by {describe(self.program, self.ended[number])}")
        if number not in self.alive:
            self.fail(f"uses %{number}, which no node before it defines")

    def define(self, value: Value) -> None:
        """A value is defined once, with a sharding that fits it and its slice."""
        if value.number in self.alive or value.number in self.ended:
            self.fail(f"defines %{value.number} a second time")
        try:
            item_bytes(value.dtype)
        except InvalidProgram as error:
            self.fail(f"cannot make %{value.number}: {error.message}")
        self.check_sharding(value.sharding, value.slice, value)
        self.alive[value.number] = value

    def check_sharding(self, sharding: Sharding, slice_number: int, value: Value) -> None:
        """A sharding has as many devices as its slice, and divides the array."""
        devices = self.device_counts.get(slice_number)
        if devices is None:
            self.fail(f"is on slice @{slice_number}, which the program does not declare")
        if sharding.device_count != devices:
            self.fail(f"has a mesh of {sharding.device_count} devices on slice @{slice_number} of {devices}")
        try:
            sharding.shard_shape(value.shape)
        except InvalidInput as error:
            self.fail(f"shards %{value.number} wrongly: {error.message}")

    def check_call(self, node: Call) -> None:
        """Operands, their shardings and donations of a call."""
        if len(node.operands) != len(node.operand_shardings):
            self.fail(
                f"has {len(node.operands)} operands and {len(node.operand_shardings)} shardings of them"
            )
        for number, wanted in zip(node.operands, node.operand_shardings, strict=True):
            value = self.alive[number]
            self.check_sharding(wanted, node.slice, value)
            if self.form >= Form.RESHARDED and (value.slice, value.sharding) != (node.slice, wanted):
                self.fail(f"needs %{number} on slice @{node.slice} in another sharding: a reshard is missing")
        for value in node.results:
            if value.slice != node.slice:
                self.fail(f"runs on slice @{node.slice} and cannot make %{value.number} on @{value.slice}")
        for place in node.donated:
            self.check_donation(node, place)

    def check_donation(self, node: Call, place: int) -> None:
        """A donated operand is used once by the node, and by nothing after it."""
        if not 0 <= place < len(node.operands):
            self.fail(f"donates operand {place} of {len(node.operands)}")
        number = node.operands[place]
        if node.operands.count(number) > 1 or number in self.ended:
            self.fail(f"donates %{number}, which it uses a second time")
        if self.form >= Form.FREED and number in self.kept:
            self.fail(f"donates %{number}, an argument that the caller keeps")
        self.end(number)

    def check_reshard(self, node: Reshard) -> None:
        """A copy is of the same array."""
        source = self.alive[node.operand]
        if (source.shape, source.dtype) != (node.result.shape, node.result.dtype):
            self.fail(f"makes of {source.dtype}{source.shape} a {node.result.dtype}{node.result.shape}")

    def check_free(self, node: Free) -> None:
        """What is freed is the program's own."""
        for number in node.operands:
            if number in self.kept:
                self.fail(f"frees %{number}, an argument that the caller keeps")
            self.check_used(number)
            self.end(number)

    def end(self, number: int) -> None:
        """Notes who gave a value up."""
        self.ended[number] = self.place
        del self.alive[number]

    def check_result(self) -> None:
        """Nothing follows the result, and nothing but it and the caller's own is left."""
        if self.place != len(self.program.nodes) - 1:
            self.fail("is followed by other nodes")
        if self.form >= Form.FREED:
            returned = set(self.program.nodes[-1].operands)
            left = sorted(self.alive.keys() - returned - self.kept)
            if left:
                self.fail(f"leaves %{left[0]} behind: it is neither freed nor returned")
