"""JAX's own notice of preemption: its coordination service spreads it, and finds the step to save at.

The service listens to SIGTERM from when `jax.distributed` is initialized, and to nothing without it. JAX is
not loaded for asking.
"""

from __future__ import annotations

import sys
from typing import Any

from waystation.coordination import jax_private


def is_served() -> bool:
    """Whether JAX listens for notices in this program."""
    return jax_private.preemption_manager() is not None


def reached_sync_point(step: int) -> bool:
    """Whether this is the step at which all processes save, after one of them was told that it will be ended.

    All processes have to ask at every step; the answer is the same in all of them.
    """
    jax: Any = sys.modules.get("jax")
    if jax is None or jax_private.distributed()[0] is None:
        return False
    from jax.experimental import multihost_utils

    try:
        return bool(multihost_utils.reached_preemption_sync_point(step))
    except RuntimeError:  # the program has switched the service off
        return False
