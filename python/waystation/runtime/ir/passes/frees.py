"""Pass: liveness. Every value of the program's own is given back as soon as nothing needs it any more."""

from __future__ import annotations

from dataclasses import replace

from waystation.runtime.ir.program import Arg, Compute, Free, Node, Program


def insert_frees(program: Program) -> Program:
    """Puts a `Free` after the last use of each value that is not returned, donated there, or the caller's.

    What nothing uses is freed where it is made.
    """
    last_uses = {number: place for place, node in enumerate(program.nodes) for number in _touched(node)}
    kept = set(program.nodes[-1].operands)
    for node in program.nodes:
        if isinstance(node, Compute):
            kept.update(node.operands[place] for place in node.donated)
        elif isinstance(node, Arg) and not node.donated:
            kept.add(node.result.number)
    nodes: list[Node] = []
    for place, node in enumerate(program.nodes):
        nodes.append(node)
        dying = [number for number in _touched(node) if last_uses[number] == place and number not in kept]
        if dying:
            nodes.append(Free(tuple(dying)))
    return replace(program, nodes=tuple(nodes))


def _touched(node: Node) -> tuple[int, ...]:
    """The values that a node uses or defines, each once, ascending."""
    return tuple(sorted({*node.operands, *(value.number for value in node.results)}))
