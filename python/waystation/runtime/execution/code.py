"""What a function is made of: one that `jax.export` wrote, or a chain of such, which is compiled as a whole.

Between the calls of a chain stands a barrier: the compiler may not mix what one computes with what the next
does, so that results are those of the calls one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import numpy as np

from waystation.frameworks.jax_public import Device
from waystation.runtime.ir.chains import Chain, ChainCall, decode_chain, is_chain

Devices = tuple[Device, ...]
Shardings = tuple[jax.sharding.Sharding, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """The code of a function.

    Attributes:
        name: Its name where it was written.
        parts: What it calls.
        chain: How.
        values: Of each value of the chain the call that it is of first, and its place among the operands
            (`is_operand`) or the results of that.
    """

    name: str
    parts: tuple[jax.export.Exported, ...]
    chain: Chain
    values: tuple[tuple[int, int], ...]

    @classmethod
    def read(cls, blob: bytes) -> Code:
        """The code of its bytes.

        Raises:
            Exception: What JAX raises where these are no such bytes.
        """
        if is_chain(blob):
            chain, found = decode_chain(blob)
            parts = tuple(jax.export.deserialize(bytearray(part)) for part in found)
            return cls(chain.label, parts, chain, _values(chain, parts))
        exported = jax.export.deserialize(bytearray(blob))
        count = len(exported.in_avals)
        calls = (ChainCall(0, tuple(range(count))),)
        results = tuple(range(count, count + len(exported.out_avals)))
        chain = Chain(exported.fun_name, ("",), count, calls, results)
        return cls(exported.fun_name, (exported,), chain, _values(chain, (exported,)))

    @property
    def operands(self) -> list[Any]:
        """Shape and dtype of each argument, as JAX knows them."""
        found = self.values[: self.chain.operand_count]
        return [self._part(call).in_avals[place] for call, place in found]

    @property
    def results(self) -> list[Any]:
        """Those of each result."""
        found = [self.values[number] for number in self.chain.results]
        return [self._part(call).out_avals[place] for call, place in found]

    def mesh_of(self, devices: Devices) -> jax.sharding.Mesh:
        """The mesh that it was exported for, of these devices in order."""
        placed = np.array(devices)
        for part in self.parts:
            # None stands for the mesh without devices, here as for the arguments; the annotation has not
            # heard of it.
            results = part.out_shardings_jax(None)  # type: ignore[arg-type]
            for sharding in (*part.in_shardings_jax(), *results):
                if isinstance(sharding, jax.sharding.NamedSharding):
                    mesh = sharding.mesh
                    return jax.sharding.Mesh(
                        placed.reshape(mesh.axis_sizes), mesh.axis_names, mesh.axis_types
                    )
        return jax.sharding.Mesh(placed, ("devices",))

    def shardings(self, mesh: jax.sharding.Mesh) -> tuple[Shardings, Shardings]:
        """How its arguments and its results lie on a mesh."""
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        taken = [part.in_shardings_jax(mesh) for part in self.parts]
        made = [part.out_shardings_jax(mesh) for part in self.parts]
        calls, values = self.chain.calls, self.values
        operands = [taken[calls[call].function][place] for call, place in values[: self.chain.operand_count]]
        results = [
            made[calls[call].function][place] for call, place in (values[each] for each in self.chain.results)
        ]
        return tuple(each or whole for each in operands), tuple(each or whole for each in results)

    def call(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Calls it with flattened arguments, while JAX traces; gives its flattened results."""
        parts: list[Callable[..., list[Any]]] = [functools.partial(_called, part) for part in self.parts]
        if len(self.chain.calls) > 1:
            parts = [jax.jit(part) for part in parts]  # each is lowered once, however often it is called
        values = list(arguments)
        for at, each in enumerate(self.chain.calls):
            made = parts[each.function](*(values[number] for number in each.operands))
            is_last = at == len(self.chain.calls) - 1
            values += made if is_last or not made else jax.lax.optimization_barrier(made)
        return tuple(values[number] for number in self.chain.results)

    def _part(self, call: int) -> jax.export.Exported:
        return self.parts[self.chain.calls[call].function]


def _called(part: jax.export.Exported, *arguments: Any) -> list[Any]:
    positional, named = jax.tree.unflatten(part.in_tree, arguments)
    return jax.tree.leaves(part.call(*positional, **named))


def _values(chain: Chain, parts: Sequence[jax.export.Exported]) -> tuple[tuple[int, int], ...]:
    operands: dict[int, tuple[int, int]] = {}
    results: list[tuple[int, int]] = []
    for at, call in enumerate(chain.calls):
        for place, number in enumerate(call.operands):
            operands.setdefault(number, (at, place))
        results += [(at, place) for place in range(len(parts[call.function].out_avals))]
    return (*(operands[number] for number in range(chain.operand_count)), *results)
