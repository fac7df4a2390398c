"""Pass: arguments that a computation takes over are the program's to free."""

from __future__ import annotations

from dataclasses import replace

from waystation.runtime.ir.program import Arg, Compute, Program


def mark_donations(program: Program) -> Program:
    """Marks each argument that a computation donates as donated by the caller, whose handle then ends.

    Has to come before `insert_reshards`: where a copy is donated in the argument's stead, the caller has
    given the argument up all the same, and its memory can be used.
    """
    computes = [node for node in program.nodes if isinstance(node, Compute)]
    donated = {node.operands[place] for node in computes for place in node.donated}
    nodes = tuple(
        replace(node, donated=True) if isinstance(node, Arg) and node.result.number in donated else node
        for node in program.nodes
    )
    return replace(program, nodes=nodes)
