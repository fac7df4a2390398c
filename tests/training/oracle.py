"""Genuine Orbax, which the tests of sequences run beside Waystation."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ocp = pytest.importorskip("orbax.checkpoint.experimental.v1")

training = ocp.training
EPOCH = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Step:
    """A step as policies see it, in both libraries."""

    step: int
    time: datetime.datetime
    metrics: Any = None


def at(step: int, seconds: float, metrics: Any = None) -> Step:
    return Step(step, EPOCH + datetime.timedelta(seconds=seconds), metrics)


def preserved(policy: Any, context: Any, steps: Sequence[Step]) -> list[bool]:
    return [bool(flag) for flag in policy.should_preserve(steps, context=context)]


def names_in(root: Path) -> list[str]:
    """The directories of steps, without what either library keeps beside them."""
    return sorted(path.name for path in root.iterdir() if path.name != "metadata")
