"""The text of a program in the high form: for people, golden tests and diffs; `parse` reads it back.

    program "step" {
      slice @0 [2, 2]
      sharding #0 = [x=2, y=2] (x, *)
      %0 = arg "state" donated : float32[8, 128] @0 #0
      %1 = compute "update" "3f2a" @0 (%0 #0) donates (0) : float32[8, 128] @0 #0
      result (%1)
    }

A sharding is written once, with the axes of its mesh and for each axis of the array those that divide it (`*`
for none, `x+y` for several). Invariant: `parse(show(program)) == program`, for every program whose names are
text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from waystation.grid import Shape
from waystation.runtime.ir.program import Arg, Compute, HostCall, Node, Program, Reshard, Value
from waystation.runtime.ir.shardings import Sharding


def show(program: Program) -> str:
    """The text of a program."""
    shardings: dict[Sharding, int] = {}
    for sharding in _shardings(program):
        shardings.setdefault(sharding, len(shardings))
    lines = [f"program {quoted(program.name)} {{"]
    lines += [f"  slice @{part.number} {extents(part.shape)}" for part in program.slices]
    lines += [f"  sharding #{number} = {_sharding(sharding)}" for sharding, number in shardings.items()]
    lines += [f"  {_node(node, shardings)}" for node in program.nodes]
    return "\n".join([*lines, "}\n"])


def quoted(text: str) -> str:
    """Text between quotation marks, as JSON writes it."""
    return json.dumps(text, ensure_ascii=False)


def extents(shape: Shape) -> str:
    """A shape, as in `[8, 128]`."""
    return f"[{', '.join(map(str, shape))}]"


def _shardings(program: Program) -> Iterator[Sharding]:
    for node in program.nodes:
        if isinstance(node, Compute | HostCall):
            yield from node.operand_shardings
        for value in node.results:
            yield value.sharding


def _sharding(sharding: Sharding) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in sharding.axes)
    parts = ", ".join("+".join(part) or "*" for part in sharding.spec)
    return f"[{axes}] ({parts})"


def _node(node: Node, shardings: dict[Sharding, int]) -> str:
    made = f" : {', '.join(_value(value, shardings) for value in node.results)}" if node.results else ""
    names = f"{', '.join(f'%{value.number}' for value in node.results)} = " if node.results else ""
    if isinstance(node, Arg):
        return f"{names}arg {quoted(node.label)}{' donated' if node.donated else ''}{made}"
    if isinstance(node, Reshard):
        return f"{names}reshard %{node.operand}{made}"
    if isinstance(node, Compute | HostCall):
        pairs = zip(node.operands, node.operand_shardings, strict=True)
        operands = ", ".join(f"%{number} #{shardings[sharding]}" for number, sharding in pairs)
        words = [node.kind, quoted(node.label), quoted(node.function), f"@{node.slice}", f"({operands})"]
        words += [f"donates ({', '.join(map(str, node.donated))})"] * bool(node.donated)
        words += ["dynamic"] * node.dynamic
        return f"{names}{' '.join(words)}{made}"
    return f"{node.kind} {_numbers(node.operands)}"


def _value(value: Value, shardings: dict[Sharding, int]) -> str:
    return f"{value.dtype}{extents(value.shape)} @{value.slice} #{shardings[value.sharding]}"


def _numbers(numbers: Iterable[int]) -> str:
    return f"({', '.join(f'%{number}' for number in numbers)})"
