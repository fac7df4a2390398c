"""Options and states that the tests of checkpointables share."""

from __future__ import annotations

from typing import Any

import numpy as np

import waystation
from waystation import handlers


def with_handlers(*types: type) -> waystation.Context:
    context = waystation.Context()
    registry = handlers.local_registry()
    for kind in types:
        registry.add(kind)
    context.checkpointables.registry = registry
    return context


def state(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {"large": random.integers(0, 255, 3 << 20, np.uint8), "small": np.arange(seed + 3), "step": seed}


def same(left: Any, right: Any) -> bool:
    return all(np.array_equal(left[name], right[name]) for name in ("large", "small", "step"))
