"""Connects a program to a cluster: to one that runs, or to one of its own on this machine.

Ray has one connection for the whole program, however often that calls `connect`. The last `Cluster` to close
ends it, unless the program itself has made it.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from waystation import _forks
from waystation._errors import Conflict, InvalidInput, NotFound, Unavailable, WrongType
from waystation.runtime.cluster.authentication import use_token
from waystation.runtime.cluster.cluster import Cluster
from waystation.runtime.cluster.connection import Connection, ask, program_in_ray
from waystation.runtime.cluster.embedded import EmbeddedRay
from waystation.runtime.cluster.probing import require_listener
from waystation.runtime.cluster.status import DEADLINE_S, MAX_RESTARTS, NAMESPACE, ClusterStatus
from waystation.runtime.control.connector import Connector
from waystation.runtime.needs import needing_packages
from waystation.runtime.resources.requests import as_count

_ANSWER_TIMEOUT_S = 60.0
_LEAVE_TIMEOUT_S = 10.0
# Ray may have to start the manager, which takes it a minute where much else starts.
_ENTER_TIMEOUT_S = 300.0
_JOIN_ATTEMPTS = 3


@dataclass
class _Joined:
    """A connection to Ray that `connect` has made.

    Attributes:
        program: What Ray knows the program by in it.
        undo: Ends it, and the Ray of this program alone.
        users: How many use it.
    """

    program: str | None = None
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    users: int = 0


_joining = _forks.WatchedLock()
_joined: list[_Joined] = []  # the newest, if any


def connect(
    address: str | None = None,
    *,
    hosts: int | None = None,
    devices_per_host: int = 1,
    kind: str = "cpu",
    deadline_s: float = DEADLINE_S,
    max_restarts: int = MAX_RESTARTS,
    name: str | None = None,
    timeline: bool = False,
) -> Cluster:
    """Connects this program to a cluster.

    Args:
        address: That of a Ray cluster, or of another program's cluster (`Cluster.address`); `auto` finds the
            one of this machine. None starts Ray on this machine for this program alone, and ends it with the
            program, unless the program has connected to Ray already: then that is used.
        hosts: Hosts of an island `main`, which is built at once; 0 for none. By default one on a cluster of
            this program's own, and none elsewhere.
        devices_per_host: Devices of each host of that island.
        kind: What they are, `cpu` or `gpu`.
        deadline_s: See `Cluster.add_island`.
        max_restarts: Likewise.
        name: What this program is called there, for shares and for people; by default a name of its own.
        timeline: Whether to record from now on what is done when; see `Cluster.record_timeline`.

    Raises:
        Conflict: Another program is connected under that name.
        InvalidInput: What is given is no address.
        Unsupported: Ray is not installed.
        Unavailable: The cluster cannot be reached or started, or has no room for the island.
    """
    if address is not None and not isinstance(address, str):
        raise WrongType(f"an address must be text, HOST:PORT, not {address!r:.60}")
    if hosts is not None and as_count("the number of hosts", hosts) < 0:
        raise InvalidInput(f"hosts must be 0 or more, not {hosts}")
    ray = _ray()
    if hosts is None:
        hosts = 1 if address is None and not ray.is_initialized() else 0
    undo = contextlib.ExitStack()
    try:
        joined = _join(ray, address, undo)
        connection = _enter(ray, name, undo)
    except BaseException:
        undo.close()
        raise
    cluster = Cluster(connection, joined, undo.close)
    try:
        if timeline:
            cluster.record_timeline()
        if hosts > 0:
            cluster.add_island(
                "main",
                hosts=hosts,
                devices_per_host=devices_per_host,
                kind=kind,
                deadline_s=deadline_s,
                max_restarts=max_restarts,
            )
    except BaseException:
        cluster.close()
        raise
    return cluster


def look(address: str | None = None) -> ClusterStatus:
    """How a cluster is, without becoming one of its programs; see `looking`."""
    with looking(address) as status:
        return status()


@contextlib.contextmanager
def looking(address: str | None = None) -> Iterator[Callable[[], ClusterStatus]]:
    """What tells how a cluster is, each time that it is called, without becoming one of its programs.

    Args:
        address: Its address; None for the one of this machine.

    Raises:
        NotFound: No Waystation runs there.
        Unavailable: The cluster cannot be reached.
        Unsupported: Ray is not installed.
    """
    ray = _ray()  # first, since the manager cannot be imported without it
    from waystation.runtime.cluster.manager import NAME

    with contextlib.ExitStack() as undo:
        # Ray prints what happens to workers meanwhile, and stdout is for who has asked.
        undo.enter_context(contextlib.redirect_stdout(sys.stderr))
        joined = _join(ray, address or "auto", undo)
        try:
            manager = ray.get_actor(NAME, NAMESPACE)
        except ValueError:
            raise NotFound(f"no program has islands on the cluster at {joined}") from None
        yield lambda: cast(ClusterStatus, ask(manager.status.remote(), _ANSWER_TIMEOUT_S))


def _ray() -> Any:
    with needing_packages(), _quiet():
        import ray
    return ray


def _join(ray: Any, address: str | None, undo: contextlib.ExitStack) -> str:
    """Connects this program to Ray, or uses the connection that it has; returns the address."""
    with _joining.lock:
        if not ray.is_initialized():
            joined = _Joined()
            try:
                _start(ray, address, joined.undo)
            except BaseException:
                joined.undo.close()
                raise
            joined.program = program_in_ray()
            _joined[:] = [joined]
            address = None
        current = str(ray.get_runtime_context().gcs_address)
        if address not in {None, "auto", current}:
            raise Conflict(
                f"this program is connected to the cluster at {current}, and cannot be to '{address}' too; "
                "close that connection first"
            )
        for joined in _joined:
            if joined.program == program_in_ray():  # else the program has made it itself
                joined.users += 1
                undo.callback(_end_use, ray, joined)
        return current


def _end_use(ray: Any, joined: _Joined) -> None:
    with _joining.lock:
        joined.users -= 1
        if joined.users == 0:
            if joined.program == program_in_ray():  # else the program has ended it itself
                ray.shutdown()
            joined.undo.close()


def _start(ray: Any, address: str | None, undo: contextlib.ExitStack) -> None:
    if address is not None:
        require_listener(address)
    # A token is shown to clusters of this machine only; for others the environment says so (`RAY_AUTH_MODE`).
    if address is None or address == "auto" or address.startswith("127."):
        with _quiet():
            use_token(make=address is None)
    if address is None:
        embedded = EmbeddedRay()
        undo.callback(embedded.close)
        address = embedded.address
    try:
        with _quiet(), _own_signals():
            ray.init(
                address=address,
                namespace=NAMESPACE,
                logging_level=logging.ERROR,
                configure_logging=False,
                log_to_driver=False,
            )
    except ValueError as error:
        raise InvalidInput(f"'{address}' is no address of a Ray cluster (HOST:PORT): {error}") from error
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        where = "on this machine" if address == "auto" else f"at '{address}'"
        reason = f": {error}"
        if address == "auto":  # Ray names an option that only its own commands have
            reason = "; start one with 'ray start --head', or give the address of one"
        raise Unavailable(f"there is no Ray cluster {where} that this program can join{reason}") from error


def _enter(ray: Any, name: str | None, undo: contextlib.ExitStack) -> Connection:
    """The manager, told that there is one more program."""
    from waystation.runtime.cluster.manager import CALLS_AT_ONCE, NAME, Entrance, Manager

    name = name or f"program-{uuid.uuid4().hex[:8]}"
    for attempt in range(_JOIN_ATTEMPTS):
        manager = (
            ray.remote(Manager)
            .options(
                name=NAME,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_concurrency=CALLS_AT_ONCE,
            )
            .remote()
        )
        # It never comes; the manager waits for it as long as this program, its owner, lives.
        attended = manager.attend.remote(name)
        try:
            entrance: Entrance = ask(manager.enter.remote(name, [attended]), _ENTER_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(
                f"the cluster's manager has not let this program in within {_ENTER_TIMEOUT_S:g} s: it does "
                "not run, or Ray cannot start it; see whether a process of it is stopped, and Ray's own logs"
            ) from None
        except Unavailable:
            if attempt + 1 == _JOIN_ATTEMPTS:
                raise
            continue  # the last program has just left it
        client = entrance.client
        connected = undo.enter_context(contextlib.ExitStack())  # ends after the program has left
        undo.callback(_leave, manager, client, attended, program_in_ray())
        break
    try:
        connector = Connector(entrance.controller, entrance.credential)
    except Unavailable as error:
        raise Unavailable(
            f"the cluster's manager ({entrance.where}) has let this program in, and is gone: {error}; "
            f"the manager's log, if it has one, is '{entrance.log_path}', on its machine"
        ) from error
    connected.callback(connector.close)
    connection = Connection(manager, client, connector, where=entrance.where, log_path=entrance.log_path)
    undo.callback(connection.leave)
    return connection


def _leave(manager: Any, client: str, attended: Any, program: str | None) -> None:
    if program == program_in_ray():  # else the program has ended its connection to Ray, and left by that
        with contextlib.suppress(Unavailable, TimeoutError):  # it may be gone, or go when this is the last
            ask(manager.leave.remote(client), _LEAVE_TIMEOUT_S)
    del attended


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Ray's hints about itself from the program's output."""
    log = logging.getLogger("ray")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Gives the program back its handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
