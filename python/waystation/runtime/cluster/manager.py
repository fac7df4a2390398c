"""The manager: the one actor of a cluster that all programs talk to. It has the islands.

It is detached, so that it outlives the program that has made it, and ends when the last program has left:
hosts are its own and end with it. It hears of a program that was killed by a call that only that program can
answer for: Ray fails those who wait for it when the owner dies. Everything runs in one event loop. What
a program submits is taken in the order of its numbers (`connection`). Methods give answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from waystation._errors import Conflict
from waystation.runtime.cluster.status import ClusterStatus, IslandRequest, IslandState, IslandStatus
from waystation.runtime.cluster.supervisor import Supervisor
from waystation.runtime.hosts.answers import answering
from waystation.runtime.hosts.errors import NoSuchIsland
from waystation.runtime.hosts.instructions import Fetched, Message
from waystation.runtime.hosts.order import BySequence

NAME = "waystation manager"
CALLS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class _Submission:
    island: str
    message: Message
    epoch: int | None
    answer: asyncio.Future[Awaitable[list[tuple[Fetched, ...]]]]


class Manager:
    """The actor."""

    def __init__(self) -> None:
        self.name = NAME
        self._islands: dict[str, Supervisor] = {}
        self._clients: dict[str, asyncio.Task[None]] = {}
        self._orders: dict[str, BySequence[_Submission]] = {}

    async def attend(self, client: str) -> None:
        """Never returns; its result is owned by the program that has called it."""
        del client
        await asyncio.Event().wait()

    @answering
    async def enter(self, client: str, attended: Sequence[Any]) -> None:
        """Counts a program in.

        Args:
            client: Its name.
            attended: The result of its call of `attend`, which fails when it dies.
        """
        self._orders[client] = BySequence()
        self._clients[client] = asyncio.create_task(self._await_death(client, attended[0]))

    @answering
    async def leave(self, client: str) -> None:
        """Counts a program out."""
        self._clients.pop(client).cancel()
        del self._orders[client]
        self._end_if_alone()

    @answering
    async def add_island(self, request: IslandRequest) -> IslandStatus:
        """Builds an island; returns when it is ready.

        Raises:
            Conflict: There is one of that name.
            Unavailable: There is no room for it, or its hosts could not be built.
        """
        if request.name in self._islands:
            raise Conflict(f"there is an island '{request.name}' already; remove it, or choose another name")
        island = self._islands[request.name] = Supervisor(request)
        try:
            await island.start()
        except BaseException:
            self._islands.pop(request.name, None)
            raise
        return island.status()

    @answering
    async def remove_island(self, name: str) -> None:
        """Ends an island."""
        self._island(name).remove()
        del self._islands[name]

    @answering
    async def register(self, island: str, key: str, name: str, exported: bytes) -> None:
        """Sends a function to the hosts of an island."""
        await self._island(island).register(key, name, exported)

    @answering
    async def submit(
        self, client: str, number: int, island: str, message: Message, epoch: int | None
    ) -> list[tuple[Fetched, ...]]:
        """Gives all hosts of an island a message, in the order of `number`; returns their answers."""
        submission = _Submission(island, message, epoch, asyncio.get_running_loop().create_future())
        for _, ready in self._orders[client].accept(number, submission):
            try:
                answer = self._island(ready.island).submit(ready.message, ready.epoch)
            except NoSuchIsland as error:
                ready.answer.set_exception(error)
            else:
                ready.answer.set_result(answer)
        return await (await submission.answer)

    @answering
    async def status(self) -> ClusterStatus:
        """How everything is now."""
        return ClusterStatus(
            address=ray.get_runtime_context().gcs_address,
            clients=len(self._clients),
            islands=tuple(self._islands[name].status() for name in sorted(self._islands)),
        )

    def _island(self, name: str) -> Supervisor:
        found = self._islands.get(name)
        if found is None or found.state is IslandState.REMOVED:
            known = ", ".join(f"'{other}'" for other in sorted(self._islands)) or "none"
            raise NoSuchIsland(f"the cluster has no island '{name}'; it has {known}", island=name)
        return found

    async def _await_death(self, client: str, attended: Any) -> None:
        try:
            await attended
        except ray.exceptions.RayError:
            self._clients.pop(client, None)
            self._orders.pop(client, None)
            self._end_if_alone()

    def _end_if_alone(self) -> None:
        if self._clients:
            return
        for island in self._islands.values():
            island.remove()
        self._islands.clear()
        ray.kill(ray.get_runtime_context().current_actor)
