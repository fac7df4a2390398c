"""What runs the programs of a client: the controller of a cluster, or one in this process.

Calls are about whole arrays and programs, never about shards or single computations. A client names an array
by a *handle*, an integer that it chooses and never uses again, so it can go on before anything has been made.
Calls of one client take effect in the order in which they were made. What can go on without an answer is
told and not waited for; only `get`, `wait` and what the resource manager decides have to be waited for.
Failure sequence: a run that fails leaves its error in the handles of its results; programs that take one of
these as an argument fail with the same error, and the client hears of it when it reads.

`put` and `get` bring arrays through the controller, so this is no way for the state of a model: `save` and
`load` have the hosts move that. Plain Python: nothing here needs Ray or JAX.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from waystation import _forks
from waystation._errors import Unavailable
from waystation.grid import Box, slices_of_box
from waystation.runtime.controller import Dispatch
from waystation.runtime.host_options import DEFAULT_OPTIONS, HostOptions, SaveManner
from waystation.runtime.ir import Program, Sharding, Value, encode
from waystation.runtime.messages import Fetched, key_of
from waystation.runtime.resources import Placement, SliceRequest
from waystation.runtime.state_trees import StateTree

_FREES_WAIT_S = 0.001


class Calls(Protocol):
    """The way to the controller. What it can be asked and told is in `controller.methods`."""

    client: str

    def ask(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Asks for something, after everything that was asked or told before; returns the answer.

        Raises:
            TimeoutError: There is none by then.
            Unavailable: There is no controller any more.
            WaystationError: What it answers.
        """
        ...

    def begin(self, method: str, *arguments: Any) -> Callable[[float | None], Any]:
        """Asks for something, in the order of calls; what it returns waits for the answer as `ask` does."""
        ...

    def tell(self, method: str, *arguments: Any) -> None:
        """Tells something, after everything that was asked or told before; waits for no answer.

        Raises:
            Unavailable: There is no controller any more.
        """
        ...

    def host_function(self, name: str, function: Callable[..., Any]) -> tuple[str, Any]:
        """The key that a function of Python gets, and what hosts take for it."""
        ...

    def end(self) -> None:
        """Ends the arrays and slices of the client, after everything that was asked or told before."""
        ...


class Backend:
    """Where the programs of one client run.

    Args:
        calls: The way to the controller.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
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
        """See `waystation._forks.Watched`; what the child asks for is refused."""
        self._lock = threading.Lock()

    @property
    def client(self) -> str:
        """The name of the client, as it is shown to people."""
        return self._calls.client

    # ---- slices --------------------------------------------------------------------------------

    def grant(self, request: SliceRequest) -> int:
        """Grants a slice and returns its number.

        Raises:
            NotEnoughDevices: No island has the devices free, and none that may is being rebuilt.
        """
        return int(self._calls.ask("grant", request))

    def release(self, slice_number: int) -> None:
        """Takes a slice back for good, when what was submitted before has run.

        Raises:
            NoSuchSlice: There is none of that number.
        """
        self._calls.ask("release", slice_number)

    def remap(
        self, slice_number: int, *, island: str | None = None, without_hosts: Collection[str] = ()
    ) -> None:
        """Moves a slice to other devices; the next runs over it are lowered anew.

        Raises:
            NoSuchSlice: There is none of that number.
            SliceNotPlaced: It has no devices to move from.
            InvalidInput: It was asked for in another island, by name.
            NotEnoughDevices: There are not enough others; it stays where it is.
        """
        self._calls.ask("remap", slice_number, island, tuple(without_hosts))

    def suspend(self) -> None:
        """Takes the devices of all slices of this client until `resume`, and keeps their arrays elsewhere.

        Raises:
            WaystationError: Arrays could not be brought elsewhere, and stay on devices for now.
        """
        self._calls.ask("suspend")

    def resume(self, without_hosts: Collection[str] = ()) -> None:
        """Gives all suspended slices devices again, and brings their arrays there.

        Args:
            without_hosts: Hosts that they are not to have devices of.

        Raises:
            NotEnoughDevices: They do not all fit, and no island that has them is being rebuilt; they stay
                suspended.
        """
        self._calls.ask("resume", tuple(without_hosts))

    def placement(self, slice_number: int) -> Placement:
        """Where a slice is now.

        Raises:
            NoSuchSlice: There is none of that number.
            SliceNotPlaced: It has no devices.
        """
        found: Placement = self._calls.ask("placement", slice_number)
        return found

    def platform(self, slice_number: int) -> str:
        """What functions for a slice have to be exported for, in JAX's words: `cpu`, `cuda` or another."""
        return {"gpu": "cuda"}.get(kind := str(self._calls.ask("kind", slice_number)), kind)

    # ---- programs ------------------------------------------------------------------------------

    def register(self, name: str, exported: bytes) -> str:
        """Makes a function known, which hosts then compile in the background.

        Args:
            name: Its name, for messages.
            exported: What `jax.export.Exported.serialize` gave, exported over an `AbstractMesh`. These
                bytes travel to each island once.

        Returns:
            The key that programs call it by: `messages.key_of(exported)`.
        """
        del name  # the function knows it
        key = key_of(exported)
        with self._lock:
            if not self._functions[key]:
                self._calls.tell("register", key, exported)
            self._functions[key] += 1
        return key

    def forget_functions(self, keys: Sequence[str]) -> None:
        """Gives functions up, each once for each time that it was registered; what calls them keeps them.

        Never raises for what is unknown, or since a cluster is gone.
        """
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
        key, code = self._calls.host_function(name, function)
        with self._lock:
            self._host_functions[key] += 1
            self._calls.tell("register_host_function", key, code)
        return key

    def install(self, program: Program, dispatch: Dispatch = Dispatch.PARALLEL) -> str:
        """Makes a program known.

        Args:
            program: What `ir.prepare` returned. Its bytes travel once.
            dispatch: Whether its calls are given to hosts at once, or each when those before it have ended.

        Returns:
            Its fingerprint.
        """
        place = program, dispatch
        with self._lock:
            found = self._installed.get(place)
            if found is None:
                found = str(self._calls.ask("install", encode(program), dispatch))
                self._installed[place], self._places[found] = found, place
            self._programs[found] += 1
            return found

    def forget_programs(self, fingerprints: Sequence[str]) -> None:
        """Gives programs up, each once for each time that it was installed; runs of them go on.

        Never raises for what is unknown, or since a cluster is gone.
        """
        with self._lock:
            gone = _given_up(self._programs, fingerprints)
            for fingerprint in gone:
                del self._installed[self._places.pop(fingerprint)]
            self._tell_forgotten("forget_programs", gone)

    def _tell_forgotten(self, method: str, names: Sequence[str]) -> None:
        if names:
            with contextlib.suppress(Unavailable):  # the manager has gone, and all programs with it
                self._calls.tell(method, tuple(names))

    def prepare(self, fingerprint: str, slices: Sequence[int]) -> None:
        """See `Backend`."""
        self._calls.ask("prepare", fingerprint, tuple(slices))

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
        """Runs a program; returns at once.

        Args:
            fingerprint: Of an installed program.
            slices: The granted slice for each of `Program.slices`, in order.
            arguments: A handle for each `Arg`, in order. Those of donated ones end.
            results: A new handle for each operand of the `Result`, in order. These are different values,
                and no arguments: a client that wants one twice keeps its handle twice.
            cost_seconds: How long its devices need for it, if that is known.
            priority: Runs of a higher one go first.

        Raises:
            NotFound: There is no such program.
        """
        places = tuple(slices), tuple(arguments), tuple(results)
        self._calls.tell("run", fingerprint, *places, cost_seconds, priority)

    # ---- arrays --------------------------------------------------------------------------------

    def put(self, handle: int, array: np.ndarray[Any, Any], slice_number: int, sharding: Sharding) -> None:
        """Makes an array of one of this process, of small or medium size; returns when it may be changed.

        Args:
            handle: Its new handle.
            array: Its elements.
            slice_number: The slice that it is to live on.
            sharding: How it is to lie there.
        """
        self._calls.tell("put", handle, np.array(array), slice_number, sharding)

    def get(self, handle: int, timeout_s: float | None = None) -> np.ndarray[Any, Any]:
        """Waits for an array and brings it here, whole.

        Raises:
            TimeoutError: It is not there after so many seconds.
            ObjectNotFound: Nothing has that handle.
            WaystationError: What kept it from being made; the context has `program`, `computation`,
                `host` and `device` where these are known.
        """
        fetched: list[Fetched] = self._calls.ask("get", handle, timeout_s=timeout_s)
        blocks = [block for each in fetched for block in each.blocks]
        whole = np.empty(fetched[0].shape, blocks[0][1].dtype)
        for offset, block in blocks:
            box: Box = (offset, block.shape)
            whole[slices_of_box(box)] = block
        return whole

    def wait(self, handles: Sequence[int], timeout_s: float | None = None) -> None:
        """Waits until arrays have been made; raises as `get`."""
        self._calls.ask("wait", tuple(handles), timeout_s=timeout_s)

    def is_done(self, handle: int) -> bool:
        """Whether an array has been made, or will never be; does not wait."""
        return bool(self._calls.ask("is_done", handle))

    def free(self, handles: Sequence[int]) -> None:
        """Gives arrays up, once what was submitted before has used them. Never waits, and never raises for
        an unknown handle: it is called from finalizers."""
        # A finalizer may run in the middle of another call of this thread: nothing is sent, or locked, here.
        self._freed.put(tuple(handles))

    def share(self, handle: int, name: str) -> None:
        """Publishes an array under a name, for all clients to read; its bytes outlive this client.

        Raises:
            NameTaken: Another array has that name.
        """
        self._calls.ask("share", handle, name)

    def named(self, name: str, handle: int) -> Value:
        """Takes a reference to a published array.

        Args:
            name: Its name.
            handle: The handle that it gets for this client.

        Returns:
            Its shape, dtype, sharding and the slice that it lives on; `number` is the handle.

        Raises:
            ObjectNotFound: No array has that name.
        """
        found: Value = self._calls.ask("named", name, handle)
        return found

    def withdraw(self, name: str) -> None:
        """Takes the name of a shared array back; the array ends with the last reference to it.

        Raises:
            ObjectNotFound: No array has that name.
        """
        self._calls.ask("withdraw", name)

    def close(self) -> None:
        """Ends this client: its slices are released and its arrays freed. Never raises for a dead manager."""
        self._freed.put(None)
        self._freeing.join()
        self.forget_programs(tuple(self._programs.elements()))
        self.forget_functions(tuple(self._functions.elements()))
        with self._lock:
            self._tell_forgotten("forget_host_functions", tuple(self._host_functions.elements()))
            self._host_functions.clear()
        with contextlib.suppress(Unavailable):
            self._calls.end()

    # ---- checkpoints ---------------------------------------------------------------------------

    def begin_save(
        self, path: str, tree: StateTree, arrays: Mapping[int, int], manner: SaveManner
    ) -> Callable[[float | None], None]:
        """Has a state saved, in the order of calls.

        Args:
            path: Where the checkpoint goes.
            tree: The state without its arrays.
            arrays: The handle of each array, by the number of its leaf.
            manner: How it is saved.

        Returns:
            What waits, for so many seconds, until that is committed, and raises what it has failed with.
        """
        return self._calls.begin("save", path, tree, tuple(arrays.items()), manner)

    def begin_load(
        self,
        path: str,
        tree: StateTree,
        arrays: Mapping[int, tuple[int, Value]],
        *,
        options: HostOptions = DEFAULT_OPTIONS,
    ) -> Callable[[float | None], tuple[Any, ...]]:
        """Has a state loaded.

        Args:
            path: Where the checkpoint is.
            tree: The abstract state without its arrays.
            arrays: For the leaf of each array, by its number, a new handle, and how it is to lie.
            options: How it is loaded.

        Returns:
            What waits for the values that are wanted.
        """
        wanted = tuple((leaf, handle, value) for leaf, (handle, value) in arrays.items())
        return self._calls.begin("load", path, tree, wanted, options)

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
                self._calls.tell("free", tuple(found))
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
