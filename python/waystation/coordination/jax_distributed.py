"""The coordinator of programs that use `jax.distributed`: over the store of its coordination service.

The service runs in process 0. Its clients are safe to use from several threads, and calls that wait delay
no others. Nothing here runs on devices, and no barrier of the service is used: these fail for good once a
process has missed one.

What a death does here, seen with JAX 0.12 and three processes, one of them killed in the middle of a round:

- Process 0: JAX aborts the others (SIGABRT) within half a second, as the connection to the service breaks.
  No exception can be raised any more.
- Another one: `liveness` notices it, and the others raise Unavailable that names it: at once if it was on
  the machine of one of those that watch it, else after ten seconds. `jax.distributed.shutdown`, which JAX
  also calls when the interpreter ends, would then wait in a barrier that the dead process never reaches,
  until the service has missed its heartbeats for `heartbeat_timeout_seconds` (100 by default), and abort
  the process. So survivors of a failed round leave without that barrier (`JaxStore.note_failure`); process 0,
  which holds the service, leaves last. A survivor that goes on running is still aborted by JAX after that
  time.
- Another one, with `jax_enable_recoverability`: the same, without the end that JAX makes of it. Before the
  next save or load, the survivors have to set up `jax.distributed` anew.

In each case `waystation launch` names the one that died.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from waystation._errors import Unavailable, Unsupported, WaystationError
from waystation.coordination import jax_private
from waystation.coordination.liveness import Watching
from waystation.coordination.store_coordinator import StoreCoordinator

T = TypeVar("T")

_log = logging.getLogger("waystation")

# How long process 0 waits for the other survivors of a failed round: JAX aborts those that still run when the
# service ends with it.
LAST_S = 5.0
# How long one of them may take to end on another machine, where its end is not seen, after it has said so.
ENDING_S = 2.0
_LOOK_INTERVAL_S = 0.05

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
    return StoreCoordinator(JaxStore(client, process_count), process_index, process_count)


class JaxStore(Watching):
    """The key-value store of JAX's coordination service as sessions need it."""

    message_bytes = 2 << 20  # half of what gRPC takes where nobody has raised its limit, as JAX 0.12 has
    # The service remembers each wait until the key comes, also one whose client has given up.
    longest_wait_s: float = 5.0
    removes_below = True

    def __init__(self, client: Any, process_count: int) -> None:
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
        self._process_count = process_count
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

    def join(self, prefix: str, process_index: int) -> None:
        """This process takes part, with keys that begin like that."""
        super().join(prefix, process_index)
        self._prefix, self._process_index = prefix, process_index

    def note_failure(self, dead: Sequence[int]) -> None:
        """Has the shutdown of JAX not wait for the dead."""
        if self.host is not None:
            return  # JAX's own shutdown waits for nobody
        for index in dead:
            self.set(f"{self._prefix}/dead/{index}", b"dead")
        jax_private.ask_before_shutdown(self._client, self._leave)

    def _leave(self) -> bool:
        """Leaves without a shutdown that would wait for the dead; False if no process is known to be dead."""
        try:
            dead = self._dead()
        except Unavailable:
            return False  # without its service, JAX's shutdown fails at once
        if not dead:
            return False
        try:
            self.set(f"{self._prefix}/left/{self._process_index}", b"left")
            if self._process_index == 0:
                self._await_others(dead)
        except WaystationError as error:
            _log.debug("the other processes could not be awaited: %s", error)
        return True

    def _dead(self) -> Collection[int]:
        """The processes that any process has found to be dead, and those of this machine that have ended."""
        others = [index for index in range(self._process_count) if index != self._process_index]
        noted = self.read(f"{self._prefix}/dead", [str(index) for index in others])
        found = {index for index, key in zip(others, noted, strict=True) if key is not None}
        return found | {index for index, has_ended in self._seen_here(others).items() if has_ended}

    def _await_others(self, dead: Collection[int]) -> None:
        """Waits, not for long, until the other survivors have ended."""
        remaining = [index for index in range(1, self._process_count) if index not in dead]
        until = time.monotonic() + LAST_S
        left_at_s: dict[int, float] = {}
        while remaining and (now_s := time.monotonic()) < until:
            seen_here = self._seen_here(remaining)
            left = self.read(f"{self._prefix}/left", [str(index) for index in remaining])
            for index, key in zip(remaining, left, strict=True):
                if key is not None:
                    left_at_s.setdefault(index, now_s)
            remaining = [
                index
                for index in remaining
                if not seen_here.get(index, now_s - left_at_s.get(index, now_s) >= ENDING_S)
            ]
            time.sleep(_LOOK_INTERVAL_S)

    def _seen_here(self, processes: Sequence[int]) -> dict[int, bool]:
        return {} if self._liveness is None else self._liveness.seen_here(processes)

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
