"""Pass: values are brought to where, and how, the calls that use them want them."""

from __future__ import annotations

from dataclasses import replace

from waystation.runtime.ir.program import Call, Compute, HostCall, Node, Program, Reshard
from waystation.runtime.ir.shardings import Sharding


def insert_reshards(program: Program) -> Program:
    """Puts a `Reshard` before each call whose operand lies on another slice or in another sharding.

    A value is brought to one place once, however many calls use it there.
    """
    inserter = _Inserter(program)
    for node in program.nodes:
        inserter.add(node)
    return replace(program, nodes=tuple(inserter.nodes))


class _Inserter:
    def __init__(self, program: Program) -> None:
        self.nodes: list[Node] = []
        self._values = program.values
        self._next_number = program.next_number
        self._copies: dict[tuple[int, int, Sharding], int] = {}

    def add(self, node: Node) -> None:
        """Adds a node, and before it the reshards that it needs."""
        if isinstance(node, Compute | HostCall):
            operands = tuple(
                self._brought(number, node, sharding)
                for number, sharding in zip(node.operands, node.operand_shardings, strict=True)
            )
            node = replace(node, operands=operands)
        self.nodes.append(node)

    def _brought(self, number: int, node: Call, sharding: Sharding) -> int:
        value = self._values[number]
        if (value.slice, value.sharding) == (node.slice, sharding):
            return number
        key = number, node.slice, sharding
        if key not in self._copies:
            copied = replace(value, number=self._next_number, slice=node.slice, sharding=sharding)
            self.nodes.append(Reshard(number, copied))
            self._copies[key] = copied.number
            self._next_number += 1
        return self._copies[key]
