"""Where commands print: results on stdout, as text or as one JSON document; notes and progress on stderr."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from waystation.cli.formatting import plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PROGRESS_DELAY_S = 1.0
_UNLIMITED_COLUMNS = 10_000

OnProgress = Callable[[int, int], None]


class Output:
    """The two streams of a command.

    Attributes:
        as_json: Whether one JSON document is wanted; text for people is then not printed.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def document(self, value: Any) -> None:
        """Prints the JSON document of a command; called once, and only if it is wanted."""
        sys.stdout.write(encoded(value, indent=2) + "\n")

    def line(self, text: str = "", style: str | None = None) -> None:
        """Prints a line for people, whole, however wide the terminal is."""
        self._stdout.print(plain(text), style=style, markup=False, highlight=False, soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """Prints a table for people."""
        if self._stdout.is_terminal:
            self._stdout.print(renderable)
            return
        with self._stdout.capture() as captured:
            self._stdout.print(renderable)
        # Columns are padded; files and pipes are spared the blanks at the ends of lines.
        sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))

    def note(self, text: str, style: str | None = None) -> None:
        """Prints a line to stderr."""
        self._stderr.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    @property
    def console(self) -> Console:
        """The console of stdout."""
        return self._stdout

    @cached_property
    def _stdout(self) -> Console:
        return _console(stderr=False)

    @cached_property
    def _stderr(self) -> Console:
        return _console(stderr=True)

    @contextmanager
    def progress(self, description: str) -> Iterator[OnProgress]:
        """A function that is told `(bytes done, bytes in all)`; shows a bar once this takes longer than a
        second, and only to people."""
        bar = _Bar(self._stderr, description)
        try:
            yield bar.update
        finally:
            bar.close()

    @contextmanager
    def working(self, description: str) -> Iterator[None]:
        """Shows people that something is going on whose end cannot be told."""
        if not self._stderr.is_terminal:
            yield
            return
        with self._stderr.status(plain(description)):
            yield


class _Bar:
    """A progress bar that appears when there is reason to."""

    def __init__(self, console: Console, description: str) -> None:
        self._console = console
        self._description = plain(description)
        self._shown_from = time.monotonic() + PROGRESS_DELAY_S
        self._progress: Any = None
        self._task: Any = None

    def update(self, done: int, total: int) -> None:
        if self._progress is None:
            if not self._console.is_terminal or time.monotonic() < self._shown_from or done >= total:
                return
            self._open(total)
        self._progress.update(self._task, completed=done, total=total)

    def _open(self, total: int) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task(self._description, total=total)
        self._progress.start()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # Into a file or pipe nothing is wrapped or cut: a line stays a line.
    width = None if stream.isatty() else _UNLIMITED_COLUMNS

    class _Console(Console):
        def on_broken_pipe(self) -> None:  # by default it ends the process with the code for damage
            raise  # noqa: PLE0704 - called where the error is handled

    return _Console(stderr=stderr, width=width, soft_wrap=width is not None, legacy_windows=False)


def encoded(value: Any, indent: int | None = None) -> str:
    """A document as text, in one line unless it is indented."""
    return json.dumps(_strict(value), indent=indent, allow_nan=False)


def _strict(value: Any) -> Any:
    """The value in what JSON has: numbers that it has no digits for become text."""
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value)
