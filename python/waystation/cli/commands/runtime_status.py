"""`waystation runtime status`: islands and hosts of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from waystation.cli import formatting
from waystation.cli.output import Output
from waystation.runtime.cluster import ClusterStatus, IslandState, IslandStatus, look

if TYPE_CHECKING:
    from rich.table import Table

FOUND_FAILURE = 1
_NOTHING = "-"


def run(output: Output, address: str | None) -> None:
    """Shows a cluster once."""
    with output.working("asking the cluster"):
        status = look(address)
    if output.as_json:
        output.document(status.document())
    else:
        show(output, status)
    if any(island.state is IslandState.FAILED for island in status.islands):
        raise typer.Exit(FOUND_FAILURE)


def show(output: Output, status: ClusterStatus) -> None:
    """Shows it to people."""
    programs = "1 program" if status.clients == 1 else f"{status.clients} programs"
    output.line(f"cluster {status.address}, {programs}")
    if not status.islands:
        output.line("no islands")
        return
    output.line()
    output.show(islands(status))
    output.line()
    output.show(_hosts(status))
    if any(owner.array_bytes or owner.pending for owner in status.owners):
        output.line()
        output.show(owners(status))
    for loss in losses(status):
        output.line(loss, style="red")


def losses(status: ClusterStatus) -> list[str]:
    """What is said of the last loss of each island."""
    return [
        f"island '{island.name}' was lost last because {island.last_loss}"
        for island in status.islands
        if island.last_loss
    ]


def islands(status: ClusterStatus) -> Table:
    """A row for each island."""
    table = table_of("island", "state", "hosts", "devices", "epoch", "restarts", "pending", "labels")
    for island in status.islands:
        cells = [
            island.name,
            island.state.value,
            str(len(island.hosts)),
            f"{len(island.hosts) * island.devices_per_host} {island.kind}",
            str(island.epoch),
            f"{island.restarts} of {island.max_restarts}",
            str(island.pending),
            ", ".join(f"{key}={value}" for key, value in island.labels) or _NOTHING,
        ]
        table.add_row(*map(formatting.plain, cells), style=_style(island))
    return table


def _hosts(status: ClusterStatus) -> Table:
    table = table_of("host", "address", "process", "devices", "ended", "doing")
    for island in status.islands:
        for host in island.hosts:
            cells = [host.name, host.address, str(host.process_id), ", ".join(host.devices)]
            cells += [str(host.ended), host.doing or _NOTHING]
            table.add_row(*map(formatting.plain, cells))
    return table


def owners(status: ClusterStatus) -> Table:
    """A row for each program and each shared array."""
    table = table_of("arrays of", "kind", "bytes", "in flight")
    for owner in status.owners:
        cells = [owner.name, "shared" if owner.is_shared else "program", str(owner.array_bytes)]
        cells.append(_NOTHING if owner.is_shared else str(owner.pending))
        table.add_row(*map(formatting.plain, cells))
    return table


def table_of(*headings: str) -> Table:
    """A table that has no rows yet."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def _style(island: IslandStatus) -> str | None:
    return "red" if island.state is IslandState.FAILED else None
