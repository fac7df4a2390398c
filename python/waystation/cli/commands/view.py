"""`waystation view`: the window, a page on this machine whose documents are those of the other commands."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer

from waystation._extras import install_command
from waystation.cli import state_tree
from waystation.cli.commands import diff, inspect, ls, published, top, verify
from waystation.cli.output import OnProgress, Output, encoded
from waystation.cli.reporting import told_of
from waystation.errors import Internal, NotFound, Unsupported
from waystation.memory import DIRECTORY_VARIABLE

_PACKAGES = ("starlette", "uvicorn")
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for.

    Attributes:
        paths: What is to be shown.
        port: Of the page; 0 for any.
        opens_browser: Whether to open one.
        agents: Which agents are watched, if any.
    """

    paths: Sequence[str]
    port: int
    opens_browser: bool
    agents: top.Request


def run(output: Output, request: Request) -> None:
    """Shows the window until this is interrupted.

    Raises:
        Unsupported: The packages of the extra are not installed.
        NotFound: There is nothing at a path.
        Unavailable: The port is taken.
        PermissionDenied, Unavailable: No path can be looked at.
    """
    if not all(importlib.util.find_spec(name) for name in _PACKAGES):
        raise Unsupported(f"the window needs packages that are not installed; {install_command('view')}")
    from waystation.view import server

    sources = server.sources_at(request.paths)
    agents = _agents(request.agents)
    listener = server.listen(request.port)
    window = server.Window(sources, Commands(agents), listener, watches=bool(agents))
    if output.as_json:
        document = {"url": window.url, "port": listener.getsockname()[1]}
        output.document({**document, "paths": [source.path for source in sources]})
    else:
        output.line(window.url)
        output.note("Only this machine can open this page, and only with this address. Ctrl-C ends it.")
        if request.opens_browser:
            _open_browser(window.url)
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):  # which is how this ends
        window.run()


def _agents(request: top.Request) -> list[top.Agent]:
    """The agents that are watched: those that are given, or the one of the environment."""
    given = request.directory or request.metrics or request.hosts
    return top.agents_of(request) if given or os.environ.get(DIRECTORY_VARIABLE) else []


def _open_browser(url: str) -> None:
    """Opens a browser where there is a screen: others would take over the terminal."""
    if sys.platform == "linux" and not any(os.environ.get(name) for name in _DISPLAYS):
        return
    threading.Thread(target=webbrowser.open, args=(url,), name="waystation: browser", daemon=True).start()


class Commands:
    """The documents that the commands print with `--json`, see `waystation.view.server.Documents`.

    Args:
        agents: Those that are watched.
    """

    def __init__(self, agents: Sequence[top.Agent]) -> None:
        self._agents = agents

    def see(self, path: str) -> state_tree.Seen:
        """Opens a checkpoint, as `inspect` does."""
        return inspect.see(path)

    def ls(self, path: str) -> dict[str, Any]:
        """What `ls` prints."""
        return _document(lambda output: ls.run(output, path))

    def verify(self, path: str, on_progress: OnProgress) -> dict[str, Any]:
        """What `verify` prints."""
        if published.is_model(path):
            return _document(lambda output: published.run_verify(output, path), on_progress)
        return _document(lambda output: verify.run(output, path, every=False), on_progress)

    def diff(
        self, first: str, second: str, on_progress: OnProgress, *, structure_only: bool
    ) -> dict[str, Any]:
        """What `diff` prints."""
        return _document(
            lambda output: diff.run(output, first, second, 0.0, 0.0, structure_only=structure_only),
            on_progress,
        )

    def top(self) -> dict[str, Any]:
        """What `top` prints."""
        if not self._agents:
            raise NotFound("no agents are watched; give 'waystation view' --directory, --metrics or --hosts")
        return top.document(top.look(self._agents))

    def error(self, error: Exception) -> dict[str, Any]:
        """What any command prints of an error."""
        return told_of(error).document()

    def encoded(self, document: Any) -> str:
        """A document in one line."""
        return encoded(document)


class _Kept(Output):
    """Keeps the document of a command, and tells somebody else of its progress."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        super().__init__(as_json=True)
        self.kept: dict[str, Any] | None = None
        self._on_progress = on_progress

    def document(self, value: Any) -> None:
        self.kept = value

    @contextmanager
    def progress(self, description: str) -> Iterator[OnProgress]:
        yield self._on_progress or (lambda _done, _total: None)


def _document(command: Callable[[Output], None], on_progress: OnProgress | None = None) -> dict[str, Any]:
    """What a command prints for programs; that it found a difference or damage is in there."""
    output = _Kept(on_progress)
    with contextlib.suppress(typer.Exit):
        command(output)
    if output.kept is None:
        raise Internal("the command printed no document")
    return output.kept
