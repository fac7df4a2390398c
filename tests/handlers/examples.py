"""Things that handlers save, and handlers written as those of Orbax are: they import nothing of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any


class Counter:
    """Something that no library knows."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


@dataclass
class AbstractCounter:
    """What stands for a counter; it adds when it is loaded."""

    add: int = 0


class CounterHandler:
    """Handles counters, in two phases."""

    file = "value.json"
    mark = "plain"

    async def save(self, directory: Any, checkpointable: Counter) -> Awaitable[None]:
        value = checkpointable.value

        async def write() -> None:
            path = await directory.await_creation()
            (path / self.file).write_text(json.dumps([self.mark, value]))

        return write()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Counter]:
        add = abstract_checkpointable.add if abstract_checkpointable is not None else 0

        async def read() -> Counter:
            mark, value = json.loads((directory / self.file).read_text())
            assert mark == self.mark, f"{type(self).__name__} was given what a {mark} has saved"
            return Counter(value + add)

        return read()

    async def metadata(self, directory: Any) -> AbstractCounter:
        return AbstractCounter()

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, Counter)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return isinstance(abstract_checkpointable, AbstractCounter)


class OtherCounterHandler(CounterHandler):
    """Handles the same."""

    mark = "other"


class SubdirectoryHandler(CounterHandler):
    """Puts its file below a directory of its own making."""

    async def save(self, directory: Any, checkpointable: Counter) -> Awaitable[None]:
        below, value = directory / "deep", checkpointable.value

        async def write() -> None:
            path = await below.await_creation()
            path.mkdir()
            (path / "er").mkdir()
            (path / "er" / "value.txt").write_text(str(value))
            (path / "empty").write_bytes(b"")

        return write()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Counter]:
        async def read() -> Counter:
            return Counter(int((directory / "deep" / "er" / "value.txt").read_text()))

        return read()


class TaskHandler(CounterHandler):
    """Begins to write in the first phase, with a task that goes on in the second."""

    async def save(self, directory: Any, checkpointable: Counter) -> Awaitable[None]:
        rest = await super().save(directory, checkpointable)

        async def write() -> None:
            await asyncio.sleep(0.01)
            await rest

        return asyncio.get_running_loop().create_task(write())


class Failing(CounterHandler):
    """Fails where it is told to."""

    phase = ""
    error: BaseException = RuntimeError("told to fail")

    async def save(self, directory: Any, checkpointable: Counter) -> Awaitable[None]:
        rest = await super().save(directory, checkpointable)

        async def write() -> None:
            await rest
            self._fail("save in the background")

        if self.phase == "save":
            rest.close()  # type: ignore[attr-defined]
        self._fail("save")
        return write()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Counter]:
        self._fail("load")
        rest = await super().load(directory, abstract_checkpointable)

        async def read() -> Counter:
            value = await rest
            self._fail("load in the background")
            return value

        return read()

    async def metadata(self, directory: Any) -> AbstractCounter:
        self._fail("metadata")
        return await super().metadata(directory)

    def _fail(self, phase: str) -> None:
        if type(self).phase == phase:
            raise type(self).error


class Iterator:
    """Saves itself, as iterators over data sets do; what it saves it takes when it is asked to."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    async def save(self, directory: Any) -> Awaitable[None]:
        position = self.position

        async def write() -> None:
            path = await directory.await_creation()
            (path / "position.txt").write_text(str(position))

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        async def read() -> None:
            self.position = int((directory / "position.txt").read_text())

        return read()
