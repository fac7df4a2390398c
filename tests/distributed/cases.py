"""Random states for programs of several processes: every process, and every later program, makes the same
from a seed, so that whoever loads can tell what each byte must be."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import ml_dtypes
import numpy as np

DTYPES = ("float32", "bfloat16", "int8", "uint16", "int32", "complex64", "bool", "float8_e4m3fn")
_FACTORS = (1, 1, 2, 2, 3, 4, 6)


@dataclass(frozen=True)
class Case:
    """One array of a random state."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    seed: int

    def values(self) -> np.ndarray:
        """The array, the same wherever it is made."""
        generator = np.random.default_rng(self.seed)
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        if self.dtype == "bool":
            return generator.integers(0, 2, self.shape).astype(bool)
        if self.dtype == "complex64":
            parts = generator.standard_normal((2, *self.shape)).astype(np.float32)
            return (parts[0] + 1j * parts[1]).astype(np.complex64)
        return generator.integers(-100, 100, self.shape).astype(dtype)


def random_cases(seed: int, count: int) -> list[Case]:
    """The arrays of a random state."""
    chooser = random.Random(seed)
    cases = []
    for number in range(count):
        rank = chooser.choice((0, 1, 1, 2, 2, 2, 3))
        shape = tuple(
            chooser.choice(_FACTORS) * chooser.choice(_FACTORS) * chooser.choice(_FACTORS)
            for _ in range(rank)
        )
        if rank and chooser.random() < 0.05:
            shape = (0, *shape[1:])
        cases.append(Case(f"array {number}", shape, chooser.choice(DTYPES), seed * 1000 + number))
    return cases


def random_mesh(chooser: random.Random, device_count: int) -> tuple[tuple[int, ...], list[int]]:
    """A mesh shape of one to three axes for that many devices, and the devices in a random order."""
    shape: list[int] = []
    rest = device_count
    for _ in range(2):
        divisors = [divisor for divisor in range(1, rest + 1) if rest % divisor == 0]
        shape.append(chooser.choice(divisors))
        rest //= shape[-1]
    shape.append(rest)
    chooser.shuffle(shape)
    order = list(range(device_count))
    if chooser.random() < 0.5:
        chooser.shuffle(order)
    return tuple(shape), order


def random_spec(
    chooser: random.Random, shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> list[tuple[str, ...] | None]:
    """Which mesh axes each axis of an array is sharded over, so that it divides; some axes replicate."""
    free = [f"m{axis}" for axis in range(len(mesh_shape))]
    sizes = dict(zip(free, mesh_shape, strict=True))
    chooser.shuffle(free)
    spec: list[tuple[str, ...] | None] = []
    for extent in shape:
        own: list[str] = []
        for axis in list(free):
            if (
                chooser.random() < 0.6
                and extent % (sizes[axis] * math.prod(sizes[name] for name in own)) == 0
            ):
                own.append(axis)
                free.remove(axis)
        spec.append(tuple(own) or None)
    return spec
