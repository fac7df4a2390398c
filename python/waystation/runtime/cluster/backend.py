"""A cluster as what runs the programs of a client: the `Backend` of `runtime.client` over the manager.

What can go on without an answer is told and not waited for, in the order of the calls. Small arrays can be
put and fetched; they pass through this program and the manager, so this is no way for the state of a model:
`save` and `load` have the hosts move that.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from waystation import _forks
from waystation._errors import Unavailable
from waystation.grid import Box, slices_of_box
from waystation.runtime.cluster.connection import Connection
from waystation.runtime.controller import Dispatch
from waystation.runtime.host_options import DEFAULT_OPTIONS, HostOptions, SaveManner
from waystation.runtime.ir import Program, Sharding, Value, encode
from waystation.runtime.messages import Fetched, host_function_key, key_of
from waystation.runtime.resources import Placement, SliceRequest
from waystation.runtime.state_trees import StateTree

_FREES_WAIT_S = 0.001


class ClusterBackend:
    """See `waystation.runtime.client.Backend`.

    Args:
        connection: The program's.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # What this end holds, and how often. The lock is held until the manager is told, so that it hears of
        # what is given up and made known again in the order in which that was counted.
        self._lock = threading.Lock()
        self._functions: Counter[str] = Counter()
        self._host_functions: Counter[str] = Counter()
        self._programs: Counter[str] = Counter()
        self._installed: dict[tuple[Program, Dispatch], str] = {}
        self._places: dict[str, tuple[Program, Dispatch]] = {}
        self._freed: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self._freeing = threading.Thread(target=self._free_all, name="waystation: frees", daemon=True)
        self._freeing.start()
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`; the connection refuses what the child asks for."""
        self._lock = threading.Lock()

    @property
    def client(self) -> str:
        """See `Backend`."""
        return self._connection.client

    # ---- slices --------------------------------------------------------------------------------

    def grant(self, request: SliceRequest) -> int:
        """See `Backend`."""
        return int(self._connection.ask("grant", request))

    def release(self, slice_number: int) -> None:
        """See `Backend`."""
        self._connection.ask("release", slice_number)

    def remap(
        self, slice_number: int, *, island: str | None = None, without_hosts: Collection[str] = ()
    ) -> None:
        """See `Backend`; arrays that lie on the slice are brought along when they are used next."""
        self._connection.ask("remap", slice_number, island, tuple(without_hosts))

    def suspend(self) -> None:
        """See `Backend`."""
        self._connection.ask("suspend")

    def resume(self, without_hosts: Collection[str] = ()) -> None:
        """See `Backend`."""
        self._connection.ask("resume", tuple(without_hosts))

    def placement(self, slice_number: int) -> Placement:
        """See `Backend`."""
        found: Placement = self._connection.ask("placement", slice_number)
        return found

    def platform(self, slice_number: int) -> str:
        """See `Backend`."""
        return {"gpu": "cuda"}.get(kind := str(self._connection.ask("kind", slice_number)), kind)

    # ---- programs ------------------------------------------------------------------------------

    def register(self, name: str, exported: bytes) -> str:
        """See `Backend`."""
        del name  # the function knows it
        key = key_of(exported)
        with self._lock:
            if not self._functions[key]:
                self._connection.tell("register", key, exported)
            self._functions[key] += 1
        return key

    def forget_functions(self, keys: Sequence[str]) -> None:
        """See `Backend`."""
        with self._lock:
            self._tell_forgotten("forget_functions", _given_up(self._functions, keys))

    def register_host_function(self, name: str, function: Callable[..., Any]) -> str:
        """Makes a function of Python known that hosts of a slice call over their own shards (`ir.HostCall`).

        Args:
            name: What errors and timelines call it.
            function: Takes for each operand a list of the local shards, each with where in the array it
                begins, in the order of the host's devices; returns for each result a list of as many arrays.
                Hosts must be able to import its module; functions of `__main__` travel whole. It stays until
                `close`.

        Returns:
            What programs call it by. Another function of the same name has a key of its own.
        """
        from ray import cloudpickle

        pickled = cloudpickle.dumps(function)
        key = host_function_key(name, pickled)
        with self._lock:
            self._host_functions[key] += 1
            # The manager does not load it: what cannot be loaded elsewhere is to fail where it is called.
            self._connection.tell("register_host_function", key, pickled)
        return key

    def install(self, program: Program, dispatch: Dispatch = Dispatch.PARALLEL) -> str:
        """See `Backend`.

        Args:
            program: The program.
            dispatch: Whether its calls are given to hosts at once, or each when those before it have ended.
        """
        place = program, dispatch
        with self._lock:
            found = self._installed.get(place)
            if found is None:
                found = str(self._connection.ask("install", encode(program), dispatch))
                self._installed[place], self._places[found] = found, place
            self._programs[found] += 1
            return found

    def forget_programs(self, fingerprints: Sequence[str]) -> None:
        """See `Backend`."""
        with self._lock:
            gone = _given_up(self._programs, fingerprints)
            for fingerprint in gone:
                del self._installed[self._places.pop(fingerprint)]
            self._tell_forgotten("forget_programs", gone)

    def _tell_forgotten(self, method: str, names: Sequence[str]) -> None:
        if names:
            with contextlib.suppress(Unavailable):  # the manager has gone, and all programs with it
                self._connection.tell(method, tuple(names))

    def prepare(self, fingerprint: str, slices: Sequence[int]) -> None:
        """See `Backend`."""
        self._connection.ask("prepare", fingerprint, tuple(slices))

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
        """See `Backend`."""
        places = tuple(slices), tuple(arguments), tuple(results)
        self._connection.tell("run", fingerprint, *places, cost_seconds, priority)

    # ---- arrays --------------------------------------------------------------------------------

    def put(self, handle: int, array: np.ndarray[Any, Any], slice_number: int, sharding: Sharding) -> None:
        """See `Backend`."""
        self._connection.tell("put", handle, np.asarray(array), slice_number, sharding)

    def get(self, handle: int, timeout_s: float | None = None) -> np.ndarray[Any, Any]:
        """See `Backend`."""
        fetched: list[Fetched] = self._connection.ask("get", handle, timeout_s=timeout_s)
        blocks = [block for each in fetched for block in each.blocks]
        whole = np.empty(fetched[0].shape, blocks[0][1].dtype)
        for offset, block in blocks:
            box: Box = (offset, block.shape)
            whole[slices_of_box(box)] = block
        return whole

    def wait(self, handles: Sequence[int], timeout_s: float | None = None) -> None:
        """See `Backend`."""
        self._connection.ask("wait", tuple(handles), timeout_s=timeout_s)

    def is_done(self, handle: int) -> bool:
        """See `Backend`."""
        return bool(self._connection.ask("is_done", handle))

    def free(self, handles: Sequence[int]) -> None:
        """See `Backend`."""
        # A finalizer may run in the middle of another call of this thread: nothing is sent, or locked, here.
        self._freed.put(tuple(handles))

    def share(self, handle: int, name: str) -> None:
        """See `Backend`."""
        self._connection.ask("share", handle, name)

    def named(self, name: str, handle: int) -> Value:
        """See `Backend`."""
        found: Value = self._connection.ask("named", name, handle)
        return found

    def withdraw(self, name: str) -> None:
        """Takes the name of a shared array back; the array ends with the last reference to it.

        Raises:
            ObjectNotFound: No array has that name.
        """
        self._connection.ask("withdraw", name)

    def close(self) -> None:
        """See `Backend`."""
        self._freed.put(None)
        self._freeing.join()
        self.forget_programs(tuple(self._programs.elements()))
        self.forget_functions(tuple(self._functions.elements()))
        with self._lock:
            self._tell_forgotten("forget_host_functions", tuple(self._host_functions.elements()))
            self._host_functions.clear()
        self._connection.ask("end")

    # ---- checkpoints ---------------------------------------------------------------------------

    def begin_save(
        self, path: str, tree: StateTree, arrays: Mapping[int, int], manner: SaveManner
    ) -> Callable[[float | None], None]:
        """See `waystation.runtime.client.checkpoints.Saves`."""
        return self._connection.begin("save", path, tree, tuple(arrays.items()), manner)

    def begin_load(
        self,
        path: str,
        tree: StateTree,
        arrays: Mapping[int, tuple[int, Value]],
        *,
        options: HostOptions = DEFAULT_OPTIONS,
    ) -> Callable[[float | None], tuple[Any, ...]]:
        """See `waystation.runtime.client.checkpoints.Saves`."""
        wanted = tuple((leaf, handle, value) for leaf, (handle, value) in arrays.items())
        return self._connection.begin("load", path, tree, wanted, options)

    def save(
        self,
        path: str,
        arrays: Mapping[str, int],
        *,
        overwrite: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Saves a dict of arrays, of one island or several, as a checkpoint; returns when it is committed, in
        one act.

        The hosts write their own shards, between the runs before this call and those after it; only the path
        and the names pass through this program.

        Args:
            path: Where the checkpoint goes, for the hosts; all have to reach it.
            arrays: A handle for each name.
            overwrite: Whether it may take the place of another.
            timeout_s: How long to wait.

        Raises:
            TimeoutError: It has not ended by then, and goes on.
            WaystationError: An array is not there, or it cannot be saved.
        """
        tree = StateTree.of_names(list(arrays))
        self.begin_save(path, tree, dict(enumerate(arrays.values())), SaveManner(overwrite))(timeout_s)

    def load(self, path: str, arrays: Mapping[str, tuple[int, Value]]) -> None:
        """Loads a dict of arrays, to one island or several; returns at once.

        Args:
            path: Where the checkpoint is, for the hosts.
            arrays: For each name in the checkpoint a new handle, and the shape, dtype, slice (its number) and
                sharding that the array is to have.
        """
        self.begin_load(path, StateTree.of_names(list(arrays)), dict(enumerate(arrays.values())))

    # ---- how ------------------------------------------------------------------------------------

    def _free_all(self) -> None:
        """Tells the manager what has been freed, as much as comes within a moment."""
        ended = False
        while not ended and (handles := self._freed.get()) is not None:
            time.sleep(_FREES_WAIT_S)  # whatever is told wakes the manager
            found = list(handles)
            while not ended and not self._freed.empty():
                more = self._freed.get()
                ended = more is None
                found += more or ()
            try:
                self._connection.tell("free", tuple(found))
            except Unavailable:
                return  # the manager has gone, and all arrays with it


def _given_up(counts: Counter[str], names: Sequence[str]) -> tuple[str, ...]:
    """Counts names down; returns those that nobody holds any more."""
    gone = []
    for name in names:
        if counts[name] > 1:
            counts[name] -= 1
        elif counts.pop(name, 0):
            gone.append(name)
    return tuple(gone)
