"""Meshes of the fake CPU devices."""

from __future__ import annotations

import jax
import numpy as np


def mesh(*sizes: int) -> jax.sharding.Mesh:
    """A mesh of the first devices, with the axes x, y and z as far as there are sizes."""
    count = int(np.prod(sizes))
    devices = np.array(jax.devices()[:count]).reshape(sizes)
    return jax.sharding.Mesh(devices, ("x", "y", "z")[: len(sizes)])
