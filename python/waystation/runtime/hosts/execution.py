"""Does what instructions say, with JAX: on a host, one message at a time.

`Execution.begin` dispatches all of a message and returns what waits for it. Buffers are in a table by handle;
what an instruction reads it holds until the message has ended, so a `Free` may follow the last use at once. A
message that fails leaves out what follows in it; what it would have made raises its error from then on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import jax
import numpy as np

from waystation._errors import InvalidInput, WaystationError
from waystation.runtime.execution.functions import Functions
from waystation.runtime.hosts.errors import BufferNotFound, ComputationFailed
from waystation.runtime.hosts.instructions import Exec, Fetched, Free, Get, Handle, Instruction, Message, Put

Note = Callable[[str], None]


class Execution:
    """The buffers and functions of a host.

    Args:
        devices: All devices of the island, in order.
        on_compiled: Called when a function has been waited for.
    """

    def __init__(self, devices: list[jax.Device], on_compiled: Callable[[], None] = lambda: None) -> None:
        self.functions = Functions()
        self.on_compiled = on_compiled
        self._devices = tuple(devices)
        self._buffers: dict[Handle, jax.Array | WaystationError] = {}

    def register(self, key: str, exported: bytes) -> None:
        """Begins to compile a function for all devices of the island, unless that has begun."""
        self.functions.add(key, exported)
        self.functions.prepare(key, self._devices)

    @property
    def buffer_count(self) -> int:
        """How many buffers there are."""
        return len(self._buffers)

    def begin(self, message: Message, note: Note) -> Callable[[], tuple[Fetched, ...]]:
        """Dispatches a message; what it returns waits until all is done and gives what `Get`s have asked for.

        Raises:
            WaystationError: An instruction cannot be carried out.
        """
        made: list[jax.Array] = []
        asked: list[jax.Array] = []
        computation = ""
        for place, instruction in enumerate(message.instructions):
            try:
                match instruction:
                    case Exec():
                        computation = self._exec(message.program, instruction, note, made)
                    case Put():
                        self._buffers[instruction.handle] = self._put(instruction)
                    case Get():
                        asked.append(self._buffer(instruction.handle))
                    case Free():
                        for handle in instruction.handles:
                            self._buffers.pop(handle, None)
            except WaystationError as error:
                self._poison(message.instructions[place:], error)
                raise

        def finish() -> tuple[Fetched, ...]:
            try:
                jax.block_until_ready(made)
                return tuple(_fetched(array) for array in asked)
            except WaystationError:
                raise
            except Exception as error:
                raise _failed(message.program, computation, error) from error

        return finish

    def _exec(self, program: str, instruction: Exec, note: Note, made: list[jax.Array]) -> str:
        if not self.functions.is_ready(instruction.function, self._devices):
            note(f"compile {instruction.name}".rstrip())
        function = self.functions.get(instruction.function, self._devices)
        self.on_compiled()
        name = instruction.name or function.name
        note(name)
        given = (len(instruction.operands), len(instruction.results))
        if given != (len(function.operands), function.result_count):
            raise InvalidInput(
                f"computation '{name}' takes {len(function.operands)} operands and gives "
                f"{function.result_count} results, not {given[0]} and {given[1]}",
                program=program,
                computation=name,
            )
        operands = [
            _lying(self._buffer(handle), sharding, handle, name)
            for handle, sharding in zip(instruction.operands, function.operands, strict=True)
        ]
        try:
            results = function.call(*operands)
        except Exception as error:
            raise _failed(program, name, error) from error
        made.extend(results)
        self._buffers.update(zip(instruction.results, results, strict=True))
        return name

    def _put(self, instruction: Put) -> jax.Array:
        parts = [part[0] if len(part) == 1 else (part or None) for part in instruction.spec]
        mesh = _mesh_of(self._devices, instruction)
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*parts))
        array = instruction.array
        try:
            return jax.make_array_from_callback(array.shape, sharding, lambda place: array[place])
        except ValueError as error:
            raise InvalidInput(f"buffer '{instruction.handle}' cannot be sharded so: {error}") from error

    def _poison(self, left_out: tuple[Instruction, ...], error: WaystationError) -> None:
        """Has those fail who use what was not made: nobody may have waited for the message itself."""
        for instruction in left_out:
            if isinstance(instruction, Exec):
                self._buffers.update(dict.fromkeys(instruction.results, error))
            elif isinstance(instruction, Put):
                self._buffers[instruction.handle] = error

    def _buffer(self, handle: Handle) -> jax.Array:
        found = self._buffers.get(handle)
        if isinstance(found, WaystationError):
            raise copy.copy(found)
        if found is None:
            raise BufferNotFound(
                f"there is no buffer '{handle}': it was not made, was freed, or was lost with its epoch"
            )
        return found


def _mesh_of(devices: tuple[jax.Device, ...], instruction: Put) -> jax.sharding.Mesh:
    sizes = tuple(size for _, size in instruction.axes)
    if math.prod(sizes) != len(devices):
        raise InvalidInput(
            f"buffer '{instruction.handle}' needs a mesh of {math.prod(sizes)} devices, and the island "
            f"has {len(devices)}"
        )
    return jax.sharding.Mesh(np.array(devices).reshape(sizes), tuple(name for name, _ in instruction.axes))


def _lying(array: jax.Array, wanted: jax.sharding.Sharding, handle: Handle, name: str) -> jax.Array:
    """An operand under the sharding that a function names; its shards stay where they are."""
    if array.sharding == wanted:
        return array
    if not array.sharding.is_equivalent_to(wanted, array.ndim):
        raise InvalidInput(
            f"computation '{name}' takes '{handle}' sharded as {wanted}, and it is sharded otherwise: "
            f"{array.sharding}; reshard it first"
        )
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, wanted, shards)


def _fetched(array: jax.Array) -> Fetched:
    blocks = []
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            offset = tuple(part.start or 0 for part in shard.index)
            blocks.append((offset, np.asarray(shard.data)))
    return Fetched(array.shape, tuple(blocks))


def _failed(program: str, computation: str, error: Exception) -> ComputationFailed:
    return ComputationFailed(
        f"computation '{computation}' failed: {type(error).__name__}: {error}",
        program=program,
        computation=computation,
    )
