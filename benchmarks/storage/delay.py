"""A link with a delay: `python -m benchmarks.storage.delay TARGET_PORT ROUND_TRIP_S`.

Passes connections on to a port of this machine. What is sent arrives half a round trip later in each
direction, and a new connection costs a round trip more, as its handshake would. The rate is not bounded.
Prints its own port, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

CHUNK_BYTES = 1 << 20
MOST_UNDER_WAY = 256


async def _pump(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_UNDER_WAY)

    async def arrive() -> None:
        while True:
            due_s, data = await under_way.get()
            await asyncio.sleep(due_s - loop.time())
            if not data:
                with contextlib.suppress(OSError):
                    target.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(target, data)

    arriving = asyncio.create_task(arrive())
    try:
        data = b"-"
        while data:
            data = await loop.sock_recv(source, CHUNK_BYTES)
            await under_way.put((loop.time() + delay_s, data))
        await arriving
    finally:
        arriving.cancel()


async def _connect(accepted: socket.socket, port: int, round_trip_s: float) -> None:
    loop = asyncio.get_running_loop()
    with accepted, socket.socket() as own:
        own.setblocking(False)
        for end in (accepted, own):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.sleep(round_trip_s)
        with contextlib.suppress(OSError):
            await loop.sock_connect(own, ("127.0.0.1", port))
            delay_s = round_trip_s / 2
            await asyncio.gather(_pump(accepted, own, delay_s), _pump(own, accepted, delay_s))


async def serve(port: int, round_trip_s: float) -> None:
    """Passes connections on until standard input ends."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin, ended.set)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        listening.setblocking(False)
        print(listening.getsockname()[1], flush=True)
        connections: set[asyncio.Task[None]] = set()

        async def accept() -> None:
            while True:
                accepted, _ = await loop.sock_accept(listening)
                accepted.setblocking(False)
                connection = asyncio.create_task(_connect(accepted, port, round_trip_s))
                connections.add(connection)
                connection.add_done_callback(connections.discard)

        accepting = asyncio.create_task(accept())
        await ended.wait()
        accepting.cancel()
        for connection in connections:
            connection.cancel()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
