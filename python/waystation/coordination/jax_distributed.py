"""The coordinator of programs that use `jax.distributed`: over the store of its coordination service.

The service runs in process 0. Its clients are safe to use from several threads, and calls that wait delay
no others. Nothing here runs on devices, and no barrier of the service is used: these fail for good once a
process has missed one.

What a death does here, seen with JAX 0.12 and three processes, one of them killed in the middle of a round:

- Process 0: JAX aborts the others (SIGABRT) within half a second, as the connection to the service breaks.
  No exception can be raised any more.
- Another one: `liveness` notices it, and the others raise Unavailable that names it: at once if it was on
  the machine of one of those that watch it, else after ten seconds. Only when the service has missed it
  for `heartbeat_timeout_seconds` (100 by default) does JAX abort the rest of the processes. So a program
  has this time to end by itself; but whether it does or not, each survivor ends with an error.
- Another one, with `jax_enable_recoverability`: the same, without the end that JAX makes of it. Before the
  next save or load, the survivors have to set up `jax.distributed` anew.

In each case `waystation launch` names the one that died.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from waystation._errors import Unavailable, Unsupported
from waystation.coordination import jax_private
from waystation.coordination.liveness import Watching
from waystation.coordination.store_coordinator import StoreCoordinator

T = TypeVar("T")

# So many keys are rather read one by one than with all others of their directory.
_FEW = 4


def find() -> tuple[Any, int, int] | None:
    """The client of the coordination service, the index of this process and how many there are; None if JAX
    is not loaded or runs in one process only.

    Raises:
        Unsupported: This JAX runs in several processes and does not show its client.
    """
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return None
    client, process_index, process_count = jax_private.distributed()
    if client is not None:
        return (client, process_index, process_count) if process_count > 1 else None
    # While another thread imports JAX, the module may be there without its parts.
    public = getattr(jax, "distributed", None)
    if public is not None and public.is_initialized() and jax.process_count() > 1:
        raise Unsupported(
            f"JAX {jax.__version__} runs in several processes and does not show how they talk to each other; "
            "use a version of JAX that this Waystation knows"
        )
    return None


def coordinator(client: Any, process_index: int, process_count: int) -> StoreCoordinator:
    """The coordinator over a client.

    Raises:
        Unsupported: The client lacks what is needed.
    """
    return StoreCoordinator(JaxStore(client), process_index, process_count)


class JaxStore(Watching):
    """The key-value store of JAX's coordination service as sessions need it."""

    message_bytes = 2 << 20  # half of what gRPC takes where nobody has raised its limit, as JAX 0.12 has
    # The service remembers each wait until the key comes, also one whose client has given up.
    longest_wait_s = 5.0
    removes_below = True

    def __init__(self, client: Any) -> None:
        import jax

        lacking = [name for name in jax_private.CLIENT_METHODS if not hasattr(client, name)]
        if lacking:
            raise Unsupported(
                f"the coordination service of JAX {jax.__version__} lacks {', '.join(lacking)}, which saving "
                "and loading from several processes needs; use a newer JAX"
            )
        # At its end, process 0 waits for the others in `jax.distributed.shutdown`, but not in this mode.
        self.host = 0 if getattr(jax.config, "jax_enable_recoverability", False) else None
        self._client = client
        self._failed: type[Exception] = jax.errors.JaxRuntimeError

    def set(self, key: str, value: bytes) -> None:
        """Puts a value."""
        self._call(lambda: self._client.key_value_set_bytes(key, value, allow_overwrite=True))

    def set_once(self, key: str, value: bytes) -> bool:
        """Puts a value if there is none yet."""

        def put() -> bool:
            self._client.key_value_set_bytes(key, value, allow_overwrite=False)
            return True

        return self._call_unless("ALREADY_EXISTS", put) is True

    def add(self, key: str, amount: int) -> int:
        """Adds to a number."""
        return int(self._call(lambda: self._client.key_value_increment(key, amount)))

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value, waiting for it."""
        timeout_ms = int(timeout_s * 1000)
        if timeout_ms < 1:
            return self._call_unless("NOT_FOUND", lambda: self._client.key_value_try_get_bytes(key))
        return self._call_unless(
            "DEADLINE_EXCEEDED", lambda: self._client.blocking_key_value_get_bytes(key, timeout_ms)
        )

    def read(self, directory: str, names: Sequence[str]) -> list[bytes | None]:
        """The values that are there now."""
        keys = [f"{directory}/{name}" for name in names]
        if len(keys) <= _FEW:
            return [self.get(key, 0) for key in keys]
        found = dict(self._call(lambda: self._client.key_value_dir_get_bytes(f"{directory}/")))
        return [found.get(key) for key in keys]

    def delete(self, keys: Sequence[str]) -> None:
        """Removes keys."""
        for key in keys:
            self._call_unless("NOT_FOUND", functools.partial(self._client.key_value_delete, key))

    def _call(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except self._failed as error:
            raise _unavailable(error) from error

    def _call_unless(self, expected: str, function: Callable[[], T]) -> T | None:
        """What the call returns; None if it fails with the status that is expected."""
        try:
            return function()
        except self._failed as error:
            if str(error).startswith(expected):
                return None
            raise _unavailable(error) from error


def _unavailable(error: Exception) -> Unavailable:
    status = str(error).partition("\n")[0]
    return Unavailable(
        "the coordination service of JAX does not answer: process 0, which holds it, has died or cannot be "
        f"reached ({status}). See its output, and restart the program",
        process=0,
    )
