"""Something to save whose saving the test holds up, or lets fail, in the background."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any


class Gate:
    """A checkpointable that is being written until it is opened; then that succeeds, or fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.opened = threading.Event()
        self.began = threading.Event()
        self._failure = failure

    def open(self) -> None:
        self.opened.set()

    async def save(self, directory: Any) -> Awaitable[None]:
        async def write() -> None:
            self.began.set()
            while not self.opened.is_set():
                await asyncio.sleep(0.002)
            if self._failure is not None:
                raise self._failure
            ((await directory.await_creation()) / "gate").write_text("open")

        return write()

    async def load(self, directory: Path) -> Awaitable[None]:
        async def read() -> None:
            assert (directory / "gate").read_text() == "open"

        return read()
