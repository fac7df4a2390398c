"""The programs of the demo, as processes of their own: started, followed line by line, and ended."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waystation_demo.proof import DemoFailed

LIMIT_S = 900.0  # for which a program may take to what is waited for


@dataclass
class Told:
    """What a training program has told.

    Attributes:
        losses: Of each step every loss that was told: more than one where it was trained again.
        saved: The steps that were saved, in order.
        saved_before: The last step that was saved before a host was lost; 0 if none was.
        lost: Hosts that were lost.
        resumed: Steps after which it went on.
        is_busy: Whether it has enough under way.
    """

    losses: dict[int, list[float]] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)
    saved_before: int = 0
    lost: list[str] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    is_busy: bool = False

    def note(self, event: dict[str, Any]) -> None:
        """Takes an event."""
        match event["event"]:
            case "step":
                self.losses.setdefault(event["step"], []).append(event["loss"])
            case "saved":
                self.saved.append(event["step"])
            case "lost":
                self.lost.append(event["host"])
                self.saved_before = self.saved[-1] if self.saved else 0
            case "resumed":
                self.resumed.append(event["step"])
            case "busy":
                self.is_busy = True


class Program:
    """One program.

    Args:
        name: For people, and of its log.
        module: What is run.
        arguments: Its command line.
        directory: Where its log goes.
        on_event: Called with each event, in a thread.

    Attributes:
        told: What it has told.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: list[str],
        directory: Path,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    ) -> None:
        self.told = Told()
        self._name = name
        self._log = directory / f"{name}.log"
        self._on_event = on_event
        self._changed = threading.Condition()
        self._has_ended = False
        with self._log.open("w") as log:
            # -P: the working directory may not provide modules.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until(self, condition: Callable[[Told], bool], what: str) -> None:
        """Waits for what it tells.

        Raises:
            DemoFailed: It has ended before, or takes too long.
        """
        with self._changed:
            if self._changed.wait_for(lambda: condition(self.told) or self._has_ended, LIMIT_S):
                if condition(self.told):
                    return
                raise self._failure(f"ended with exit code {self._process.wait()} before {what}")
        raise self._failure(f"did not come to {what} in {LIMIT_S:g} s")

    def finish(self) -> Told:
        """Lets it end, and returns all that it has told.

        Raises:
            DemoFailed: It failed, or does not end.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            exit_code = self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise self._failure(f"did not end in {LIMIT_S:g} s") from None
        self._reader.join()
        if exit_code != 0:
            raise self._failure(f"ended with exit code {exit_code}")
        return self.told

    def kill(self) -> None:
        """Ends it, however it is; does nothing where it has ended."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            with self._changed:
                self.told.note(event)
                self._changed.notify_all()
            self._on_event(event)
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _failure(self, what: str) -> DemoFailed:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return DemoFailed(f"the program '{self._name}' {what}:\n{tail}", path=str(self._log))


@contextmanager
def running(program: Program) -> Iterator[Program]:
    """A program that does not outlive this block."""
    try:
        yield program
    finally:
        program.kill()
