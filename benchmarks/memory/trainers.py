"""Training steps of a decoder with Adam, in JAX and in torch, on the CPU.

What is trained on are random tokens: a step takes as long whatever they are. Steps are complete when they
return, and the state is what a program would save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

VOCABULARY = 256
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model and of what it is given in a step.

    Attributes:
        width: Of the model.
        context: Tokens of a sequence.
        batch: Sequences of a step.
        layers: Of the model.
    """

    width: int
    context: int
    batch: int
    layers: int = 12

    @property
    def state_bytes(self) -> int:
        """About what parameters and moments take; never less."""
        parameters = (
            self.layers * (12 * self.width + 20) * self.width + (2 * VOCABULARY + self.context) * self.width
        )
        return 12 * parameters + (1 << 20)


SIZES = {
    "quick": Size(width=32, context=16, batch=2, layers=2),
    "usual": Size(width=256, context=64, batch=4),
    "full": Size(width=384, context=128, batch=10),
}


class Trainer(Protocol):
    """A program that trains."""

    def step(self) -> None:
        """Takes a step."""
        ...

    def state(self) -> Any:
        """All that the next step follows from."""
        ...


def trainer_of(framework: str, size: Size) -> Trainer:
    """A program that has not taken a step yet."""
    return JaxTrainer(size) if framework == "jax" else TorchTrainer(size)


def tokens_of(size: Size) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A batch, with the token that follows the last."""
    random = np.random.default_rng(0)
    return random.integers(0, VOCABULARY, (size.batch, size.context + 1), dtype=np.int32)


class JaxTrainer:
    """The model of the demo, with optax."""

    def __init__(self, size: Size) -> None:
        import jax
        import optax

        from waystation_demo import model

        shape = model.Shape(VOCABULARY, size.context, size.width, heads=8, layers=size.layers)
        optimizer = optax.adamw(LEARNING_RATE)
        parameters = model.initialize(jax.random.key(0), shape)
        self._state = {
            "parameters": parameters,
            "optimizer": optimizer.init(parameters),
            "key": jax.random.key(1),
        }
        self._tokens = jax.numpy.asarray(tokens_of(size))

        def step(state: dict[str, Any], tokens: Any) -> dict[str, Any]:
            key, dropout_key = jax.random.split(state["key"])
            gradients = jax.grad(model.loss)(state["parameters"], tokens, dropout_key, shape)
            updates, moments = optimizer.update(gradients, state["optimizer"], state["parameters"])
            following = optax.apply_updates(state["parameters"], updates)
            return {"parameters": following, "optimizer": moments, "key": key}

        self._step = jax.jit(step, donate_argnums=0)

    def step(self) -> None:
        """Takes a step; the old state is donated."""
        import jax

        self._state = jax.block_until_ready(self._step(self._state, self._tokens))

    def state(self) -> Any:
        """Parameters, moments and the random key."""
        return self._state


class TorchTrainer:
    """torch's own layers, with its AdamW, which change the state in place."""

    def __init__(self, size: Size) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            size.width, 8, 4 * size.width, dropout=0.05, batch_first=True, norm_first=True
        )
        self._model = nn.ModuleDict(
            {
                "embedding": nn.Embedding(VOCABULARY, size.width),
                "position": nn.Embedding(size.context, size.width),
                "layers": nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False),
                "head": nn.Linear(size.width, VOCABULARY),
            }
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
        self._tokens = torch.from_numpy(tokens_of(size)).long()
        self._places = torch.arange(size.context)
        self._mask = nn.Transformer.generate_square_subsequent_mask(size.context)

    def step(self) -> None:
        """Takes a step."""
        import torch

        inputs, targets = self._tokens[:, :-1], self._tokens[:, 1:]
        values = self._model["embedding"](inputs) + self._model["position"](self._places)
        values = self._model["layers"](values, mask=self._mask, is_causal=True)
        logits = self._model["head"](values)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def state(self) -> Any:
        """Parameters, moments and the random generator's."""
        import torch

        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
