"""Models that are trained: perceptrons of a few layers, whose step takes as long as their width says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SEED, RATE, LAYERS = 0, 1e-2, 4
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and how it is trained.

    Attributes:
        width: Of each layer.
        batch: Examples of a step, over all devices.
    """

    width: int
    batch: int


MODELS = {"small": Model(768, 512), "middle": Model(1024, 768), "large": Model(1536, 1024)}
QUICK_MODELS = {"tiny": Model(32, 16)}


def start(model: Model) -> list[np.ndarray[Any, Any]]:
    """The parameters before training."""
    random = np.random.default_rng(SEED)
    scale = model.width**-0.5
    return [random.normal(0, scale, (model.width, model.width)).astype(np.float32) for _ in range(LAYERS)]


def batch(model: Model) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What every step learns: inputs, and what they are to become."""
    random = np.random.default_rng(SEED + 1)
    shape = model.batch, model.width
    given = random.normal(0, 1, shape).astype(np.float32)
    return given, np.roll(given, 1, axis=1)


def step(
    parameters: list[jax.Array], given: jax.Array, wanted: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """One step of gradient descent; returns the new parameters, and the loss before."""

    def loss(parameters: list[jax.Array]) -> jax.Array:
        x = given
        for matrix in parameters[:-1]:
            x = jax.nn.gelu(x @ matrix)
        return jnp.mean((x @ parameters[-1] - wanted) ** 2)

    found, gradients = jax.value_and_grad(loss)(parameters)
    return [old - RATE * change for old, change in zip(parameters, gradients, strict=True)], found
