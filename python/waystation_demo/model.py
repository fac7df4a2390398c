"""A small decoder-only transformer in plain JAX: parameters are a dict of arrays, the rest are functions.

The layers are stacked along the first axis of their parameters and run by `scan`, so that the program
compiles once for all of them. `PARTITIONS` says how the parameters are split over a mesh with the axes
`data` and `model`; whatever it does not name is replicated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

Parameters = dict[str, Any]

PARTITIONS = {
    "embedding": PartitionSpec(None, "model"),
    "attend": PartitionSpec(None, None, None, "model", None),
    "merge": PartitionSpec(None, "model", None, None),
    "expand": PartitionSpec(None, None, "model"),
    "contract": PartitionSpec(None, "model", None),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    vocabulary: int = 256
    context: int = 64
    width: int = 128
    heads: int = 4
    layers: int = 2
    dropout: float = 0.05


def initialize(key: jax.Array, shape: Shape) -> Parameters:
    """Draws the parameters at the start of training."""
    width, head_width, layers = shape.width, shape.width // shape.heads, shape.layers
    keys = iter(jax.random.split(key, 6))

    def normal(*dimensions: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), dimensions) / jnp.sqrt(fan_in)

    return {
        "embedding": normal(shape.vocabulary, width, fan_in=width),
        "position": normal(shape.context, width, fan_in=width),
        "layers": {
            "attend": normal(layers, width, 3, shape.heads, head_width, fan_in=width),
            "merge": normal(layers, shape.heads, head_width, width, fan_in=width * 2 * layers),
            "expand": normal(layers, width, 4 * width, fan_in=width),
            "contract": normal(layers, 4 * width, width, fan_in=4 * width * 2 * layers),
            "attend_norm": jnp.ones((layers, width)),
            "expand_norm": jnp.ones((layers, width)),
        },
        "norm": jnp.ones(width),
    }


def _normalize(values: jax.Array, scale: jax.Array) -> jax.Array:
    return values * scale * jax.lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + 1e-6)


def _drop(values: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    kept = jax.random.bernoulli(key, 1 - rate, values.shape)
    return jnp.where(kept, values / (1 - rate), 0.0)


def _attention(values: jax.Array, layer: Parameters) -> jax.Array:
    query, keys, content = jnp.einsum("btd,dchk->cbthk", values, layer["attend"])
    scores = jnp.einsum("bqhk,bthk->bhqt", query, keys) * query.shape[-1] ** -0.5
    length = values.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhqt,bthk,hkd->bqd", weights, content, layer["merge"])


def loss(parameters: Parameters, tokens: jax.Array, key: jax.Array, shape: Shape) -> jax.Array:
    """Mean cross-entropy, in nats per byte, of predicting each token from those before it."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def block(values: jax.Array, layer_and_key: tuple[Parameters, jax.Array]) -> tuple[jax.Array, None]:
        layer, layer_key = layer_and_key
        attend_key, expand_key = jax.random.split(layer_key)
        attended = _attention(_normalize(values, layer["attend_norm"]), layer)
        values = values + _drop(attended, attend_key, shape.dropout)
        hidden = jax.nn.gelu(_normalize(values, layer["expand_norm"]) @ layer["expand"])
        return values + _drop(hidden @ layer["contract"], expand_key, shape.dropout), None

    values = parameters["embedding"][inputs] + parameters["position"]
    values, _ = jax.lax.scan(block, values, (parameters["layers"], jax.random.split(key, shape.layers)))
    logits = _normalize(values, parameters["norm"]) @ parameters["embedding"].T
    chances = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.mean(chances)
