"""A cluster in this process: islands of its own devices, for tests, notebooks and one machine.

The controller and the hosts are those of a cluster: each island is one host, with devices that no other has
and an execution queue of its own. Only what carries messages between them is missing. One thread has the
controller: calls of clients and what hosts have done come to it in one queue, and it hands to hosts what the
controller decides. So a client that is interrupted is in the middle of nothing that others need.

Failure sequence: a call that fails answers with its error; a host that fails says so of the work, and hosts
that wait for its blocks hear of that. A program that ends without having closed its clients waits for what
they have called, since JAX aborts a program that ends while threads run its code.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax

from waystation import _forks
from waystation._errors import Cancelled, Internal, InvalidInput, Unavailable, WaystationError
from waystation.frameworks.jax_public import Device
from waystation.runtime.cluster.status import DEADLINE_S, require_island_name
from waystation.runtime.controller import (
    Abandon,
    Begin,
    Controller,
    Effect,
    ForgetLists,
    MemoryLimits,
    Prepare,
    Release,
    Stall,
)
from waystation.runtime.controller.methods import ClientMethods
from waystation.runtime.devices import Host, Island
from waystation.runtime.execution import LocalExchange
from waystation.runtime.hosts.work import HostWork, WorkQueue
from waystation.runtime.messages import Done, Message, host_function_key
from waystation.runtime.suspended_state import KeepSuspended, SuspendedStateDirectories
from waystation.runtime.timeline import HostRecorder

_PREPARATIONS = 8
_ADVICE = "JAX does not work in forked processes; begin processes by 'spawn' or 'forkserver'"
_log = logging.getLogger(__name__)

T = TypeVar("T")


class LocalHost:
    """The one host of an island.

    Args:
        name: Its name.
        devices: Its devices.
        exchange: How blocks come from other hosts and go there.
        tell: Is told what it has done.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[Device],
        exchange: LocalExchange,
        tell: Callable[[list[Done]], None],
    ) -> None:
        recorder = HostRecorder()
        self.work: HostWork = HostWork(name, devices, exchange, recorder)
        self.queue: WorkQueue = WorkQueue(name, self.work, tell, recorder, ends_at_once=True)
        self._numbers = itertools.count()

    def begin(self, message: Message) -> None:
        """Has it do what a message says, after all before."""
        self.queue.begin(next(self._numbers), message)


class LocalCluster:
    """See above.

    Args:
        islands: How many devices each island has, by name.
        devices: The devices to take; by default those of JAX's default backend.
        limits: How much arrays may take on the host of each island.

    Attributes:
        function_numbers: What tells host functions apart.

    Raises:
        InvalidInput: There are not as many devices.
    """

    def __init__(
        self,
        islands: Mapping[str, int],
        devices: Sequence[Device] | None = None,
        limits: MemoryLimits | None = None,
    ) -> None:
        available = list(jax.devices() if devices is None else devices)
        if sum(islands.values()) > len(available):
            raise InvalidInput(
                f"islands {dict(islands)} need {sum(islands.values())} devices, JAX has {len(available)}; on "
                "CPUs ask for more before JAX is first used: "
                f"jax.config.update('jax_num_cpu_devices', {sum(islands.values())})"
            )
        self._controller = Controller()
        self._suspended_states = SuspendedStateDirectories()
        self._controller.suspensions.places = self._suspended_states.places
        self._exchange = LocalExchange()
        self._hosts: dict[str, LocalHost] = {}
        self._clients: set[str] = set()
        self._lost: set[str] = set()  # islands
        self.function_numbers: Iterator[int] = itertools.count()
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = threading.RLock()
        self._is_closed = False
        taken = iter(available)
        for name, count in islands.items():
            self._add_island(name, list(itertools.islice(taken, count)), limits or MemoryLimits())
        # Threads that wait for the compilers of hosts.
        self._preparing = ThreadPoolExecutor(_PREPARATIONS, thread_name_prefix="waystation: preparation")
        self._thread = threading.Thread(target=self._drive, name="waystation: controller", daemon=True)
        self._thread.start()
        self._owner = _forks.Owner()
        atexit.register(self.close)

    def connect(self, name: str = "local") -> LocalCalls:
        """Counts a client in, which ends by `LocalCalls.end`; the last one ends the cluster.

        Raises:
            Conflict: There is one of that name.
        """
        client = self.do(lambda: self._controller.add_client(name))
        self._clients.add(client)
        return LocalCalls(self, ClientMethods(client, self._controller))

    def share(self, shares: Mapping[str, int]) -> None:
        """See `Cluster.share`."""
        self.do(lambda: self._controller.clients.share(shares))

    def keep_suspended(self, wanted: KeepSuspended) -> None:
        """See `Cluster.keep_suspended`."""
        self.do(lambda: self._suspended_states.keep(wanted))

    def do(self, action: Callable[[], T]) -> T:
        """Has the thread of the controller do something; returns, or raises, what that does."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

        self.post(work)
        return future.result()

    def post(self, action: Callable[[], None]) -> None:
        """Has the thread of the controller do something that raises nothing, after all before.

        Raises:
            Unavailable: It has ended.
        """
        with self._closing:
            if self._is_closed:
                raise Unavailable("the islands of this process have ended with their last client")
            self._todo.put(action)

    def leave(self, client: str) -> None:
        """Counts a client out; what it has called and that has not begun does not begin."""
        self.post(lambda: self._controller.drop_client(client))
        self._clients.discard(client)
        if not self._clients:
            self.close()

    def close(self) -> None:
        """Ends it, when all has run that was called before; once is enough."""
        if not self._owner.is_here:
            return
        with self._closing:
            if not self._is_closed:
                self._todo.put(None)
            self._is_closed = True
        atexit.unregister(self.close)
        self._thread.join()
        self._preparing.shutdown()
        for host in self._hosts.values():
            host.queue.close()
        self._suspended_states.close()

    # ---- in the thread of the controller -------------------------------------------------------

    def _drive(self) -> None:
        is_closing = False
        while not (is_closing and self._controller.orders.is_idle):
            action = self._todo.get()
            if action is None:
                is_closing = True
                continue
            try:
                action()
                self._carry_out()
            except Exception:  # a defect: others go on
                _log.exception("the controller of this process has failed at something")

    def _add_island(self, name: str, devices: Sequence[Device], limits: MemoryLimits) -> None:
        require_island_name(name)
        host = Host(f"{name}/0", name, len(devices), devices[0].platform)
        self._controller.addresses[host.name] = host.name
        self._controller.add_island(Island(name, (host,)), limits)
        tell = functools.partial(self._hear, host)
        self._hosts[name] = LocalHost(host.name, devices, self._exchange, tell)

    def _hear(self, host: Host, done: Sequence[Done]) -> None:
        """A host, in a thread of its own, has ended messages."""
        orders = self._controller.orders

        def note() -> None:
            for each in done:
                orders.done(host.island, orders.epoch(host.island), host.name, each)

        self._todo.put(note)

    def _carry_out(self) -> None:
        """Carries out what the controller has decided."""
        for path in self._controller.suspensions.take_removed():
            with contextlib.suppress(RuntimeError):  # the program ends, and then all of them go
                self._preparing.submit(self._suspended_states.remove, path)
        orders = self._controller.orders
        while orders.effects:
            effects, orders.effects = orders.effects, []
            for effect in effects:
                try:
                    self._carry_out_one(effect)
                except Exception as error:
                    self._lose(effect.island, error)

    def _carry_out_one(self, effect: Effect) -> None:
        host = self._hosts[effect.island]
        match effect:
            case Begin():
                host.begin(effect.messages[host.queue.name])
            case Release():
                host.work.buffers.free(effect.handles)
            case Abandon():
                self._exchange.abandon(effect.work, effect.error, has_ended=effect.has_ended)
            case ForgetLists():
                for listed in effect.lists.values():
                    host.work.forget((listed,), tuple(host.work.calls(listed)))
            case Prepare():
                self._prepare(host, effect)
            case Stall():
                give_up = functools.partial(self._controller.orders.give_up, effect.island, effect.work)
                timer = threading.Timer(DEADLINE_S, self._todo.put, (give_up,))
                timer.daemon = True
                timer.start()

    def _lose(self, island: str, error: Exception) -> None:
        """A host has failed at what the controller has decided, which is a defect: nobody may wait for it."""
        _log.error("the host of island '%s' has failed", island, exc_info=error)
        if island in self._lost:
            return
        self._lost.add(island)
        failed = Internal(f"island '{island}' of this process has failed: {type(error).__name__}: {error}")
        self._controller.lose(island, failed.message, lambda _: failed, lambda _: failed)

    def _prepare(self, host: LocalHost, effect: Prepare) -> None:
        functions, host_functions = self._controller.programs.code_of(effect)

        def prepare() -> None:
            """In a thread of its own, since it waits for the compiler."""
            failed: WaystationError | None = None
            try:
                for listed in effect.lists.values():
                    host.work.prepare(listed, tuple(functions.items()), tuple(host_functions.items()))
            except WaystationError as error:
                failed = error
            except Exception as error:
                failed = Internal(f"host '{host.queue.name}' failed: {type(error).__name__}: {error}")
            self._todo.put(functools.partial(self._controller.orders.prepared, effect.number, failed))

        try:
            self._preparing.submit(prepare)
        except RuntimeError:  # the program ends, and begins no threads any more
            ended = Cancelled("this program has ended before its hosts have compiled what it calls")
            self._todo.put(functools.partial(self._controller.orders.prepared, effect.number, ended))


class LocalCalls:
    """The way of one client to the controller of this process: see `Calls`.

    Args:
        cluster: The controller's.
        methods: What it may call.
    """

    def __init__(self, cluster: LocalCluster, methods: ClientMethods) -> None:
        self.cluster = cluster
        self.client: str = methods.client
        self._methods = methods
        self._owner = _forks.Owner()

    def ask(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """See `Calls`."""
        return self.begin(method, *arguments)(timeout_s)

    def begin(self, method: str, *arguments: Any) -> Callable[[float | None], Any]:
        """See `Calls`."""
        self._require_owner()
        future: Future[Any] = Future()

        def end(error: Exception | None, result: Any = None, /) -> None:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.cluster.post(functools.partial(self._methods.call, method, arguments, end))

        def answer(timeout_s: float | None) -> Any:
            self._require_owner()
            try:
                failed = future.exception(timeout_s)
            except TimeoutError:
                raise TimeoutError(f"there is no answer after {timeout_s:g} s; the call goes on") from None
            if failed is not None:
                raise copy.copy(failed)  # which others may be told of too
            return future.result()

        return answer

    def tell(self, method: str, *arguments: Any) -> None:
        """See `Calls`."""
        self._require_owner()
        told = functools.partial(self._told, method)
        self.cluster.post(functools.partial(self._methods.call, method, arguments, told))

    def host_function(self, name: str, function: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
        """See `Calls`; hosts of this process call the function itself."""
        return host_function_key(name, str(next(self.cluster.function_numbers)).encode()), function

    def end(self) -> None:
        """See `Calls`; waits for what runs."""
        self.ask("end")
        self.cluster.leave(self.client)

    def _told(self, method: str, error: Exception | None, result: Any = None, /) -> None:
        if error is not None and not isinstance(error, WaystationError):
            _log.error("client '%s' has told '%s', which failed", self.client, method, exc_info=error)

    def _require_owner(self) -> None:
        self._owner.require(f"client '{self.client}'", _ADVICE)
