"""The coordinator of programs that use `torch.distributed`: over the store of the default process group.

No collectives: a save in the background must not come between those of the training. The store (usually a
TCPStore in process 0) is the group's own, reached by connections of our own (`clone`), one for each call
that is under way, because a call that waits keeps others of the same connection waiting. A wait inside the
store is begun once and without a limit, while we look at it for as long as we like: torch writes a warning
for each wait that times out. Where a store cannot be cloned (files; older versions of torch) nothing waits
inside of it, and what is waited for is asked for again and again, at growing intervals.

What a death does here: the store goes with process 0, and every call then fails at once (the process was
killed) or is not answered (its machine is gone), which is given up after `ANSWER_S`; the beats of
`liveness` make sure that there is such a call every second. Unavailable names process 0. Other processes
are watched by `liveness`, and their death is Unavailable that names them.

Nothing of this process may be inside the store when the interpreter ends: torch's calls cannot end then, and
abort the process. So waits that were given up are released at exit, by an empty value for their keys, which
stands for none.

Neither the group nor its server is kept alive here (a clone is only a client), so that a program may destroy
the group and make another, with the same address. Connections are kept from one session to the next, as
making one takes a look-up of names, which can take seconds.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from waystation import _forks
from waystation._errors import Unavailable
from waystation.coordination.liveness import Watching
from waystation.coordination.store_coordinator import StoreCoordinator

T = TypeVar("T")

ANSWER_S = 20.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
_RELEASE_S = 2.0
_NO_LIMIT = timedelta(days=1)
_NEXT_TO_NO_TIME = timedelta(milliseconds=100)


def find() -> tuple[Any, int, int] | None:
    """The default process group, the index of this process and how many there are; None if torch is not
    loaded or has no group of several processes."""
    distributed: Any = sys.modules.get("torch.distributed")
    # While another thread imports torch, the module may be there without its functions.
    is_initialized = getattr(distributed, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    count = distributed.get_world_size()
    return (distributed.group.WORLD, distributed.get_rank(), count) if count > 1 else None


def coordinator(group: Any, process_index: int, process_count: int) -> StoreCoordinator:
    """The coordinator over a process group, which it does not keep alive."""
    reference = weakref.ref(group)

    def find_store() -> Any:
        group = reference()
        if group is None:
            raise Unavailable(
                "the process group of torch.distributed was destroyed; begin again with the new"
            )
        return _store_of(group)

    return StoreCoordinator(TorchStore(find_store), process_index, process_count)


def _store_of(group: Any) -> Any:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    import torch.distributed.distributed_c10d as c10d

    return c10d._get_default_store()


class TorchStore(Watching):
    """A `torch.distributed` store as sessions need it."""

    message_bytes = 4 << 20  # a TCPStore takes up to 8 MiB
    longest_wait_s: float = 0.5  # deaths are looked for between
    removes_below = False

    def __init__(self, find_store: Callable[[], Any]) -> None:
        self._find_store = find_store
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._waits: dict[str, _Wait] = {}
        weakref.finalize(self, _close, self._idle, self._waits)
        _forks.watch(self)
        self._given_up: list[_Wait] = []  # inside the store all the same, until it has what they wait for
        self._lost: str | None = None
        store = find_store()
        # Only that of TCP lives in a process, which is the first unless a launcher keeps it.
        self.host = 0 if _is_tcp(store) else None
        # Whether a wait inside the store keeps nobody else waiting.
        self._can_wait = self.host is not None and hasattr(store, "clone")
        _stores.add(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: the threads, and the connections of theirs, are the parent's."""
        _stores.discard(self)
        self._lock = threading.Lock()
        self._idle.clear()
        self._waits.clear()

    def set(self, key: str, value: bytes) -> None:
        """Puts a value."""
        self._call(lambda client: client.store.set(key, value))

    def set_once(self, key: str, value: bytes) -> bool:
        """Puts a value if there is none yet."""
        return bytes(self._call(lambda client: client.store.compare_set(key, "", value))) == value

    def add(self, key: str, amount: int) -> int:
        """Adds to a number."""
        return int(self._call(lambda client: client.store.add(key, amount)))

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value, waiting for it."""
        if timeout_s > 0 and self._can_wait:
            return self._wait(key, timeout_s)
        return self._call(lambda client: client.poll(key, timeout_s), timeout_s)

    def read(self, directory: str, names: Sequence[str]) -> list[bytes | None]:
        """The values that are there now."""
        keys = [f"{directory}/{name}" for name in names]
        return self._call(lambda client: client.read(keys))

    def delete(self, keys: Sequence[str]) -> None:
        """Removes keys."""
        if keys:
            self._call(lambda client: [client.store.delete_key(key) for key in keys])

    def begin(self, watched: Sequence[int]) -> bool:
        """A session begins; the first one tries the store again, also if it was lost."""
        first = super().begin(watched)
        if first:
            self._lost = None
        return first

    def end(self, watched: Sequence[int]) -> bool:
        """A session has ended."""
        if not super().end(watched):
            return False
        with self._lock:
            given_up = dict(self._waits)
            self._waits.clear()
            still_inside = [wait for wait in self._given_up if wait.connection.thread.is_alive()]
            self._given_up = [*still_inside, *given_up.values()]
        for wait in given_up.values():
            wait.connection.close()
        return True

    def leave(self) -> None:
        """Gets the threads that still wait for keys out of the store: this process ends."""
        with self._lock:
            waits = [*self._given_up, *self._waits.values()]
        inside = [wait for wait in waits if wait.connection.thread.is_alive()]
        for wait in inside:
            wait.is_given_up.set()
            wait.connection.close()
        self._release_from([wait.key for wait in inside])
        for wait in inside:
            wait.connection.thread.join(_RELEASE_S)

    def _release_from(self, keys: Iterable[str]) -> None:
        try:
            for key in keys:
                # Changes no value that is there.
                self._call(partial(_put_nothing, key))
        except Unavailable:
            pass  # with the store, all waits inside of it have ended

    def _call(self, function: Callable[[_Client], T], waiting_s: float = 0.0) -> T:
        connection = self._connect()
        try:
            call = connection.call(function)
            is_done = _is_done(call, waiting_s + ANSWER_S)
            error = call.exception() if is_done else None
        except BaseException:  # an interrupt
            connection.close()
            raise
        if is_done and error is None:
            self._release(connection)
            return call.result()
        connection.close()  # the call may still run
        if error is None:
            raise self._lose(f"no answer within {ANSWER_S:g} s")
        if isinstance(error, RuntimeError):  # what torch raises, of whatever class
            raise self._lose(_first_line(error)) from error
        raise error

    def _wait(self, key: str, timeout_s: float) -> bytes | None:
        """Looks for so long at the wait for a key, which is begun if there is none."""
        if self._lost is not None:
            raise self._unavailable(self._lost)
        with self._lock:
            begun = self._waits.pop(key, None)
        if begun is None:
            begun = _Wait(self._connect(), key)
        is_done = False
        try:
            is_done = _is_done(begun.future, timeout_s)
        finally:
            if not is_done:
                with self._lock:
                    self._waits[key] = begun
        if not is_done:
            return None
        error = begun.future.exception()
        if error is None:
            self._release(begun.connection)
            return begun.future.result()
        begun.connection.close()
        if isinstance(error, RuntimeError):
            raise self._lose(_first_line(error)) from error
        raise error

    def _connect(self) -> _Connection:
        if self._lost is not None:
            raise self._unavailable(self._lost)
        with self._lock:
            return self._idle.pop() if self._idle else _Connection(self._find_store)

    def _release(self, connection: _Connection) -> None:
        with self._lock:
            self._idle.append(connection)

    def _lose(self, why: str) -> Unavailable:
        """The store is gone, and is not asked again until all sessions have failed for that."""
        self._lost = why
        return self._unavailable(why)

    def _unavailable(self, why: str) -> Unavailable:
        if self.host is None:
            return Unavailable(f"the store of torch.distributed does not work: {why}")
        return Unavailable(
            f"the store of torch.distributed does not answer: {self.describe(self.host)}, which "
            f"holds it, has died or cannot be reached ({why}). See its output, and restart the program",
            process=self.host,
        )


def _is_done(call: concurrent.futures.Future[Any], timeout_s: float) -> bool:
    """Waits for the end of a call. What a signal handler raises meanwhile is not taken for the call's."""
    return bool(concurrent.futures.wait([call], timeout_s).done)


class _Client:
    """What one connection does with its own copy of the store."""

    def __init__(self, store: Any) -> None:
        self.store = store.clone() if hasattr(store, "clone") else store
        self._reads_together = hasattr(store, "multi_get") and self.store.has_extended_api()

    def wait(self, key: str, is_given_up: threading.Event) -> bytes:
        """The value, however long it takes, unless it is given up."""
        self.store.set_timeout(_NO_LIMIT)
        while not (value := bytes(self.store.get(key))) and not is_given_up.is_set():
            # Removed between torch's wait and its get, which then is empty; or somebody else has given up.
            time.sleep(_FIRST_PAUSE_S)
        return value

    def poll(self, key: str, timeout_s: float) -> bytes | None:
        """The value, asking for it again and again; None if it was not in time."""
        until = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while not self.store.check([key]):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return None
            time.sleep(min(pause_s, left_s))
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        return self._take(key)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values that are there now."""
        there = list(keys) if self.store.check(list(keys)) else [k for k in keys if self.store.check([k])]
        if self._reads_together and len(there) > 1:
            self.store.set_timeout(_NEXT_TO_NO_TIME)
            try:
                found = dict(zip(there, self.store.multi_get(there), strict=True))
                # Of those that are removed meanwhile torch gives nothing, or times out.
                return [bytes(found[key]) or None if key in found else None for key in keys]
            except RuntimeError:  # what torch raises, of a class that differs between stores
                pass
        return [self._take(key) if key in there else None for key in keys]

    def _take(self, key: str) -> bytes | None:
        """A value that was there a moment ago; None if it has been removed."""
        self.store.set_timeout(_NEXT_TO_NO_TIME)
        while True:
            try:
                return bytes(self.store.get(key)) or None
            except RuntimeError:
                # The key was removed, or the server is late. If the connection broke, this fails, too.
                if not self.store.check([key]):
                    return None


class _Connection:
    """A thread that makes a client and calls it, so that what is not answered can be given up."""

    def __init__(self, find_store: Callable[[], Any]) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=_serve, args=(find_store, self._calls), name="waystation-store", daemon=True
        )
        self.thread.start()

    def call(self, function: Callable[[_Client], T]) -> concurrent.futures.Future[T]:
        """Begins a call."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._calls.put((function, future))
        return future

    def close(self) -> None:
        """The thread ends, and with it the connection, after the call that is under way."""
        self._calls.put(None)


@dataclass(slots=True)
class _Wait:
    """A wait for a key, inside the store."""

    connection: _Connection
    key: str
    is_given_up: threading.Event = field(default_factory=threading.Event)
    future: concurrent.futures.Future[bytes] = field(init=False)

    def __post_init__(self) -> None:
        key, is_given_up = self.key, self.is_given_up
        self.future = self.connection.call(lambda client: client.wait(key, is_given_up))


def _put_nothing(key: str, client: _Client) -> None:
    client.store.compare_set(key, "", "")


_stores: weakref.WeakSet[TorchStore] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    for store in list(_stores):
        store.leave()


def _serve(find_store: Callable[[], Any], calls: queue.SimpleQueue[Any]) -> None:
    client = None
    while (call := calls.get()) is not None:
        function, future = call
        try:
            client = client or _Client(find_store())
            future.set_result(function(client))
        except Exception as error:
            future.set_exception(error)
        # Or they would keep alive what they refer to, until the next call.
        del call, function, future


def _close(idle: list[_Connection], waits: dict[str, _Wait]) -> None:
    for connection in [*idle, *(wait.connection for wait in waits.values())]:
        connection.close()


def _first_line(error: Exception) -> str:
    # What follows is where in torch it happened.
    return str(error).partition("\n")[0]


def _is_tcp(store: Any) -> bool:
    distributed: Any = sys.modules["torch.distributed"]
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    return isinstance(store, distributed.TCPStore)
