"""The computations that all systems run: a sum of a scalar over all devices, and an addition, each of what
the one before has made (section 5.1 of the Pathways paper).

Their results say how many there were: whoever measures checks that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import PartitionSpec as P

AXIS = "x"
CHAIN = 128
"""Computations of a program that is chained, and of one that is fused."""
Computation = Callable[..., jax.Array]
_LANES = 256


def single(mesh: Any) -> Computation:
    """One computation: takes the array of one scalar for each device, and returns the next."""
    return _over(mesh, _step)


def fused(mesh: Any) -> Computation:
    """A chain of them as one computation."""

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            x = _step(x)
        return x

    return _over(mesh, chain)


def busy(mesh: Any) -> Computation:
    """One computation before which each device is busy for so many turns: `(x, turns)`."""

    def work(x: jax.Array, turns: jax.Array) -> jax.Array:
        # Stays zero, which no compiler finds out: x could be infinite.
        zeros = lax.fori_loop(0, turns, lambda _, z: z * x[0], np.zeros(_LANES, np.float32))
        return _step(x + zeros[0])

    return jax.shard_map(work, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS), check_vma=False)


def start(devices: int) -> npt.NDArray[np.float32]:
    """What the first computation takes."""
    return np.zeros(devices, np.float32)


def check(found: Any, count: int, devices: int, first: int = 0) -> None:
    """Looks whether scalars are what so many computations make.

    Args:
        found: Those of some devices, as NumPy takes them.
        count: How many computations there were.
        devices: How many devices took part.
        first: Of these devices, the place of the first that scalars are of.

    Raises:
        ValueError: They are not.
    """
    grown = (count - 1) * (devices + 1) / 2
    wanted = np.array([grown + 1 + first + at for at in range(np.size(found))], np.float32)
    if not np.array_equal(np.ravel(np.asarray(found)), wanted):
        raise ValueError(f"{count} computations should have made {wanted}, not {found}")


def _over(mesh: Any, work: Computation) -> Computation:
    return jax.shard_map(work, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)


def _step(x: jax.Array) -> jax.Array:
    # What differs from device to device keeps compilers from leaving the next sum out.
    stepped: jax.Array = lax.pmean(x, AXIS) + (1.0 + lax.axis_index(AXIS).astype(x.dtype))
    return stepped
