"""The manager: the one actor of a cluster that all programs talk to. It has the islands.

It is detached, so that it outlives the program that has made it, and ends when the last program has left:
hosts are its own and end with it. It hears of a program that was killed by a call that only that program can
answer for: Ray fails those who wait for it when the owner dies. Everything runs in one event loop. What is to
be done is decided by the `Controller`; here it is carried out, by the supervisors of the islands. Methods
give answers. Programs ask, and hosts are told what to do and tell what they have done, over connections of
their own (`waystation.runtime.control`); by Ray comes what is rare.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from waystation._errors import Conflict, WaystationError
from waystation.runtime.cluster.calls import ClientCalls
from waystation.runtime.cluster.event_log import EventLog
from waystation.runtime.cluster.losses import Loss
from waystation.runtime.cluster.status import (
    ClusterStatus,
    IslandRequest,
    IslandState,
    IslandStatus,
    OwnerStatus,
)
from waystation.runtime.cluster.supervisor import Supervisor
from waystation.runtime.cluster.timelines import Timelines
from waystation.runtime.cluster.watchdog import Awaited
from waystation.runtime.control.credentials import Credential, Role, issue
from waystation.runtime.control.listener import Listener as Connections
from waystation.runtime.controller import (
    Abandon,
    Begin,
    Controller,
    ForgetLists,
    MemoryLimits,
    Prepare,
    Release,
    Stall,
)
from waystation.runtime.devices import Host, Island
from waystation.runtime.errors import NoSuchIsland
from waystation.runtime.hosts.answers import answering
from waystation.runtime.messages import Done
from waystation.runtime.suspended_state import KeepSuspended, SuspendedStateDirectories
from waystation.runtime.timeline import Recording

NAME = "waystation manager"
CALLS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class Entrance:
    """What a program has to know of its cluster.

    Attributes:
        client: What it is known by.
        controller: Where it connects to.
        credential: What it proves itself by there.
        where: The process and the machine of the manager, for people.
        log_path: The manager's log, on that machine; empty if it has none.
    """

    client: str
    controller: str
    credential: Credential
    where: str
    log_path: str


def _island_of(host: str) -> str:
    return host.rpartition("/")[0]  # with that its name begins


class Manager:
    """The actor."""

    def __init__(self) -> None:
        self.name = NAME
        self._log = EventLog()
        self._where = f"process {os.getpid()} on {socket.gethostname()}"
        self._log.write(f"the manager begins: {self._where}")
        self._controller = Controller()
        self._secret = secrets.token_bytes(32)  # which nobody else gets
        self._islands: dict[str, Supervisor] = {}
        self._known: set[str] = set()  # islands that the controller knows
        self._clients: dict[str, ClientCalls] = {}
        self._attending: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed: asyncio.Future[None] | None = None
        self._is_due = False  # whether what the controller has decided is going to be carried out
        self._timelines = Timelines(
            lambda: [(each, island.epoch) for island in self._islands.values() for each in island.members]
        )
        self._controller.orders.observer = self._timelines.recorder
        self._connections: asyncio.Task[Connections] | None = None
        self._suspended_states = SuspendedStateDirectories()
        self._controller.suspensions.places = self._suspended_states.places

    # ---- programs ------------------------------------------------------------------------------

    async def attend(self, client: str) -> None:
        """Never returns; its result is owned by the program that has called it."""
        del client
        await asyncio.Event().wait()

    @answering
    async def enter(self, name: str, attended: Sequence[Any]) -> Entrance:
        """Counts a program in; returns what it has to know.

        Args:
            name: Its name.
            attended: The result of its call of `attend`, which fails when it dies.

        Raises:
            Conflict: There is one of that name.
        """
        connections = await self._listen()
        client = self._controller.add_client(name)
        calls = self._clients[client] = ClientCalls(
            client, self._controller, self._carry_out, self._next_change
        )

        def lost() -> None:
            if self._clients.get(client) is calls:
                self._attending.pop(client).cancel()
                self._drop(client)

        connections.expect(client, lambda end: calls.connect(end, lost))
        self._attending[client] = asyncio.create_task(self._await_death(client, attended[0]))
        self._log.write(f"program '{client}' is connected")
        credential = issue(self._secret, Role.PROGRAM, client)
        return Entrance(client, connections.address, credential, self._where, self._log.path)

    @answering
    async def leave(self, client: str) -> None:
        """Counts a program out."""
        if client in self._clients:  # else its connection was lost before
            self._attending.pop(client).cancel()
            self._drop(client)

    @answering
    async def share(self, shares: Mapping[str, int]) -> None:
        """Divides the time of devices among programs in proportion to weights, by their names."""
        self._controller.clients.share(shares)

    @answering
    async def keep_suspended(self, wanted: KeepSuspended) -> None:
        """Says where arrays of clients go that are suspended from now on."""
        self._suspended_states.keep(wanted)

    # ---- islands -------------------------------------------------------------------------------

    @answering
    async def add_island(self, request: IslandRequest) -> IslandStatus:
        """Builds an island; returns when it is ready.

        Raises:
            Conflict: There is one of that name.
            Unavailable: There is no room for it, or its hosts could not be built.
        """
        if request.name in self._islands:
            raise Conflict(f"there is an island '{request.name}' already; remove it, or choose another name")
        connections = await self._listen()
        if request.name in self._islands:
            raise Conflict(f"island '{request.name}' is being added already")
        before = self._controller.orders.epochs_before(request.name)
        island = self._islands[request.name] = Supervisor(request, self, connections, self._secret, before)
        try:
            await island.start()
        except BaseException:
            self._islands.pop(request.name, None)
            raise
        return self._status_of(island)

    @answering
    async def remove_island(self, name: str) -> None:
        """Ends an island."""
        island = self._island(name)
        del self._islands[name]
        self._log.write(f"island '{name}' is removed")
        island.remove()
        if name in self._known:
            self._known.discard(name)
            gone = NoSuchIsland(f"island '{name}' has been removed", island=name)
            self._controller.remove_island(name, gone)
        self._carry_out()
        self._change()

    @answering
    async def status(self) -> ClusterStatus:
        """How everything is now."""
        table = self._controller.arrays.table
        pending = self._controller.orders.pending_of
        owners = [
            OwnerStatus(client, False, table.client_bytes(client), pending(client))
            for client in sorted(self._clients)
        ]
        owners += [OwnerStatus(name, True, size) for name, size in table.named_bytes().items()]
        programs = self._controller.programs
        return ClusterStatus(
            address=ray.get_runtime_context().gcs_address,
            clients=len(self._clients),
            islands=tuple(self._status_of(self._islands[name]) for name in sorted(self._islands)),
            owners=tuple(owners),
            programs=programs.installed_count,
            functions=programs.function_count,
        )

    @answering
    async def record_timeline(self, is_wanted: bool) -> None:
        """Begins or ends to record what is done when."""
        await self._timelines.switch(is_wanted)

    @answering
    async def timeline(self, is_forgotten: bool) -> list[Recording]:
        """What was recorded, of all programs; then forgets it, if that is wished."""
        found = await self._timelines.recordings()
        if is_forgotten:
            self._timelines.forget()
        return found

    # ---- what supervisors tell -----------------------------------------------------------------

    def built(self, island: Supervisor) -> None:
        """The gang of an island is there."""
        request = island.request
        self._log.write(f"island '{request.name}' is ready, epoch {island.epoch}")
        self._controller.addresses.update(island.addresses)
        if request.name in self._known:
            self._controller.rebuilt(request.name)
        else:
            self._known.add(request.name)
            hosts = tuple(
                Host(
                    request.host_name(index),
                    request.name,
                    request.devices_per_host,
                    request.kind,
                    request.labels,
                    request.device_memory_bytes,
                )
                for index in range(request.hosts)
            )
            limits = MemoryLimits(request.device_memory_bytes, request.spill_bytes)
            self._controller.add_island(Island(request.name, hosts), limits)
        self._timelines.built()
        self._carry_out()
        self._change()

    def done(self, island: Supervisor, host: str, done: Sequence[Done]) -> None:
        """A host has ended messages."""
        for each in done:
            self._controller.orders.done(island.request.name, island.epoch, host, each)
        self._carry_out_soon()

    def lost(self, island: Supervisor, loss: Loss) -> None:
        """The gang of an island is lost."""
        self._log.write(f"island '{loss.island}' is lost in epoch {loss.epoch}: {loss}")
        self._controller.lose(
            island.request.name,
            str(loss),
            lambda work: loss.error(work.program, work.computation, work.number),
            loss.array_error,
        )
        self._carry_out()

    def goes_on(self, awaited: Awaited, island: str) -> bool:
        """Whether a host is yet to do its part of a work, and waits for nobody of an island, not even by way
        of others."""
        return self._goes_on(awaited, {island})

    def failed(self, island: Supervisor, error: WaystationError) -> None:
        """An island is lost for good."""
        self._log.write(f"island '{island.request.name}' is lost for good: {error.message}")
        self._controller.failures[island.request.name] = error
        self._carry_out()
        self._change()

    # ---- how ------------------------------------------------------------------------------------

    def _goes_on(self, awaited: Awaited, passed: set[str]) -> bool:
        work, host = awaited
        name = _island_of(host)
        island = self._islands.get(name)
        if name in passed or island is None or not self._controller.orders.is_at(work, name, host):
            return False
        # Hosts of one island that wait for each other are for its own watchdog to judge.
        others = (each for each in island.awaited if _island_of(each[1]) != name)
        return all(self._goes_on(each, passed | {name}) for each in others)

    def _carry_out_soon(self) -> None:
        """Carries out what the controller has decided when all has been heard that there is to hear now: what
        follows from that goes to hosts together."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._carry_out)

    def _carry_out(self) -> None:
        """Carries out what the controller has decided."""
        self._is_due = False
        for path in self._controller.suspensions.take_removed():
            self._run(asyncio.to_thread(self._suspended_states.remove, path))
        effects, self._controller.orders.effects = self._controller.orders.effects, []
        told: dict[str, Supervisor] = {}
        for effect in effects:
            island = self._islands.get(effect.island)
            if island is None:
                continue
            told[effect.island] = island
            match effect:
                case Begin():
                    island.begin(effect)
                case Release():
                    island.release(effect)
                case Abandon():
                    island.abandon(effect)
                case ForgetLists():
                    island.forget(effect)
                case Prepare():
                    self._run(self._prepare(island, effect))
                case Stall():
                    asyncio.get_running_loop().call_later(
                        island.request.deadline_s, self._give_up, effect.island, effect.work
                    )
        for island in told.values():
            island.flush()

    async def _prepare(self, island: Supervisor, effect: Prepare) -> None:
        error = await island.prepare(effect, *self._controller.programs.code_of(effect))
        self._controller.orders.prepared(effect.number, error)
        self._carry_out()

    def _give_up(self, island: str, work: int) -> None:
        self._controller.orders.give_up(island, work)
        self._carry_out()

    async def _listen(self) -> Connections:
        """Where hosts connect to; begins to listen when it is first needed."""
        if self._connections is None:
            self._log.watch(asyncio.get_running_loop())
            start = Connections.start(ray.util.get_node_ip_address(), self._secret, self._log.write)
            self._connections = asyncio.create_task(start)
        return await self._connections

    def _island(self, name: str) -> Supervisor:
        found = self._islands.get(name)
        if found is None or found.state is IslandState.REMOVED:
            known = ", ".join(f"'{other}'" for other in sorted(self._islands)) or "none"
            raise NoSuchIsland(f"the cluster has no island '{name}'; it has {known}", island=name)
        return found

    def _status_of(self, island: Supervisor) -> IslandStatus:
        name = island.request.name
        return island.status(self._controller.orders.pending(name) if name in self._known else 0)

    def _next_change(self) -> asyncio.Future[None] | None:
        """Ends when an island has been built or has failed; None if none is being built."""
        building = {IslandState.BUILDING, IslandState.REBUILDING}
        if not any(island.state in building for island in self._islands.values()):
            return None
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return asyncio.shield(self._changed)

    def _change(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set_result(None)

    async def _await_death(self, client: str, attended: Any) -> None:
        try:
            await attended
        except ray.exceptions.RayError:
            self._attending.pop(client, None)
            self._drop(client)

    def _drop(self, client: str) -> None:
        self._clients.pop(client).close()
        self._log.write(f"program '{client}' has left or died")
        self._controller.drop_client(client)
        self._carry_out()
        if self._clients:
            return
        for island in self._islands.values():
            island.remove()
        self._islands.clear()
        self._suspended_states.close()
        self._log.write("the manager ends: no program is left")
        self._log.close()
        ray.kill(ray.get_runtime_context().current_actor)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself does not keep it
        task.add_done_callback(self._tasks.discard)
