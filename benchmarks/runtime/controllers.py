"""Multi-controller JAX: a process for each host, which runs the same program by itself, in one
`jax.distributed` world with the others.

Each is told over a pipe what to do; the time is from the first beginning to the last end, by the processes'
own clock, so the telling is in none of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import IO, Any

from benchmarks.processes import ROOT
from benchmarks.runtime.shapes import Shape
from waystation._ports import free_port

NAME = "multi-controller JAX"
_END_S = 10.0


class Controllers:
    """The processes. Use it in a `with`.

    Args:
        shape: How many, and with how many devices each.
        module: What a process runs.
    """

    def __init__(self, shape: Shape, module: str = "benchmarks.runtime.controller_process") -> None:
        coordinator = f"127.0.0.1:{free_port()}"
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, coordinator, str(index), str(shape)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                text=True,
            )
            for index in range(shape.hosts)
        ]

    def __enter__(self) -> Controllers:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()  # after `jax.distributed.initialize` a process ignores to be asked to end
        for process in self._processes:
            process.wait(_END_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def run(self, operation: str, count: int, **facts: Any) -> float:
        """Has all of them do something; returns how long that took, in seconds.

        Raises:
            RuntimeError: One has failed.
        """
        answers = self.ask({"operation": operation, "count": count, **facts})
        return float(max(each["end_s"] for each in answers) - min(each["begin_s"] for each in answers))

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """What all of them answer.

        Raises:
            RuntimeError: One has failed.
        """
        for process in self._processes:
            _pipe(process.stdin).write(json.dumps(request) + "\n")
            _pipe(process.stdin).flush()
        answers = []
        for index, process in enumerate(self._processes):
            line = _pipe(process.stdout).readline()
            answer = json.loads(line) if line else {"reason": "it has ended"}
            if answer.get("status") != "ok":
                raise RuntimeError(f"process {index} of {NAME} failed at {request}: {answer['reason']}")
            answers.append(answer)
        return answers


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "a pipe was asked for"
    return pipe
