"""Starts and ends the Ray that a program has for itself (see `local_ray`)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import IO

from waystation import _forks
from waystation._errors import Unavailable

_ATTEMPTS = 2
_END_TIMEOUT_S = 20.0


class EmbeddedRay:
    """A running Ray of this machine.

    Attributes:
        address: Where it is joined.

    Raises:
        Unavailable: It does not start.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        _forks.watch(self)
        for _ in range(_ATTEMPTS):
            with tempfile.TemporaryFile() as output:
                problem = self._try(output)
            if not problem:
                return
        raise Unavailable(f"Ray does not start on this machine: {problem}")

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: Ray ends with the parent, however long a child of it lives."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()

    def _try(self, output: IO[bytes]) -> str:
        command = [sys.executable, "-m", "waystation.runtime.cluster.local_ray"]
        # In a session of its own: Ctrl-C is for the program, which then closes this.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, start_new_session=True
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        process.stdout.close()
        self._process = process
        if line:
            told = json.loads(line)
            self.address: str = told["address"]
            return ""
        self.close()
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines() or ["it says nothing"]
        return lines[-1]

    def close(self) -> None:
        """Ends it and all of its processes; once is enough."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # the kernel then ends the others
            process.wait()
