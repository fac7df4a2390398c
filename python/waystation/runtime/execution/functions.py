"""The functions that a host can call: compiled in the background, once for each place where they run.

A function comes as `jax.export` wrote it, for a mesh without devices (`AbstractMesh`), and gets devices here.
Its key is made of its bytes (`messages.key_of`), so equal functions are compiled once, whoever
sends them. What is donated is said by who calls, and belongs to what is compiled.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import numpy as np

from waystation._errors import WaystationError
from waystation.runtime.errors import ComputationFailed, FunctionNotFound

Devices = tuple[jax.Device, ...]


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
    """Functions by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exported: dict[str, bytes] = {}
        self._compiled: dict[tuple[str, Devices, tuple[int, ...]], Future[Function]] = {}
        # One thread: a host should have cores left for what it is called to do.
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="waystation: compiler")

    def add(self, key: str, exported: bytes) -> None:
        """Makes a function known."""
        with self._lock:
            self._exported.setdefault(key, exported)

    def prepare(self, key: str, devices: Devices, donated: tuple[int, ...] = ()) -> None:
        """Begins to compile a function, unless that has begun, or it is not known.

        Args:
            key: Its key.
            devices: Those that it runs on, in the order of its mesh, also those of other hosts.
            donated: Places of operands whose memory it takes over.
        """
        self._find(key, devices, donated)

    def is_ready(self, key: str, devices: Devices, donated: tuple[int, ...] = ()) -> bool:
        """Whether it need not be waited for."""
        found = self._find(key, devices, donated)
        return found is None or found.done()

    def get(self, key: str, devices: Devices, donated: tuple[int, ...] = ()) -> Function:
        """A function, once it is compiled.

        Raises:
            FunctionNotFound: Nobody has registered it.
            ComputationFailed: It cannot be compiled.
        """
        found = self._find(key, devices, donated)
        if found is None:
            raise FunctionNotFound(
                f"no function '{key}' has been registered; register it before it is called"
            )
        try:
            return found.result()
        except WaystationError as error:
            raise copy.copy(error) from None  # each call that needs it fails with one of its own

    def _find(self, key: str, devices: Devices, donated: tuple[int, ...]) -> Future[Function] | None:
        place = key, devices, donated
        with self._lock:
            found = self._compiled.get(place)
            if found is None and key in self._exported:
                found = self._compiler.submit(_compiled, self._exported[key], devices, donated)
                self._compiled[place] = found
            return found


def _compiled(blob: bytes, devices: Devices, donated: tuple[int, ...]) -> Function:
    try:
        exported = jax.export.deserialize(bytearray(blob))
    except Exception as error:
        raise ComputationFailed(f"a function cannot be read: {type(error).__name__}: {error}") from error
    name = exported.fun_name
    try:
        mesh = _mesh_of(devices, exported)
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        operands = tuple(each or whole for each in exported.in_shardings_jax(mesh))
        results = tuple(each or whole for each in exported.out_shardings_jax(mesh))

        def flat(*arguments: Any) -> tuple[Any, ...]:
            positional, named = jax.tree.unflatten(exported.in_tree, arguments)
            return tuple(jax.tree.leaves(exported.call(*positional, **named)))

        flat.__name__ = name
        shapes = [
            jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding)
            for each, sharding in zip(exported.in_avals, operands, strict=True)
        ]
        usable = _usable(exported, operands, results, donated)
        jitted = jax.jit(flat, in_shardings=operands, out_shardings=results, donate_argnums=usable)
        return Function(name, jitted.lower(*shapes).compile(), operands, len(results))
    except WaystationError:
        raise
    except Exception as error:
        raise ComputationFailed(
            f"computation '{name}' cannot be compiled: {type(error).__name__}: {error}", computation=name
        ) from error


def _usable(
    exported: jax.export.Exported, operands: Any, results: Any, donated: tuple[int, ...]
) -> tuple[int, ...]:
    """The donated places whose memory a result can take; JAX warns of others."""
    free = Counter(
        (each.shape, each.dtype, sharding.shard_shape(each.shape))
        for each, sharding in zip(exported.out_avals, results, strict=True)
    )
    usable = []
    for place in donated:
        aval = exported.in_avals[place]
        kind = (aval.shape, aval.dtype, operands[place].shard_shape(aval.shape))
        if free[kind] > 0:
            free[kind] -= 1
            usable.append(place)
    return tuple(usable)


def _mesh_of(devices: Devices, exported: jax.export.Exported) -> jax.sharding.Mesh:
    """The mesh that a function was exported for, of these devices in order."""
    placed = np.array(devices)
    # None stands for the mesh without devices, here as for the arguments; the annotation has not heard of it.
    results = exported.out_shardings_jax(None)  # type: ignore[arg-type]
    for sharding in (*exported.in_shardings_jax(), *results):
        if isinstance(sharding, jax.sharding.NamedSharding):
            mesh = sharding.mesh
            return jax.sharding.Mesh(placed.reshape(mesh.axis_sizes), mesh.axis_names, mesh.axis_types)
    return jax.sharding.Mesh(placed, ("devices",))
