"""A slow link: `python -m benchmarks.storage.delay TARGET_PORT ROUND_TRIP_S [REQUESTS_PER_S]`.

Passes connections on to a port of this machine. What is sent arrives half a round trip later in each
direction, and a new connection costs a round trip more, as its handshake would. The rate of bytes is not
bounded. HTTP requests are counted, and with REQUESTS_PER_S each waits for its turn.

Prints its own port, and the number of requests so far for each line of its standard input. It ends with that.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

CHUNK_BYTES = 1 << 20
MOST_UNDER_WAY = 256
METHODS = {b"GET", b"HEAD", b"PUT", b"POST", b"DELETE"}


class Requests:
    """Counts requests, and lets a bounded number through each second.

    A client sends its next request on a connection once it has the answer to the last, so a request begins
    what is received.
    """

    def __init__(self, per_s: float | None) -> None:
        self.count = 0
        self._interval_s = 1 / per_s if per_s else 0.0
        self._next_s = 0.0

    async def take_turn(self, data: bytes) -> None:
        """Waits until data may be passed on."""
        if data.split(b" ", 1)[0] not in METHODS:
            return
        self.count += 1
        now_s = asyncio.get_running_loop().time()
        turn_s = max(now_s, self._next_s)
        self._next_s = turn_s + self._interval_s
        await asyncio.sleep(turn_s - now_s)


async def _pump(
    source: socket.socket, target: socket.socket, delay_s: float, requests: Requests | None
) -> None:
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
            if requests is not None:
                await requests.take_turn(data)
            await under_way.put((loop.time() + delay_s, data))
        await arriving
    finally:
        arriving.cancel()


async def _connect(accepted: socket.socket, port: int, round_trip_s: float, requests: Requests) -> None:
    loop = asyncio.get_running_loop()
    with accepted, socket.socket() as own:
        own.setblocking(False)
        for end in (accepted, own):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.sleep(round_trip_s)
        with contextlib.suppress(OSError):
            await loop.sock_connect(own, ("127.0.0.1", port))
            delay_s = round_trip_s / 2
            await asyncio.gather(_pump(accepted, own, delay_s, requests), _pump(own, accepted, delay_s, None))


async def serve(port: int, round_trip_s: float, requests_per_s: float | None) -> None:
    """Passes connections on until standard input ends."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    requests = Requests(requests_per_s)

    def asked() -> None:
        if sys.stdin.readline():
            print(requests.count, flush=True)
        else:
            ended.set()

    loop.add_reader(sys.stdin, asked)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        listening.setblocking(False)
        print(listening.getsockname()[1], flush=True)
        connections: set[asyncio.Task[None]] = set()

        async def accept() -> None:
            while True:
                accepted, _ = await loop.sock_accept(listening)
                accepted.setblocking(False)
                connection = asyncio.create_task(_connect(accepted, port, round_trip_s, requests))
                connections.add(connection)
                connection.add_done_callback(connections.discard)

        accepting = asyncio.create_task(accept())
        await ended.wait()
        accepting.cancel()
        for connection in connections:
            connection.cancel()


if __name__ == "__main__":
    asyncio.run(
        serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else None)
    )
