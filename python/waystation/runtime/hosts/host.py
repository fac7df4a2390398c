"""A host: the Ray actor that owns devices and does what its island's manager tells it.

One process, one epoch: when its island is lost it is killed, and another takes its place in the next epoch.
Calls answer in the event loop of the actor; the work is done by the threads of its lane. `health` and
`attend` are called in the concurrency group `CONTROL`, which has a loop of its own, so they answer whatever
the others do. Methods give answers (`waystation.runtime.hosts.answers`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import ray

from waystation._errors import Fenced
from waystation.runtime.hosts.answers import answering
from waystation.runtime.hosts.instructions import Fetched, Message
from waystation.runtime.hosts.lane import Lane, Report
from waystation.runtime.hosts.order import BySequence
from waystation.runtime.hosts.world import Process, World, die_with_parent, free_address, join

CONTROL = "control"


@dataclass(frozen=True, slots=True)
class Description:
    """What a host says of itself.

    Attributes:
        node: The Ray node that it runs on.
        address: That node's address.
        process: Its process.
        devices: Its devices, as JAX shows them.
    """

    node: str
    address: str
    process: Process
    devices: tuple[str, ...]


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
        self._lane: Lane[Message] | None = None
        self._execution: Any = None

    def order(self) -> Any:
        """What orders its messages."""
        return BySequence()

    @answering
    async def describe(self) -> Description:
        """Where it runs, before it has devices."""
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        return Description(context.get_node_id(), address, Process.own(), ())

    @answering
    async def free_address(self, attempt: int) -> str:
        """An address of its own for the coordination service of the world, another for each attempt."""
        del attempt  # ports are chosen by the system
        return free_address(ray.util.get_node_ip_address())

    @answering
    async def join(self, world: World) -> tuple[str, ...]:
        """Gets its devices and meets the other hosts of the island; returns its devices."""
        return await asyncio.to_thread(self._join, world)

    def _join(self, world: World) -> tuple[str, ...]:
        join(world)
        import jax

        from waystation.runtime.hosts.execution import Execution

        self._execution = execution = Execution(jax.devices())
        self._lane = Lane(execution.begin, self.order())
        execution.on_compiled = self._lane.progress
        return tuple(map(str, jax.local_devices()))

    @answering
    async def register(self, key: str, exported: bytes) -> None:
        """Begins to compile a function, unless it is known."""
        self._execution.register(key, exported)

    @answering
    async def run(self, epoch: int, sequence: int, message: Message) -> tuple[Fetched, ...]:
        """Does what a message says once it is its turn; returns what it asks for when all is done.

        Raises:
            Fenced: The message is for another epoch.
        """
        if epoch != self._epoch or self._lane is None:
            raise Fenced(f"host '{self.name}' is of epoch {self._epoch}, the message of epoch {epoch}")
        result: tuple[Fetched, ...] = await asyncio.wrap_future(self._lane.submit(sequence, message))
        return result

    @answering
    async def health(self) -> Report:
        """How far it is."""
        if self._lane is None:
            return Report(0, 0, 0, "", 0.0)
        return self._lane.report()

    async def attend(self) -> None:
        """Never returns: whoever waits for it hears of the end of this process."""
        await asyncio.Event().wait()
