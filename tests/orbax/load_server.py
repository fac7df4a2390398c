"""Loads checkpoints with genuine Orbax for a program that must not import it: one that forks.

Run as a program: for each path on its standard input it prints one line of JSON, the state with the bytes of
its arrays as hex, or what went wrong.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


class LoadServer:
    """The other side of it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def load(self, path: Path) -> Any:
        """What genuine Orbax loads from there: the state, in which arrays are NumPy's."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, f"genuine Orbax could not load {path}: {answer['error']}"
        return _decoded(answer["state"])


@contextmanager
def running() -> Iterator[LoadServer]:
    """A server, until the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.orbax.load_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield LoadServer(process)
    finally:
        process.kill()
        process.wait()


def _decoded(tree: Any) -> Any:
    if isinstance(tree, dict) and tree.keys() == {"dtype", "shape", "hex"}:
        return np.frombuffer(bytes.fromhex(tree["hex"]), tree["dtype"]).reshape(tree["shape"])
    return {key: _decoded(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def _encoded(tree: Any) -> Any:
    if isinstance(tree, np.ndarray):
        return {"dtype": tree.dtype.str, "shape": tree.shape, "hex": tree.tobytes().hex()}
    return {key: _encoded(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def main() -> None:
    from tests.orbax import oracle

    for line in sys.stdin:
        try:
            answer = {"state": _encoded(oracle.load(Path(line.rstrip("\n"))))}
        except Exception as error:  # whatever it is, the program has to be told
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
