"""The client: slices, functions on them, arrays, and the programs that calls become.

What is called is recorded, and sent as one program when something of it is read, when there are many calls,
or when much memory waits to be given back. Order is kept: what is called later sees what was called before.
A client may be used from several threads; their calls come one after the other. Failure sequence: a program
that cannot be sent leaves its error in its results; one that fails on hosts leaves it there, and reading
brings it here.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import os
import queue
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from waystation import _forks
from waystation._errors import InvalidInput, WaystationError, WrongType
from waystation.runtime.client.backend import Backend
from waystation.runtime.client.checkpoints import begin_load, begin_save, in_background
from waystation.runtime.client.functions import PlacedFunction, host_array
from waystation.runtime.client.joining import Installed, Joining
from waystation.runtime.client.layouts import default_axes, layout
from waystation.runtime.client.slices import DeviceSet, Slice
from waystation.runtime.errors import NotEnoughDevices
from waystation.runtime.ir import Sharding
from waystation.runtime.tracing import Array, Batch, Callee, Kind, Recorder, Reference, Trace
from waystation.runtime.tracing.arrays import SliceLike
from waystation.runtime.tracing.recordings import donated
from waystation.runtime.tracing.releases import ForgottenFunction, ForgottenProgram, Freed, Registration
from waystation.storage import PathLike
from waystation.transfers.handle import AsyncResponse, Progress
from waystation.tree import iterate_leaves

# A batch is sent when it has so many calls, or when so many bytes wait that nobody can read any more.
BATCH_CALLS = 64
BATCH_UNREADABLE_BYTES = 64 << 20
_FREES_WAIT_S = 0.002
# Programs of batches and of traces that are found by their structure; others are installed anew.
KEPT_PROGRAMS = 256

TRACE: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("trace", default=None)


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
        self.lock: threading.RLock | _forks.LockOfParent = threading.RLock()
        self._handles = itertools.count()
        self._freed: Freed = queue.SimpleQueue()
        self._installed: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._stale: deque[Hashable] = deque()  # structures with a function that is gone
        self._joining = Joining(backend, self._freed)
        self._batch = Batch(self, self.put_laid)
        self._closed = False
        self._saving: set[threading.Event] = set()  # of saves in the background: when they have ended
        threading.Thread(
            target=_free_all, args=(self._freed, backend), name="waystation: frees", daemon=True
        ).start()
        # The thread ends with the client, also where nobody closes it.
        self._finalizer = weakref.finalize(self, self._freed.put, None)
        self._process_id = os.getpid()
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: whoever records, sends or reads something takes the lock."""
        advice = "start a client in this one"
        error = _forks.not_of_this_process(f"client '{self.backend.client}'", self._process_id, advice)
        self.lock = _forks.LockOfParent(error)
        self._closed = True

    def __repr__(self) -> str:
        return f"<client {self.backend.client!r}>"

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
        if not isinstance(on, Slice):
            raise WrongType(f"an array is put on a slice (add_slice), not on {on!r:.60}")
        if on.client is not self:
            raise InvalidInput(
                f"{self!r} cannot put an array on {on}, which is of another client, {on.client!r}"
            )
        how = Sharding(default_axes(on)) if sharding is None else layout(sharding, on, "the sharding")
        return self.put_laid(array, how, on)

    def share(self, array: Array, name: str) -> None:
        """Publishes an array under a name, for all clients to read; its bytes are there once, and outlive
        this client.

        Raises:
            NameTaken: Another array has that name.
        """
        if not isinstance(array, Array):
            raise WrongType(f"only arrays on slices can be shared, not {type(array).__name__}; put it on one")
        self.backend.share(array.usable("shared", self).handle, name)

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

    def save(
        self, path: PathLike, state: Any, *, overwrite: bool = False, custom_metadata: Any = None
    ) -> None:
        """Saves a state as one checkpoint; returns when it is committed. Its arrays may be on several
        islands: hosts write their own shards, no element of them comes through here, and one act makes all
        of it visible.

        Args:
            path: Where, for the hosts, which all have to reach it.
            state: What is saved, as it is now: a tree of containers, as `waystation.save` takes it, with
                arrays of this client. Its other leaves are at most 16 MiB together.
            overwrite: Whether it may take the place of another checkpoint.
            custom_metadata: A JSON value to keep with it.

        Raises:
            Unsupported: Hosts cannot heed an option.
            UnsupportedLeaf: A leaf cannot be saved; names its key path.
            InvalidInput: The state has no array of this client, or its other leaves are too large.
            WaystationError: An array could not be made, or not be saved.
        """
        begin_save(self, path, state, overwrite=overwrite, custom_metadata=custom_metadata)(None)

    def save_async(
        self, path: PathLike, state: Any, *, overwrite: bool = False, custom_metadata: Any = None
    ) -> AsyncResponse[None]:
        """Saves a state as it is now, and returns once hosts will do so before whatever is called later.

        Takes and raises what `save` does. The handle's `result()` returns when it is committed, and raises
        what has failed meanwhile. It cannot be cancelled: hosts go on, and commit.
        """
        wait = begin_save(self, path, state, overwrite=overwrite, custom_metadata=custom_metadata)
        saving = AsyncResponse(f"saving '{path}'", in_background(wait, path))
        ended = threading.Event()
        self._saving.add(ended)

        def end(response: AsyncResponse[None]) -> None:
            ended.set()
            self._saving.discard(ended)

        saving.on_end(end)
        return saving

    def load(self, path: PathLike, like: Any) -> Any:
        """Loads a state, to one island or several; hosts read what they need. Returns at once, with arrays
        that will be there, unless other values are wanted, which it waits for.

        Args:
            path: Where it is, for the hosts.
            like: The same tree as was saved, with an array of this client for each array to load. The new
                array has its shape, dtype, sharding and slice. It may have been donated or lost. Other
                leaves are what `waystation.load` takes for arrays of JAX, torch and NumPy and for scalars;
                `...` skips a leaf.

        Raises:
            Unsupported: Hosts cannot heed an option.
            InvalidInput: Hosts load no such leaf; names its key path.
            WaystationError: Other values were to be loaded, and that has failed.
        """
        return begin_load(self, path, like)(None)

    def load_async(self, path: PathLike, like: Any) -> AsyncResponse[Any]:
        """Loads a state in the background; takes what `load` does. The handle's `result()` is the state once
        all of it is there, and raises whatever has failed."""
        finish = begin_load(self, path, like)

        def work(progress: Progress) -> Any:
            state = finish(None)
            arrays = [leaf for leaf in iterate_leaves(state) if isinstance(leaf, Array)]
            self.await_all([array.usable("waited for") for array in arrays], None)
            return state

        return AsyncResponse(f"loading '{path}'", work)

    def flush(self) -> None:
        """Sends all calls that have not been sent."""
        with self.lock:
            if self._batch.is_empty:
                return
            batch, self._batch = self._batch, Batch(self, self.put_laid)
            if batch.call_count:
                self._send(batch)

    def suspend(self) -> None:
        """Has the devices of all its slices taken until `resume`; returns when its arrays have left them.

        Arrays are kept in host memory or on disk (`Cluster.keep_suspended`), and outlive the islands that
        they were on. They stay what they are for this program, and cannot be read meanwhile.

        Raises:
            WaystationError: Arrays could not be brought elsewhere. It is suspended, and they stay on devices.
        """
        self.flush()
        self.backend.suspend()

    def resume(self, without_hosts: Collection[str] = ()) -> None:
        """Has devices given back, not always the same, and its arrays brought there.

        Args:
            without_hosts: Hosts that are not to be used.

        Raises:
            NotEnoughDevices: They do not all fit; it stays suspended. An island that is being rebuilt is
                waited for.
        """
        self.backend.resume(without_hosts)

    def migrate(self, without_hosts: Collection[str] = ()) -> None:
        """Suspends and resumes: so that it leaves hosts, or has better ones since others have gone.

        Args:
            without_hosts: Hosts that it is to leave.

        Raises:
            NotEnoughDevices: There are not enough devices elsewhere. It has devices as before, or stays
                suspended if others have taken them meanwhile.
        """
        self.suspend()
        try:
            self.resume(without_hosts)
        except NotEnoughDevices:
            self.resume()
            raise

    def close(self) -> None:
        """Sends what is left, waits for saves in the background, and ends. Once is enough.

        In a forked child it does nothing: the client is that of the parent.
        """
        if self.is_closed:
            return
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self.flush()
        for ended in list(self._saving):
            ended.wait()
        self._finalizer()
        self.backend.close()

    # ---- what functions, programs and arrays use -----------------------------------------------

    def record(self, callee: Callee, on: Slice, operands: Sequence[Any]) -> list[Array]:
        """Records a call, in the program that is being traced or to be sent."""
        with self.lock:
            trace = TRACE.get()
            if trace is not None:
                trace.require(self, callee.label)
                return trace.call(callee, on, operands)
            batch = self._batch
            made = batch.call(callee, on, operands)
            if batch.call_count >= BATCH_CALLS or batch.unreadable_bytes > BATCH_UNREADABLE_BYTES:
                self.flush()
            return made

    def trace(self, name: str) -> Trace:
        """A trace of a new program."""
        self.flush()
        return Trace(name, self, self.put_laid)

    def register(self, name: str, exported: bytes) -> Registration:
        """Makes a function known, as long as what this returns is kept."""
        return self._joining.register(name, exported)

    def install(self, recorder: Recorder, results: Sequence[int], *, join_chains: bool = True) -> Installed:
        """Has the backend know a program; one that it knows is found by its structure.

        Args:
            recorder: What was recorded.
            results: The arrays that are results.
            join_chains: Whether its chains are compiled as one once it has run often.

        Raises:
            InvalidProgram: It breaks a rule.
        """
        while self._stale:
            self._installed.pop(self._stale.popleft(), None)
        structure = (recorder.structure(results), join_chains)
        found = self._installed.pop(structure, None)
        if found is None:
            made = self._joining.installed(recorder.program(results), join_chains=join_chains)
            stale = functools.partial(_note_stale, self._stale, structure)
            found = _Kept(made, [weakref.ref(callee, stale) for callee in {*recorder.callees}])
        self._installed[structure] = found  # the last one used is the last
        if len(self._installed) > KEPT_PROGRAMS:
            self._installed.popitem(last=False)
        return found.installed

    def run(
        self, installed: Installed, slices: Sequence[int], arguments: Sequence[Reference], count: int
    ) -> list[Reference]:
        """Sends one run of a program; returns its results, which have its error where it cannot be sent."""
        if installed.traced is not None:
            self._joining.count(installed, slices)
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
        if self.is_closed and self._process_id == os.getpid():
            raise InvalidInput("this array has ended with its client, which was closed")
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

    def array_like(self, array: Array) -> tuple[Array, int]:
        """An array like another one, which is about to be made, and its handle."""
        handle = next(self._handles)
        made = Array(self, array.kind, array.slice, reference=Reference(handle, self._freed))
        return made, handle

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


@dataclass(frozen=True, slots=True)
class _Kept:
    """A program that is found by its structure, as long as all functions that it calls are there."""

    installed: Installed
    functions: list[weakref.ref[Callee]]


def _note_stale(stale: deque[Hashable], structure: Hashable, gone: weakref.ref[Callee]) -> None:
    """A function is gone: no call will ever make a program of that structure. Called at any time, in any
    thread."""
    del gone
    stale.append(structure)


def _free_all(freed: Freed, backend: Backend) -> None:
    """Gives up what is not needed any more, as much at once as comes within a moment."""
    ended = False
    while not ended:
        found = [freed.get()]
        if found[0] is not None:
            time.sleep(_FREES_WAIT_S)  # each time that this thread wakes, whoever calls functions has to wait
        while not freed.empty():
            found.append(freed.get())
        ended = None in found
        programs = [each.fingerprint for each in found if isinstance(each, ForgottenProgram)]
        functions = [each.key for each in found if isinstance(each, ForgottenFunction)]
        if programs:
            backend.forget_programs(programs)
        if functions:
            backend.forget_functions(functions)
        backend.free([each for each in found if isinstance(each, int)])
