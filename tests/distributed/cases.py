"""States over random meshes, described so that each process makes its own part of them, and whoever loads
can tell what each byte must be.

The descriptions are plain data: Hypothesis draws and shrinks them in the test, and they are sent to the
processes of a program.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

KEY = "key<fry>"
DTYPES = ("float32", "bfloat16", "int4", "int8", "uint16", "complex64", "bool", "float8_e4m3fn", KEY)


@dataclass(frozen=True)
class Placed:
    """How an array lies on devices.

    Attributes:
        mesh: The shape of the mesh.
        order: The devices of the mesh, in its order, by their place in `jax.devices()`.
        spec: For each axis of the array the axes of the mesh that it is sharded over.
    """

    mesh: tuple[int, ...]
    order: tuple[int, ...]
    spec: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """One array, as one program saves and another loads it."""

    shape: tuple[int, ...]
    dtype: str
    seed: int
    saved: Placed
    loaded: Placed

    def values(self) -> np.ndarray[Any, Any]:
        """The array, the same wherever it is made; of keys their data."""
        generator = np.random.default_rng(self.seed)
        if self.dtype == KEY:
            return generator.integers(0, 1 << 32, (*self.shape, 2), np.uint32)
        if self.dtype == "int4":
            return generator.integers(-8, 8, self.shape).astype(ml_dtypes.int4)
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        if self.dtype == "bool":
            return generator.integers(0, 2, self.shape).astype(bool)
        # Any bits: also those of numbers that are none, which no arithmetic would keep.
        return np.frombuffer(generator.bytes(math.prod(self.shape) * dtype.itemsize), dtype).reshape(
            self.shape
        )


@dataclass(frozen=True)
class Options:
    """How a state is saved, and whether the tables are read page by page as those of large jobs are."""

    asynchronous: bool
    chunk_bytes: int | None
    min_slice_bytes: int | None
    use_replica_parallel: bool | None
    file_bytes_target: int
    paged_tables: bool


@dataclass(frozen=True)
class State:
    """Arrays, and the options to save them with."""

    cases: tuple[Case, ...]
    options: Options
    step: int


def _mesh_shapes(device_count: int) -> list[tuple[int, ...]]:
    """All meshes of up to three axes for so many devices."""
    return [
        shape
        for axes in (1, 2, 3)
        for shape in itertools.product(range(1, device_count + 1), repeat=axes)
        if math.prod(shape) == device_count
    ]


@st.composite
def placed(draw: st.DrawFn, shape: tuple[int, ...], device_count: int) -> Placed:
    """A mesh of all devices, and a sharding over it that divides an array; axes left over replicate."""
    mesh = draw(st.sampled_from(_mesh_shapes(device_count)))
    order = draw(
        st.permutations(range(device_count)) if draw(st.booleans()) else st.just(range(device_count))
    )
    spec: list[list[int]] = [[] for _ in shape]
    left = list(shape)
    for mesh_axis in draw(st.permutations(range(len(mesh)))):
        choices = [axis for axis, extent in enumerate(left) if extent % mesh[mesh_axis] == 0]
        chosen = draw(st.sampled_from([None, *choices]))
        if chosen is not None:
            spec[chosen].append(mesh_axis)
            left[chosen] //= mesh[mesh_axis]
    return Placed(mesh, tuple(order), tuple(map(tuple, spec)))


@st.composite
def states(draw: st.DrawFn, saving_devices: int, loading_devices: int) -> State:
    """States of some arrays."""
    extents = st.sampled_from((0, 1, 2, 3, 4, 5, 6, 8, 12, 24, 48))
    cases = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(extents, max_size=3)))
        cases.append(
            Case(
                shape,
                draw(st.sampled_from(DTYPES)),
                draw(st.integers(0, 1 << 32)),
                draw(placed(shape, saving_devices)),
                draw(placed(shape, loading_devices)),
            )
        )
    options = Options(
        draw(st.booleans()),
        draw(st.sampled_from((None, 16, 1000))),
        draw(st.sampled_from((None, 1, 64))),
        draw(st.sampled_from((None, False))),
        draw(st.sampled_from((2000, 1 << 31))),
        draw(st.booleans()),
    )
    return State(tuple(cases), options, draw(st.integers(0, 1000)))
