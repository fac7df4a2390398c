"""`waystation top`: what agents keep and do, as it changes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from waystation.cli import formatting
from waystation.cli.output import Output
from waystation.errors import InvalidInput
from waystation.memory import DIRECTORY_VARIABLE

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
import http.client
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field

from waystation import _native
from waystation.errors import Unavailable, WaystationError
from waystation.memory.exposition import samples_of
from waystation_launch.hosts import read_hosts

FOUND_SILENCE = 1
_NOTHING = "-"
_RECOVERY_PHASES = "decide", "transfer"
_HEADINGS = [
    *("slots", "memory", "processes", "epoch", "sealed", "committed", "lag"),
    *("sent", "received", "damaged", "recovery", *_RECOVERY_PHASES),
]
_KEPT_HEADINGS = 7  # about what is kept; the others are about what goes on
_UNLIMITED_COLUMNS = 10_000


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for."""

    directory: Path | None
    metrics: Sequence[str]
    hosts: Path | None
    metrics_port: int
    interval_s: float
    once: bool


@dataclass(frozen=True, slots=True)
class _Look:
    """What was seen at a moment."""

    moment_s: float
    views: list[View]


@dataclass(frozen=True, slots=True)
class _Row:
    """What is shown of one agent.

    Attributes:
        name: Of its host.
        cells: One for each heading, or fewer.
        is_silent: Whether it does not answer.
    """

    name: str
    cells: list[str]
    is_silent: bool


def run(output: Output, request: Request) -> None:
    """Shows agents: once, or until this is interrupted or nobody reads any more."""
    agents = agents_of(request)
    if output.as_json or request.once:
        views = look(agents)
        if output.as_json:
            output.document(document(views))
        else:
            output.show(_shown_agents(output, _Look(0, views), None))
            _show_problems(output, views)
        if any(view.problem for view in views):
            raise typer.Exit(FOUND_SILENCE)
        return
    with contextlib.suppress(KeyboardInterrupt):  # which is how this ends
        _follow(output, agents, request.interval_s)


def document(views: Sequence[View]) -> dict[str, Any]:
    """What was seen, for programs."""
    return {"agents": [_document(view) for view in views]}


def agents_of(request: Request) -> list[Agent]:
    """The agents that are meant.

    Raises:
        InvalidInput: None are, or in two ways.
    """
    given = [request.directory is not None, bool(request.metrics), request.hosts is not None]
    if sum(given) > 1:
        raise InvalidInput(
            "give only one of --directory, --metrics and --hosts: each says which agents are meant"
        )
    if request.hosts is not None:
        return in_file(request.hosts, request.metrics_port)
    if request.metrics:
        return [at_address(address) for address in request.metrics]
    directory = request.directory or os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        raise InvalidInput(
            "say which agents are meant: --directory of the store of one on this host, --metrics HOST:PORT "
            f"of each, or --hosts FILE (the environment has no {DIRECTORY_VARIABLE} either)"
        )
    return [in_directory(Path(directory))]


def _follow(output: Output, agents: list[Agent], interval_s: float) -> None:
    earlier: _Look | None = None
    if not output.console.is_terminal:
        while True:  # until writing fails, as whoever has read it is gone
            now = _Look(time.monotonic(), look(agents))
            output.show(_shown_agents(output, now, earlier))
            _show_problems(output, now.views)
            output.line()
            sys.stdout.flush()
            earlier = now
            time.sleep(interval_s)
    from rich.live import Live

    with Live(console=output.console, auto_refresh=False, transient=False) as live:
        while True:
            now = _Look(time.monotonic(), look(agents))
            live.update(_shown_agents(output, now, earlier, with_problems=True), refresh=True)
            earlier = now
            time.sleep(interval_s)


def _show_problems(output: Output, views: list[View]) -> None:
    for view in views:
        if view.problem:
            output.line(f"{view.name}: {view.problem}", style="red")


def _shown_agents(output: Output, now: _Look, earlier: _Look | None, *, with_problems: bool = False) -> Group:
    """One table; two, one above the other, where one would be wider than the terminal."""
    from rich.console import Group
    from rich.measure import Measurement

    rows = _rows(now, earlier, with_problems=with_problems)
    whole = _table(rows, slice(0, len(_HEADINGS)))
    unlimited = output.console.options.update_width(_UNLIMITED_COLUMNS)
    if Measurement.get(output.console, unlimited, whole).maximum <= output.console.width:
        return Group(whole)
    return Group(
        _table(rows, slice(0, _KEPT_HEADINGS)), "", _table(rows, slice(_KEPT_HEADINGS, len(_HEADINGS)))
    )


def _rows(now: _Look, earlier: _Look | None, *, with_problems: bool) -> list[_Row]:
    before = {} if earlier is None else {view.name: view for view in earlier.views}
    passed_s = 0.0 if earlier is None else now.moment_s - earlier.moment_s
    rows = []
    for view in now.views:
        name = view.name + (" *" if view.number("is_controller") else "")
        if view.problem is None:
            cells = _cells(view, before.get(view.name), passed_s)
        else:
            cells = ["silent", view.problem] if with_problems else ["silent"]
        rows.append(_Row(name, cells, is_silent=view.problem is not None))
    return rows


def _table(rows: Sequence[_Row], columns: slice) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("host", overflow="fold")
    for heading in _HEADINGS[columns]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [row.name, *row.cells[columns]]
        style = "red" if row.is_silent else None
        table.add_row(*(Text(formatting.plain(cell)) for cell in cells), style=style)
    return table


def _cells(view: View, before: View | None, passed_s: float) -> list[str]:
    slots = view.numbers.get("slots", {})
    free = view.number("slots", "free") or 0
    in_all = sum(slots.values())
    lag = view.number("replication_lag_versions")
    lag_s = view.number("replication_lag_seconds") or 0
    damaged = (view.number("verification_failures_total") or 0) + (view.number("slots", "quarantined") or 0)
    return [
        f"{in_all - free}/{in_all}",
        formatting.size(int(view.number("memory_bytes") or 0)),
        _shown(view.number("processes")),
        _epoch(view.number("epoch")),
        _shown(view.number("newest_step", "sealed")),
        _shown(view.number("newest_step", "committed")),
        f"{lag} ({lag_s:.1f} s)" if lag else "0",
        _rate("sent_bytes_total", view, before, passed_s),
        _rate("received_bytes_total", view, before, passed_s),
        _shown(damaged),
        _seconds(view.number("last_recovery_seconds")),
        *(_seconds(view.number("last_recovery_phase_seconds", phase)) for phase in _RECOVERY_PHASES),
    ]


def _shown(number: int | float | None) -> str:
    return _NOTHING if number is None else f"{number:g}" if isinstance(number, float) else str(number)


def _epoch(number: int | float | None) -> str:
    """Of several agents an epoch says who its controller is; people want to know how many there were."""
    if number is None:
        return _NOTHING
    return str(int(number) >> 32 or int(number))


def _rate(name: str, view: View, before: View | None, passed_s: float) -> str:
    now = view.number(name)
    if now is None:
        return _NOTHING
    then = None if before is None else before.number(name)
    if then is None or then > now or passed_s <= 0:  # it has been replaced
        return formatting.size(int(now))
    return f"{formatting.size(int((now - then) / passed_s))}/s"


def _seconds(seconds: int | float | None) -> str:
    return _NOTHING if seconds is None else f"{seconds:.2f} s"


def _document(view: View) -> dict[str, Any]:
    return {
        "name": view.name,
        "problem": view.problem,
        "about": view.about,
        "numbers": view.numbers,
    }


# ---- the agents that are watched ---------------------------------------------------------------
# The agents that `waystation top` watches: where their numbers are had, and what of them is shown.
#
# An agent is asked over its socket on this host, or over the address at which it serves numbers for
# Prometheus. Both give the same text. What does not answer is a row that says so, and never delays the
# others.


ANSWER_S = 2.0  # how long an agent may take
_MOST_BYTES = 4 << 20
_PREFIX = "waystation_agent_"
_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent that is watched.

    Attributes:
        name: By which it is shown.
        text: Gets its numbers.
        counts_this: Whether this process is one of those that it counts.
    """

    name: str
    text: Callable[[], str]
    counts_this: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """What was seen of an agent.

    Attributes:
        name: By which it is shown.
        problem: Why there are no numbers; None if there are.
        numbers: By name, without prefix; of those with one label by that label's value.
        about: The labels of its `info`.
    """

    name: str
    problem: str | None = None
    numbers: dict[str, Any] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)

    def number(self, name: str, label: str | None = None) -> int | float | None:
        """One of them, if it is there."""
        found = self.numbers.get(name)
        if label is not None:
            return found.get(label) if isinstance(found, dict) else None
        return found if isinstance(found, int | float) else None


def in_directory(directory: Path) -> Agent:
    """The agent of a store on this host."""
    clients: list[_native.AgentClient] = []

    def text() -> str:
        if not clients:
            clients.append(_native.AgentClient(str(directory), timeout_s=ANSWER_S))
        return clients[0].metrics()

    return Agent(str(directory), text, counts_this=True)


def at_address(address: str, name: str | None = None) -> Agent:
    """An agent that serves its numbers at an address.

    Raises:
        InvalidInput: It is none.
    """
    host, port = split_address(address)
    return Agent(name or address, lambda: _fetch(host, port))


def in_file(path: Path, port: int) -> list[Agent]:
    """The agents of a file of hosts, each of which serves its numbers at this port.

    Raises:
        InvalidInput: The file is not one of hosts.
    """
    return [at_address(_joined(host.machine, port), host.name) for host in read_hosts(path)]


def look(agents: Sequence[Agent]) -> list[View]:
    """Asks all of them at once."""
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(agents)), thread_name_prefix="top") as threads:
        return list(threads.map(_look_at, agents))


def _look_at(agent: Agent) -> View:
    try:
        text = agent.text()
        numbers: dict[str, Any] = {}
        about: dict[str, str] = {}
        for sample in samples_of(text):
            name = sample.name.removeprefix(_PREFIX)
            if name == "info":
                about = sample.labels
            elif not sample.labels:
                numbers[name] = sample.value
            elif len(sample.labels) == 1:
                (label,) = sample.labels.values()
                numbers.setdefault(name, {})[label] = sample.value
    except WaystationError as error:
        return View(agent.name, formatting.without_number(error.message))
    if agent.counts_this and "processes" in numbers:
        numbers["processes"] -= 1
    return View(about.get("host") or agent.name, None, numbers, about)


def _fetch(host: str, port: int) -> str:
    # Not through a proxy that the environment may name: agents are on the network of the job.
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        content = answer.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Unavailable(
            f"no agent answers at {_joined(host, port)}: {reason}; start one with 'waystation agent run "
            f"--metrics {_joined(host, port)} …', or see whether its host runs"
        ) from None
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise Unavailable(f"what answers at {_joined(host, port)} is no agent: it says {answer.status}")
    return content.decode(errors="replace")


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        InvalidInput: It has not both.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidInput(f"'{address}' is no address; write it like 10.0.0.1:9464")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
