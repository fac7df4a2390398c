"""Timelines in the manager: recorders are switched on, and asked for what they have every second.

So of a host that is lost what it has stamped in its last second is missing, and nothing else. Recorders of
hosts are asked in the group `CONTROL`; the round trip says how their clocks lie to the manager's. Nothing
here is waited for by a run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray

from waystation._errors import WaystationError
from waystation.runtime.cluster.gang import Member
from waystation.runtime.hosts.answers import unwrap
from waystation.runtime.hosts.host import CONTROL
from waystation.runtime.timeline import ControllerRecorder, History, Recording, Source

INTERVAL_S = 1.0
_ANSWER_TIMEOUT_S = 10.0
_MOST_SOURCES = 1_000  # hosts, of all epochs; the oldest go first


class Timelines:
    """See above.

    Args:
        members: Gives the hosts there are, each with the epoch of its island.

    Attributes:
        recorder: The controller's own.
    """

    def __init__(self, members: Callable[[], Iterable[tuple[Member, int]]]) -> None:
        self.recorder: ControllerRecorder = ControllerRecorder()
        self._members = members
        self._own = History(Source(""))
        self._hosts: dict[tuple[str, int], History] = {}
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._first: asyncio.Task[None] | None = None  # the loop itself does not keep it

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded."""
        return self.recorder.is_on

    async def switch(self, is_wanted: bool) -> None:
        """Begins to record, or ends; what was recorded stays until it is forgotten. Once is enough."""
        self.recorder.is_on = is_wanted
        if is_wanted and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._collect_again_and_again())
        elif not is_wanted and self._task is not None:
            self._task.cancel()
            self._task = None
        await self.collect()

    def forget(self) -> None:
        """Forgets what was recorded until now."""
        own, self._own = self._own, History(Source(""))
        self._own.go_on_after(own)
        for place, history in list(self._hosts.items()):
            self._hosts[place] = History(history.source)
            self._hosts[place].go_on_after(history)

    def built(self) -> None:
        """There are new hosts."""
        if self.is_on:
            self._first = asyncio.get_running_loop().create_task(self.collect())

    async def collect(self) -> None:
        """Asks all for what they have, and tells them whether to go on."""
        async with self._lock:
            self._own.add(self.recorder.collect(*self._own.wanted))
            await asyncio.gather(*(self._ask(member, epoch) for member, epoch in self._members()))

    async def recordings(self) -> list[Recording]:
        """All that was recorded, up to now."""
        await self.collect()
        return [history.recording() for history in (self._own, *self._hosts.values())]

    async def _collect_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.collect()

    async def _ask(self, member: Member, epoch: int) -> None:
        place = member.name, epoch
        if place not in self._hosts:
            while len(self._hosts) >= _MOST_SOURCES:
                del self._hosts[next(iter(self._hosts))]
            self._hosts[place] = History(Source(member.name, epoch, len(member.devices)))
        history = self._hosts[place]
        method = member.actor.stamps.options(concurrency_group=CONTROL)
        asked_ns = time.monotonic_ns()
        try:
            call = _awaited(method.remote(*history.wanted, self.is_on))
            stamps = unwrap(await asyncio.wait_for(call, _ANSWER_TIMEOUT_S))
        except (TimeoutError, ray.exceptions.RayError, WaystationError):
            return  # it is lost, or will be: the watchdog asks it, too
        history.clock.observe(asked_ns, time.monotonic_ns(), stamps.clock_ns, stamps.machine)
        history.add(stamps)


async def _awaited(reference: Any) -> Any:
    return await reference
