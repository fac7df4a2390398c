"""The functions that a host can call: compiled in the background, once for each place where they run.

A function comes as `jax.export` wrote it, for a mesh without devices (`AbstractMesh`), or as a chain of such
(`code.py`), and gets devices here.
Its key is made of its bytes (`messages.key_of`), so equal functions are compiled once, whoever
sends them. What is donated is said by who calls, and belongs to what is compiled. What is compiled stays as
long as a list calls it (`hold`, `release`), its bytes until `forget`.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from waystation._errors import WaystationError
from waystation.runtime.errors import ComputationFailed, FunctionNotFound
from waystation.runtime.execution.code import Code, Devices

# What is compiled once: the key of a function, the devices that it runs on, in the order of its mesh, also
# those of other hosts, and the places of operands whose memory it takes over.
Place: TypeAlias = tuple[str, Devices, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Function:
    """A function that can be called.

    Attributes:
        name: Its name where it was written.
        call: Takes its flattened arguments and returns its flattened results.
        operands: How its arguments lie on the devices.
        result_count: How many results it gives.
        met: For each argument shardings that it was given and that lie so, by identity.
    """

    name: str
    call: Any
    operands: tuple[jax.sharding.Sharding, ...]
    result_count: int
    met: tuple[dict[int, jax.sharding.Sharding], ...]


class Functions:
    """Functions by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exported: dict[str, bytes] = {}
        self._compiled: dict[Place, Future[Function]] = {}
        self._lists: Counter[Place] = Counter()  # how many lists call each
        # One thread: a host should have cores left for what it is called to do.
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="waystation: compiler")

    def add(self, key: str, exported: bytes) -> None:
        """Makes a function known."""
        with self._lock:
            self._exported.setdefault(key, exported)

    def forget(self, key: str) -> None:
        """Makes a function unknown; what lists have found of it stays theirs."""
        with self._lock:
            self._exported.pop(key, None)

    def hold(self, places: Iterable[Place]) -> None:
        """A list calls functions: begins to compile those that are known and that no list has called."""
        for place in places:
            with self._lock:
                self._lists[place] += 1
            self._find(*place)

    def release(self, places: Iterable[Place]) -> None:
        """A list that calls functions is forgotten, and so is what no other list calls."""
        with self._lock:
            for place in places:
                self._lists[place] -= 1
                if not self._lists[place]:
                    del self._lists[place]
                    self._compiled.pop(place, None)

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
        code = Code.read(blob)
    except Exception as error:
        raise ComputationFailed(f"a function cannot be read: {type(error).__name__}: {error}") from error
    name = code.name
    try:
        mesh = code.mesh_of(devices)
        operands, results = code.shardings(mesh)

        def flat(*arguments: Any) -> tuple[Any, ...]:
            return code.call(arguments)

        flat.__name__ = name
        shapes = [
            jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding)
            for each, sharding in zip(code.operands, operands, strict=True)
        ]
        usable = _usable(code, operands, results, donated)
        jitted = jax.jit(flat, in_shardings=operands, out_shardings=results, donate_argnums=usable)
        met: tuple[dict[int, jax.sharding.Sharding], ...] = tuple({} for _ in operands)
        return Function(name, jitted.lower(*shapes).compile(), operands, len(results), met)
    except WaystationError:
        raise
    except Exception as error:
        raise ComputationFailed(
            f"computation '{name}' cannot be compiled: {type(error).__name__}: {error}", computation=name
        ) from error


def _usable(code: Code, operands: Any, results: Any, donated: tuple[int, ...]) -> tuple[int, ...]:
    """The donated places whose memory a result can take; JAX warns of others."""
    free = Counter(
        (each.shape, each.dtype, sharding.shard_shape(each.shape))
        for each, sharding in zip(code.results, results, strict=True)
    )
    usable = []
    for place in donated:
        aval = code.operands[place]
        kind = (aval.shape, aval.dtype, operands[place].shard_shape(aval.shape))
        if free[kind] > 0:
            free[kind] -= 1
            usable.append(place)
    return tuple(usable)
