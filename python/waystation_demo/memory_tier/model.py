"""The language model of `waystation_demo.model`, smaller and in torch: a dict of tensors, and functions.

Each process computes on one thread and adds in one order, so that the same state gives the same bits wherever
and however often it is taken up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    vocabulary: int = 256
    context: int = 64
    width: int = 192
    heads: int = 4
    layers: int = 4
    dropout: float = 0.05


def initialize(seed: int, shape: Shape) -> Tensors:
    """Draws the parameters at the start of training."""
    generator = torch.Generator().manual_seed(seed)
    width = shape.width

    def normal(*dimensions: int, fan_in: int) -> torch.Tensor:
        return torch.randn(*dimensions, generator=generator) / math.sqrt(fan_in)

    parameters = {
        "embedding": normal(shape.vocabulary, width, fan_in=width),
        "position": normal(shape.context, width, fan_in=width),
        "norm": torch.ones(width),
    }
    for layer in range(shape.layers):
        parameters |= {
            f"{layer}.attend": normal(width, 3 * width, fan_in=width),
            f"{layer}.merge": normal(width, width, fan_in=2 * shape.layers * width),
            f"{layer}.expand": normal(width, 4 * width, fan_in=width),
            f"{layer}.contract": normal(4 * width, width, fan_in=8 * shape.layers * width),
            f"{layer}.attend_norm": torch.ones(width),
            f"{layer}.expand_norm": torch.ones(width),
        }
    return parameters


def _normalize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values * scale * torch.rsqrt((values * values).mean(-1, keepdim=True) + 1e-6)


def _attention(values: torch.Tensor, layer: Tensors, heads: int) -> torch.Tensor:
    rows, length, width = values.shape
    parts = (values @ layer["attend"]).view(rows, length, 3, heads, width // heads)
    query, key, content = parts.permute(2, 0, 3, 1, 4)
    scores = query @ key.transpose(-1, -2) * (width // heads) ** -0.5
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed: torch.Tensor = scores.masked_fill(later, -torch.inf).softmax(-1) @ content
    return mixed.transpose(1, 2).reshape(rows, length, width) @ layer["merge"]


def loss(parameters: Tensors, tokens: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Mean cross-entropy, in nats per byte, of predicting each token from those before it."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    values = parameters["embedding"][inputs] + parameters["position"]
    for number in range(shape.layers):
        names = ("attend", "merge", "expand", "contract", "attend_norm", "expand_norm")
        layer = {name: parameters[f"{number}.{name}"] for name in names}
        attended = _attention(_normalize(values, layer["attend_norm"]), layer, shape.heads)
        values = values + functional.dropout(attended, shape.dropout)
        hidden = functional.gelu(_normalize(values, layer["expand_norm"]) @ layer["expand"])
        values = values + functional.dropout(hidden @ layer["contract"], shape.dropout)
    logits = _normalize(values, parameters["norm"]) @ parameters["embedding"].T
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def advance(state: dict[str, Any], gradients: Tensors, *, rate: float = 3e-3) -> None:
    """One step of Adam, in place: of `parameters`, and their `means` and `squares`."""
    state["step"] += 1
    slow, quick = 1 - 0.99 ** state["step"], 1 - 0.9 ** state["step"]
    warm = min(1.0, state["step"] / 10)
    with torch.no_grad():
        for name, gradient in gradients.items():
            mean = state["means"][name].lerp_(gradient, 0.1)
            square = state["squares"][name].lerp_(gradient * gradient, 0.01)
            change = (mean / quick) / ((square / slow).sqrt() + 1e-8)
            state["parameters"][name] -= warm * rate * change
