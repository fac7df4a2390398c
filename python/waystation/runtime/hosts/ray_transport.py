"""A `Transport` over Ray: a host asks the actor that has what it wants; the object store carries the bytes.

A block is offered to the event loop of the actor of its host; whoever wants it calls that actor, whose answer
comes when all blocks that it was asked for are there. The address of a host is the name of its actor. Failure
sequence: an actor that dies fails the calls that wait for it, by Ray's word; a run that has failed is
poisoned on each of its hosts, which fails who waits there and who asks there; a deadline ends the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from waystation._errors import Cancelled, Unavailable, WaystationError
from waystation.runtime.hosts.answers import unwrap
from waystation.runtime.transport import Block, Key, Wanted

_LOOK_S = 0.2  # how often a waiting fetch looks whether its run has failed here


class RayTransport:
    """See above. Made in the event loop of the actor.

    Args:
        address: The name of the actor.
        namespace: Where names of actors are known.
    """

    def __init__(self, address: str, namespace: str) -> None:
        self.address = address
        self._namespace = namespace
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._blocks: dict[Key, Block] = {}
        self._errors: dict[int, WaystationError] = {}
        self._changed = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """See `Transport`."""
        with self._lock:
            return sum(block.nbytes for block in self._blocks.values())

    def offer(self, blocks: Mapping[Key, Block]) -> None:
        """See `Transport`."""
        with self._lock:
            self._blocks.update((key, block) for key, block in blocks.items() if key.run not in self._errors)
        self._tell()

    def fetch(self, address: str, wanted: Sequence[Wanted], *, deadline_s: float) -> RayFetch:
        """See `Transport`."""
        keys = [each.key for each in wanted]
        try:
            peer = ray.get_actor(address, self._namespace)
        except ValueError:
            return RayFetch(self, None, address, keys, deadline_s)
        return RayFetch(self, peer.blocks.remote(keys), address, keys, deadline_s)

    def drop(self, run: int, epoch: int | None = None) -> None:
        """See `Transport`."""
        with self._lock:
            for key in [key for key in self._blocks if key.run == run and epoch in (None, key.epoch)]:
                del self._blocks[key]
        self.poison(Cancelled(f"run {run} was dropped"), run=run)

    def poison(self, error: WaystationError, *, address: str | None = None, run: int | None = None) -> None:
        """See `Transport`; that a host is lost is told by Ray."""
        del address
        if run is not None:
            with self._lock:
                self._errors.setdefault(run, error)
            self._tell()

    def wait_for_room(self, limit_bytes: int, *, deadline_s: float) -> None:
        """See `Transport`."""
        end_s = time.monotonic() + deadline_s
        while self.held_bytes >= limit_bytes:
            if time.monotonic() > end_s:
                raise Unavailable(f"{self.held_bytes} bytes are offered that nobody has fetched")
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """See `Transport`; it ends with its actor."""

    async def serve(self, keys: Sequence[Key]) -> list[Block]:
        """Blocks, once all are offered; each is given once.

        Raises:
            WaystationError: Their run was poisoned or dropped.
        """
        while True:
            self._changed.clear()
            with self._lock:
                error = next((self._errors[key.run] for key in keys if key.run in self._errors), None)
                if error is not None:
                    raise error
                if all(key in self._blocks for key in keys):
                    return [self._blocks.pop(key) for key in keys]
            await self._changed.wait()

    def error_of(self, run: int) -> WaystationError | None:
        """What a run was poisoned with here."""
        with self._lock:
            return self._errors.get(run)

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # the actor is about to end
            self._loop.call_soon_threadsafe(self._changed.set)


class RayFetch:
    """Blocks that are on their way; see `Fetch`."""

    def __init__(
        self, transport: RayTransport, reference: Any, address: str, keys: Sequence[Key], deadline_s: float
    ) -> None:
        self._transport = transport
        self._reference = reference
        self._address = address
        self._keys = keys
        self._end_s = time.monotonic() + deadline_s
        self._blocks: list[Block] | None = None

    def done(self) -> bool:
        """See `Fetch`."""
        return self._reference is None or bool(ray.wait([self._reference], timeout=0)[0])

    def result(self, timeout_s: float | None = None) -> list[Block]:
        """See `Fetch`."""
        end_s = self._end_s if timeout_s is None else time.monotonic() + timeout_s
        while self._blocks is None:
            if self._reference is None:
                raise Unavailable(f"host '{self._address}' is not there, and blocks were to come from it")
            try:
                self._blocks = list(unwrap(ray.get(self._reference, timeout=_LOOK_S)))
            except ray.exceptions.GetTimeoutError:
                self._check(end_s)
            except ray.exceptions.RayError as error:
                raise Unavailable(
                    f"host '{self._address}' has died, and blocks were to come from it"
                ) from error
        return self._blocks

    def _check(self, end_s: float) -> None:
        error = self._transport.error_of(self._keys[0].run)
        if error is not None:
            raise error
        if time.monotonic() > self._end_s:
            raise Unavailable(f"host '{self._address}' has not sent {len(self._keys)} blocks in its deadline")
        if time.monotonic() > end_s:
            raise TimeoutError(f"{len(self._keys)} blocks from host '{self._address}' are not there yet")
