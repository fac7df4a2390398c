"""Transfers of a host over a `Transport`: blocks are read from devices by a thread, and fetched early.

What a list receives is asked for when it begins. Blocks from one peer are asked for together as far as none
of them can depend on what the list does before it uses another. What it sends may not be computed yet: a
thread of its own waits for it, in the order of the sends, so that the execution queue never waits for a
device. Failure sequence: who cannot be reached, or has failed, fails `receive`; who does not go on is found
by a watchdog, and the run is abandoned then. What cannot be read is offered as an error to whoever waits for
it.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from waystation._errors import Internal, WaystationError
from waystation.frameworks.dtypes import numpy_dtype
from waystation.runtime.execution import Expected
from waystation.runtime.timeline import HostRecorder
from waystation.runtime.transport import Fetch, Key, Transport, Wanted

Block = np.ndarray[Any, np.dtype[Any]]

# How long a sender may take is for the watchdogs to judge, who know whether it goes on.
_NEVER_S = 10 * 365 * 86_400.0


class Transfers:
    """An `Exchange` of a host in a cluster.

    Args:
        transport: Carries blocks.
        recorder: Stamps what is sent.

    Attributes:
        awaited: The run, and the host, of the block that `receive` waits for now; None while it does not.
    """

    def __init__(self, transport: Transport, recorder: HostRecorder) -> None:
        self._transport = transport
        self._recorder = recorder
        self._addresses: dict[int, dict[str, str]] = {}
        self._fetches: dict[int, dict[int, tuple[Fetch, int, str]]] = {}
        self._sends: queue.SimpleQueue[tuple[Key, str, jax.Array]] = queue.SimpleQueue()
        self.sent_bytes: int = 0
        self.awaited: tuple[int, str] | None = None
        threading.Thread(target=self._offer_all, name="waystation: sends", daemon=True).start()

    def meet(self, run: int, addresses: dict[str, str]) -> None:
        """Says where the hosts are that a run receives from."""
        if addresses:
            self._addresses[run] = addresses

    def expect(self, run: int, transfers: Sequence[Expected]) -> None:
        """See `Exchange`."""
        addresses = self._addresses.pop(run, {})
        together: defaultdict[tuple[str, int], list[Expected]] = defaultdict(list)
        for each in transfers:
            together[each.host, each.phase].append(each)
        found = self._fetches[run] = {}
        for (host, _), expected in together.items():
            wanted = [Wanted(Key(run, 0, each.transfer), each.shape, _dtype(each.dtype)) for each in expected]
            fetch = self._transport.fetch(addresses[host], wanted, deadline_s=_NEVER_S)
            for place, each in enumerate(expected):
                found[each.transfer] = fetch, place, host

    def send(
        self, run: int, transfer: int, host: str, block: jax.Array, error: WaystationError | None = None
    ) -> None:
        """See `Exchange`."""
        if error is not None:
            self._transport.poison(error, run=run)
        self._sends.put((Key(run, 0, transfer), host, block))

    def receive(self, run: int, transfer: int) -> Block:
        """See `Exchange`."""
        fetch, place, host = self._fetches[run][transfer]
        self.awaited = None if fetch.done() else (run, host)
        try:
            return fetch.result()[place]
        finally:
            self.awaited = None

    def close(self, run: int) -> None:
        """See `Exchange`."""
        self._fetches.pop(run, None)

    def abandon(self, run: int, error: WaystationError, *, has_ended: bool) -> None:
        """A run has failed somewhere: nobody waits for it, and what it offers is let go once it has ended."""
        self._transport.poison(error, run=run)
        if has_ended:
            self._transport.drop(run)

    def _offer_all(self) -> None:
        while True:
            key, host, block = self._sends.get()
            try:
                block.block_until_ready()
                began_ns = self._recorder.now()
                held = np.ascontiguousarray(np.asarray(block))
                self.sent_bytes += held.nbytes
                self._transport.offer({key: held})
                self._recorder.sent(key.run, host, held.nbytes, began_ns)
            except Exception as error:
                told = Internal(f"a block cannot be sent: {type(error).__name__}: {error}")
                self._transport.poison(error if isinstance(error, WaystationError) else told, run=key.run)


def _dtype(name: str) -> np.dtype[Any]:
    found = numpy_dtype(name)
    if found is None:
        raise Internal(f"arrays of dtype '{name}' cannot travel")
    return found
