"""The client: slices, functions on them, arrays, and the programs that calls become.

What is called is recorded, and sent as one program when something of it is read, when there are many calls,
or when much memory waits to be given back. Order is kept: what is called later sees what was called before.
A client may be used from several threads; their calls come one after the other. Failure sequence: a program
that cannot be sent leaves its error in its results; one that fails on hosts leaves it there, and reading
brings it here.
"""

from __future__ import annotations

import contextvars
import itertools
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from waystation._errors import WaystationError
from waystation.runtime.client.backend import Backend
from waystation.runtime.client.checkpoints import saves_of, value_like
from waystation.runtime.client.functions import PlacedFunction, host_array
from waystation.runtime.client.layouts import default_axes, layout
from waystation.runtime.client.slices import DeviceSet, Slice
from waystation.runtime.ir import Program, Sharding, prepare
from waystation.runtime.tracing import Array, Batch, Callee, Kind, Recorder, Reference, Trace
from waystation.runtime.tracing.arrays import Freed, SliceLike
from waystation.runtime.tracing.recordings import donated

# A batch is sent when it has so many calls, or when so many bytes wait that nobody can read any more.
BATCH_CALLS = 64
BATCH_UNREADABLE_BYTES = 64 << 20
_KEPT_PROGRAMS = 1024

TRACE: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("trace", default=None)


@dataclass(frozen=True, slots=True)
class Installed:
    """A program that the backend knows.

    Attributes:
        program: It, prepared.
        fingerprint: What it is known by.
    """

    program: Program
    fingerprint: str


class Client:
    """One program's part of a cluster, or of the devices of this process. Use it in a `with`, or close it.

    Args:
        backend: Where its programs run.

    Attributes:
        backend: The same.
        lock: Held while something is recorded or sent.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.lock = threading.RLock()
        self._handles = itertools.count()
        self._freed: Freed = queue.SimpleQueue()
        self._installed: OrderedDict[Hashable, Installed] = OrderedDict()
        self._batch = Batch(self, self.put_laid)
        self._closed = False
        threading.Thread(
            target=_free_all, args=(self._freed, backend), name="waystation: frees", daemon=True
        ).start()
        # The thread ends with the client, also where nobody closes it.
        self._finalizer = weakref.finalize(self, self._freed.put, None)

    def __repr__(self) -> str:
        return f"Client({self.backend!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self._closed

    # ---- what programs use ---------------------------------------------------------------------

    def make_virtual_device_set(self) -> DeviceSet:
        """A set of slices, which has none yet."""
        return DeviceSet(self)

    def jit(self, function: Callable[..., Any], on: Slice, **options: Any) -> PlacedFunction:
        """Places a function, under `jax.jit` or not, on a slice.

        Args:
            function: What JAX can trace.
            on: The slice that it runs on.
            **options: `in_shardings` and `out_shardings`: a `PartitionSpec` over the axes of the slice, or a
                `NamedSharding` over an `AbstractMesh`, for each argument or branch of it. An argument
                without one lies as it comes from the same kind of slice, else whole on each device. A
                result without one lies as the first argument of its shape does.
                `donate_argnums`, `static_argnums`, `static_argnames`: as for `jax.jit`. `name`: for people.
        """
        return PlacedFunction(function, on, **options)

    def put(self, array: Any, on: Slice, sharding: Any = None) -> Array:
        """Puts an array of this process on a slice. It travels through here: states of models are better
        made on the hosts.

        Args:
            array: What JAX takes for an array.
            on: The slice.
            sharding: A `PartitionSpec` or `NamedSharding`; by default each device has the whole.
        """
        how = Sharding(default_axes(on)) if sharding is None else layout(sharding, on, "the sharding")
        return self.put_laid(array, how, on)

    def share(self, array: Array, name: str) -> None:
        """Publishes an array under a name, for all clients to read; its bytes are there once, and outlive
        this client.

        Raises:
            NameTaken: Another array has that name.
        """
        self.backend.share(array.usable("shared").handle, name)

    def named(self, name: str) -> Array:
        """A published array.

        Raises:
            ObjectNotFound: No array has that name.
        """
        with self.lock:
            handle = next(self._handles)
            value = self.backend.named(name, handle)
            axes = value.sharding.axes
            shape, names = tuple(size for _, size in axes), tuple(name for name, _ in axes)
            kind = Kind(value.shape, value.dtype, value.sharding)
            on = Slice(self, value.slice, shape, names)
            return Array(self, kind, on, reference=Reference(handle, self._freed))

    def save(self, path: str, arrays: Mapping[str, Array], *, overwrite: bool = False) -> None:
        """Saves arrays of one island, by names, as a checkpoint; returns when it is committed. Hosts write
        their own shards, and no element comes through here.

        Args:
            path: Where, for the hosts.
            arrays: What is saved, as it is now.
            overwrite: Whether it may take the place of another checkpoint.

        Raises:
            Unsupported: The client runs in this process alone.
            WaystationError: An array could not be made, or not be saved.
        """
        handles = {name: array.usable("saved").handle for name, array in arrays.items()}
        saves_of(self.backend).save(path, handles, overwrite=overwrite)

    def load(self, path: str, like: Mapping[str, Array]) -> dict[str, Array]:
        """Loads arrays of a checkpoint to one island; returns at once. Hosts read what they need.

        Args:
            path: Where it is, for the hosts.
            like: For each name in it an array of which the new one has shape, dtype, sharding and slice. It
                may have been donated, or lost.

        Raises:
            Unsupported: The client runs in this process alone.
        """
        self.flush()
        with self.lock:
            handles = {name: next(self._handles) for name in like}
            wanted = {name: (handles[name], value_like(array, handles[name])) for name, array in like.items()}
            saves_of(self.backend).load(path, wanted)
        return {
            name: Array(self, array.kind, array.slice, reference=Reference(handles[name], self._freed))
            for name, array in like.items()
        }

    def flush(self) -> None:
        """Sends all calls that have not been sent."""
        with self.lock:
            batch, self._batch = self._batch, Batch(self, self.put_laid)
            if batch.call_count:
                self._send(batch)

    def suspend(self) -> None:
        """Has the devices of all its slices taken until `resume`; arrays stay."""
        self.flush()
        self.backend.suspend()

    def resume(self) -> None:
        """Has them given back.

        Raises:
            NotEnoughDevices: They do not all fit; it stays suspended.
        """
        self.backend.resume()

    def close(self) -> None:
        """Sends what is left and ends. Once is enough."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self.flush()
        self._finalizer()
        self.backend.close()

    # ---- what functions, programs and arrays use -----------------------------------------------

    def record(self, callee: Callee, on: Slice, operands: Sequence[Any]) -> list[Array]:
        """Records a call, in the program that is being traced or to be sent."""
        with self.lock:
            trace = TRACE.get()
            if trace is not None:
                return trace.call(callee, on, operands)
            made = self._batch.call(callee, on, operands)
            full = self._batch.call_count >= BATCH_CALLS
            if full or self._batch.unreadable_bytes > BATCH_UNREADABLE_BYTES:
                self.flush()
            return made

    def trace(self, name: str) -> Trace:
        """A trace of a new program."""
        self.flush()
        return Trace(name, self, self.put_laid)

    def install(self, recorder: Recorder, results: Sequence[int]) -> Installed:
        """Has the backend know a program; one that it knows is found by its structure.

        Raises:
            InvalidProgram: It breaks a rule.
        """
        structure = recorder.structure(results)
        found = self._installed.pop(structure, None)
        if found is None:
            program = prepare(recorder.program(results))
            found = Installed(program, self.backend.install(program))
        self._installed[structure] = found  # the last one used is the last
        if len(self._installed) > _KEPT_PROGRAMS:
            self._installed.popitem(last=False)
        return found

    def run(
        self, installed: Installed, slices: Sequence[int], arguments: Sequence[Reference], count: int
    ) -> list[Reference]:
        """Sends one run of a program; returns its results, which have its error where it cannot be sent."""
        handles = [next(self._handles) for _ in range(count)]
        error: WaystationError | None = None
        try:
            self.backend.run(
                installed.fingerprint, slices, [reference.handle for reference in arguments], handles
            )
        except WaystationError as failed:
            error = failed.where(program=installed.program.name)
        return [Reference(handle, self._freed, error) for handle in handles]

    def read(self, reference: Reference, timeout_s: float | None) -> np.ndarray[Any, Any]:
        """Waits for an array and brings it here."""
        return self.backend.get(reference.handle, timeout_s)

    def await_all(self, references: list[Reference], timeout_s: float | None) -> None:
        """Waits until arrays have been made."""
        self.backend.wait([reference.handle for reference in references], timeout_s)

    def is_done(self, reference: Reference) -> bool:
        """Whether an array has been made, or will never be."""
        return self.backend.is_done(reference.handle)

    def put_laid(self, array: Any, how: Sharding, on: SliceLike) -> Array:
        """Puts an array of this process on a slice, laid out as a program describes it."""
        here = host_array(array)
        how.shard_shape(here.shape)
        with self.lock:
            handle = next(self._handles)
            self.backend.put(handle, here, on.number, how)
        kind = Kind(here.shape, str(here.dtype), how)
        return Array(self, kind, on, reference=Reference(handle, self._freed))

    # ---- how -----------------------------------------------------------------------------------

    def _send(self, batch: Batch) -> None:
        results = batch.results()
        given_up = batch.given_up()
        numbers = [number for number, _ in results]
        try:
            installed = self.install(batch.recorder, numbers)
            references = self.run(installed, batch.recorder.slices, batch.arguments, len(numbers))
        except WaystationError as error:
            references = [Reference(-1, self._freed, error) for _ in numbers]
        for (_, array), reference in zip(results, references, strict=True):
            array.reference, array.recording = reference, None
        for label, array in given_up:
            array.reference, array.recording = Reference(-1, self._freed, donated(label)), None


def _free_all(freed: Freed, backend: Backend) -> None:
    """Frees what is not needed any more, as many arrays at once as there are."""
    ended = False
    while not ended:
        handles = [freed.get()]
        while not freed.empty():
            handles.append(freed.get())
        ended = None in handles
        backend.free([handle for handle in handles if handle is not None])
