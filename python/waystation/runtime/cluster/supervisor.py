"""Keeps one island: builds its gang, gives it messages in one order, notices losses, rebuilds it.

Runs in the event loop of the manager, without locks. What happens when a host is lost: Ray tells of the death
of its process, or the watchdog finds it stuck; the whole gang is killed, since the others may wait for it for
ever; every call of this epoch that has no answer fails with a `HostLost` that says whose fault it was;
functions are sent again to the next gang, in the next epoch, and buffers are gone. Other islands notice
nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from waystation._errors import Fenced, WaystationError
from waystation.runtime.cluster.gang import Member, build, end, reserve
from waystation.runtime.cluster.losses import Loss, first_computation
from waystation.runtime.cluster.status import HostStatus, IslandRequest, IslandState, IslandStatus
from waystation.runtime.cluster.watchdog import find_stuck, interval_s
from waystation.runtime.hosts.answers import unwrap
from waystation.runtime.hosts.errors import IslandFailed, NoSuchIsland
from waystation.runtime.hosts.instructions import Fetched, Message
from waystation.runtime.hosts.lane import Report

_DIED = "has died"


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message under way: its epoch and number, and the calls of all hosts."""

    epoch: int
    sequence: int
    calls: list[Any]


class Supervisor:
    """One island.

    Args:
        request: What is wanted.
    """

    def __init__(self, request: IslandRequest) -> None:
        self.request = request
        self.state = IslandState.BUILDING
        self.epoch = self.restarts = self.pending = 0
        self._group: PlacementGroup | None = None
        self._members: list[Member] = []
        self._reports: dict[str, Report | None] = {}
        self._sequence = itertools.count()
        self._queue: asyncio.Queue[tuple[Message, int | None, asyncio.Future[_Sent]] | None] = asyncio.Queue()
        self._functions: dict[str, tuple[str, bytes]] = {}
        self._last_loss: Loss | None = None
        self._failure: WaystationError | None = None
        self._settled = asyncio.Event()  # it is neither being built nor rebuilt
        self._losses: dict[int, asyncio.Future[WaystationError | Loss]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Builds it for the first time.

        Raises:
            Unavailable: There is no room for it, or its hosts could not be built.
        """
        self._run(self._dispatch())
        try:
            self._group = await reserve(self.request)
            await self._build()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Ends it for good; calls that have no answer fail."""
        gone = NoSuchIsland(f"island '{self.request.name}' has been removed", island=self.request.name)
        self._end_epoch(gone)
        self.state, self._failure = IslandState.REMOVED, gone
        self._settled.set()
        self._queue.put_nowait(None)
        self._release()

    async def register(self, key: str, name: str, exported: bytes) -> None:
        """Sends a function to all hosts, unless they have it; those of later epochs get it too."""
        if key in self._functions:
            return
        members, _ = await self._ready(None)
        self._functions[key] = (name, exported)
        calls = [_awaited(member.actor.register.remote(key, exported)) for member in members]
        # Where a host dies now, the next one gets it.
        await asyncio.gather(*calls, return_exceptions=True)

    def submit(self, message: Message, epoch: int | None) -> Awaitable[list[tuple[Fetched, ...]]]:
        """Gives all hosts a message, after those of earlier calls; what each has answered is to be awaited.

        Args:
            message: The same for all.
            epoch: The epoch that it is meant for; None for any.

        Raises:
            Fenced: The island is of a later epoch.
            HostLost: A host was lost meanwhile.
            WaystationError: A host could not do it.
        """
        sent: asyncio.Future[_Sent] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((message, epoch, sent))
        return self._answer(message, sent)

    async def _dispatch(self) -> None:
        """Sends messages one by one: while the island is rebuilt they wait, and keep their order."""
        while (entry := await self._queue.get()) is not None:
            message, epoch, sent = entry
            try:
                members, now = await self._ready(epoch)
            except WaystationError as error:
                sent.set_exception(error)
                continue
            sequence = next(self._sequence)
            calls = [member.actor.run.remote(now, sequence, message) for member in members]
            sent.set_result(_Sent(now, sequence, calls))

    async def _answer(self, message: Message, waiting: asyncio.Future[_Sent]) -> list[tuple[Fetched, ...]]:
        self.pending += 1
        try:
            sent = await waiting
            answers = await asyncio.gather(*map(_awaited, sent.calls), return_exceptions=True)
        finally:
            self.pending -= 1
        lost = [answer for answer in answers if isinstance(answer, ray.exceptions.RayError)]
        if lost:
            names = {key: name for key, (name, _) in self._functions.items()}
            raise await self._error_of(sent.epoch, sent.sequence, message, names)
        return [unwrap(answer) for answer in answers]

    def status(self) -> IslandStatus:
        """How it is now."""
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
            pending=self.pending,
            last_loss="" if self._last_loss is None else str(self._last_loss),
            hosts=tuple(map(self._host_status, self._members)),
        )

    def _host_status(self, member: Member) -> HostStatus:
        report = self._reports.get(member.name) or Report(0, 0, 0, "", 0.0)
        return HostStatus(
            name=member.name,
            address="" if member.description is None else member.description.address,
            process_id=member.process_id,
            devices=member.devices,
            doing=report.doing,
            ended=report.ended,
            stalled_s=report.stalled_s,
        )

    async def _ready(self, epoch: int | None) -> tuple[list[Member], int]:
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure
        if epoch is not None and epoch != self.epoch:
            raise Fenced(
                f"island '{self.request.name}' is in epoch {self.epoch}, and what epoch {epoch} had is gone: "
                "prepare the call anew",
                island=self.request.name,
                epoch=self.epoch,
            )
        return self._members, self.epoch

    async def _build(self) -> None:
        assert self._group is not None
        self.epoch += 1
        members = await build(self.request, self.epoch, self._group)
        if self._failure is not None:  # it was removed meanwhile
            end(members)
            raise self._failure
        self._members = members
        self._sequence = itertools.count()
        self._losses[self.epoch] = asyncio.get_running_loop().create_future()
        for key, (_, exported) in self._functions.items():
            for member in members:
                member.actor.register.remote(key, exported)
        for member in members:
            self._run(self._attend(member, self.epoch))
        self._run(self._watch(members, self.epoch))
        self.state = IslandState.READY
        self._settled.set()

    async def _attend(self, member: Member, epoch: int) -> None:
        """Waits for the end of a host."""
        try:
            await member.control("attend")
        except ray.exceptions.RayError:
            self._lose(member, epoch, _DIED)

    async def _watch(self, members: list[Member], epoch: int) -> None:
        """Asks hosts how far they are, for as long as the epoch lasts."""
        deadline_s = self.request.deadline_s
        while epoch == self.epoch and self.state is IslandState.READY:
            await asyncio.sleep(interval_s(deadline_s))
            answers = await asyncio.gather(*(self._ask(member) for member in members))
            if any(isinstance(answer, ray.exceptions.RayError) for answer in answers):
                return  # whoever attends it hears of that too
            reports = {member.name: answer for member, answer in zip(members, answers, strict=True)}
            self._reports = reports
            stuck = find_stuck(reports, deadline_s)
            if stuck is not None:
                member = next(member for member in members if member.name == stuck.host)
                self._lose(member, epoch, stuck.reason)
                return

    async def _ask(self, member: Member) -> Any:
        deadline_s = self.request.deadline_s
        try:
            call = _awaited(member.control("health"))
            return unwrap(await asyncio.wait_for(call, deadline_s - interval_s(deadline_s)))
        except TimeoutError:
            return None
        except ray.exceptions.RayError as error:
            return error

    def _lose(self, member: Member, epoch: int, reason: str) -> None:
        if epoch != self.epoch or self.state is not IslandState.READY:
            return  # the first one counts: the others end because of it
        report = self._reports.get(member.name)
        loss = Loss(
            island=self.request.name,
            host=member.name,
            devices=member.devices,
            epoch=epoch,
            process_id=member.process_id,
            reason=reason,
            doing="" if report is None else report.doing,
            ended=-1 if report is None else report.ended,
            restarts_left=self.request.max_restarts - self.restarts,
        )
        self._last_loss = loss
        self.state = IslandState.REBUILDING
        self._settled.clear()
        self._end_epoch(loss)
        self._run(self._rebuild(loss))

    async def _rebuild(self, loss: Loss) -> None:
        name = self.request.name
        if self.restarts >= self.request.max_restarts:
            self._fail(
                IslandFailed(
                    f"island '{name}' has been rebuilt {self.restarts} times, as often as it may be, and was "
                    f"lost again: {loss}; remove it, and add it again",
                    island=name,
                    host=loss.host,
                )
            )
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
        self._settled.set()
        self._release()

    def _end_epoch(self, cause: WaystationError | Loss) -> None:
        """Ends the hosts, and says to calls why."""
        told = self._losses.get(self.epoch)
        if told is not None and not told.done():
            told.set_result(cause)
        end(self._members)
        self._members, self._reports = [], {}

    async def _error_of(
        self, epoch: int, sequence: int, message: Message, names: dict[str, str]
    ) -> WaystationError:
        cause = await asyncio.shield(self._losses[epoch])
        if isinstance(cause, Loss):
            return cause.error(message.program, first_computation(message, names), sequence)
        return cause

    def _release(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            ray.util.remove_placement_group(group)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself does not keep it
        task.add_done_callback(self._tasks.discard)


async def _awaited(reference: Any) -> Any:
    return await reference
