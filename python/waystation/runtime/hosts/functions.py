"""The functions that a host can call: compiled once each, in the background.

A function comes as `jax.export` wrote it, for a mesh without devices (`AbstractMesh`); here it gets the
devices of the island. Its key is made of its bytes (`instructions.key_of`), so equal
functions are compiled once, whoever sends them. JAX is imported by the process of a host only.
"""

from __future__ import annotations

import copy
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import numpy as np

from waystation._errors import WaystationError
from waystation.runtime.hosts.errors import ComputationFailed, FunctionNotFound


@dataclass(frozen=True, slots=True)
class Function:
    """A function that can be called.

    Attributes:
        name: Its name where it was written.
        call: Takes its flattened arguments and returns its flattened results.
        operands: How its arguments lie on the devices.
        result_count: How many results it gives.
    """

    name: str
    call: Any
    operands: tuple[jax.sharding.Sharding, ...]
    result_count: int


class Functions:
    """Functions by key.

    Args:
        devices: All devices of the island, in order.
    """

    def __init__(self, devices: list[jax.Device]) -> None:
        self._devices = devices
        self._lock = threading.Lock()
        self._compiled: dict[str, Future[Function]] = {}
        # One thread: a host should have cores left for what it is called to do.
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="waystation: compiler")

    def add(self, key: str, exported: bytes) -> None:
        """Begins to compile a function, unless that has begun."""
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = self._compiler.submit(_compiled, self._devices, exported)

    def is_ready(self, key: str) -> bool:
        """Whether it need not be waited for."""
        with self._lock:
            found = self._compiled.get(key)
        return found is None or found.done()

    def get(self, key: str) -> Function:
        """A function, once it is compiled.

        Raises:
            FunctionNotFound: Nobody has registered it.
            ComputationFailed: It cannot be compiled.
        """
        with self._lock:
            found = self._compiled.get(key)
        if found is None:
            raise FunctionNotFound(
                f"no function '{key}' has been registered; register it before it is called"
            )
        try:
            return found.result()
        except WaystationError as error:
            raise copy.copy(error) from None  # each call that needs it fails with one of its own


def _compiled(devices: list[jax.Device], blob: bytes) -> Function:
    try:
        exported = jax.export.deserialize(bytearray(blob))
        mesh = _mesh_of(devices, exported)
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        operands = tuple(each or whole for each in exported.in_shardings_jax(mesh))
        results = tuple(each or whole for each in exported.out_shardings_jax(mesh))

        def flat(*arguments: Any) -> tuple[Any, ...]:
            positional, named = jax.tree.unflatten(exported.in_tree, arguments)
            return tuple(jax.tree.leaves(exported.call(*positional, **named)))

        flat.__name__ = exported.fun_name
        shapes = [
            jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding)
            for each, sharding in zip(exported.in_avals, operands, strict=True)
        ]
        lowered = jax.jit(flat, in_shardings=operands, out_shardings=results).lower(*shapes)
        return Function(exported.fun_name, lowered.compile(), operands, len(results))
    except WaystationError:
        raise
    except Exception as error:
        raise ComputationFailed(f"a function cannot be compiled: {type(error).__name__}: {error}") from error


def _mesh_of(devices: list[jax.Device], exported: jax.export.Exported) -> jax.sharding.Mesh:
    """The mesh that a function was exported for, of these devices in order."""
    placed = np.array(devices)
    # None stands for the mesh without devices, here as for the arguments; the annotation has not heard of it.
    results = exported.out_shardings_jax(None)  # type: ignore[arg-type]
    for sharding in (*exported.in_shardings_jax(), *results):
        if isinstance(sharding, jax.sharding.NamedSharding):
            mesh = sharding.mesh
            return jax.sharding.Mesh(placed.reshape(mesh.axis_sizes), mesh.axis_names, mesh.axis_types)
    return jax.sharding.Mesh(placed, ("devices",))
