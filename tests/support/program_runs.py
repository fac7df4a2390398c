"""Runs programs that are files, tells a test each line that they print, and kills them."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from tests.support.programs import Place


class Told:
    """Tells the test each line that a program prints."""

    def __init__(self, place: Place) -> None:
        self._place, self._text = place, ""

    def write(self, text: str) -> int:
        self._text += text
        *lines, self._text = self._text.split("\n")
        for line in lines:
            self._place.report(line)
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""


def run(place: Place, script: Path, arguments: list[str]) -> None:
    """Runs a program in this process, which finds what torchrun tells programs."""
    stdout: Any = Told(place)
    kept: TextIO = sys.stdout
    os.environ |= {
        "RANK": str(place.index),
        "LOCAL_RANK": str(place.index),
        "WORLD_SIZE": str(place.count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.ports[0]),
    }
    sys.argv, sys.stdout = [str(script), *arguments], stdout
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.stdout = kept


def run_some(
    place: Place, modules: Sequence[str], runs: Sequence[tuple[Path, list[str], int | None]]
) -> list[list[str]]:
    """Runs programs one after another, each in a process forked where modules are imported, which takes
    seconds.

    Args:
        place: Of this process.
        modules: What is imported first.
        runs: For each run the program, its arguments, and after how many lines it is killed; None for not at
            all.

    Returns:
        The lines that each has printed.
    """
    del place
    for name in modules:
        importlib.import_module(name)
    return [_lines_of(*each) for each in runs]


def _lines_of(script: Path, arguments: list[str], kill_after: int | None) -> list[str]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be(script, arguments, writer)
    os.close(writer)
    lines = []
    with os.fdopen(reader) as file:
        for line in file:
            lines.append(line.strip())
            if len(lines) == kill_after:
                os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0 or (kill_after is not None and status == -signal.SIGKILL), (status, lines)
    return lines


def _be(script: Path, arguments: list[str], writer: int) -> NoReturn:
    code = 1
    multiprocessing.set_start_method("fork", force=True)  # not as the server that this comes from
    try:
        sys.argv, sys.stdout = [str(script), *arguments], os.fdopen(writer, "w", buffering=1)
        runpy.run_path(str(script), run_name="__main__")
        sys.stdout.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)
