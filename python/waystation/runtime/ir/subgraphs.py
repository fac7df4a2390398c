"""Static subgraphs: what of a program can be dispatched at once.

Where every shape is known before anything runs, the whole program is one subgraph and one message to each
island it touches. What depends on a `dynamic` node is of a later subgraph, which is dispatched when that node
has run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from waystation.runtime.ir.passes.place import PlacedProgram
from waystation.runtime.ir.program import Compute, Free, HostCall, Program, Result


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Nodes that are dispatched together.

    Attributes:
        number: Its place among the subgraphs of the program; it depends only on those before it.
        nodes: The places of its nodes, ascending.
    """

    number: int
    nodes: tuple[int, ...]


def static_subgraphs(program: Program) -> tuple[Subgraph, ...]:
    """The subgraphs of a program, in the order in which they can be dispatched."""
    levels: dict[int, int] = {}  # the subgraph in which each value is there
    last_used: dict[int, int] = {}  # the latest subgraph that uses it: who gives it up comes no earlier
    members: dict[int, list[int]] = {}
    for place, node in enumerate(program.nodes):
        ended = node.operands if isinstance(node, Free) else ()
        if isinstance(node, Compute):
            ended = tuple(node.operands[position] for position in node.donated)
        level = max((levels[number] for number in node.operands), default=0)
        level = max([level, *(last_used.get(number, 0) for number in ended)])
        if isinstance(node, Result):
            level = max([level, *members])
        for number in node.operands:
            last_used[number] = max(last_used.get(number, 0), level)
        dynamic = isinstance(node, Compute | HostCall) and node.dynamic
        levels.update((value.number, level + dynamic) for value in node.results)
        members.setdefault(level, []).append(place)
    return tuple(Subgraph(number, tuple(members[level])) for number, level in enumerate(sorted(members)))


def islands_of(placed: PlacedProgram, nodes: Iterable[int]) -> tuple[str, ...]:
    """The islands that have something to do for these nodes, by name: each gets one message."""
    placements = placed.by_slice
    values = placed.program.values
    islands: set[str] = set()
    for place in nodes:
        node = placed.program.nodes[place]
        touched = [value.slice for value in node.results]
        if isinstance(node, Compute | HostCall):
            touched.append(node.slice)
        elif node.kind in ("reshard", "free"):
            touched += [values[number].slice for number in node.operands]
        if node.kind != "arg":
            islands.update(placements[number].island for number in touched)
    return tuple(sorted(islands))
