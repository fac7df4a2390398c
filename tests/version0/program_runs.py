"""Runs programs that are files, and tells a test each line that they print."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any, TextIO

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
    """Runs a program in this process."""
    stdout: Any = Told(place)
    kept: TextIO = sys.stdout
    sys.argv, sys.stdout = [str(script), *arguments], stdout
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.stdout = kept
