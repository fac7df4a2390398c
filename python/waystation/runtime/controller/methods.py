"""What a client may call of the controller, in the words of `Backend`.

A call takes effect at once, in the order in which calls are made. Its answer is given to `then`, now or, of
what takes long, such as to wait for an array, when it is there. A client can call what `METHODS` names, and
nothing else of this object.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from waystation._errors import InvalidInput, WaystationError
from waystation.runtime.controller.controller import Controller
from waystation.runtime.controller.lowered import Dispatch
from waystation.runtime.controller.works import Work
from waystation.runtime.host_options import HostOptions, SaveManner
from waystation.runtime.ir import Sharding, Value, decode
from waystation.runtime.resources import Placement, SliceRequest
from waystation.runtime.state_trees import StateTree

_AT_ONCE = frozenset(
    {
        *("grant", "release", "remap", "resume", "placement", "kind"),
        *("register", "register_host_function", "forget_functions", "forget_host_functions"),
        *("install", "forget_programs", "run"),
        *("put", "is_done", "free", "named", "withdraw", "end"),
    }
)
_LATER = frozenset({"suspend", "prepare", "get", "wait", "share", "save", "load"})
METHODS = _AT_ONCE | _LATER


class Then(Protocol):
    """Is given an answer, once: an error, or a result."""

    def __call__(self, error: Exception | None, result: Any = None, /) -> None:
        """Takes it."""
        ...


class ClientMethods:
    """The calls of one client.

    Args:
        client: What it is known by.
        controller: Decides.
    """

    def __init__(self, client: str, controller: Controller) -> None:
        self.client = client
        self._controller = controller

    def call(self, method: str, arguments: Sequence[Any], then: Then) -> None:
        """Calls a method by its name; raises nothing itself."""
        try:
            if method in _LATER:
                then = _once(then)
                getattr(self, method)(*arguments, then)
                return
            if method not in _AT_ONCE:
                raise InvalidInput(f"programs cannot call '{method}' of their controller")
            result = getattr(self, method)(*arguments)
        except Exception as error:
            then(error)
        else:
            then(None, result)

    # ---- slices --------------------------------------------------------------------------------

    def grant(self, request: SliceRequest) -> int:
        """See `Backend`."""
        return self._controller.grant(self.client, request)

    def release(self, number: int) -> None:
        """See `Backend`."""
        self._controller.release(self.client, number)

    def remap(self, number: int, island: str | None, without_hosts: Collection[str]) -> None:
        """See `Backend`."""
        self._controller.remap(self.client, number, island, without_hosts)

    def suspend(self, then: Then) -> None:
        """See `Backend`."""
        self._controller.suspensions.suspend(self.client, then)

    def resume(self, without_hosts: Collection[str]) -> None:
        """See `Backend`."""
        self._controller.suspensions.resume(self.client, without_hosts)

    def placement(self, number: int) -> Placement:
        """See `Backend`."""
        return self._controller.placement(number)

    def kind(self, number: int) -> str:
        """What the devices of a slice are."""
        return self._controller.kind(number)

    # ---- programs ------------------------------------------------------------------------------

    def register(self, key: str, exported: bytes) -> None:
        """See `Backend`; hosts get a function with the first list that calls it."""
        functions = self._controller.programs.functions
        functions.hold(key, self.client)
        functions.set(key, exported)

    def register_host_function(self, key: str, function: Any) -> None:
        """Makes a function of Python known that programs call on hosts by its key."""
        functions = self._controller.programs.host_functions
        functions.hold(key, self.client)
        functions.set(key, function)

    def forget_functions(self, keys: Sequence[str]) -> None:
        """See `Backend`."""
        for key in keys:
            self._controller.programs.functions.release(key, self.client)

    def forget_host_functions(self, keys: Sequence[str]) -> None:
        """Gives functions of Python up, each once for each time that it was made known."""
        for key in keys:
            self._controller.programs.host_functions.release(key, self.client)

    def install(self, encoded: bytes, dispatch: Dispatch) -> str:
        """See `Backend`."""
        return self._controller.install(self.client, decode(encoded), dispatch)

    def forget_programs(self, fingerprints: Sequence[str]) -> None:
        """See `Backend`."""
        for fingerprint in fingerprints:
            self._controller.programs.forget(fingerprint, self.client)

    def run(
        self,
        fingerprint: str,
        slices: Sequence[int],
        arguments: Sequence[int],
        results: Sequence[int],
        cost_seconds: float | None,
        priority: int,
    ) -> None:
        """See `Backend`."""
        self._controller.run(self.client, fingerprint, slices, arguments, results, cost_seconds, priority)

    def prepare(self, fingerprint: str, slices: Sequence[int], then: Then) -> None:
        """Has hosts compile a program before it runs."""
        self._controller.prepare(self.client, fingerprint, slices, then)

    # ---- arrays --------------------------------------------------------------------------------

    def put(self, handle: int, array: Any, slice_number: int, sharding: Sharding) -> None:
        """See `Backend`."""
        value = Value(handle, array.shape, str(array.dtype), slice_number, sharding)
        self._controller.works.put(self.client, handle, array, value)

    def get(self, handle: int, then: Then) -> None:
        """What hosts have of an array: an answer of each."""

        def end(work: Work) -> None:
            then(work.error, [fetched[0] for fetched in work.fetched.values() if fetched])

        self._controller.works.get(self.client, handle, end)

    def wait(self, handles: Sequence[int], then: Then) -> None:
        """See `Backend`."""
        left = len(handles)

        def made(handle: int) -> None:
            nonlocal left
            left -= 1
            try:
                self._controller.arrays.check(self.client, handle)
            except WaystationError as error:
                then(error)
            else:
                if not left:
                    then(None)

        if not handles:
            then(None)
        for handle in handles:
            self._controller.when_made(self.client, handle, functools.partial(made, handle))

    def is_done(self, handle: int) -> bool:
        """See `Backend`."""
        arrays = self._controller.arrays
        return arrays.is_made(arrays.handle(self.client, handle))

    def free(self, handles: Sequence[int]) -> None:
        """See `Backend`."""
        self._controller.free(self.client, handles)

    def share(self, handle: int, name: str, then: Then) -> None:
        """See `Backend`; an array that is not there yet is waited for."""
        held = self._controller.hold(self.client, handle)

        def made() -> None:
            try:
                self._controller.share(held, name)
            except WaystationError as error:
                then(error)
            else:
                then(None)

        self._controller.when_made(self.client, handle, made)

    def named(self, name: str, handle: int) -> Value:
        """See `Backend`."""
        stored = self._controller.arrays.attach(self.client, name, handle)
        return replace(stored.value, number=handle)

    def withdraw(self, name: str) -> None:
        """Takes a name back."""
        self._controller.withdraw(name)

    def end(self) -> None:
        """Frees everything of this program, and releases its slices."""
        self._controller.collect(self._controller.arrays.drop_client(self.client))
        self._controller.arrays.add_client(self.client)
        self._controller.release_slices(self.client)

    # ---- checkpoints ---------------------------------------------------------------------------

    def save(
        self,
        path: str,
        tree: StateTree,
        arrays: Sequence[tuple[int, int]],
        manner: SaveManner,
        then: Then,
    ) -> None:
        """Has hosts save a state."""
        self._controller.checkpoints.save(self.client, path, tree, arrays, manner, then)

    def load(
        self,
        path: str,
        tree: StateTree,
        arrays: Sequence[tuple[int, int, Value]],
        options: HostOptions,
        then: Then,
    ) -> None:
        """Has hosts make arrays of a checkpoint; answers with the values that are wanted."""
        self._controller.checkpoints.load(self.client, path, tree, arrays, options, then)


def _once(then: Then) -> Then:
    """The same, but for answers after the first one."""
    is_given = False

    def give(error: Exception | None, result: Any = None, /) -> None:
        nonlocal is_given
        if not is_given:
            is_given = True
            then(error, result)

    return give
