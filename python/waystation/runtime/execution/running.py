"""One run of a list: all of it is dispatched ahead of the devices, and waited for later.

Failure sequence: what cannot be made is *poisoned*, with an error that names program, computation, host and
devices; the list goes on to its end, and everything that depends on it has the same error. Since other hosts
may be in the same collective, a call is not left out where only its operands are poisoned: it runs on zeros.
What cannot be compiled fails on all hosts alike, and is left out. A failure on a device shows when it is
waited for, and poisons what has been made by then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from waystation._errors import Internal, InvalidInput, WaystationError
from waystation.grid import relative_to
from waystation.runtime.endings import Ending
from waystation.runtime.errors import ComputationFailed, FunctionNotFound
from waystation.runtime.execution.assembly import Assembly, Block, copied, cut
from waystation.runtime.execution.functions import Function
from waystation.runtime.execution.lists import LoadedList, Run
from waystation.runtime.execution.observed import ObservedCalls
from waystation.runtime.ir import Copy, Exec, Recv, Send
from waystation.runtime.ir.low import Free
from waystation.runtime.messages import host_function_name

if TYPE_CHECKING:
    from waystation.runtime.execution.host_execution import HostExecution

Note = Callable[[str], None]
_MOST_MET = 64  # shardings of an argument


class RunningList(Ending):
    """One run of a list: dispatched, then waited for by calling it.

    Args:
        execution: Its host.
        loaded: The list.
        run: The run.
        note: Is told what is about to be done.
    """

    def __init__(self, execution: HostExecution, loaded: LoadedList, run: Run, note: Note) -> None:
        self._execution = execution
        self._loaded = loaded
        self._run = run
        self._note = note
        self._arrays: dict[int, jax.Array] = {}
        self._making: dict[int, Assembly] = {}
        self._errors: dict[int, WaystationError] = {}
        self._awaited: list[tuple[Exec, list[jax.Array]]] = []
        self._last: tuple[Exec, Sequence[jax.Array]] | None = None  # call, and what it has made
        self._first: WaystationError | None = None
        self._doing = ""
        self._arguments = {number for number, _ in run.arguments}
        self._results = {number for number, _ in run.results}
        self._observed = ObservedCalls(execution.recorder, run.run)

    # ---- dispatch ------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Begins everything."""
        execution, loaded = self._execution, self._loaded
        if loaded.expected:
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
        if loaded.expected:
            execution.exchange.close(self._run.run)
        self._awaited = self._to_await()
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
        if ending:
            buffers.free(ending)

    def _exec(self, step: Exec) -> None:
        try:
            results = self._call(step) if step.kind == "compute" else self._call_host(step)
        except WaystationError as error:
            self._leave_in_results(step, error)
            return
        except (Exception, SystemExit) as error:  # whatever it is, other hosts are not left in a collective
            self._leave_in_results(step, self._failed(step, self._name(step), error))
            return
        for number, array in zip(step.results, results, strict=True):
            self._arrays[number] = array
        if self._errors:
            found = (self._errors[number] for number in step.operands if number in self._errors)
            poisoned = next(found, None)
            if poisoned is not None:
                for number in step.results:
                    self._poison(number, poisoned)
        if step.donated:
            self._drop_donated(step)

    def _leave_in_results(self, step: Exec, error: WaystationError) -> None:
        for number in step.results:
            self._poison(number, error)
        self._drop_donated(step)

    def _call(self, step: Exec) -> Sequence[jax.Array]:
        execution = self._execution
        function = self._loaded.compiled.get(id(step)) or self._compiled(step)
        execution.on_compiled()
        if function.name != self._doing:  # of a chain of the same calls, the first one says it
            self._doing = function.name
            self._note(function.name)
        operands = []
        for number, met, wanted in zip(step.operands, function.met, function.operands, strict=True):
            array = self._arrays.get(number)
            if array is None:
                array = self._array(number)
            operands.append(array if id(array.sharding) in met else _lying_so(array, wanted, met))
        began_ns = execution.recorder.now() if execution.recorder.is_on else 0
        try:
            results: tuple[jax.Array, ...] = function.call(*operands)
        except Exception as error:
            raise self._failed(step, function.name, error) from error
        for each in step.donated:
            array = self._array(step.operands[each])
            if not array.is_deleted():  # no result could take its memory
                array.delete()
        if began_ns and results:
            here = self._loaded.lying(step.results[0]).devices
            self._observed.called(step, function.name, began_ns, results, here)
        self._last = step, results
        return results

    def _compiled(self, step: Exec) -> Function:
        """The function of a call, when it is compiled; from then on every run finds it in its list."""
        functions, devices = self._execution.functions, self._loaded.devices[step.slice]
        place = step.function, devices, step.donated
        if not functions.is_ready(*place):
            self._doing = ""
            self._note("compile")
        try:
            function = functions.get(*place)
        except WaystationError as error:
            raise error.where(**self._where(step, None))
        self._loaded.compiled[id(step)] = function
        return function

    def _call_host(self, step: Exec) -> Sequence[jax.Array]:
        name = self._name(step)
        function = self._execution.host_functions.get(step.function)
        if function is None:
            raise FunctionNotFound(
                f"host '{self._execution.host}' has no function '{name}' to call", **self._where(step, name)
            )
        self._doing = name
        self._note(name)
        operands = []
        for number in step.operands:
            lying, array = self._loaded.lying(number), self._array(number)
            operands.append(
                [(lying.box(index)[0], jax.device_get(lying.shard(array, index))) for index in step.devices]
            )
        self._observed.finish()  # which takes no longer: what the operands depend on is there
        began_ns = self._execution.recorder.now()
        self._execution.is_elsewhere = True
        try:
            made = function(*operands)
        except WaystationError as error:
            raise error.where(**self._where(step, name))
        finally:
            self._execution.is_elsewhere = False
        self._observed.called_host(step, name, began_ns)
        return self._returned(step, made)

    def _returned(self, step: Exec, made: Sequence[Sequence[Block]]) -> list[jax.Array]:
        """The arrays of what a function of Python has returned."""
        arrays, name = [], self._name(step)
        for number, blocks in zip(step.results, made, strict=True):
            lying, given = self._loaded.lying(number), [np.asarray(block) for block in blocks]
            dtype = lying.dtype
            if dtype is None or not all(
                each.shape == lying.shard_shape and np.can_cast(each.dtype, dtype, "same_kind")
                for each in given
            ):
                told = ", ".join(f"{each.dtype}{each.shape}" for each in given)
                raise InvalidInput(
                    f"host function '{name}' has returned blocks {told}; the program says that each is "
                    f"{dtype}{lying.shard_shape}",
                    **self._where(step, name),
                )
            arrays.append(lying.of_shards([each.astype(dtype, copy=False) for each in given]))
        return arrays

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
            try:
                block = exchange.receive(run, step.transfer)
            except WaystationError as error:
                raise error.where(peer=step.host) from None
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

    def is_ready(self) -> bool:
        """See `Ending`."""
        try:
            # JAX has it for all arrays, but not in their common type.
            return all(array.is_ready() for _, results in self._awaited for array in results)  # type: ignore[attr-defined]
        except RuntimeError:  # one was taken over meanwhile, or has failed: whoever waits finds that out
            return True

    def __call__(self) -> None:
        """Waits for all that was dispatched.

        Raises:
            WaystationError: The first error of the run, which its results have too.
        """
        self._observed.finish()
        failed: dict[int, WaystationError] = {}
        for step, results in self._awaited:
            try:
                for array in results:
                    array.block_until_ready()
            except Exception as error:
                if any(array.is_deleted() for array in results):
                    continue  # a later run has taken the memory over meanwhile
                known = next((failed[number] for number in step.operands if number in failed), None)
                told = known or self._failed(step, self._name(step), error)
                failed.update(dict.fromkeys(step.results, told))
        for number, handle in self._run.results:
            if number in failed:
                self._execution.buffers.poison(handle, failed[number])
        first = self._first or next(iter(failed.values()), None)
        self._awaited.clear()
        if first is not None:
            raise copy.copy(first)

    def _to_await(self) -> list[tuple[Exec, list[jax.Array]]]:
        """What calls have made and is still there, and what the last one has made; in their order."""
        found: dict[int, tuple[Exec, list[jax.Array]]] = {}
        for number, array in self._arrays.items():
            step = self._loaded.makers.get(number)
            if step is not None:
                found.setdefault(step.node, (step, []))[1].append(array)
        if self._last is not None:
            step, results = self._last
            found[step.node] = step, [array for array in results if not array.is_deleted()]
        return [found[place] for place in sorted(found)]

    def _name(self, step: Exec) -> str:
        """What a call calls, for people."""
        function = self._loaded.compiled.get(id(step))
        return host_function_name(step.function) if function is None else function.name

    def _failed(self, step: Exec, name: str, error: BaseException) -> WaystationError:
        return ComputationFailed(
            f"computation '{name}' failed: {type(error).__name__}: {error}", **self._where(step, name)
        )

    def _where(self, step: Exec, name: str | None) -> dict[str, str | None]:
        devices = ", ".join(f"{self._execution.host}:{index}" for index in step.devices)
        found = {"program": self._loaded.name, "computation": name, "host": self._execution.host}
        return {**found, "device": devices}


def _lying_so(
    array: jax.Array, wanted: jax.sharding.Sharding, met: dict[int, jax.sharding.Sharding]
) -> jax.Array:
    """An operand under the sharding that a function names; its shards stay where they are."""
    if array.sharding == wanted:
        if len(met) >= _MOST_MET:
            met.clear()
        met[id(array.sharding)] = array.sharding  # kept, so that its identity stays its own
        return array
    if not array.sharding.is_equivalent_to(wanted, array.ndim):
        raise Internal(f"an operand lies as {array.sharding}, and the function takes it as {wanted}")
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, wanted, shards, dtype=array.dtype)
