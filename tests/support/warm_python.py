"""A `python` whose programs are forked where the frameworks are imported already: an import takes seconds.

`python()` is a command in the place of `sys.executable`. It takes `-c`, `-m` or a file, as Python does. It is
a client (`warm_client.py`) of a server that each process of tests starts once. The server forks the program,
with the client's arguments, environment, directory, input and output. The client passes signals on to the
program, and ends as the program does, by the same exit code or signal.

The program has a process id of its own and is no child of the client. If the client is killed with SIGKILL,
the server kills the program a moment later. What JAX has read from the environment as it was imported is set
anew where the program is told otherwise. So this is for tests of what programs do. Tests of process ids,
of namespaces, of what a fresh interpreter imports, and of kills from outside use `sys.executable`. In
`make test-long` all do.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.util
import io
import json
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import selectors
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.support import warm_client
from tests.support.long import IS_LONG
from tests.support.programs import HANG_S, context


def python() -> str:
    """The command: a file of that name, in a directory of its own."""
    return sys.executable if IS_LONG else _client()


def python_with_tests(arguments: Sequence[str]) -> str:
    """The command of a Python that has imported what pytest collects for these arguments, too.

    Whatever its programs import of that is there, with the assertions as pytest rewrites them.
    """
    return _started(arguments)


@functools.cache
def _client() -> str:
    return _started(None)


def _started(arguments: Sequence[str] | None) -> str:
    """Starts a server; returns the file that is its client."""
    directory = Path(tempfile.mkdtemp(prefix="waystation-tests-python-"))
    address = directory / "server"
    life, there = context.Pipe()
    server = context.Process(target=_serve, args=(str(address), there, arguments))
    server.start()
    there.close()
    # It imports all tests, which takes minutes where they are compiled for the first time on a busy machine.
    until_s = time.monotonic() + 5 * HANG_S
    while not life.poll(0.1):
        assert server.is_alive(), "the server of programs has died"
        assert time.monotonic() < until_s, "the server of programs does not start"
    life.recv()

    def end() -> None:
        life.close()
        server.join(HANG_S)
        shutil.rmtree(directory)

    atexit.register(end)
    client = directory / "python"
    words = [sys.executable, "-IS", warm_client.__file__, sys.executable, str(address)]
    client.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    client.chmod(0o700)
    return str(client)


class _Failures:
    """A plugin that notes which files could not be imported."""

    def __init__(self) -> None:
        self.paths: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Called by pytest for each file."""
        if report.failed:
            self.paths.add(os.path.abspath(report.nodeid))


def _import_tests(arguments: Sequence[str]) -> None:
    """Imports what pytest collects, but for files that make arrays as they are imported.

    JAX has threads from then on, so it could not be used in a forked process. Such files, and those with
    errors, are left to the processes that need them.
    """
    from jax._src import xla_bridge

    failures, backends = _Failures(), xla_bridge.backends

    def refuse() -> Any:
        raise RuntimeError("JAX is not started here")

    xla_bridge.backends = refuse
    options = ["--collect-only", "-qq", "-p", "no:xdist", "-p", "no:cacheprovider"]
    # Hypothesis is here already.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main([*options, *arguments], plugins=[failures])
    xla_bridge.backends = backends
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) in failures.paths:
            del sys.modules[name]
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"tests start threads as they are imported: {threading.enumerate()}, {threads}"


def _serve(address: str, life: Connection, arguments: Sequence[str] | None) -> None:
    """Forks programs, until the process of tests ends, which has the other end of `life`."""
    if arguments is not None:
        _import_tests(arguments)
    clients: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(life, selectors.EVENT_READ)
        life.send(None)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    client, _ = listener.accept()
                    child = _forked(client)
                    clients[child] = client
                    selector.register(client, selectors.EVENT_READ, child)
                    selector.register(os.pidfd_open(child), selectors.EVENT_READ, child)
                elif key.fileobj is life:
                    for child in clients:
                        os.killpg(child, signal.SIGKILL)
                    return
                elif isinstance(key.fileobj, int):
                    selector.unregister(key.fileobj)
                    os.close(key.fileobj)
                    _, status = os.waitpid(key.data, 0)
                    with clients.pop(key.data) as client:
                        if client in selector.get_map():
                            selector.unregister(client)
                        with contextlib.suppress(OSError):  # it was killed
                            client.sendall(str(status).encode())
                elif key.data in clients:
                    _pass_on(clients[key.data], key.data, selector)


def _pass_on(client: socket.socket, child: int, selector: selectors.BaseSelector) -> None:
    """Sends a program the signal that its client has got; one that is gone was killed."""
    try:
        number = client.recv(1)
    except OSError:
        number = b""
    if number:
        os.kill(child, number[0])
    else:
        selector.unregister(client)
        os.killpg(child, signal.SIGKILL)


def _forked(client: socket.socket) -> int:
    """The process of a client's program."""
    size, descriptors, _, _ = socket.recv_fds(client, 4, 3)
    with client.makefile("rb") as file:
        told = json.loads(file.read(int.from_bytes(size, "little")))
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        _be_program(**told)
    with contextlib.suppress(OSError):  # it may have done more than that already
        os.setpgid(child, child)
    for descriptor in descriptors:
        os.close(descriptor)
    return child


def _be_program(arguments: list[str], environment: dict[str, str], directory: str) -> None:
    """Does what a fresh Python does, from its first to its last moment."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    # The semaphores of the server are not this program's to remove, and their tracker is not open here.
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    tracker = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    os.chdir(directory)
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    is_unbuffered = "-u" in arguments or bool(environment.get("PYTHONUNBUFFERED"))
    written = os.fdopen(1, "wb", buffering=0 if is_unbuffered else -1)
    sys.stdin, sys.stdout = os.fdopen(0), io.TextIOWrapper(written, write_through=is_unbuffered)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    from tests.support import at_exit  # imported where it notes anything only

    at_exit.register_again()
    code: Any = 0
    try:
        _set_jax(changed)
        exec(*_code(arguments))
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        own = error.__traceback__ and error.__traceback__.tb_next  # without this function
        traceback.print_exception(error.with_traceback(own))
        code = 1
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit((code or 0) & 0xFF)


def _set_jax(changed: dict[str, str]) -> None:
    """Has JAX work as if it were imported with these variables of the environment."""
    import jax

    for name, value in changed.items():
        if not name.startswith("JAX_") or not hasattr(jax.config, name.lower()):
            continue
        present = getattr(jax.config, name.lower())
        if isinstance(present, bool):
            jax.config.update(name.lower(), value.lower() in ("1", "t", "true", "y", "yes", "on"))
        elif isinstance(present, int | float):
            jax.config.update(name.lower(), type(present)(value))
        else:
            jax.config.update(name.lower(), value)


def _code(arguments: list[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """What a program runs, in which namespace."""
    has_own_place = "-P" not in arguments
    while arguments[0] in warm_client.OPTIONS:
        arguments = arguments[1:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    kind, *rest = arguments
    place = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(os.path.abspath(kind)))
    sys.path[:0] = [place] * has_own_place
    if kind == "-c":
        sys.argv = [kind, *rest[1:]]
        return compile(rest[0], "<string>", "exec"), vars(main)
    if kind == "-m":
        spec = importlib.util.find_spec(rest[0])
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{rest[0]}.__main__")
        assert spec is not None, f"there is no module '{rest[0]}'"
        loader: Any = spec.loader
        main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
        sys.argv = [str(spec.origin), *rest[1:]]
        return loader.get_code(spec.name), vars(main)
    main.__file__, sys.argv = os.path.abspath(kind), arguments
    return compile(Path(kind).read_bytes(), main.__file__, "exec"), vars(main)
