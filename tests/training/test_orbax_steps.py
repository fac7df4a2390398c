"""Sequences of checkpoints of genuine Orbax are gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tests.training import oracle

from waystation.training import Checkpointer, preservation_policies, save_decision_policies

theirs = oracle.training
EVERY_STEP = save_decision_policies.FixedIntervalPolicy(1)


def state(step: int) -> dict[str, Any]:
    return {"weights": jnp.arange(12.0).reshape(3, 4) + step, "host": np.arange(5) + step}


def require_same(found: dict[str, Any], step: int) -> None:
    for name, value in state(step).items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(value))


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
