"""Hosts that do what hosts should not, for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from waystation.runtime.hosts.answers import answering, unwrap
from waystation.runtime.hosts.host import Health, Host
from waystation.runtime.hosts.world import World, free_address
from waystation.runtime.messages import Load, Message, Run, Save
from waystation.runtime.scheduling import ReorderBuffer
from waystation.transfers.handle import AsyncResponse, Progress


class DeafHost(Host):
    """The last of two does not hear messages of the program `unheard`; the first offers a taken port once.

    So is a host whose message was lost on the way: the others wait for it in their collectives. The first
    time that one is asked how it is, it fails to say.
    """

    _asked = 0

    @answering
    async def health(self) -> Health:
        self._asked += 1
        if self._asked == 1:
            raise RuntimeError("an array has been deleted")
        return unwrap(await super().health())

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


class CutHost(Host):
    """Loses its connection to the controller at the first message of the program `cut`, and lives on."""

    def begin(self, number: int, message: Message) -> None:
        if message.program == "cut":
            assert self._control is not None
            self._control.close()
        super().begin(number, message)


class SlowHost(Host):
    """Ends a save or a load once the file beside its checkpoint is there whose name has `.go` at its end: as
    hosts do whose storage is slow."""

    def _join(self, world: World, address: str) -> tuple[tuple[str, ...], str]:
        joined = super()._join(world, address)
        checkpoints = self._work._checkpoints
        checkpoints.begin_save = _slow(checkpoints.begin_save)
        checkpoints.begin_load = _slow(checkpoints.begin_load)
        return joined


def _slow(begin: Callable[..., AsyncResponse[Any]]) -> Callable[..., AsyncResponse[Any]]:
    def slowly(instruction: Save | Load, *arguments: Any) -> AsyncResponse[Any]:
        began = begin(instruction, *arguments)

        def wait(progress: Progress) -> Any:
            del progress
            while not Path(f"{instruction.path}.go").exists():
                time.sleep(0.05)
            return began.result()

        return AsyncResponse(f"{began!r}, slowly", wait)

    return slowly


class HeldHost(Host):
    """Begins the first preparation only when the second has ended: they are done in any order."""

    def __init__(self, name: str, epoch: int) -> None:
        super().__init__(name, epoch)
        self._preparations = 0
        self._second = asyncio.Event()

    async def prepare(self, *arguments: Any) -> Any:
        self._preparations += 1
        is_first = self._preparations == 1
        if is_first:
            await self._second.wait()
        try:
            return await super().prepare(*arguments)
        finally:
            if not is_first:
                self._second.set()


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
