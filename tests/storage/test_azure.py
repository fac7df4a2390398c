"""Checkpoints in Azure Blob Storage, as Azurite has it (`tools/azurite` installs it, or its programs are on
the PATH)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.azure import Container

import waystation
from waystation import storage
from waystation.errors import CheckpointNotFound, Conflict


@pytest.fixture
def place() -> Iterator[str]:
    """The location of a container, which is reached within the test."""
    own = Container()
    with own.context():
        yield own.location


def state_of(value: int) -> dict[str, Any]:
    """A state with an array that is uploaded in parts; all of it says which it is."""
    return {"large": np.full(5 << 20, value, np.float32), "step": value}


def test_a_state_is_saved_replaced_loaded_and_deleted(place: str) -> None:
    path = f"{place}/run/ckpt"
    waystation.save(path, state_of(1))
    with pytest.raises(Conflict, match="overwrite=True"):
        waystation.save(path, state_of(2))
    waystation.save(path, state_of(2), overwrite=True)
    loaded = waystation.load(path)
    assert loaded["step"] == 2
    assert (loaded["large"] == 2).all()
    assert waystation.delete(path)
    with pytest.raises(CheckpointNotFound):
        waystation.load(path)


def test_a_run_keeps_what_its_policy_says(place: str) -> None:
    policy = waystation.training.preservation_policies.LatestN(2)
    with waystation.training.Checkpointer(f"{place}/steps", preservation_policy=policy) as run:
        for step in range(4):
            run.save(step, state_of(step), metrics={"loss": 1 / (1 + step)})
        assert [each.step for each in run.checkpoints] == [2, 3]
        assert run.load()["step"] == 3


def test_nothing_is_removed_on_condition(place: str) -> None:
    """The crate's removals are batches there, so comparisons and removals are two acts."""
    assert not storage.of(place).removes_in_one_act(f"{place}/run/a")
