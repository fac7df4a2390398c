"""The sentence encoder all-MiniLM-L6-v2 (BERT with mean pooling), for arrays of torch and of JAX alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, HEADS, EPSILON = 6, 12, 1e-12
BEGIN, END = "[CLS]", "[SEP]"


def tokens(vocabulary: Path, sentence: str) -> np.ndarray[Any, Any]:
    """The numbers of the words and marks of a sentence, each of which has to be in the vocabulary."""
    numbers = {word: number for number, word in enumerate(vocabulary.read_text().splitlines())}
    words = re.findall(r"[a-z]+|[^a-z ]", sentence.lower())
    return np.array([numbers[word] for word in (BEGIN, *words, END)])


def embed(
    weights: Mapping[str, Any],
    ids: np.ndarray[Any, Any],
    exp: Callable[[Any], Any],
    erf: Callable[[Any], Any],
) -> np.ndarray[Any, Any]:
    """The embedding of a sentence, of length 1."""

    def dense(name: str, x: Any) -> Any:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def normalised(name: str, x: Any) -> Any:
        centred = x - x.mean(-1)[..., None]
        variance = (centred * centred).mean(-1)[..., None]
        return centred * (variance + EPSILON) ** -0.5 * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def heads(x: Any) -> Any:
        return x.reshape(len(ids), HEADS, -1).swapaxes(0, 1)

    x = weights["embeddings.word_embeddings.weight"][ids]
    x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
    x = normalised("embeddings.LayerNorm", x + weights["embeddings.token_type_embeddings.weight"][0])
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        query, key, value = (
            heads(dense(f"{layer}.attention.self.{part}", x)) for part in ("query", "key", "value")
        )
        scores = exp(query @ key.swapaxes(1, 2) * query.shape[-1] ** -0.5)
        attended = (scores / scores.sum(-1)[..., None]) @ value
        attended = dense(f"{layer}.attention.output.dense", attended.swapaxes(0, 1).reshape(len(ids), -1))
        x = normalised(f"{layer}.attention.output.LayerNorm", x + attended)
        inner = dense(f"{layer}.intermediate.dense", x)
        inner = dense(f"{layer}.output.dense", 0.5 * inner * (1 + erf(inner * 0.5**0.5)))
        x = normalised(f"{layer}.output.LayerNorm", x + inner)
    pooled = np.asarray(x.mean(0))
    return np.asarray(pooled / np.linalg.norm(pooled))


def similarities(embeddings: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The cosine of each pair."""
    return np.stack(embeddings) @ np.stack(embeddings).T
