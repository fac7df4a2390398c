"""Hosts that do what hosts should not, for tests."""

from __future__ import annotations

from typing import Any

import ray

from waystation.runtime.hosts.answers import answering
from waystation.runtime.hosts.host import Host
from waystation.runtime.hosts.world import free_address
from waystation.runtime.messages import Message, Run
from waystation.runtime.scheduling import ReorderBuffer


class DeafHost(Host):
    """The last of two does not hear messages of the program `unheard`; the first offers a taken port once.

    So is a host whose message was lost on the way: the others wait for it in their collectives.
    """

    @answering
    async def free_address(self, attempt: int) -> str:
        here = ray.util.get_node_ip_address()
        if attempt == 0:
            # The port of Ray itself: something listens there for certain.
            return f"{here}:{ray.get_runtime_context().gcs_address.rpartition(':')[2]}"
        return free_address(here)

    def begin(self, number: int, message: Message) -> None:
        if not (self.name.endswith("/1") and message.program == "unheard"):
            super().begin(number, message)


class UnorderedHost(Host):
    """The last of two begins runs two by two, the later of them first: as hosts do that nobody orders."""

    def order(self) -> Any:
        return _Swapped(self._epoch) if self.name.endswith("/1") else super().order()


class _Swapped(ReorderBuffer[Any]):
    def __init__(self, epoch: int) -> None:
        super().__init__(epoch)
        self._held: list[Any] = []

    def add(self, epoch: int, sequence: int, message: Any) -> list[Any]:
        ready = []
        for entry in super().add(epoch, sequence, message):
            if not any(isinstance(each, Run) for each in entry.message.instructions):
                ready += [*self._held, entry]
                self._held = []
            elif self._held:
                ready += [entry, self._held.pop()]
            else:
                self._held = [entry]
        return ready
