"""Servers of other projects that tests start on this machine."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.ports import claimed_ports
from tests.support.programs import HANG_S

# Runs the server until this process ends, however that is: then the pipe is closed.
_KEEPER = 'directory=$1; shift; "$@" >/dev/null 2>&1 & read -r _; kill $!; wait; rm -rf "$directory"'


def serve(
    program: str,
    options: Callable[[int, Path], Sequence[str]],
    environment: Mapping[str, str] | None = None,
) -> tuple[str, Path]:
    """Starts a server that ends with this process, and waits until it takes connections.

    Args:
        program: Its path.
        options: What it is told of its port, and of a directory of its own.
        environment: What it finds there besides that of this process.

    Returns:
        HOST:PORT, and the directory, which is removed at the end.
    """
    directory = Path(tempfile.mkdtemp(prefix=f"waystation-tests-{os.path.basename(program)}-"))
    claims = contextlib.ExitStack()
    (port,) = claims.enter_context(claimed_ports(1))
    keeper = subprocess.Popen(
        ["sh", "-c", _KEEPER, "keeper", os.fspath(directory), program, *options(port, directory)],
        stdin=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )

    def end() -> None:
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait(HANG_S)
        claims.close()

    atexit.register(end)
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return f"127.0.0.1:{port}", directory
        except OSError:
            assert time.monotonic() < deadline, f"{os.path.basename(program)} does not answer"
            time.sleep(0.01)
