"""Pass: small computations that follow each other on one slice become one.

To dispatch a computation that takes next to nothing costs more than the computation. So calls of functions
whose code and whose arrays are small, which follow each other on one slice and hand their values on as they
lie, are joined into one call, of a function that is the chain of theirs (`chains.Chain`). Large ones gain
nothing and would take long to compile together. What a chain makes for itself alone is no value of the
program any more, so it is not counted where runs are admitted to memory: it is small. The pass works on
traced programs, before reshards and frees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from waystation.runtime.ir.chains import Chain, ChainCall
from waystation.runtime.ir.program import Compute, Node, Program, Value
from waystation.runtime.ir.shardings import Sharding

# A chain is compiled as a whole, so it has no more calls than a compiler is done with in a moment.
MOST_CALLS = 128
# Arrays that count as small, in bytes on each device.
SMALL_ARRAY_BYTES = 1 << 16
_MOST_LABELS = 3


@dataclass(frozen=True, slots=True)
class JoinedProgram:
    """A program whose chains are joined.

    Attributes:
        program: It.
        functions: The label and the code of each chain, by the key that the program calls it by.
    """

    program: Program
    functions: dict[str, tuple[str, bytes]]


def can_be_joined(program: Program, code: Mapping[str, bytes]) -> bool:
    """Whether `join_chains` would change a program; its arguments."""
    return any(isinstance(run, _Run) and len(run.calls) > 1 for run in _runs(program, code))


def join_chains(program: Program, code: Mapping[str, bytes], key_of: Callable[[bytes], str]) -> JoinedProgram:
    """Joins chains of calls.

    Args:
        program: A traced program.
        code: The code of the functions that may be joined, by key.
        key_of: The key of a function, made of its code.
    """
    nodes: list[Node] = []
    functions: dict[str, tuple[str, bytes]] = {}
    for run in _runs(program, code):
        if isinstance(run, _Run) and len(run.calls) > 1:
            chain, call = run.joined(_used_outside(program, run.calls))
            encoded = chain.encoded(code)
            key = key_of(encoded)
            functions[key] = chain.label, encoded
            nodes.append(replace(call, function=key))
        else:
            nodes += run.calls if isinstance(run, _Run) else [run]
    return JoinedProgram(replace(program, nodes=tuple(nodes)), functions)


def _runs(program: Program, code: Mapping[str, bytes]) -> list[_Run | Node]:
    """The nodes in order, those together that can be joined."""
    found: list[_Run | Node] = []
    values = program.values
    for node in program.nodes:
        if not isinstance(node, Compute) or not _can_be_joined(node, code, values):
            found.append(node)
            continue
        last = found[-1] if found else None
        if not isinstance(last, _Run) or not last.takes(node):
            last = _Run(node)
            found.append(last)
        last.add(node)
    return found


def _can_be_joined(node: Compute, code: Mapping[str, bytes], values: Mapping[int, Value]) -> bool:
    if node.function not in code or node.donated or node.dynamic or len(_axes(node)) != 1:
        return False
    touched = [*(values[number] for number in node.operands), *node.results]
    return all(value.shard_bytes <= SMALL_ARRAY_BYTES for value in touched)


def _axes(node: Compute) -> set[tuple[tuple[str, int], ...]]:
    """The meshes over which what a call uses and makes lies."""
    shardings = [*node.operand_shardings, *(value.sharding for value in node.results)]
    return {sharding.axes for sharding in shardings}


def _used_outside(program: Program, calls: list[Compute]) -> set[int]:
    inside = set(map(id, calls))
    return {number for node in program.nodes if id(node) not in inside for number in node.operands}


class _Run:
    """Calls that can be joined."""

    def __init__(self, first: Compute) -> None:
        self.calls: list[Compute] = []
        self._slice = first.slice
        self._axes = _axes(first)
        self._made: dict[int, Value] = {}

    def takes(self, node: Compute) -> bool:
        """Whether a call can follow."""
        pairs = zip(node.operands, node.operand_shardings, strict=True)
        return (
            node.slice == self._slice
            and _axes(node) == self._axes
            and len(self.calls) < MOST_CALLS
            and all(number not in self._made or self._made[number].sharding == how for number, how in pairs)
        )

    def add(self, node: Compute) -> None:
        """A call follows."""
        self.calls.append(node)
        self._made.update((value.number, value) for value in node.results)

    def joined(self, used: set[int]) -> tuple[Chain, Compute]:
        """The chain, and its call, which has no key yet; `used` are the values that others use."""
        operands: dict[tuple[int, Sharding], int] = {}
        functions: dict[str, int] = {}
        for call in self.calls:
            functions.setdefault(call.function, len(functions))
            for number, how in zip(call.operands, call.operand_shardings, strict=True):
                if number not in self._made:
                    operands.setdefault((number, how), len(operands))
        places = {number: len(operands) + at for at, number in enumerate(self._made)}
        calls = tuple(
            ChainCall(
                functions[call.function],
                tuple(
                    places[number] if number in places else operands[number, how]
                    for number, how in zip(call.operands, call.operand_shardings, strict=True)
                ),
            )
            for call in self.calls
        )
        results = tuple(value for number, value in self._made.items() if number in used)
        label = self._label()
        chain = Chain(
            label, tuple(functions), len(operands), calls, tuple(places[value.number] for value in results)
        )
        numbers = tuple(number for number, _ in operands)
        shardings = tuple(how for _, how in operands)
        return chain, Compute(label, "", self._slice, numbers, shardings, results)

    def _label(self) -> str:
        labels = list(dict.fromkeys(call.label for call in self.calls))
        shown = ", ".join(labels[:_MOST_LABELS]) + ", …" * (len(labels) > _MOST_LABELS)
        return f"{shown} (chain of {len(self.calls)})"
