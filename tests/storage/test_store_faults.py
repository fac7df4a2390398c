"""Saves, loads and deletions in an object store whose requests fail in every way, at random.

Whatever happens: a load gives one version whole or a typed error, a save that fails leaves the old version or
the new one whole, and no call waits much longer than the deadline of its requests.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.long import amount
from tests.support.s3 import (
    ACCESS_KEY,
    FLIP,
    FORBID,
    LOSE_ANSWER,
    PASS,
    REFUSE,
    SECRET_KEY,
    SLOW,
    STALE,
    STATUSES,
    STATUSES_AFTER,
    TRUNCATE,
    Bucket,
    bucket,
    context,
    proxy,
)

import waystation
from waystation.checkpoint.verify import verify
from waystation.errors import CheckpointNotFound, WaystationError

DEADLINE_S = 2.0
# A call makes so many requests one after the other, each of which has the deadline.
MOST_S = 30 * DEADLINE_S
CALLS = 12
FAULTS = (REFUSE, FORBID, LOSE_ANSWER, TRUNCATE, SLOW, FLIP, STALE, *STATUSES, *STATUSES_AFTER)
ABSENT = None


def state_of(value: int) -> dict[str, Any]:
    """A state with an array that is uploaded in parts; all of it says which it is."""
    return {"large": np.full(5 << 19, value, np.float32), "small": np.arange(100) + value, "step": value}


def value_of(state: dict[str, Any]) -> int:
    """Which state it is; fails if it is a mixture."""
    value = int(state["step"])
    assert (state["large"] == value).all()
    assert (state["small"] == np.arange(100) + value).all()
    return value


def present(place: Bucket, path: str) -> int | None:
    """The version that is there, verified."""
    with place.context():
        try:
            value = value_of(waystation.load(path))
        except CheckpointNotFound:
            return ABSENT
        assert not verify(path).damages
        return value


@pytest.mark.long
@pytest.mark.parametrize("share", [0.03, 0.3])
@pytest.mark.parametrize("seed", range(amount(1, 40)))
@pytest.mark.share(2)
def test_every_outcome_is_whole_or_an_error(seed: int, share: float) -> None:
    place = bucket()
    path = f"{place.location}/run/ckpt"
    choices = random.Random(seed)

    def on_request(_: int) -> str:
        return choices.choice(FAULTS) if choices.random() < share else PASS

    known: int | None = ABSENT
    with proxy(place.endpoint, on_request) as between, context(between.endpoint, deadline_s=DEADLINE_S):
        for number in range(CALLS):
            outcomes, call = _call(choices.choice(("save", "save", "load", "delete")), path, number, known)
            begun = time.monotonic()
            try:
                loaded = call()
            except WaystationError as error:
                told, outcomes = str(error), {*outcomes, known}
            else:
                told = ""
                if loaded is not None:
                    assert value_of(loaded) == known
            assert time.monotonic() - begun < MOST_S
            assert ACCESS_KEY not in told
            assert SECRET_KEY not in told
            known = present(place, path)
            assert known in outcomes
    with place.context():  # what failed saves have left does not stand in the way
        waystation.save(path, state_of(CALLS), overwrite=True)
        assert present(place, path) == CALLS


def _call(
    operation: str, path: str, number: int, known: int | None
) -> tuple[set[int | None], Callable[[], dict[str, Any] | None]]:
    """What may be there after a call that went well, and the call."""
    if operation == "save":
        return {number}, lambda: waystation.save(path, state_of(number), overwrite=True)
    if operation == "delete":

        def delete() -> None:
            waystation.delete(path, missing_ok=True)

        return {ABSENT}, delete
    return {known}, lambda: waystation.load(path)
