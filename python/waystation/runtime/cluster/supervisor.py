"""Keeps one island: builds its gang, passes on what hosts are told, notices losses, rebuilds it.

Runs in the event loop of the manager, without locks. What happens when a host is lost: Ray tells of the death
of its process, or the watchdog finds it stuck, or its connection ends though it lives; the whole gang is
killed, since the others may wait for it for ever; the manager is told, which fails what was under way; the
gang is built again, in the next epoch, and the manager is told of that. Other islands notice nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup

from waystation._errors import WaystationError
from waystation.runtime.cluster.gang import Member, build, end, reserve
from waystation.runtime.cluster.host_connection import HostConnection
from waystation.runtime.cluster.losses import Loss
from waystation.runtime.cluster.status import HostStatus, IslandRequest, IslandState, IslandStatus
from waystation.runtime.cluster.watchdog import Awaited, Seen, Watchdog, interval_s
from waystation.runtime.control.host_messages import AbandonWork, ReleaseBuffers
from waystation.runtime.control.listener import Listener as Connections
from waystation.runtime.controller import Abandon, Begin, ForgetLists, Prepare, Release
from waystation.runtime.errors import HostLost, IslandFailed, NoSuchIsland
from waystation.runtime.hosts.answers import Failure, unwrap
from waystation.runtime.hosts.execution_queue import Moving, Report
from waystation.runtime.hosts.host import Health
from waystation.runtime.messages import Done

_DIED = "has died"
_CUT_OFF = "has lost its connection to the controller"
_WORD_S = 2.0
_NOTHING = Health(Report(0, 0, 0, "", 0.0))


class Listener(Protocol):
    """What a supervisor tells."""

    def built(self, island: Supervisor) -> None:
        """The gang is there."""
        ...

    def done(self, island: Supervisor, host: str, done: Sequence[Done]) -> None:
        """A host of the gang has ended messages."""
        ...

    def lost(self, island: Supervisor, loss: Loss) -> None:
        """The gang is lost."""
        ...

    def failed(self, island: Supervisor, error: WaystationError) -> None:
        """The gang is lost, and will not be built again."""
        ...

    def goes_on(self, awaited: Awaited, island: str) -> bool:
        """Whether a host of another island is yet to do its part of a work, and waits for nobody of this one.

        Args:
            awaited: The work, and the host.
            island: This one.
        """
        ...


class Supervisor:
    """One island.

    Args:
        request: What is wanted.
        listener: Who is told of its gangs.
        connections: Where hosts connect to.
        secret: Of the cluster; hosts get keys that are derived from it.
        epochs_before: How many epochs islands of this name have had before.
    """

    def __init__(
        self,
        request: IslandRequest,
        listener: Listener,
        connections: Connections,
        secret: bytes,
        epochs_before: int,
    ) -> None:
        self.request = request
        self.state: IslandState = IslandState.BUILDING
        self.epoch: int = epochs_before
        self.restarts: int = 0
        self._listener = listener
        self._connections = connections
        self._secret = secret
        self._group: PlacementGroup | None = None
        self._members: dict[str, Member] = {}
        self._host_connections: dict[str, HostConnection] = {}
        self._begun = 0  # messages of this epoch, each for one host or several
        self._health: dict[str, Health | None] = {}
        self._last_loss: Loss | None = None
        self._failure: WaystationError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Builds it for the first time.

        Raises:
            Unavailable: There is no room for it, or its hosts could not be built.
        """
        try:
            self._group = await reserve(self.request)
            await self._build()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Ends it for good."""
        self.state = IslandState.REMOVED
        self._failure = NoSuchIsland(
            f"island '{self.request.name}' has been removed", island=self.request.name
        )
        self._end_gang()
        self._release()

    @property
    def addresses(self) -> dict[str, str]:
        """Where the transport of each host listens, by the host's name."""
        return {
            name: member.description.transport
            for name, member in self._members.items()
            if member.description is not None
        }

    @property
    def awaited(self) -> tuple[Awaited, ...]:
        """What its hosts wait for from others, when they last reported."""
        reports = (health.report for health in self._health.values() if health is not None)
        return tuple(report.awaits for report in reports if report.awaits is not None)

    @property
    def members(self) -> tuple[Member, ...]:
        """Its hosts; none while it is being built."""
        return tuple(self._members.values())

    # ---- what hosts are told -------------------------------------------------------------------

    def begin(self, effect: Begin) -> None:
        """Tells hosts to begin a work; `flush` sends it."""
        if effect.epoch != self.epoch or self.state is not IslandState.READY:
            return
        for host, message in effect.messages.items():
            self._host_connections[host].begin(self._begun, message, effect.messages)
        self._begun += 1

    def release(self, effect: Release) -> None:
        """Tells a host to forget buffers."""
        if effect.host in self._host_connections:
            self._host_connections[effect.host].tell(ReleaseBuffers(tuple(map(int, effect.handles))))

    def forget(self, effect: ForgetLists) -> None:
        """Tells hosts to forget lists."""
        if effect.epoch != self.epoch or self.state is not IslandState.READY:
            return
        for host, listed in effect.lists.items():
            self._host_connections[host].forget_list(listed)

    def abandon(self, effect: Abandon) -> None:
        """Tells hosts that a work has failed."""
        for host in effect.hosts:
            if host in self._host_connections:
                self._host_connections[host].tell(AbandonWork(effect.work, effect.error, effect.has_ended))

    def flush(self) -> None:
        """Sends what hosts are told: one frame for each."""
        for connection in self._host_connections.values():
            connection.flush()

    async def prepare(
        self,
        effect: Prepare,
        exported: dict[str, bytes],
        host_functions: dict[str, bytes],
    ) -> WaystationError | None:
        """Gives hosts their lists; returns when all have compiled what these call.

        Args:
            effect: The lists.
            exported: Functions that they call, by key. A host gets one until it has said that it has it: what
                it is given at once is done in any order, so a list must not count on what came with another.
            host_functions: Functions of Python that they call, by key, pickled; likewise.
        """
        if effect.epoch != self.epoch or self.state is not IslandState.READY:
            return self._gone()
        connected = {host: self._host_connections[host] for host in effect.lists}
        calls: list[Awaitable[Any]] = []
        for host, listed in effect.lists.items():
            connected[host].give_list(listed.fingerprint, (*effect.functions, *effect.host_calls))
            known = connected[host].functions
            new = tuple((key, code) for key, code in exported.items() if key not in known)
            named = tuple((name, each) for name, each in host_functions.items() if name not in known)
            calls.append(_awaited(self._members[host].actor.prepare.remote(listed, new, named)))
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                return self._gone()
            try:
                unwrap(answer)
            except WaystationError as error:
                return error
        for connection in connected.values():
            connection.functions |= {*exported, *host_functions}
        return None

    def _gone(self) -> WaystationError:
        if self._failure is not None:
            return self._failure
        return HostLost(f"island '{self.request.name}' is not what it was any more: {self._last_loss}")

    # ---- how it is -----------------------------------------------------------------------------

    def status(self, pending: int) -> IslandStatus:
        """How it is now; `pending` are its works that have not ended."""
        request = self.request
        return IslandStatus(
            name=request.name,
            state=self.state,
            epoch=self.epoch,
            restarts=self.restarts,
            max_restarts=request.max_restarts,
            kind=request.kind,
            devices_per_host=request.devices_per_host,
            labels=request.labels,
            pending=pending,
            last_loss="" if self._last_loss is None else str(self._last_loss),
            hosts=tuple(map(self._host_status, self._members.values())),
        )

    def _host_status(self, member: Member) -> HostStatus:
        health = self._health.get(member.name) or _NOTHING
        return HostStatus(
            name=member.name,
            address="" if member.description is None else member.description.address,
            process_id=member.process_id,
            devices=member.devices,
            doing=health.report.doing or ", ".join(map(_moving, health.report.moving)),
            ended=health.report.ended,
            stalled_s=health.report.stalled_s,
            array_bytes=health.array_bytes,
            sent_bytes=health.sent_bytes,
            programs=health.programs,
            functions=health.functions,
        )

    # ---- gangs ---------------------------------------------------------------------------------

    async def _build(self) -> None:
        assert self._group is not None
        self.epoch += 1
        members = await build(self.request, self.epoch, self._group, self._connections, self._secret)
        if self._failure is not None:  # it was removed meanwhile
            end(members)
            raise self._failure
        self._members = {member.name: member for member in members}
        self._host_connections = {member.name: self._connect(member, self.epoch) for member in members}
        self._begun = 0
        for member in members:
            self._run(self._attend(member, self.epoch))
        self._run(self._watch(members, self.epoch))
        self.state = IslandState.READY
        self._listener.built(self)

    def _connect(self, member: Member, epoch: int) -> HostConnection:
        def on_done(done: Sequence[Done]) -> None:
            if epoch == self.epoch and self.state is IslandState.READY:
                self._listener.done(self, member.name, done)

        def on_lost() -> None:
            # Ray knows why, if its process has ended, and says so at once.
            loop = asyncio.get_running_loop()
            loop.call_later(_WORD_S, self._lose, member, epoch, _CUT_OFF)

        assert member.end is not None
        return HostConnection(member.end, on_done, on_lost)

    async def _attend(self, member: Member, epoch: int) -> None:
        """Waits for the end of a host."""
        try:
            await member.control("attend")
        except ray.exceptions.RayError:
            self._lose(member, epoch, _DIED)

    async def _watch(self, members: list[Member], epoch: int) -> None:
        """Asks hosts how far they are, for as long as the epoch lasts."""
        deadline_s = self.request.deadline_s
        watchdog = Watchdog(deadline_s, self.request.computation_limit_s)
        while epoch == self.epoch and self.state is IslandState.READY:
            await asyncio.sleep(interval_s(deadline_s))
            answers = await asyncio.gather(*(self._ask(member) for member in members))
            if any(isinstance(answer, ray.exceptions.RayError) for answer in answers):
                return  # whoever attends it hears of that too
            if epoch != self.epoch or self.state is not IslandState.READY:
                return
            self._health = {member.name: answer for member, answer in zip(members, answers, strict=True)}
            seen = {name: self._seen(name, health) for name, health in self._health.items()}
            stuck = watchdog.judge(seen, lambda awaited: self._listener.goes_on(awaited, self.request.name))
            if stuck is not None:
                self._lose(self._members[stuck.host], epoch, stuck.reason)
                return

    def _seen(self, host: str, health: Health | None) -> Seen:
        """What a host has reported, with its places in the order of the island, where it can be compared with
        others: not every host takes part in every work."""
        connection = self._host_connections[host]
        if health is None:
            return Seen(None)
        begun = health.report.begun
        report = replace(health.report, begun=connection.place(begun, self._begun))
        first = connection.first()
        if first is None:
            return Seen(report, self._begun, owes=connection.owes(begun))
        return Seen(report, first.place, owes=True, hosts=first.hosts)

    async def _ask(self, member: Member) -> Any:
        """How a host is; None where it has not said so by the deadline.

        Time counts in which this process would have heard the answer: not while it is stopped itself, or
        busy.
        """
        deadline_s, waited_s = self.request.deadline_s, 0.0
        each_s = interval_s(deadline_s)
        asked = asyncio.ensure_future(self._health_of(member))
        try:
            while not asked.done() and waited_s < deadline_s - each_s:
                await asyncio.wait([asked], timeout=each_s)
                waited_s += each_s
            return asked.result() if asked.done() else None
        except ray.exceptions.RayError as error:
            return error
        finally:
            asked.cancel()

    async def _health_of(self, member: Member) -> Health:
        """Asks a host again where it fails to say how it is: that does not end the watch."""
        while isinstance(answer := await _awaited(member.control("health")), Failure):
            await asyncio.sleep(interval_s(self.request.deadline_s))
        found: Health = unwrap(answer)
        return found

    def _lose(self, member: Member, epoch: int, reason: str) -> None:
        if epoch != self.epoch or self.state is not IslandState.READY:
            return  # the first one counts: the others end because of it
        health = self._health.get(member.name)
        loss = Loss(
            island=self.request.name,
            host=member.name,
            devices=member.devices,
            epoch=epoch,
            process_id=member.process_id,
            reason=reason,
            doing="" if health is None else health.report.doing,
            work=self._host_connections[member.name].work,
            restarts_left=self.request.max_restarts - self.restarts,
        )
        self._last_loss = loss
        self.state = IslandState.REBUILDING
        self._end_gang()
        self._listener.lost(self, loss)
        self._run(self._rebuild(loss))

    async def _rebuild(self, loss: Loss) -> None:
        name = self.request.name
        if self.restarts >= self.request.max_restarts:
            told = (
                f"island '{name}' has been rebuilt {self.restarts} times, as often as it may be, and was "
                f"lost again: {loss}; remove it, and add it again"
            )
            self._fail(IslandFailed(told, island=name, host=loss.host))
            return
        self.restarts += 1
        try:
            await self._build()
        except WaystationError as error:
            self._fail(error)
        except Exception as error:
            told = f"island '{name}' could not be rebuilt: {type(error).__name__}: {error}"
            self._fail(IslandFailed(told, island=name))

    def _fail(self, error: WaystationError) -> None:
        if self._failure is None:
            self.state, self._failure = IslandState.FAILED, error
            self._listener.failed(self, error)
        self._release()

    def _end_gang(self) -> None:
        end(self._members.values())
        for connection in self._host_connections.values():
            connection.close()
        self._members, self._host_connections, self._health = {}, {}, {}

    def _release(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            ray.util.remove_placement_group(group)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself does not keep it
        task.add_done_callback(self._tasks.discard)


def _moving(transfer: Moving) -> str:
    return f"{transfer.doing} ({transfer.done_bytes:,} of {transfer.total_bytes:,} bytes)"


async def _awaited(reference: Any) -> Any:
    return await reference
