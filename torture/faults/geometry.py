"""Arrays of random shapes, saved in one sharding and loaded in another, from files that are not in memory.

Nothing fails here: what is at fault is the geometry. One seed is some sets of arrays, with the meshes and
specs that they are saved and loaded with, in one process of eight devices or in two of four. The same
processes save all sets, and others load them: to start JAX costs more than a set does.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torture.faults.base import Done, Fault, random_of
from torture.operations import Workspace
from torture.outcomes import Outcome, Verdict
from torture.processes import Child, Ended, attempt
from torture.states import MixedStateError
from torture.systems import Orbax, System, Waystation
from waystation._ports import free_port

DEVICES = 8
_MESHES = [(8,), (4, 2), (2, 4), (2, 2, 2), (1, 8)]
_DTYPES = ["float32", "bfloat16", "int8", "float64", "int16", "uint8", "complex64", "bool"]
_MOST_BYTES = 24 << 20  # of a set
_SETS = 8
_DISTINCT = 1 << 30


@dataclass(frozen=True)
class _Spec:
    """How an array lies on devices: the mesh's shape, and for each dimension the axes that divide it."""

    mesh: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Geometric:
    """An array's shape and dtype, and how it is saved and loaded."""

    shape: tuple[int, ...]
    dtype: str
    saved: _Spec
    loaded: _Spec


def drawn(chance: random.Random, most_bytes: int = _MOST_BYTES) -> dict[str, Geometric]:
    """Arrays of random shapes, with shardings."""
    count = chance.choice([1, 1, 2, 3, 5])
    return {f"array {index}": _array(chance, most_bytes // count) for index in range(count)}


def told(arrays: dict[str, Geometric]) -> str:
    """What they are."""
    return "; ".join(
        f"{array.dtype}{list(array.shape)} {array.saved.mesh}{array.saved.axes} to "
        f"{array.loaded.mesh}{array.loaded.axes}"
        for array in arrays.values()
    )


def _array(chance: random.Random, most: int) -> Geometric:
    shape, dtype = shape_and_dtype(chance, most)
    return Geometric(shape, dtype, _spec(chance, list(shape)), _spec(chance, list(shape)))


def shape_and_dtype(chance: random.Random, most: int) -> tuple[tuple[int, ...], str]:
    """Those of an array of so many bytes at most."""
    dtype = chance.choice(_DTYPES)
    item = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    shape: list[int] = []
    for _ in range(chance.choice([1, 2, 2, 2, 3])):
        size = chance.choice(
            [8, 16, 24, 40, 64, 96, 256, 1000, 1024, 4096, 8 * chance.randint(1, 700), 65536, 131072]
        )
        shape.append(min(size, max(8, most // item // int(np.prod(shape or [1])) // 8 * 8)))
    chance.shuffle(shape)
    return tuple(shape), dtype


def _spec(chance: random.Random, shape: list[int]) -> _Spec:
    mesh = chance.choice(_MESHES)
    axes: list[list[int]] = [[] for _ in shape]
    for axis in range(len(mesh)):
        # An axis divides one dimension, or copies lie along it.
        dimension = chance.randrange(-1, len(shape))
        if (
            dimension >= 0
            and shape[dimension] % int(np.prod([mesh[each] for each in [*axes[dimension], axis]])) == 0
        ):
            axes[dimension].append(axis)
    return _Spec(mesh, tuple(map(tuple, axes)))


def _values(name: str, array: Geometric, seed: int) -> npt.NDArray[Any]:
    """Random bits, of which those of floats may be any: they are compared as bytes."""
    import ml_dtypes

    dtype = np.dtype(ml_dtypes.bfloat16) if array.dtype == "bfloat16" else np.dtype(array.dtype)
    generator = np.random.default_rng([seed, *name.encode()])
    if array.dtype == "bool":
        return generator.integers(0, 2, array.shape).astype(bool)
    nbytes = int(np.prod(array.shape)) * dtype.itemsize
    values = np.frombuffer(generator.bytes(nbytes), np.uint8)
    if dtype.kind in "fcV":  # no signalling NaN, which conversions may make quiet
        values = np.bitwise_and(values, np.uint8(0x3F))
    return values.view(dtype).reshape(array.shape)


def _sharding(spec: _Spec) -> Any:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    names = [f"axis{index}" for index in range(len(spec.mesh))]
    mesh = Mesh(np.array(jax.devices()).reshape(spec.mesh), names)
    divided = [tuple(names[axis] for axis in axes) or None for axes in spec.axes]
    return NamedSharding(mesh, PartitionSpec(*divided))


def save(system: Waystation | Orbax, path: Path, arrays: dict[str, Geometric], seed: int) -> None:
    """Saves the arrays of a seed."""
    import jax

    state = {}
    for name, array in arrays.items():
        values = _values(name, array, seed)
        state[name] = jax.make_array_from_callback(array.shape, _sharding(array.saved), values.__getitem__)
    system.save_state(path, state)


def load(system: Waystation | Orbax, path: Path, arrays: dict[str, Geometric], seed: int) -> None:
    """Loads them, and compares every bit."""
    import jax

    abstract = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=_sharding(array.loaded))
        for name, array in arrays.items()
    }
    loaded = system.load_state(path, abstract)
    for name, array in arrays.items():
        values = _values(name, array, seed)
        if loaded[name].sharding != abstract[name].sharding:
            raise MixedStateError(f"'{name}' has another sharding")
        for shard in loaded[name].addressable_shards:
            if np.asarray(shard.data).tobytes() != values[shard.index].tobytes():
                raise MixedStateError(f"'{name}' differs on {shard.device}")


def _make_cold(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Geometry:
    """Random arrays and shardings, in some processes."""

    def __init__(self, name: str, processes: int) -> None:
        self.name = f"geometry/{name}"
        self._processes = processes

    def applies(self, system: System) -> bool:
        return isinstance(system, Waystation | Orbax)

    def seeds(self, system: System, workspace: Workspace) -> int:
        del system, workspace
        return _DISTINCT

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        assert isinstance(system, Waystation | Orbax)
        chance = random_of(system, self.name, seed)
        sets = [drawn(chance) for _ in range(_SETS)]
        workspace.clear()
        workspace.root.mkdir()
        paths = [workspace.root / f"checkpoint {index}" for index in range(_SETS)]
        for what, act in ("save", save), ("load", load):
            index, ended = self._together(
                [functools.partial(act, system, *each, seed) for each in zip(paths, sets, strict=True)]
            )
            if ended.how != "returned":
                return Done(_failed(what, ended), told(sets[index]), index + 1)
            _make_cold(workspace.root)
        return Done(Verdict(Outcome.OK), "", _SETS)

    def _together(self, acts: Sequence[Callable[[], None]]) -> tuple[int, Ended]:
        """Does one act after another in all processes; returns the worst that came of it, and of which
        act."""
        port = free_port()
        children = [
            Child(functools.partial(self._connected, acts, port, index)) for index in range(self._processes)
        ]
        ended = [child.end() for child in children]
        came = [each.value if each.how == "returned" else (0, each) for each in ended]
        return next((each for each in came if each[1].how != "returned"), came[0])

    def _connected(self, acts: Sequence[Callable[[], None]], port: int, process: int) -> tuple[int, Ended]:
        import jax

        jax.config.update("jax_num_cpu_devices", DEVICES // self._processes)
        jax.config.update("jax_enable_x64", True)
        if self._processes == 1:
            return _one_after_another(acts)
        jax.distributed.initialize(f"127.0.0.1:{port}", self._processes, process)
        came = _one_after_another(acts)
        jax.distributed.shutdown()
        return came


def _one_after_another(acts: Sequence[Callable[[], None]]) -> tuple[int, Ended]:
    """What came of the first that has failed, else of the last."""
    came = []
    for act in acts:
        came.append(attempt(act))
        if came[-1].how != "returned":
            break
    return len(came) - 1, came[-1]


def _failed(what: str, ended: Ended) -> Verdict:
    if ended.how == "hung":
        return Verdict(Outcome.HUNG, f"the {what}")
    if ended.error_type == "MixedStateError":
        return Verdict(Outcome.SILENTLY_WRONG, f"the {what}: {ended.error}")
    return Verdict(Outcome.REFUSED_WRONGLY, f"the {what}: {ended.error}")


GEOMETRIES: list[Fault] = [Geometry("one process", 1), Geometry("two processes", 2)]
