"""How each system brings a block from the process that has it to the one that wants it.

A *hand-over* begins when the consumer asks the producer for the next block, and ends when its bytes are in an
array of the consumer. The producer has the array in its own memory before. How the consumer asks is each
system's own way: a pipe where it has none. So it includes whatever a system needs to make the block
available: nothing, a copy into an object store, or a registration.
"""

from __future__ import annotations

import multiprocessing
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.systems import UnavailableError

Bytes = npt.NDArray[np.uint8]
SECRET = b"the secret of a benchmark"
WAIT_S = 120.0


class Consumer(ABC):
    """The process that wants blocks; the producer is another, which it starts.

    Args:
        sizes: Of the blocks that will be asked for, in bytes.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)

    @abstractmethod
    def take(self, nbytes: int, number: int) -> Bytes:
        """One hand-over, the next of its number; returns the block."""

    @abstractmethod
    def close(self) -> None:
        """Ends the producer."""


def block(nbytes: int) -> Bytes:
    """What is handed over: bytes that show whether they came."""
    return (np.arange(nbytes, dtype=np.int64) % 251).astype(np.uint8)


class Child:
    """A producer in a process of its own, which is told over a pipe what comes next."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def close(self) -> None:
        self.pipe.close()
        self.process.join(WAIT_S)


class Waystation(Consumer):
    """The transport of the runtime; blocks are asked for before they are offered, as a host's list does."""

    reads_memory = True

    def __init__(self, sizes: Sequence[int]) -> None:
        from waystation.runtime.transport import TcpTransport

        super().__init__(sizes)
        self._child = Child(_offer, self.sizes)
        self._transport = TcpTransport("consumer", SECRET, reads_memory=self.reads_memory)
        self._address: str = self._child.pipe.recv()

    def take(self, nbytes: int, number: int) -> Bytes:
        from waystation.runtime.transport import Key, Wanted

        wanted = [Wanted(Key(number, 0, 0), (nbytes,), np.dtype(np.uint8))]
        fetch = self._transport.fetch(self._address, wanted, deadline_s=WAIT_S)
        self._child.pipe.send((nbytes, number))
        return fetch.result()[0]

    def close(self) -> None:
        self._transport.close()
        self._child.close()


class WaystationNetwork(Waystation):
    """The same, over TCP, as between machines."""

    reads_memory = False


def _offer(pipe: Connection, sizes: Sequence[int]) -> None:
    from waystation.runtime.transport import Key, TcpTransport

    blocks = {nbytes: block(nbytes) for nbytes in sizes}
    transport = TcpTransport("producer", SECRET)
    pipe.send(transport.address)
    for nbytes, number in _told(pipe):
        transport.offer({Key(number, 0, 0): blocks[nbytes]})
    transport.close()


class RawSocket(Consumer):
    """The limit of what goes over TCP: one socket, no frames, no checksums, into memory that is there."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        listener = socket.create_server(("127.0.0.1", 0))
        self._child = Child(_send_raw, listener.getsockname(), self.sizes)
        self._socket, _ = listener.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.close()
        self._memory = {nbytes: np.zeros(nbytes, np.uint8) for nbytes in self.sizes}

    def take(self, nbytes: int, number: int) -> Bytes:
        self._child.pipe.send((nbytes, number))
        view = memoryview(self._memory[nbytes]).cast("B")
        received = 0
        while received < nbytes:
            received += self._socket.recv_into(view[received:])
        return self._memory[nbytes]

    def close(self) -> None:
        self._socket.close()
        self._child.close()


def _send_raw(pipe: Connection, address: tuple[str, int], sizes: Sequence[int]) -> None:
    blocks = {nbytes: block(nbytes) for nbytes in sizes}
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for nbytes, _ in _told(pipe):
            connection.sendall(memoryview(blocks[nbytes]))


class JaxTransfer(Consumer):
    """`jax.experimental.transfer`: the producer registers an array, the consumer pulls it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self._child = Child(_await_pulls, self.sizes)
        self._server = _transfer_server()
        self._connection = self._server.connect(self._child.pipe.recv())

    def take(self, nbytes: int, number: int) -> Bytes:
        import jax

        device = jax.local_devices()[0]
        sharding = jax.sharding.SingleDeviceSharding(device)
        wanted = jax.ShapeDtypeStruct((nbytes,), np.uint8, sharding=sharding)
        self._child.pipe.send((nbytes, number))
        [array] = self._connection.pull(number + 1, [wanted])
        return np.asarray(jax.block_until_ready(array))

    def close(self) -> None:
        self._child.close()


def _transfer_server() -> Any:
    import jax

    try:
        from jax.experimental import transfer
    except ImportError as error:
        raise UnavailableError(f"this JAX has no transfer server: {error}") from error
    client = jax.local_devices()[0].client
    return transfer.start_transfer_server(client, "127.0.0.1:0", ["127.0.0.1:0"])


def _await_pulls(pipe: Connection, sizes: Sequence[int]) -> None:
    import jax

    arrays = {nbytes: jax.block_until_ready(jax.device_put(block(nbytes))) for nbytes in sizes}
    server = _transfer_server()
    pipe.send(server.address())
    for nbytes, number in _told(pipe):
        server.await_pull(number + 1, [arrays[nbytes]])


class RaySameNode(Consumer):
    """Ray's object store: an actor puts the array, this process gets it, which maps it without a copy."""

    node = "near"

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        try:
            import ray
            from ray.cluster_utils import Cluster
        except ImportError as error:
            raise UnavailableError(f"Ray is not installed: {error}") from error
        memory = 4 * max(sizes) + (256 << 20)
        self._cluster = Cluster()
        self._cluster.add_node(num_cpus=2, resources={"near": 1}, object_store_memory=memory)
        if self.node == "far":
            self._cluster.add_node(num_cpus=2, resources={"far": 1}, object_store_memory=memory)
        ray.init(address=self._cluster.address, log_to_driver=False, configure_logging=False)
        self._get = ray.get
        actor = ray.remote(resources={self.node: 1})(_Puts)
        self._producer: Any = actor.remote(self.sizes)
        ray.get(self._producer.ready.remote())

    def take(self, nbytes: int, number: int) -> Bytes:
        found: Bytes = self._get(self._producer.put.remote(nbytes))
        return found

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


class RayOtherNode(RaySameNode):
    """The same from an actor of another node, so that the bytes go from one object store to another."""

    node = "far"


class _Puts:
    """The actor that has the arrays: what a call returns is put into the object store."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._blocks = {nbytes: block(nbytes) for nbytes in sizes}

    def ready(self) -> None:
        """Answers once it has them."""

    def put(self, nbytes: int) -> Bytes:
        """The array of a size."""
        return self._blocks[nbytes]


def _told(pipe: Connection) -> Any:
    """What the consumer asks for, until it is gone."""
    while True:
        try:
            yield pipe.recv()
        except (EOFError, ConnectionResetError):
            return


SYSTEMS: dict[str, type[Consumer]] = {
    "waystation": Waystation,
    "waystation, TCP": WaystationNetwork,
    "raw socket": RawSocket,
    "jax transfer": JaxTransfer,
    "ray, same node": RaySameNode,
    "ray, other node": RayOtherNode,
}
