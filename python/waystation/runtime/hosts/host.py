"""A host: the Ray actor that owns devices and does what its island's manager tells it.

One process, one epoch: when its island is lost it is killed, and another takes its place in the next epoch.
It has a connection to the controller (`waystation.runtime.control`), over which it is told what to do, and
tells what is done, as much at a time as there is; the work is done by its execution queue, in order: what
waits for nobody is begun by the thread that hears of it, and the threads that wait for results tell of them.
What is rare, and its life and death, go by Ray: `health`, `stamps` and `attend` are called in the group
`CONTROL`, which has a loop of its own, so they answer whatever the others do. Methods that answer give
answers (`waystation.runtime.hosts.answers`).
"""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from waystation._errors import Unavailable
from waystation.runtime.control.connector import Connector
from waystation.runtime.control.host_messages import (
    AbandonWork,
    BeginMessage,
    ForgetCode,
    ReleaseBuffers,
    pack_done,
    unpack_told,
)
from waystation.runtime.control.packing import Packer, Unpacker
from waystation.runtime.errors import FunctionNotFound
from waystation.runtime.hosts.answers import answering
from waystation.runtime.hosts.execution_queue import Report
from waystation.runtime.hosts.idleness import Idleness
from waystation.runtime.hosts.world import Process, World, die_with_parent, free_address, join, name_in
from waystation.runtime.messages import Done, HostList, Message, host_function_name
from waystation.runtime.scheduling import ReorderBuffer
from waystation.runtime.timeline import HostRecorder, Stamps
from waystation.runtime.transport import TcpTransport

CONTROL = "control"


@dataclass(frozen=True, slots=True)
class Description:
    """What a host says of itself.

    Attributes:
        node: The Ray node that it runs on.
        address: That node's address.
        process: Its process.
        devices: Its devices, as JAX shows them.
        transport: Where other hosts fetch blocks from it.
    """

    node: str
    address: str
    process: Process
    devices: tuple[str, ...] = ()
    transport: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """How a host is.

    Attributes:
        report: How far it is.
        array_bytes: Bytes of arrays on its devices.
        sent_bytes: Bytes that it has sent to other hosts.
        programs: Lists that it was given and has not been told to forget.
        functions: Functions that these call.
    """

    report: Report
    array_bytes: int = 0
    sent_bytes: int = 0
    programs: int = 0
    functions: int = 0


class Host:
    """The actor.

    Args:
        name: Its name, as people see it.
        epoch: The epoch of its island.
    """

    def __init__(self, name: str, epoch: int) -> None:
        die_with_parent()
        self.name = name
        self._epoch = epoch
        self._control: Connector | None = None
        self._queue: Any = None
        self._work: Any = None
        self._transfers: Any = None
        self._recorder = HostRecorder()
        self._packer = Packer()
        self._idleness: Idleness | None = None

    def order(self) -> Any:
        """What orders its messages."""
        return ReorderBuffer(self._epoch)

    @answering
    async def describe(self) -> Description:
        """Where it runs, before it has devices."""
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        return Description(context.get_node_id(), address, Process.own())

    @answering
    async def free_address(self, attempt: int) -> str:
        """An address of its own for the coordination service of the world, another for each attempt."""
        del attempt  # ports are chosen by the system
        return free_address(ray.util.get_node_ip_address())

    @answering
    async def join(self, world: World) -> tuple[tuple[str, ...], str]:
        """Gets its devices and meets the other hosts of the island; returns its devices, and where other
        hosts fetch blocks from it."""
        return await asyncio.to_thread(self._join, world, ray.util.get_node_ip_address())

    def _join(self, world: World, address: str) -> tuple[tuple[str, ...], str]:
        join(world)
        import jax

        from waystation.runtime.hosts.transfers import Transfers
        from waystation.runtime.hosts.work import HostWork, WorkQueue

        # An address that is out of date leads to nobody else: the name is of this epoch alone.
        transport = TcpTransport(name_in(self._epoch, self.name), world.secret, address)
        self._transfers = Transfers(transport, self._recorder)
        self._work = work = HostWork(self.name, jax.devices(), self._transfers, self._recorder)
        self._control = control = Connector(world.controller, world.credential)
        tell = functools.partial(self._tell, control)
        self._queue = WorkQueue(self.name, work, tell, self._recorder, self.order())
        self._idleness = Idleness() if world.kind == "cpu" else None
        threading.Thread(target=self._hear, args=(control,), name="waystation: orders", daemon=True).start()
        return tuple(map(str, jax.local_devices())), transport.address

    @answering
    async def prepare(
        self,
        listed: HostList,
        exported: Sequence[tuple[str, bytes]],
        host_functions: Sequence[tuple[str, bytes]],
    ) -> None:
        """Takes a list and what it calls; answers when that is compiled."""
        await asyncio.to_thread(self._prepare, listed, exported, host_functions)

    def _prepare(
        self,
        listed: HostList,
        exported: Sequence[tuple[str, bytes]],
        host_functions: Sequence[tuple[str, bytes]],
    ) -> None:
        loaded = [(name, _loaded(name, pickled)) for name, pickled in host_functions]
        self._work.prepare(listed, exported, loaded)

    def begin(self, number: int, message: Message) -> None:
        """Does what a message says, when it is its turn.

        Args:
            number: Its place among all that this host is told.
            message: The message.
        """
        self._queue.begin(number, message)

    def _hear(self, control: Connector) -> None:
        """Does what the controller tells, until the connection ends; then the controller ends this host."""
        unpacker = Unpacker()
        try:
            while (body := control.receive()) is not None:
                for told in unpack_told(unpacker.open(body)):
                    match told:
                        case BeginMessage(number, message):
                            self.begin(number, message)
                        case ReleaseBuffers(handles):
                            self._work.buffers.free(handles)
                        case AbandonWork(work, error, has_ended):
                            self._transfers.abandon(work, error, has_ended=has_ended)
                        case ForgetCode(lists, functions):
                            self._work.forget(lists, functions)
        finally:
            control.close()

    def _tell(self, control: Connector, done: list[Done]) -> None:
        """Tells the controller what is done."""
        is_told = False
        try:
            control.send(pack_done(done, self._packer))
            is_told = True
        except Unavailable:
            pass  # the connection has ended
        finally:
            if not is_told:
                control.close()

    @answering
    async def health(self) -> Health:
        """How it is."""
        if self._queue is None:
            return Health(Report(0, 0, 0, "", 0.0))
        report: Report = self._queue.report()
        if report.begun == report.ended + len(report.moving) + 1:
            report = replace(report, awaits=self._transfers.awaited)
        idle_s = None if self._idleness is None else self._idleness.idle_s()
        report = replace(report, is_elsewhere=self._work.execution.is_elsewhere, idle_s=idle_s)
        sizes = self._work.buffers.held_bytes, self._transfers.sent_bytes
        return Health(report, *sizes, *self._work.code_sizes)

    @answering
    async def stamps(self, after: int, after_names: int, is_wanted: bool) -> Stamps:
        """What it has stamped since, and whether it is to go on with that."""
        self._recorder.is_on = is_wanted
        return self._recorder.collect(after, after_names)

    async def attend(self) -> None:
        """Never returns: whoever waits for it hears of the end of this process."""
        await asyncio.Event().wait()


def _loaded(name: str, pickled: bytes) -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = pickle.loads(pickled)  # noqa: S301 a program's own
    except Exception as error:
        raise FunctionNotFound(
            f"host function '{host_function_name(name)}' cannot be loaded on a host: {type(error).__name__}: "
            f"{error}; hosts must be able to import its module"
        ) from error
    return function
