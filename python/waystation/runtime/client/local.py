"""A backend in this process: islands of its own devices, for tests, notebooks and one machine.

Each island is one host, with devices that no other has, a thread of its own that runs its lists in order, and
one that waits for results. Programs are lowered and run as on a cluster: what goes from island to island is
sent and received, and nothing is shared but the process. Slices that are moved or suspended take their arrays
along, through the memory of this process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from waystation import _forks
from waystation._errors import InvalidInput, NotFound, WaystationError
from waystation.runtime.client.local_hosts import LocalHost, Note, result_of, whole
from waystation.runtime.devices import DeviceId, Host, Island
from waystation.runtime.errors import NameTaken, ObjectNotFound
from waystation.runtime.execution import HostExecution, LocalExchange, Run
from waystation.runtime.execution.assembly import Lying
from waystation.runtime.execution.buffers import shards_of
from waystation.runtime.ir import Arg, Compute, LowProgram, Program, Sharding, Value, fingerprint, lower
from waystation.runtime.messages import Fetched, key_of
from waystation.runtime.objects import Held
from waystation.runtime.resources import Placement, ResourceManager, SliceRequest


@dataclass(slots=True)
class _Held:
    """An array of the client: what is known of it before it is there."""

    value: Value
    made: Future[Any]


class LocalBackend:
    """Islands of devices of this process; see `Backend` for the methods.

    Args:
        islands: How many devices each island has, by name.
        devices: The devices to take; by default those of JAX's default backend.
        client: The name of the client.

    Raises:
        InvalidInput: There are not as many devices.
    """

    def __init__(
        self,
        islands: Mapping[str, int],
        devices: Sequence[jax.Device] | None = None,
        client: str = "local",
    ) -> None:
        available = list(jax.devices() if devices is None else devices)
        if sum(islands.values()) > len(available):
            raise InvalidInput(
                f"islands {dict(islands)} need {sum(islands.values())} devices, JAX has {len(available)}; on "
                "CPUs ask for more before JAX is first used: "
                f"jax.config.update('jax_num_cpu_devices', {sum(islands.values())})"
            )
        self._client = client
        self._platform: str = available[0].platform
        self._lock: threading.RLock | _forks.LockOfParent = threading.RLock()
        self._resources = ResourceManager()
        self._programs: Held[Program] = Held()
        self._functions: Held[bytes] = Held()
        self._lowered: dict[str, dict[tuple[Placement, ...], tuple[str, LowProgram]]] = {}
        self._lists = itertools.count()
        self._held: dict[int, _Held] = {}
        self._names: dict[str, int] = {}
        self._suspended: dict[int, np.ndarray[Any, Any] | WaystationError] = {}
        self._own_handles = itertools.count(-1, -1)  # of arrays that have a name
        self._runs = itertools.count()
        self._hosts: dict[str, LocalHost] = {}
        exchange, taken = LocalExchange(), iter(available)
        for name, count in islands.items():
            host = Host(f"{name}0", name, count, self._platform)
            self._resources.add_island(Island(name, (host,)))
            own = list(itertools.islice(taken, count))
            self._hosts[host.name] = LocalHost(host.name, own, exchange)
        self._by_island = {name: self._hosts[f"{name}0"] for name in islands}

        self._process_id = os.getpid()
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: neither its threads nor JAX's are in a child."""
        advice = "JAX does not work in forked processes; begin processes by 'spawn' or 'forkserver'"
        error = _forks.not_of_this_process(f"client '{self._client}'", self._process_id, advice)
        self._lock = _forks.LockOfParent(error)

    def __repr__(self) -> str:
        return f"LocalBackend({list(self._by_island)})"

    @property
    def client(self) -> str:
        """See `Backend`."""
        return self._client

    # ---- slices --------------------------------------------------------------------------------

    def grant(self, request: SliceRequest) -> int:
        """See `Backend`."""
        with self._lock:
            return self._resources.grant(self._client, request).number

    def release(self, slice_number: int) -> None:
        """See `Backend`."""
        with self._lock:
            self._resources.release(slice_number)

    def remap(
        self, slice_number: int, *, island: str | None = None, without_hosts: Collection[str] = ()
    ) -> None:
        """See `Backend`."""
        with self._lock:
            arrays = self._taken_off(slice_number)
            try:
                self._resources.remap(slice_number, island=island, without_hosts=without_hosts)
            finally:
                self._put_back(arrays)

    def suspend(self) -> None:
        """See `Backend`."""
        with self._lock:
            for found in self._resources.slices:
                self._suspended.update(self._taken_off(found.number))
            self._resources.suspend(self._client)

    def resume(self, without_hosts: Collection[str] = ()) -> None:
        """See `Backend`."""
        with self._lock:
            self._resources.resume(self._client, without_hosts)
            arrays, self._suspended = self._suspended, {}
            self._put_back({handle: found for handle, found in arrays.items() if handle in self._held})

    def placement(self, slice_number: int) -> Placement:
        """See `Backend`."""
        with self._lock:
            return self._resources.placement(slice_number)

    def platform(self, slice_number: int) -> str:
        """See `Backend`."""
        del slice_number  # all devices are of one platform
        return "cuda" if self._platform == "gpu" else self._platform

    # ---- programs ------------------------------------------------------------------------------

    def register(self, name: str, exported: bytes) -> str:
        """See `Backend`."""
        del name  # the function knows it
        key = key_of(exported)
        with self._lock:
            self._functions.hold(key, self._client)
            for host in self._hosts.values():
                host.execution.functions.add(key, exported)
        return key

    def forget_functions(self, keys: Sequence[str]) -> None:
        """See `Backend`."""
        with self._lock:
            for key in keys:
                self._functions.release(key, self._client)
            self._forget((), [key for key in keys if key not in self._functions])

    def install(self, program: Program) -> str:
        """See `Backend`."""
        key = fingerprint(program)
        with self._lock:
            self._programs.hold(key, self._client)
            if self._programs.get(key) is None:
                self._programs.set(key, program)
                for called in _called(program):
                    self._functions.hold(called, key)
        return key

    def forget_programs(self, fingerprints: Sequence[str]) -> None:
        """See `Backend`."""
        with self._lock:
            lists: list[str] = []
            functions: set[str] = set()
            for key in fingerprints:
                program = self._programs.release(key, self._client)
                if program is not None:
                    lists += [list_key for list_key, _ in self._lowered.pop(key, {}).values()]
                    self._functions.drop(key)
                    functions |= {called for called in _called(program) if called not in self._functions}
            self._forget(lists, sorted(functions))

    def _forget(self, lists: Sequence[str], functions: Sequence[str]) -> None:
        """Has hosts forget lists and functions, after all that they were told to do."""

        def forget(execution: HostExecution) -> None:
            for each in lists:
                execution.unload(each)
            with self._lock:
                for key in functions:
                    if key not in self._functions:  # else it was made known again meanwhile
                        execution.functions.forget(key)

        if lists or functions:
            for host in self._hosts.values():
                host.do(functools.partial(forget, host.execution))

    def run(
        self,
        fingerprint: str,
        slices: Sequence[int],
        arguments: Sequence[int],
        results: Sequence[int],
        *,
        cost_seconds: float | None = None,
        priority: int = 0,
    ) -> None:
        """See `Backend`; runs are begun in the order of their calls."""
        del cost_seconds, priority
        with self._lock:
            program = self._installed(fingerprint)
            places = {part.number: number for part, number in zip(program.slices, slices, strict=True)}
            key, low = self._lower(fingerprint, program, places)
            args = [node for node in program.nodes if isinstance(node, Arg)]
            given = tuple((node.result.number, handle) for node, handle in zip(args, arguments, strict=True))
            for _, handle in given:
                self._known(handle)
            kept = tuple(zip(program.nodes[-1].operands, results, strict=True))
            run = Run(key, next(self._runs), given, kept)
            ended = {}
            for part in low.hosts:
                host = self._hosts[part.host]
                ended[part.host] = host.submit(functools.partial(host.execution.begin, run))
            for number, handle in kept:
                value = program.values[number]
                made = ended[self._host_of(places[value.slice]).name]
                self._held[handle] = _Held(replace(value, number=handle, slice=places[value.slice]), made)
            for node, handle in zip(args, arguments, strict=True):
                if node.donated:
                    self._held.pop(handle, None)

    def prepare(self, fingerprint: str, slices: Sequence[int]) -> None:
        """See `Backend`."""
        with self._lock:
            program = self._installed(fingerprint)
            places = {part.number: number for part, number in zip(program.slices, slices, strict=True)}
            key, low = self._lower(fingerprint, program, places)
        for part in low.hosts:
            self._hosts[part.host].execution.wait_until_compiled(key)

    def _installed(self, key: str) -> Program:
        program = self._programs.get(key)
        if program is None:
            raise NotFound(f"no program '{key}' was installed; install it before it is run")
        return program

    def _lower(self, key: str, program: Program, places: Mapping[int, int]) -> tuple[str, LowProgram]:
        found = {number: self._resources.placement(granted) for number, granted in places.items()}
        lowered, place = self._lowered.setdefault(key, {}), tuple(found.values())
        if place not in lowered:
            low = lower(program, found)
            list_key = f"{key}/{next(self._lists)}"
            for part in low.hosts:
                self._hosts[part.host].execution.load(list_key, low)
            lowered[place] = list_key, low
        return lowered[place]

    # ---- arrays --------------------------------------------------------------------------------

    def put(self, handle: int, array: np.ndarray[Any, Any], slice_number: int, sharding: Sharding) -> None:
        """See `Backend`."""
        value = Value(handle, array.shape, str(array.dtype), slice_number, sharding)
        with self._lock:
            self._put(value, np.array(array))

    def _put(self, value: Value, array: np.ndarray[Any, Any] | WaystationError) -> None:
        placement = self._resources.placement(value.slice)
        host = self._by_island[placement.island]

        def make() -> None:
            if isinstance(array, WaystationError):
                host.execution.buffers.set(value.number, array)
            else:
                made = self._lying(value, placement).of_whole(array)
                host.execution.buffers.set(value.number, made)

        self._held[value.number] = _Held(value, host.do(make))

    def get(self, handle: int, timeout_s: float | None = None) -> np.ndarray[Any, Any]:
        """See `Backend`."""
        with self._lock:
            fetched = self._fetch(handle)
        return whole(result_of(fetched, timeout_s))

    def _fetch(self, handle: int) -> Future[Fetched]:
        held = self._known(handle)
        found = self._suspended.get(handle)
        if found is not None:
            done: Future[Fetched] = Future()
            if isinstance(found, WaystationError):
                done.set_exception(found)
            else:
                done.set_result(Fetched(found.shape, (((0,) * found.ndim, found),)))
            return done
        execution = self._host_of(held.value.slice).execution

        def begin(note: Note) -> Callable[[], Fetched]:
            del note
            array = execution.buffers.get(handle)

            def finish() -> Fetched:
                try:
                    return shards_of(array)
                except RuntimeError as error:
                    execution.buffers.get(handle)  # raises what its own run has failed with, if it has
                    raise InvalidInput(f"an array cannot be read: {error}") from error

            return finish

        return self._host_of(held.value.slice).submit(begin)

    def wait(self, handles: Sequence[int], timeout_s: float | None = None) -> None:
        """See `Backend`."""
        with self._lock:
            found = [(handle, self._known(handle)) for handle in handles]
        for handle, held in found:
            with contextlib.suppress(WaystationError):  # another result of that run may have failed
                result_of(held.made, timeout_s)
            if handle not in self._suspended:
                self._host_of(held.value.slice).execution.buffers.get(handle)

    def is_done(self, handle: int) -> bool:
        """See `Backend`."""
        with self._lock:
            return self._known(handle).made.done()

    def free(self, handles: Sequence[int]) -> None:
        """See `Backend`."""
        with self._lock:
            for handle in handles:
                self._held.pop(handle, None)
                self._suspended.pop(handle, None)
            for host in self._hosts.values():
                host.do(functools.partial(host.execution.buffers.free, handles))

    def share(self, handle: int, name: str) -> None:
        """See `Backend`."""
        with self._lock:
            if name in self._names:
                raise NameTaken(f"another array is named '{name}'; choose another name")
            own = next(self._own_handles)
            self._alias(handle, own)
            self._names[name] = own

    def named(self, name: str, handle: int) -> Value:
        """See `Backend`."""
        with self._lock:
            if name not in self._names:
                raise ObjectNotFound(f"no array is named '{name}'; there are {sorted(self._names)}")
            self._alias(self._names[name], handle)
            return self._held[handle].value

    def _alias(self, handle: int, other: int) -> None:
        held = self._known(handle)
        buffers = self._host_of(held.value.slice).execution.buffers

        def alias() -> None:
            array = buffers.get(handle)
            # A copy, since either may be donated.
            buffers.set(other, jax.numpy.copy(array))

        made = self._host_of(held.value.slice).do(alias)
        self._held[other] = _Held(replace(held.value, number=other), made)

    def close(self) -> None:
        """See `Backend`; waits for what runs."""
        for host in self._hosts.values():
            host.close()
        with self._lock:
            self._resources.release_client(self._client)
            for host in self._hosts.values():
                host.execution.buffers.free(list(self._held))
            self._held.clear()

    # ---- how -----------------------------------------------------------------------------------

    def _known(self, handle: int) -> _Held:
        found = self._held.get(handle)
        if found is None:
            raise ObjectNotFound(f"there is no array {handle}: it was freed, donated, or never made")
        return found

    def _host_of(self, slice_number: int) -> LocalHost:
        return self._by_island[self._resources.slice(slice_number).placement.island]

    def _lying(self, value: Value, placement: Placement) -> Lying:
        def found(device: DeviceId) -> jax.Device:
            return self._hosts[device.host].device(device)

        devices = tuple(found(device) for device in placement.devices)
        local = {device.index: place for place, device in enumerate(placement.devices)}
        return Lying(value, devices, local)

    def _taken_off(self, slice_number: int) -> dict[int, np.ndarray[Any, Any] | WaystationError]:
        """The arrays of a slice, or what they have failed with, taken off its devices."""
        here = [handle for handle, held in self._held.items() if held.value.slice == slice_number]
        fetched = {handle: self._fetch(handle) for handle in here if handle not in self._suspended}
        arrays: dict[int, np.ndarray[Any, Any] | WaystationError] = {}
        for handle, future in fetched.items():
            try:
                arrays[handle] = np.array(whole(future.result()))
            except WaystationError as error:
                arrays[handle] = error
        host = self._host_of(slice_number)
        host.do(lambda: host.execution.buffers.free(list(arrays))).result()
        return arrays

    def _put_back(self, arrays: Mapping[int, np.ndarray[Any, Any] | WaystationError]) -> None:
        for handle, array in arrays.items():
            self._put(self._held[handle].value, array)


def _called(program: Program) -> set[str]:
    """The functions that a program calls."""
    return {node.function for node in program.nodes if isinstance(node, Compute)}
