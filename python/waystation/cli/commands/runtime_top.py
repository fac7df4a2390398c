"""`waystation runtime top`: islands, hosts and programs of a cluster, as they change."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from waystation.cli import formatting
from waystation.cli.commands import runtime_status
from waystation.cli.output import Output
from waystation.runtime.cluster import ClusterStatus, HostStatus, IslandState, looking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType
    from rich.table import Table

_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at a moment.

    Attributes:
        moment_s: When, by a clock that grows.
        status: What.
    """

    moment_s: float
    status: ClusterStatus


def run(output: Output, address: str | None, *, interval_s: float, once: bool) -> None:
    """Shows a cluster: once, or until this is interrupted, nobody reads any more, or the cluster ends."""
    with looking(address) as status:
        if output.as_json or once:
            now = status()
            if output.as_json:
                output.document(now.document())
            else:
                show(output, Look(0, now), None)
            if any(island.state is IslandState.FAILED for island in now.islands):
                raise typer.Exit(runtime_status.FOUND_FAILURE)
            return
        looks = _looks(status, interval_s)
        with contextlib.suppress(KeyboardInterrupt):  # which is how this ends
            _follow(output, looks)


def _looks(status: Callable[[], ClusterStatus], interval_s: float) -> Iterator[Look]:
    while True:
        yield Look(time.monotonic(), status())
        time.sleep(interval_s)


def _follow(output: Output, looks: Iterator[Look]) -> None:
    earlier: Look | None = None
    if not output.console.is_terminal:
        for now in looks:  # until writing fails, as whoever has read it is gone
            show(output, now, earlier)
            output.line()
            sys.stdout.flush()
            earlier = now
        return
    from rich.console import Group
    from rich.live import Live

    with Live(console=output.console, auto_refresh=False, transient=False) as live:
        for now in looks:
            live.update(Group(*_parts(now, earlier)), refresh=True)
            earlier = now


def show(output: Output, now: Look, earlier: Look | None) -> None:
    """Shows one look.

    Args:
        output: Where.
        now: The look.
        earlier: The one before, by which rates are known.
    """
    for part in _parts(now, earlier):
        output.show(part)


def _parts(now: Look, earlier: Look | None) -> list[RenderableType]:
    from rich.text import Text

    status = now.status
    parts: list[RenderableType] = [Text(f"cluster {status.address}"), Text("")]
    parts += [runtime_status.islands(status), Text("")] if status.islands else [Text("no islands"), Text("")]
    if any(island.hosts for island in status.islands):
        parts += [_hosts(now, earlier), Text("")]
    parts.append(runtime_status.owners(status))
    parts += [Text(formatting.plain(loss), style="red") for loss in runtime_status.losses(status)]
    return parts


def _hosts(now: Look, earlier: Look | None) -> Table:
    table = runtime_status.table_of("host", "process", "done", "arrays", "sent", "stalled", "doing")
    before = {} if earlier is None else {host.process_id: host for host in _all_hosts(earlier)}
    passed_s = 0.0 if earlier is None else now.moment_s - earlier.moment_s
    for host in _all_hosts(now):
        then = before.get(host.process_id)
        done, sent = str(host.ended), formatting.size(host.sent_bytes)
        if then is not None and passed_s > 0:
            done = f"{(host.ended - then.ended) / passed_s:.0f}/s"
            sent = f"{formatting.size(int((host.sent_bytes - then.sent_bytes) / passed_s))}/s"
        stalled = f"{host.stalled_s:.1f} s" if host.stalled_s else _NOTHING
        cells = [host.name, str(host.process_id), done, formatting.size(host.array_bytes)]
        cells += [sent, stalled, host.doing or _NOTHING]
        table.add_row(*map(formatting.plain, cells))
    return table


def _all_hosts(look: Look) -> list[HostStatus]:
    return [host for island in look.status.islands for host in island.hosts]
