"""An island as a program has it: where it registers functions, and sends what hosts are to do.

A call returns at once; `Pending` has its result. Small arrays can be put and fetched through it. They pass
through the program and the manager, so this is no way for the state of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from waystation._errors import InvalidInput, Unavailable
from waystation.grid import Box
from waystation.runtime.cluster.connection import Connection
from waystation.runtime.cluster.status import IslandStatus
from waystation.runtime.hosts.answers import unwrap
from waystation.runtime.hosts.instructions import (
    Axes,
    Fetched,
    Free,
    Get,
    Handle,
    Instruction,
    Message,
    Put,
    Spec,
    key_of,
)


class Pending:
    """The result of a call that may not have ended.

    Args:
        reference: Ray's.
    """

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def done(self) -> bool:
        """Whether it has ended."""
        import ray

        ready, _ = ray.wait([self._reference], timeout=0)
        return bool(ready)

    def result(self, timeout_s: float | None = None) -> list[tuple[Fetched, ...]]:
        """Waits for the end; for each host what it was asked for.

        Args:
            timeout_s: Seconds to wait at most; None waits as long as it takes.

        Raises:
            TimeoutError: It has not ended by then, and goes on.
            HostLost: A host was lost, and its island with it.
            WaystationError: A host could not do it.
        """
        return list(ask(self._reference, timeout_s))


def ask(reference: Any, timeout_s: float | None = None) -> Any:
    """What the manager answers.

    Raises:
        TimeoutError: It has not by then.
        Unavailable: It has died.
        WaystationError: What it has answered.
    """
    import ray

    try:
        answer = ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(f"there is no answer after {timeout_s:g} s; the call goes on") from None
    except ray.exceptions.RayError as error:
        raise Unavailable(f"the cluster's manager has died, and all islands with it: {error}") from None
    return unwrap(answer)


class Island:
    """Hosts whose devices share one mesh.

    Args:
        connection: The program's.
        status: How it was when it was found.
    """

    def __init__(self, connection: Connection, status: IslandStatus) -> None:
        self._connection = connection
        self._first = status

    def __repr__(self) -> str:
        first = self._first
        return f"Island({self.name!r}, hosts={self.host_count}, devices_per_host={first.devices_per_host})"

    @property
    def name(self) -> str:
        """Its name."""
        return self._first.name

    @property
    def host_count(self) -> int:
        """How many hosts it has."""
        return len(self._first.hosts)

    @property
    def device_count(self) -> int:
        """How many devices it has, on all hosts."""
        return self.host_count * self._first.devices_per_host

    def status(self) -> IslandStatus:
        """How it is now.

        Raises:
            NoSuchIsland: It has been removed.
        """
        from waystation.runtime.hosts.errors import NoSuchIsland

        for status in ask(self._connection.manager.status.remote()).islands:
            if status.name == self.name:
                found: IslandStatus = status
                return found
        raise NoSuchIsland(f"island '{self.name}' has been removed", island=self.name)

    def register(self, exported: Any) -> str:
        """Sends a function to all hosts, once; they compile it in the background.

        Args:
            exported: A `jax.export.Exported`, exported for a mesh of as many devices as the island has.

        Returns:
            The key to call it by.

        Raises:
            InvalidInput: It is for another number of devices.
        """
        if exported.nr_devices != self.device_count:
            raise InvalidInput(
                f"function '{exported.fun_name}' was exported for {exported.nr_devices} devices, and island "
                f"'{self.name}' has {self.device_count}; export it over a mesh of as many"
            )
        data = bytes(exported.serialize())
        key = key_of(data)
        ask(self._connection.manager.register.remote(self.name, key, exported.fun_name, data))
        return key

    def run(
        self,
        instructions: Sequence[Instruction],
        *,
        program: str = "untraced",
        epoch: int | None = None,
    ) -> Pending:
        """Has all hosts do something, after everything that they were told before.

        Args:
            instructions: What, the same for all hosts.
            program: The name of the program, for messages and timelines.
            epoch: The epoch of the island that this was prepared for; None for any.
        """
        message = Message(program, tuple(instructions))
        return Pending(self._connection.submit(self.name, message, epoch))

    def put(self, handle: Handle, array: Any, sharding: Any = None) -> Pending:
        """Makes a buffer of a small array of this program.

        Args:
            handle: The handle that it gets.
            array: What NumPy takes for an array.
            sharding: A `jax.sharding.NamedSharding` over an `AbstractMesh`; by default each device has the
                whole.
        """
        axes: Axes = (("devices", self.device_count),)
        spec: Spec = ()
        if sharding is not None:
            axes = _axes(sharding.mesh)
            spec = tuple(_names(part) for part in sharding.spec)
        return self.run([Put(handle, np.asarray(array), axes, spec)], program="put")

    def get(self, handle: Handle, timeout_s: float | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        """The array of a buffer, whole.

        Raises:
            BufferNotFound: There is none of that handle.
            TimeoutError: There is no answer by then.
        """
        fetched = [each[0] for each in self.run([Get(handle)], program="get").result(timeout_s)]
        blocks = [block for each in fetched for block in each.blocks]
        whole = np.empty(fetched[0].shape, blocks[0][1].dtype)
        for offset, block in blocks:
            whole[_slices((offset, block.shape))] = block
        return whole

    def free(self, *handles: Handle) -> Pending:
        """Forgets buffers, once everything that was told before is done."""
        return self.run([Free(handles)], program="free")


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + extent) for begin, extent in zip(*box, strict=True))


def _axes(mesh: Any) -> Axes:
    return tuple((str(name), int(size)) for name, size in mesh.shape.items())


def _names(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if part is None:
        return ()
    return (part,) if isinstance(part, str) else tuple(part)
