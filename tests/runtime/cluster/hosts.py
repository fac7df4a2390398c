"""Hosts that do what hosts should not, for tests."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from waystation.runtime.hosts.answers import answering
from waystation.runtime.hosts.host import Host
from waystation.runtime.hosts.instructions import Message
from waystation.runtime.hosts.world import free_address


class DeafHost(Host):
    """The last of two ignores messages of the program `unheard`; the first offers a taken port once.

    Its `run` is that of a host whose message was lost on the way: the others wait for it in their
    collectives.
    """

    @answering
    async def free_address(self, attempt: int) -> str:
        here = ray.util.get_node_ip_address()
        if attempt == 0:
            # The port of Ray itself: something listens there for certain.
            return f"{here}:{ray.get_runtime_context().gcs_address.rpartition(':')[2]}"
        return free_address(here)

    async def run(self, epoch: int, sequence: int, message: Message) -> Any:
        if message.program == "unheard" and self.name.endswith("/1"):
            await asyncio.Event().wait()
        return await super().run(epoch, sequence, message)
