"""A program between two hosts: takes connections for one of them, and carries bytes, not always well.

`python proxy.py LISTEN_HOST:PORT TARGET_HOST:PORT SEED` prints a line once it listens, and obeys the lines of
its stdin, each answered by a line. It ends when its stdin does.

=================  =======================================================================================
`pass`             carries everything as it is
`corrupt N`        changes a bit of about every N bytes that go to the target, where the seed decides
`delay S`          lets everything wait for so many seconds, in both directions
`hold`             carries nothing more, and closes nothing
`cut`              ends all connections with a reset, and makes no new ones until `pass`
`count`            answers with how many bits it has changed, and how many bytes it has carried
=================  =======================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import sys

_PIECE_BYTES = 64 << 10
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what is closed is reset


class Proxy:
    """Carries bytes between whoever connects and one target."""

    def __init__(self, target: tuple[str, int], seed: int) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._corrupt_every_bytes = 0
        self._until_corrupt = 0
        self._delay_s = 0.0
        self._goes = asyncio.Event()
        self._goes.set()
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self.changed_bits = 0
        self.carried_bytes = 0

    def obey(self, line: str) -> str:
        """Does what a line says; returns the answer."""
        command, _, value = line.partition(" ")
        if command == "count":
            return f"{self.changed_bits} {self.carried_bytes}"
        self._corrupt_every_bytes = int(value) if command == "corrupt" else 0
        self._until_corrupt = self._next_distance()
        self._delay_s = float(value) if command == "delay" else 0.0
        self._is_cut = command == "cut"
        (self._goes.clear if command == "hold" else self._goes.set)()
        if self._is_cut:
            for writer in list(self._writers):
                _reset(writer)
        return "done"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries what one client says, and what it is answered."""
        if self._is_cut:
            return _reset(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            return _reset(writer)
        self._writers |= {writer, far_writer}
        try:
            await asyncio.gather(
                self._carry(reader, far_writer, may_corrupt=True),
                self._carry(far_reader, writer, may_corrupt=False),
            )
        except OSError:
            _reset(writer)
            _reset(far_writer)
        finally:
            self._writers -= {writer, far_writer}
            writer.close()
            far_writer.close()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, may_corrupt: bool
    ) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            await self._goes.wait()
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            writer.write(self._corrupted(piece) if may_corrupt else piece)
            await writer.drain()
            self.carried_bytes += len(piece)
        with contextlib.suppress(OSError):
            writer.write_eof()

    def _corrupted(self, piece: bytes) -> bytes:
        if not self._corrupt_every_bytes:
            return piece
        changed = bytearray(piece)
        while self._until_corrupt < len(changed):
            changed[self._until_corrupt] ^= 1 << self._random.randrange(8)
            self.changed_bits += 1
            self._until_corrupt += self._next_distance()
        self._until_corrupt -= len(changed)
        return bytes(changed)

    def _next_distance(self) -> int:
        return 1 + self._random.randrange(2 * self._corrupt_every_bytes) if self._corrupt_every_bytes else 0


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


async def _main(listen: str, target: str, seed: str) -> None:
    proxy = Proxy(_address(target), int(seed))
    server = await asyncio.start_server(proxy.serve, *_address(listen))
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        answer = proxy.obey(line.strip())
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
    server.close()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
