"""The window as tests have it: a real server on the loopback interface, asked over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.programs import HANG_S

import waystation
from waystation.cli.commands import top
from waystation.cli.commands.view import Commands
from waystation.view import server


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]


class Client:
    """Asks a window.

    Attributes:
        url: Its address, with the token.
        port: Of that.
        token: Likewise.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urllib.parse.urlsplit(url)
        assert parts.hostname == "127.0.0.1"
        assert parts.port is not None
        self.port = parts.port
        self.token = parts.path.strip("/")

    def get(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
        """The answer to a request for a path, which begins with a slash."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())

    def path(self, name: str, /, **values: object) -> str:
        """The path of a question."""
        return f"/{self.token}/api/{name}?{urllib.parse.urlencode(values)}"

    def ask(self, name: str, /, **values: object) -> Any:
        """The document that answers a question."""
        return self.get(self.path(name, **values)).document

    def result(self, name: str, /, **values: object) -> Any:
        """The last line of an answer that takes long: a result or an error."""
        *_, last = self.get(self.path(name, **values)).lines
        return last.get("result", last)


Open = Callable[..., Client]


@pytest.fixture
def window() -> Iterator[Open]:
    """Opens windows on paths, until the test ends."""
    with contextlib.ExitStack() as ends:

        def open_window(*paths: Path | str, agents: list[top.Agent] | None = None) -> Client:
            sources = [server.source_at(str(path)) for path in paths]
            made = server.Window(sources, Commands(agents or []), server.listen(0), watches=bool(agents))
            thread = threading.Thread(target=made.run, name="window")
            thread.start()
            ends.callback(thread.join, HANG_S)
            ends.callback(made.stop)
            return Client(made.url)

        yield open_window


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run of two steps, of which one array differs."""
    state = {
        "params": {"w": np.arange(6000, dtype=np.float32).reshape(60, 100), "b": np.zeros(3)},
        "step": 1,
    }
    waystation.save(tmp_path / "runs" / "step_1", state, custom_metadata={"loss": 2.5})
    state["params"]["w"][1, 2] += 3.0  # type: ignore[index]
    state["params"]["w"][2, 2] -= 4.0  # type: ignore[index]
    state["step"] = 2
    waystation.save(tmp_path / "runs" / "step_2", state)
    return tmp_path / "runs"
