"""Sequences of checkpoints pass between Waystation and genuine Orbax, in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.training import oracle

import waystation
from waystation.training import Checkpointer, preservation_policies, save_decision_policies

theirs = oracle.training
EVERY_STEP = save_decision_policies.FixedIntervalPolicy(1)


def state(step: int) -> dict[str, Any]:
    return {"weights": jnp.arange(12.0).reshape(3, 4) + step, "host": np.arange(5) + step}


def require_same(found: dict[str, Any], step: int) -> None:
    for name, value in state(step).items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(value))


def orbax_layout(*, use_ocdbt: bool) -> waystation.Context:
    context = waystation.Context()
    context.array.saving.use_ocdbt = use_ocdbt
    return context


def test_steps_of_orbax_are_listed_loaded_and_collected(tmp_path: Path) -> None:
    with theirs.Checkpointer(tmp_path, custom_metadata={"run": 7}) as other:
        for step in range(3):
            other.save(step, state(step), metrics={"loss": 1.0 / (step + 1)}, custom_metadata={"step": step})
        wanted = [(info.step, info.metrics) for info in other.checkpoints]
        commits = [other.metadata(step).commit_timestamp_nsecs for step in range(3)]
    keep = preservation_policies.LatestN(2)
    with Checkpointer(tmp_path, save_decision_policy=EVERY_STEP, preservation_policy=keep) as own:
        assert [(info.step, info.metrics) for info in own.checkpoints] == wanted
        assert [info.commit_timestamp_nsecs for info in own.checkpoints] == commits
        assert own.root_metadata().custom_metadata == {"run": 7}
        require_same(own.load(), 2)
        require_same(own.load_async(0).result(), 0)
        found = own.metadata(1)
        assert (found.custom_metadata, found.metrics) == ({"step": 1}, {"loss": 0.5})
        assert found.metadata["weights"].shape == (3, 4)
        own.save(3, state(3))
        assert [info.step for info in own.checkpoints] == [2, 3]
        assert not (tmp_path / "0").exists()
        require_same(own.load(3), 3)
        assert own.delete(2)


@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_orbax_lists_and_loads_steps_in_its_layout(tmp_path: Path, use_ocdbt: bool) -> None:
    context = orbax_layout(use_ocdbt=use_ocdbt)
    with Checkpointer(tmp_path, context=context, save_decision_policy=EVERY_STEP) as own:
        own.save(0, state(0), metrics={"loss": 0.5}, custom_metadata={"note": "x"})
        response = own.save_async(1, state(1), metrics={"loss": 0.25})
        assert response is not None
        response.result()
        require_same(own.load(0), 0)
    with theirs.Checkpointer(tmp_path) as other:
        assert [(info.step, info.metrics) for info in other.checkpoints] == [
            (0, {"loss": 0.5}),
            (1, {"loss": 0.25}),
        ]
        for step in (0, 1):
            require_same(other.load(step, state(0)), step)
        assert other.metadata(0).custom_metadata == {"note": "x"}
        other.save(2, state(2))
    with Checkpointer(tmp_path) as again:
        assert [info.step for info in again.checkpoints] == [0, 1, 2]
        assert [info.metrics for info in again.checkpoints] == [{"loss": 0.5}, {"loss": 0.25}, None]
        require_same(again.load(), 2)
