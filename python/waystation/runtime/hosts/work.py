"""What a host does for messages: programs through `HostExecution`, and what is not a program.

`begin` dispatches a message and returns what waits for its end and says how that was. Failure sequence: an
instruction that fails leaves its error in the buffers that it was to make, the others are done all the same,
and the first error is what the message answers.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from waystation._errors import Fenced, Internal, WaystationError
from waystation.frameworks.jax_public import Device
from waystation.grid import Shape
from waystation.runtime.devices import DeviceId
from waystation.runtime.endings import Ending, TransferEnding
from waystation.runtime.execution import Buffers, Exchange, HostExecution
from waystation.runtime.execution import Run as ListRun
from waystation.runtime.execution.assembly import named_sharding, own_copy
from waystation.runtime.hosts.checkpoints import Checkpoints, Loaded, may_broadcast
from waystation.runtime.hosts.execution_queue import ExecutionQueue, Report, as_exception, is_over
from waystation.runtime.ir import Exec, Sharding
from waystation.runtime.messages import (
    BeginJoining,
    Done,
    EndJoining,
    Fetched,
    Get,
    HostList,
    Identify,
    Instruction,
    Load,
    Message,
    Put,
    Restore,
    Run,
    Said,
    Save,
    Spill,
    is_transfer,
)
from waystation.runtime.resources import Placement
from waystation.runtime.scheduling import ReorderBuffer
from waystation.runtime.timeline import HostRecorder
from waystation.transfers.handle import AsyncResponse

Note = Callable[[str], None]
Finish = Callable[[], Fetched | Said | None]
_PROGRESS_S = 0.1


class _Begun(Ending):
    """What waits for the end of a message.

    Args:
        finishes: Wait for the ends of its instructions.
        end: Calls these, and makes of them what is told.
    """

    def __init__(self, finishes: list[Finish], end: Callable[[list[Finish]], Done]) -> None:
        self._finishes = finishes
        self._end = end

    def __call__(self) -> Done:
        return self._end(self._finishes)

    def is_ready(self) -> bool:
        """See `Ending`."""
        return all(map(is_over, self._finishes))


class _Fetching(Ending):
    """Waits for shards of an array.

    Args:
        shape: The shape of the array.
        shards: Where each begins, and its elements.
    """

    def __init__(self, shape: Shape, shards: list[tuple[Shape, jax.Array]]) -> None:
        self._shape = shape
        self._shards = shards

    def __call__(self) -> Fetched:
        return Fetched(self._shape, tuple((offset, np.asarray(block)) for offset, block in self._shards))

    def is_ready(self) -> bool:
        """See `Ending`."""
        # JAX has it for all arrays, but not in their common type.
        return all(block.is_ready() for _, block in self._shards)  # type: ignore[attr-defined]


class _BegunTransfer(TransferEnding):
    """The same of a message that moves bytes between devices and storage.

    Args:
        finishes: Wait for the ends of its instructions.
        end: Calls these, and makes of them what is told.
        moved: Bytes that have been moved, and bytes to move.
    """

    def __init__(
        self,
        finishes: list[Finish],
        end: Callable[[list[Finish]], Done],
        moved: Callable[[], tuple[int, int]],
    ) -> None:
        self._finishes = finishes
        self._end = end
        self._moved = moved

    def __call__(self) -> Done:
        return self._end(self._finishes)

    def progress(self) -> tuple[int, int]:
        """See `TransferEnding`."""
        return self._moved()


class HostWork:
    """See above.

    Args:
        name: The name of the host.
        devices: All devices of its island, by process and number.
        exchange: How blocks come from other hosts and go there.
        recorder: Stamps what is done.

    Attributes:
        on_progress: Called as a load goes on that later messages wait for.
    """

    def __init__(
        self, name: str, devices: Sequence[Device], exchange: Exchange, recorder: HostRecorder
    ) -> None:
        self._island = name.rpartition("/")[0]
        self._devices = devices
        self._per_host = sum(device.process_index == jax.process_index() for device in devices)
        self._preparing = threading.Lock()  # what follows is of threads that give lists, and of orders
        self._lists: dict[str, HostList] = {}
        self._callers: Counter[str] = Counter()  # how many lists call each function
        self._functions: dict[str, Callable[..., Any]] = {}
        self._checkpoints = Checkpoints()
        self._ended_s = 0.0
        self.on_progress: Callable[[], None] = lambda: None
        self._recorder = recorder
        self.execution: HostExecution = HostExecution(
            name, self._device, exchange, self._functions, recorder=recorder
        )

    @property
    def buffers(self) -> Buffers:
        """The arrays of the host."""
        return self.execution.buffers

    def prepare(
        self,
        listed: HostList,
        functions: Sequence[tuple[str, bytes]],
        host_functions: Sequence[tuple[str, Callable[..., Any]]],
    ) -> None:
        """Takes a list and what it calls, and waits until that is compiled.

        Raises:
            ComputationFailed: A function cannot be compiled.
            FunctionNotFound: One is not known.
        """
        with self._preparing:
            for key, exported in functions:
                self.execution.functions.add(key, exported)
            self._functions.update(host_functions)
            self._lists[listed.fingerprint] = listed
            self._callers.update(_called(listed))
            self.execution.load(listed.fingerprint, listed.low)
        self.execution.wait_until_compiled(listed.fingerprint)

    def forget(self, lists: Sequence[str], functions: Sequence[str]) -> None:
        """Forgets lists, which nothing that is still to begin runs, and functions that no other list calls.

        Args:
            lists: What the lists are known by.
            functions: Keys of functions, and names of host functions.
        """
        with self._preparing:
            for known in lists:
                listed = self._lists.pop(known, None)
                if listed is not None:
                    self._callers.subtract(_called(listed))
                    self.execution.unload(known)
            for name in functions:
                if not self._callers[name]:  # else a list has come meanwhile that calls it
                    del self._callers[name]
                    self.execution.functions.forget(name)
                    self._functions.pop(name, None)

    def calls(self, listed: str) -> set[str]:
        """What a list calls."""
        with self._preparing:
            return _called(self._lists[listed])

    @property
    def code_sizes(self) -> tuple[int, int]:
        """How many lists it has, and how many functions they call."""
        with self._preparing:
            return len(self._lists), sum(count > 0 for count in self._callers.values())

    def is_quick(self, message: Message) -> bool:
        """Whether to dispatch a message waits for nobody."""
        return all(
            isinstance(each, Get) or (isinstance(each, Run) and self.execution.is_quick(each.list))
            for each in message.instructions
        )

    def begin(self, message: Message, note: Note) -> Callable[[], Done]:
        """Dispatches a message; what it returns waits for its end, and may say whether it has to."""
        began_s, began_ns = time.monotonic(), self._recorder.now()
        finishes: list[Finish] = []
        failed: list[WaystationError] = []
        moves: list[Callable[[], tuple[int, int]]] = []
        for instruction in message.instructions:
            try:
                finishes.append(self._begin(message.work, instruction, note, moves))
            except Exception as error:
                told = _told(error)
                self._poison(instruction, told)
                failed.append(told)
        self._recorder.begun(message.work, began_ns)
        if is_transfer(message.instructions):
            end = functools.partial(self._end, message.work, failed)
            return _BegunTransfer(finishes, end, functools.partial(_total, moves))
        return _Begun(finishes, functools.partial(self._end_on_devices, message.work, began_s, failed))

    def _end_on_devices(
        self, work: int, began_s: float, failed: list[WaystationError], finishes: list[Finish]
    ) -> Done:
        done = self._end(work, failed, finishes)
        now_s = time.monotonic()
        # Devices do one message after the other.
        taken_s = now_s - max(began_s, self._ended_s)
        self._ended_s = now_s
        return replace(done, device_seconds=taken_s)

    def _end(self, work: int, failed: list[WaystationError], finishes: list[Finish]) -> Done:
        fetched: list[Fetched] = []
        said: Said = ""
        for each in finishes:
            try:
                found = each()
            except Exception as error:
                failed.append(_told(error))
            else:
                fetched += [found] if isinstance(found, Fetched) else []
                said = found if isinstance(found, str | tuple) else said
        self._recorder.ended(work)
        return Done(work, 0.0, failed[0] if failed else None, tuple(fetched), said)

    def _begin(
        self,
        work: int,
        instruction: Instruction,
        note: Note,
        moves: list[Callable[[], tuple[int, int]]],
    ) -> Finish:
        match instruction:
            case Run():
                return self._run(work, instruction, note)
            case Put():
                self._put(instruction)
            case Get():
                note("get")
                return self._get(instruction)
            case Spill():
                note("spill")
                self.buffers.spill(instruction.handle)
            case Restore():
                self.buffers.restore(instruction.handle)
            case Save():
                note(f"save '{instruction.path}'")
                return self._save(instruction, moves)
            case Load():
                note(f"load '{instruction.path}'")
                return self._load(instruction, moves)
            case BeginJoining() | EndJoining() | Identify():
                note(f"{type(instruction).__name__} of a checkpoint")
                return self._checkpoint(instruction)
        return lambda: None

    def _run(self, work: int, run: Run, note: Note) -> Finish:
        listed = self._lists[run.list]
        if run.peers:
            self.execution.exchange.meet(work, dict(run.peers))
        arguments = tuple(zip(listed.arguments, run.arguments, strict=True))
        results = tuple(zip(listed.results, run.results, strict=True))
        finish = self.execution.begin(ListRun(run.list, work, arguments, results), note)
        if run.consumed:
            self.buffers.free(run.consumed)
        return finish

    def _put(self, put: Put) -> None:
        sharding = self._sharding(put.placement, put.value.sharding)
        array = np.asarray(put.array)
        self.buffers.set(
            put.handle,
            jax.make_array_from_callback(
                array.shape, sharding, lambda place: array[place], dtype=array.dtype
            ),
        )

    def _get(self, get: Get) -> Finish:
        array = self.buffers.get(get.handle)
        # Copies, since a later message may donate the array before this one has ended.
        shards = [
            (tuple(part.start or 0 for part in shard.index), own_copy(shard.data))
            for shard in array.addressable_shards
            if shard.replica_id == 0
        ]
        return _Fetching(array.shape, shards)

    def _save(self, save: Save, moves: list[Callable[[], tuple[int, int]]]) -> Finish:
        arrays = {leaf: self.buffers.get(handle) for leaf, handle in save.arrays}
        with self._elsewhere():
            saving = self._checkpoints.begin_save(save, arrays)
        moves.append(saving.progress)
        return saving.result

    def _checkpoint(self, instruction: BeginJoining | EndJoining | Identify) -> Finish:
        """What is done of storage alone, which no later message needs to wait for."""

        def finish() -> str | None:
            match instruction:
                case BeginJoining():
                    return self._checkpoints.begin_joining(instruction)
                case EndJoining():
                    self._checkpoints.end_joining(instruction)
                    return None
                case Identify():
                    return self._checkpoints.identify(instruction)

        return finish

    def _load(self, instruction: Load, moves: list[Callable[[], tuple[int, int]]]) -> Finish:
        shardings = {
            leaf: self._sharding(placement, value.sharding)
            for leaf, _, value, placement in instruction.arrays
        }
        loading = self._checkpoints.begin_load(instruction, shardings)
        moves.append(loading.progress)

        def finish() -> Said | None:
            try:
                arrays, values = loading.result()
            except Exception as error:
                self._poison(instruction, _told(error))
                raise
            for leaf, handle, _, _ in instruction.arrays:
                self.buffers.set(handle, arrays[leaf])
            # One host answers for all.
            return values if jax.process_index() == instruction.processes[0] else None

        if may_broadcast(instruction):
            with self._elsewhere():
                self._await(loading)
        return finish

    def _await(self, loading: AsyncResponse[Loaded]) -> None:
        """Waits for the end of a load, and tells of its progress."""
        seen = loading.progress()
        ended = threading.Event()
        loading.on_end(lambda _: ended.set())
        while not ended.wait(_PROGRESS_S):
            now = loading.progress()
            if now != seen:
                seen = now
                self.on_progress()

    @contextlib.contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """What is done now runs on no device."""
        self.execution.is_elsewhere = True
        try:
            yield
        finally:
            self.execution.is_elsewhere = False

    def _poison(self, instruction: Instruction, error: WaystationError) -> None:
        made: Sequence[int] = ()
        if isinstance(instruction, Run):
            made = instruction.results
        elif isinstance(instruction, Put):
            made = (instruction.handle,)
        elif isinstance(instruction, Load):
            made = tuple(handle for _, handle, _, _ in instruction.arrays)
        for handle in made:
            self.buffers.set(handle, error)

    def _device(self, device: DeviceId) -> Device:
        return self._devices[int(device.host.rpartition("/")[2]) * self._per_host + device.index]

    def _sharding(self, placement: Placement, sharding: Sharding) -> jax.sharding.NamedSharding:
        return named_sharding(sharding, tuple(map(self._device, placement.devices)))


class WorkQueue:
    """Has a host do messages in their order, and tells what it has done, as much at a time as there is.

    Args:
        name: The name of the host.
        work: Does them.
        tell: Is told what has been done; one thread at a time.
        recorder: Stamps what has come.
        order: Brings messages into their order.
        ends_at_once: See `ExecutionQueue`.
    """

    def __init__(
        self,
        name: str,
        work: HostWork,
        tell: Callable[[list[Done]], None],
        recorder: HostRecorder,
        order: ReorderBuffer[Any] | None = None,
        *,
        ends_at_once: bool = False,
    ) -> None:
        self.name = name
        self._tell = tell
        self._recorder = recorder
        self._telling = threading.Lock()  # what follows is of all threads that end messages
        self._done: list[Done] = []  # what is to be told
        self._queue: ExecutionQueue[Message] = ExecutionQueue(
            work.begin,
            order,
            is_quick=work.is_quick,
            is_transfer=lambda message: is_transfer(message.instructions),
            on_pause=self._tell_done,
            ends_at_once=ends_at_once,
        )
        work.execution.on_compiled = work.on_progress = self._queue.progress

    def begin(self, number: int, message: Message) -> None:
        """Does what a message says, when it is its turn.

        Args:
            number: Its place among all that this host is told.
            message: The message.
        """
        self._recorder.received(message.work)
        self._queue.take(number, message, functools.partial(self._end, message))

    def report(self) -> Report:
        """How far it is."""
        return self._queue.report()

    def close(self) -> None:
        """Lets what has come end; nothing is taken meanwhile, or later."""
        self._queue.close()

    def _end(self, message: Message, done: Done, failed: BaseException | None) -> None:
        if failed is not None:
            error = as_exception(failed)
            if not isinstance(error, WaystationError):
                error = Fenced(f"host '{self.name}' was stopped: {error}")
            done = Done(message.work, 0.0, error)
        with self._telling:
            self._done.append(done)

    def _tell_done(self) -> None:
        with self._telling:
            done, self._done = self._done, []
            if done:
                self._tell(done)


def _called(listed: HostList) -> set[str]:
    """The functions that a list calls."""
    steps = [step for part in listed.low.hosts for step in part.instructions]
    return {step.function for step in steps if isinstance(step, Exec)}


def _total(moves: Sequence[Callable[[], tuple[int, int]]]) -> tuple[int, int]:
    moved = [each() for each in moves]
    return sum(done for done, _ in moved), sum(total for _, total in moved)


def _told(error: Exception) -> WaystationError:
    if isinstance(error, WaystationError):
        return error
    return Internal(f"a host failed: {type(error).__name__}: {error}")
