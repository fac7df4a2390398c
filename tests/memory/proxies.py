"""Proxies that lie between hosts, told from a test what to do; what they can is said in `proxy`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from tests.memory import proxy as program
from tests.memory.namespaces import Network, Started


class Proxy:
    """One that runs.

    Attributes:
        address: Where it listens.
    """

    def __init__(self, started: Started, address: str) -> None:
        self.address = address
        self.started = started
        assert self._hear() == "listening"

    def tell(self, command: str) -> None:
        """Has it do something from now on."""
        assert self._ask(command) == "done"

    @property
    def changed_bits(self) -> int:
        """How many bits it has changed."""
        return int(self._ask("count").split()[0])

    @property
    def carried_bytes(self) -> int:
        """How many bytes it has carried, in both directions."""
        return int(self._ask("count").split()[1])

    def _ask(self, line: str) -> str:
        assert self.started.entered.stdin is not None
        self.started.entered.stdin.write(line + "\n")
        self.started.entered.stdin.flush()
        return self._hear()

    def _hear(self) -> str:
        assert self.started.entered.stdout is not None
        return str(self.started.entered.stdout.readline()).strip()


@contextlib.contextmanager
def between(network: Network, target: str, *, port: int, seed: int) -> Iterator[Proxy]:
    """A proxy on the bridge: what connects to its port there is carried to the target."""
    address = f"{network.address}:{port}"
    command = [sys.executable, "-IS", program.__file__, address, target, seed]
    started = network.start_between(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    entered = started.entered
    assert entered.stdin is not None
    assert entered.stdout is not None
    with entered.stdin, entered.stdout:
        try:
            yield Proxy(started, address)
        finally:
            started.kill()
