"""Does what lists say, with JAX: the lists of one host, one run after the other.

`begin` dispatches all of a list, ahead of the devices, and returns what waits for its end. Failure sequence:
what cannot be made is *poisoned*, with an error that names program, computation, host and devices; the list
goes on to its end, and everything that depends on it has the same error. Since other hosts may be in the same
collective, a call is not left out where only its operands are poisoned: it runs on zeros. What cannot be
compiled fails on all hosts alike, and is left out. A failure on a device shows when it is waited for, and
poisons what has been made by then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax

from waystation._errors import Internal, WaystationError
from waystation.grid import relative_to
from waystation.runtime.errors import ComputationFailed, FunctionNotFound
from waystation.runtime.execution.assembly import Assembly, Block, copied, cut
from waystation.runtime.execution.buffers import Buffers
from waystation.runtime.execution.exchange import Exchange
from waystation.runtime.execution.functions import Functions
from waystation.runtime.execution.lists import FindDevice, LoadedList, Run
from waystation.runtime.execution.observed import ObservedCalls
from waystation.runtime.ir import Copy, Exec, LowProgram, Recv, Send
from waystation.runtime.ir.low import Free
from waystation.runtime.timeline import HostRecorder

Note = Callable[[str], None]
# Takes for each operand the local shards and where they begin; gives for each result one block a device.
HostFunction = Callable[..., Sequence[Sequence[Block]]]


class HostExecution:
    """The arrays, functions and lists of a host.

    Args:
        host: Its name.
        find_device: The JAX device of each device of its slices, those of other hosts of the island too.
        exchange: How blocks come from other hosts and go there.
        host_functions: What host calls can call, by name.
        on_compiled: Called when a function has been waited for.
        recorder: Stamps what devices do; by default nobody does.
    """

    def __init__(
        self,
        host: str,
        find_device: FindDevice,
        exchange: Exchange,
        host_functions: Mapping[str, HostFunction] | None = None,
        on_compiled: Callable[[], None] = lambda: None,
        recorder: HostRecorder | None = None,
    ) -> None:
        self.host = host
        self.recorder = HostRecorder() if recorder is None else recorder
        self.functions = Functions()
        self.buffers = Buffers()
        self.exchange = exchange
        self.host_functions: Mapping[str, HostFunction] = {} if host_functions is None else host_functions
        self.on_compiled = on_compiled
        self._find_device = find_device
        self._lists: dict[str, LoadedList] = {}

    def load(self, key: str, program: LowProgram) -> None:
        """Takes a list, and begins to compile what it calls; one that is known stays."""
        if key not in self._lists:
            self._lists[key] = LoadedList(program, self.host, self._find_device, self.functions)

    def wait_until_compiled(self, key: str) -> None:
        """Waits until everything that a list calls is compiled.

        Raises:
            FunctionNotFound: No list of that key was loaded, or a function was not registered.
            ComputationFailed: A function cannot be compiled.
        """
        loaded = self._list(key)
        for step in loaded.instructions:
            if isinstance(step, Exec) and step.kind == "compute":
                self.functions.get(step.function, loaded.devices[step.slice], step.donated)

    def unload(self, key: str) -> None:
        """Forgets a list."""
        self._lists.pop(key, None)

    def begin(self, run: Run, note: Note) -> Callable[[], None]:
        """Dispatches a list; what it returns waits until all is done.

        Returns:
            Waits, and raises the first error of the run, which its results have too.

        Raises:
            FunctionNotFound: No list of that key was loaded.
        """
        frame = _Frame(self, self._list(run.list), run, note)
        try:
            frame.dispatch()
        except Exception as error:  # nobody may ever wait for this run itself
            frame.fail(error)
            raise
        return frame.finish

    def _list(self, key: str) -> LoadedList:
        found = self._lists.get(key)
        if found is None:
            raise FunctionNotFound(f"host '{self.host}' has no list '{key}'; load it before it is run")
        return found


class _Frame:
    """One run on one host."""

    def __init__(self, execution: HostExecution, loaded: LoadedList, run: Run, note: Note) -> None:
        self._execution = execution
        self._loaded = loaded
        self._run = run
        self._note = note
        self._arrays: dict[int, jax.Array] = {}
        self._making: dict[int, Assembly] = {}
        self._errors: dict[int, WaystationError] = {}
        self._called: list[tuple[Exec, str]] = []
        self._awaited: list[tuple[Exec, str, list[jax.Array]]] = []
        self._last: tuple[jax.Array, ...] = ()
        self._first: WaystationError | None = None
        self._arguments = {number for number, _ in run.arguments}
        self._results = {number for number, _ in run.results}
        self._observed = ObservedCalls(execution.recorder, run.run)

    # ---- dispatch ------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Begins everything."""
        execution, loaded = self._execution, self._loaded
        execution.exchange.expect(self._run.run, loaded.expected)
        self._take_arguments()
        for step in loaded.instructions:
            match step:
                case Exec():
                    self._exec(step)
                case Send():
                    self._send(step)
                case Recv():
                    self._recv(step)
                case Copy():
                    self._copy(step)
                case Free():
                    for number in step.values:
                        self._arrays.pop(number, None)
                        self._making.pop(number, None)
        self._keep_results()
        execution.exchange.close(self._run.run)
        self._awaited = list(self._to_await())
        self._arrays.clear()  # what was freed must not be held until the run has ended

    def fail(self, error: Exception) -> None:
        """Leaves in all results what has kept the run from being dispatched."""
        told: WaystationError = Internal(f"{type(error).__name__}: {error}")
        if isinstance(error, WaystationError):
            told = error
        for number, handle in self._run.results:
            if self._loaded.is_here(number):
                where = {"program": self._loaded.name, "host": self._execution.host}
                self._execution.buffers.set(handle, told.where(**where))

    def _take_arguments(self) -> None:
        buffers = self._execution.buffers
        ending = []
        for number, handle in self._run.arguments:
            if not self._loaded.is_here(number):
                continue
            try:
                self._arrays[number] = buffers.get(handle)
            except WaystationError as error:
                self._poison(number, error.where(program=self._loaded.name, host=self._execution.host))
            if number in self._loaded.ended:
                ending.append(handle)
        buffers.free(ending)

    def _exec(self, step: Exec) -> None:
        try:
            results = self._call(step) if step.kind == "compute" else self._call_host(step)
        except WaystationError as error:
            for number in step.results:
                self._poison(number, error)
            self._drop_donated(step)
            return
        self._arrays.update(zip(step.results, results, strict=True))
        poisoned = next((self._errors[number] for number in step.operands if number in self._errors), None)
        if poisoned is not None:
            for number in step.results:
                self._poison(number, poisoned)
        self._drop_donated(step)

    def _call(self, step: Exec) -> Sequence[jax.Array]:
        functions, devices = self._execution.functions, self._loaded.devices[step.slice]
        place = step.function, devices, step.donated
        if not functions.is_ready(*place):
            self._note("compile")
        try:
            function = functions.get(*place)
        except WaystationError as error:
            raise error.where(**self._where(step, None))
        self._execution.on_compiled()
        self._note(function.name)
        pairs = zip(step.operands, function.operands, strict=True)
        operands = [_lying_so(self._array(number), sharding) for number, sharding in pairs]
        began_ns = self._execution.recorder.now()
        try:
            results: tuple[jax.Array, ...] = function.call(*operands)
        except Exception as error:
            raise self._failed(step, function.name, error) from error
        for number in (step.operands[each] for each in step.donated):
            array = self._array(number)
            if not array.is_deleted():  # no result could take its memory
                array.delete()
        self._called.append((step, function.name))
        if results:
            here = self._loaded.lying(step.results[0]).devices
            self._observed.called(step, function.name, began_ns, results, here)
        self._last = results
        return results

    def _call_host(self, step: Exec) -> Sequence[jax.Array]:
        function = self._execution.host_functions.get(step.function)
        if function is None:
            raise FunctionNotFound(
                f"host '{self._execution.host}' has no function '{step.function}' to call",
                **self._where(step, step.function),
            )
        self._note(step.function)
        operands = []
        for number in step.operands:
            lying, array = self._loaded.lying(number), self._array(number)
            operands.append(
                [(lying.box(index)[0], jax.device_get(lying.shard(array, index))) for index in step.devices]
            )
        self._observed.finish()  # which takes no longer: what the operands depend on is there
        began_ns = self._execution.recorder.now()
        try:
            made = function(*operands)
        except WaystationError as error:
            raise error.where(**self._where(step, step.function))
        except Exception as error:
            raise self._failed(step, step.function, error) from error
        self._observed.called_host(step, began_ns)
        pairs = zip(step.results, made, strict=True)
        return [self._loaded.lying(number).of_shards(list(blocks)) for number, blocks in pairs]

    def _send(self, step: Send) -> None:
        lying = self._loaded.lying(step.value)
        shard = lying.shard(self._array(step.value), step.device)
        block = cut(shard, relative_to(step.box, lying.box(step.device)[0]))
        if block is shard and not self._is_dropped(step.value):
            block = copied(block, lying.devices[step.device])
        error = self._errors.get(step.value)
        self._execution.exchange.send(self._run.run, step.transfer, step.host, block, error)

    def _recv(self, step: Recv) -> None:
        exchange, run, made = self._execution.exchange, self._run.run, self._assembly(step.value)

        def receive() -> Block:
            began_ns = self._execution.recorder.now()
            block = exchange.receive(run, step.transfer)
            self._execution.recorder.brought(run, step.host, block.nbytes, began_ns)
            return block

        for index in step.devices:
            made.add(index, step.box, receive)

    def _copy(self, step: Copy) -> None:
        lying, made = self._loaded.lying(step.source), self._assembly(step.value)
        shard = lying.shard(self._array(step.source), step.device)
        piece = cut(shard, relative_to(step.box, lying.box(step.device)[0]))
        for index in step.devices:
            made.add(index, step.box, piece)
        if step.source in self._errors:
            self._poison(step.value, self._errors[step.source])

    def _keep_results(self) -> None:
        buffers = self._execution.buffers
        kept: set[int] = set()
        for number, handle in self._run.results:
            if not self._loaded.is_here(number):
                continue
            array = self._array(number)
            if number in self._errors:
                buffers.set(handle, self._errors[number])
                continue
            if number in kept or (number in self._arguments and number not in self._loaded.ended):
                devices = self._loaded.lying(number).devices.items()
                shards = [
                    copied(self._loaded.lying(number).shard(array, at), device) for at, device in devices
                ]
                array = self._loaded.lying(number).of_shards(shards)
            kept.add(number)
            buffers.set(handle, array)

    # ---- values --------------------------------------------------------------------------------

    def _array(self, number: int) -> jax.Array:
        """A value; zeros of its kind where it could not be made."""
        if number in self._making:
            try:
                self._arrays[number] = self._making.pop(number).finish()
            except WaystationError as error:
                self._poison(number, error.where(program=self._loaded.name, host=self._execution.host))
        if number not in self._arrays:
            self._arrays[number] = self._loaded.lying(number).zeros()
        return self._arrays[number]

    def _assembly(self, number: int) -> Assembly:
        if number not in self._making:
            self._making[number] = Assembly(self._loaded.lying(number))
        return self._making[number]

    def _poison(self, number: int, error: WaystationError) -> None:
        self._errors.setdefault(number, error)
        self._first = self._first or error

    def _drop_donated(self, step: Exec) -> None:
        for place in step.donated:
            self._arrays.pop(step.operands[place], None)

    def _is_dropped(self, number: int) -> bool:
        """Whether a value is of this run alone and its memory is never taken over, so that nobody can delete
        it while it is sent."""
        return not (number in self._loaded.donated or number in self._arguments or number in self._results)

    # ---- the end -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Waits for all that was dispatched; see `HostExecution.begin`."""
        self._observed.finish()
        failed: dict[int, WaystationError] = {}
        for step, name, results in self._awaited:
            try:
                jax.block_until_ready(results)
            except Exception as error:
                if any(array.is_deleted() for array in results):
                    continue  # a later run has taken the memory over meanwhile
                known = next((failed[number] for number in step.operands if number in failed), None)
                told = known or self._failed(step, name, error)
                failed.update(dict.fromkeys(step.results, told))
        for number, handle in self._run.results:
            if number in failed:
                self._execution.buffers.poison(handle, failed[number])
        first = self._first or next(iter(failed.values()), None)
        self._awaited.clear()
        if first is not None:
            raise copy.copy(first)

    def _to_await(self) -> Iterator[tuple[Exec, str, list[jax.Array]]]:
        """What calls have made and is still there, and what the last one has made."""
        for place, (step, name) in enumerate(self._called, 1):
            arrays = [self._arrays[number] for number in step.results if number in self._arrays]
            if place == len(self._called):
                arrays = [array for array in self._last if not array.is_deleted()]
            if arrays:
                yield step, name, arrays

    def _failed(self, step: Exec, name: str, error: Exception) -> WaystationError:
        return ComputationFailed(
            f"computation '{name}' failed: {type(error).__name__}: {error}", **self._where(step, name)
        )

    def _where(self, step: Exec, name: str | None) -> dict[str, str | None]:
        devices = ", ".join(f"{self._execution.host}:{index}" for index in step.devices)
        found = {"program": self._loaded.name, "computation": name, "host": self._execution.host}
        return {**found, "device": devices}


def _lying_so(array: jax.Array, wanted: jax.sharding.Sharding) -> jax.Array:
    """An operand under the sharding that a function names; its shards stay where they are."""
    if array.sharding == wanted:
        return array
    if not array.sharding.is_equivalent_to(wanted, array.ndim):
        raise Internal(f"an operand lies as {array.sharding}, and the function takes it as {wanted}")
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, wanted, shards, dtype=array.dtype)
