"""Pass: shapes that depended on data are known, and replace their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from waystation.grid import Shape
from waystation.runtime.errors import InvalidProgram
from waystation.runtime.ir.program import Compute, HostCall, Node, Program, Reshard, Value, describe


def refine_shapes(program: Program, shapes: Mapping[int, Shape]) -> Program:
    """Replaces the shapes of results of `dynamic` nodes that have run, and of copies of them.

    What is lowered afterwards (the static subgraphs that come later) moves and reserves only what is there.

    Args:
        program: A program in any form.
        shapes: The shapes of values, by number.

    Raises:
        InvalidProgram: A value is no result of a dynamic node, or its shape is beyond the bound.
    """
    known = dict(shapes)
    refinable: set[int] = set()
    nodes: list[Node] = []
    for place, node in enumerate(program.nodes):
        dynamic = isinstance(node, Compute | HostCall) and node.dynamic
        if isinstance(node, Reshard) and node.operand in known:
            known[node.result.number] = known[node.operand]
            refinable.add(node.result.number)
        if dynamic:
            refinable.update(value.number for value in node.results)
        changed = tuple(_refined(value, known, describe(program, place)) for value in node.results)
        if isinstance(node, Compute | HostCall):
            nodes.append(replace(node, results=changed))
        elif isinstance(node, Reshard):
            nodes.append(replace(node, result=changed[0]))
        else:
            nodes.append(node)
    unknown = sorted(known.keys() - refinable)
    if unknown:
        raise InvalidProgram(
            f"program '{program.name}' makes %{unknown[0]} of a shape that does not depend on data"
        )
    return replace(program, nodes=tuple(nodes))


def _refined(value: Value, known: Mapping[int, Shape], where: str) -> Value:
    shape = known.get(value.number, value.shape)
    within = len(shape) == len(value.shape) and all(
        extent <= bound for extent, bound in zip(shape, value.shape, strict=False)
    )
    if not within:
        raise InvalidProgram(f"{where} has made %{value.number} of shape {shape}, its bound is {value.shape}")
    return replace(value, shape=shape)
