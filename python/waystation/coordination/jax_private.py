"""The one place where JAX's private modules are touched: each thing taken here is optional.

Every name is None where this JAX does not have what it needs, and its user then takes the public way,
which gives the same arrays more slowly. Nothing here changes what JAX does, but for `ask_before_shutdown`: a
program of several processes one of which has died could not end otherwise.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Put = Callable[[Sequence[Any]], Any]
Putting = Callable[[tuple[int, ...], np.dtype[Any], Any, Sequence[Any], bool, bool], Put]


def _find_putting() -> Putting | None:
    """What makes one array from host arrays, one per device, at a sixth of the cost of `jax.device_put`.

    It is had once for all arrays of a kind, by their global shape, dtype, sharding, devices, whether they
    are committed to these, and whether 64-bit dtypes are enabled.
    """
    try:
        from jax._src.core import ShapedArray
        from jax._src.lib import xla_client  # type: ignore[attr-defined]

        batched = xla_client.batched_device_put
    except (ImportError, AttributeError):
        return None
    shaped = lru_cache(maxsize=4096)(ShapedArray)

    def putting(
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        sharding: Any,
        devices: Sequence[Any],
        committed: bool,
        x64: bool,
    ) -> Put:
        aval = shaped(shape, dtype)
        return lambda arrays: batched(aval, sharding, arrays, devices, committed, enable_x64=x64)

    return putting if _works(putting) else None


def _works(putting: Putting) -> bool:
    """Tries the call once, since its parameters are nobody's promise."""
    import jax

    device = jax.local_devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    try:
        put = putting((3,), np.dtype(np.int8), sharding, [device], False, False)
        made = put([np.arange(3, dtype=np.int8)])
    except (TypeError, ValueError):
        return False
    return made.shape == (3,) and not made.committed and np.asarray(made).tolist() == [0, 1, 2]


@lru_cache(maxsize=1)
def putting() -> Putting | None:
    """The fast way to make arrays of host arrays, or None."""
    return _find_putting()


@lru_cache(maxsize=1)
def single_device() -> Callable[[Any], Any]:
    """What tells single-device shardings apart, at a fraction of the cost of their own hash."""
    import jax

    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    try:
        device_is_known = sharding._device == jax.local_devices()[0]
        known = device_is_known and sharding._memory_kind == sharding.memory_kind
    except AttributeError:
        known = False
    if not known:
        return lambda sharding: sharding
    return lambda sharding: (sharding._device, sharding._memory_kind)


@lru_cache(maxsize=1)
def host_array() -> Callable[[Any], np.ndarray[Any, Any]]:
    """What makes the host array of a single-device array: of CPU memory a view, else a copy.

    The public `numpy.asarray` does the same, but keeps a copy inside the array for as long as it lives, and
    takes three times as long for dtypes that the buffer protocol does not know.
    """
    try:
        from jax._src.array import ArrayImpl

        convert = ArrayImpl._single_device_array_to_np_array_did_copy
    except (ImportError, AttributeError):
        return np.asarray
    return lambda array: convert(array)[0]


# What the client of the coordination service has to offer.
CLIENT_METHODS = (
    "key_value_set_bytes",
    "key_value_try_get_bytes",
    "blocking_key_value_get_bytes",
    "key_value_dir_get_bytes",
    "key_value_increment",
    "key_value_delete",
)


def distributed() -> tuple[Any, int, int]:
    """The client of the coordination service, the index of this process and how many there are; the client
    is None where `jax.distributed` is not initialized. Loads nothing."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    client = getattr(state, "client", None)
    if state is None or client is None:
        return None, 0, 1
    return client, state.process_id, state.num_processes


def ask_before_shutdown(client: Any, leave: Callable[[], bool]) -> None:
    """Has `jax.distributed.shutdown` call `leave` first, once, and do without the client's barrier if that
    returns True. JAX shuts down at the end of the interpreter, too.

    Args:
        client: Of the coordination service that is meant; nothing happens if JAX has another one by now.
        leave: Decides, and does what is to be done instead.
    """
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if state is None or getattr(state, "client", None) is not client or "shutdown" in vars(state):
        return
    by_jax = state.shutdown

    def shutdown() -> None:
        del state.shutdown
        if not leave():
            by_jax()
            return
        if state.preemption_sync_manager is not None:
            state.preemption_sync_manager.shutdown()
        # Both wait for the barrier when they are destroyed, so they are left to the end of the process.
        for held in (state.client, state.service):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        state.preemption_sync_manager = state.client = state.service = None

    state.shutdown = shutdown


def preemption_manager() -> Any:
    """What of `jax.distributed` listens for notices of preemption; None where nothing does. Loads nothing."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return getattr(state, "preemption_sync_manager", None)
