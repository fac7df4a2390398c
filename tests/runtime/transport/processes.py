"""Hosts in processes of their own, which do what they are told over a pipe.

They are forked where the frameworks are imported: tests have dozens of them.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.programs import context

from waystation.runtime.transport import TcpTransport

SECRET = b"a secret of the tests"
LONG_S = 120.0


class HostProcess:
    """A process with a transport. `call` runs a function there, with the transport as its first argument."""

    def __init__(self, name: str, *, reads_memory: bool = True) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name, reads_memory), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begins a call, whose result `told` gives."""
        self._pipe.send((function, arguments))

    def told(self) -> Any:
        """The result of the call that was begun first; raises what it raised."""
        assert self._pipe.poll(LONG_S), "a host has not answered"
        kind, value = self._pipe.recv()
        if kind == "failed":
            raise value
        return value

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function there."""
        self.tell(function, *arguments)
        return self.told()

    def address(self) -> str:
        """Its address."""
        found: str = self.call(address_of)
        return found

    def leave(self) -> None:
        """Has it end by itself."""
        self._pipe.close()
        self.process.join(LONG_S)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(LONG_S)


@contextmanager
def host_processes(*names: str, reads_memory: bool = True) -> Iterator[list[HostProcess]]:
    """Hosts of these names."""
    hosts = [HostProcess(name, reads_memory=reads_memory) for name in names]
    try:
        yield hosts
    finally:
        for host in hosts:
            if host.process.is_alive():
                host.kill()


def address_of(transport: TcpTransport) -> str:
    """The address of a host."""
    return transport.address


def _serve(pipe: Any, name: str, reads_memory: bool) -> None:
    transport = TcpTransport(name, SECRET, reads_memory=reads_memory)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", function(transport, *arguments)))
        except Exception as error:
            error.add_note(traceback.format_exc())
            pipe.send(("failed", error))
