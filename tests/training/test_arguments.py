"""Arguments of a `Checkpointer` that cannot work are refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from waystation import errors, training


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("save_decision_policy", 10, "not 10"),
        ("save_decision_policy", training.save_decision_policies.InitialSavePolicy, "call it"),
        ("memory", True, "MemoryTier or None, not True"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(
    tmp_path: Path, argument: str, value: Any, text: str
) -> None:
    with pytest.raises(errors.WrongType, match=text):
        training.Checkpointer(tmp_path, **{argument: value})


def test_metrics_may_be_scalars_of_any_framework(tmp_path: Path) -> None:
    metrics = {"numpy": np.float32(0.5), "jax": jnp.float32(1), "torch": torch.tensor(2)}
    several = {"all": [np.int64(3)]}
    with training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"x": np.ones(2)}, metrics=metrics | several)
        found = checkpointer.latest
        assert found is not None
        assert found.metrics == {"numpy": 0.5, "jax": 1.0, "torch": 2, "all": [3]}
