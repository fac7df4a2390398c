"""What other programs do with sequences in an object store."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from tests.support import programs, s3

from waystation.path import Location
from waystation.storage.store_leases import StoreLeases
from waystation.training import Checkpointer, preservation_policies, save_decision_policies

EVERY_STEP = save_decision_policies.FixedIntervalPolicy(1)


def state(step: int) -> dict[str, Any]:
    return {"a": np.full(300_000, step, np.int32), "step": step}


def keeper(root: Location, n: int = 1, **given: Any) -> Checkpointer:
    policy = preservation_policies.LatestN(n)
    return Checkpointer(root, save_decision_policy=EVERY_STEP, preservation_policy=policy, **given)


def read_until_killed(endpoint: str, root: str, ready: Any) -> None:
    with s3.context(endpoint), StoreLeases(root).hold("0") as may_read:
        assert may_read
        ready.set()
        time.sleep(programs.HANG_S)


def condemn_until_killed(endpoint: str, root: str, ready: Any) -> None:
    with s3.context(endpoint), StoreLeases(root).condemned("1") as may_go:
        assert may_go
        ready.set()
        time.sleep(programs.HANG_S)


def save_step(endpoint: str, root: str, step: int) -> None:
    with s3.context(endpoint), keeper(Location(root), n=2) as checkpointer:
        checkpointer.save(step, state(step), metrics={"score": step})
