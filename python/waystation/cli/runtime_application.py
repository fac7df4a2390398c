"""Declares the commands of the runtime, as `application` does the others. Nothing is done here."""

from __future__ import annotations

from typing import Annotated

import typer

from waystation.cli import topics
from waystation.cli.arguments import AsJson, Traceback
from waystation.cli.reporting import reporting

_COMMANDS = typer.Typer(cls=topics.GroupByTopic, no_args_is_help=True, rich_markup_mode=None)


def declare(application: typer.Typer) -> None:
    """Adds them, under a name of their own."""
    application.add_typer(
        _COMMANDS,
        name="runtime",
        help="Show the state of a running cluster.",
        rich_help_panel=topics.PROGRAMS,
    )


@_COMMANDS.callback()
def _runtime() -> None:
    """Look at a cluster that programs run on."""


@_COMMANDS.command("status")
def _status(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="ADDRESS", help="Address of the cluster; by default the cluster of this machine."
        ),
    ] = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """List islands and hosts of a running cluster: devices, epochs, restarts, current runs.

    Exits with 1 if an island has failed.
    """
    with reporting(as_json, traceback) as output:
        from waystation.cli.commands import runtime_status

        runtime_status.run(output, address)


@_COMMANDS.command("top")
def _top(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="ADDRESS", help="Address of the cluster; by default the cluster of this machine."
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Time between two updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Watch a running cluster: islands, hosts, runs, programs, memory of arrays, lost hosts.

    --json prints the state once. With --json or --once it exits with 1 if an island has failed.
    """
    with reporting(as_json, traceback) as output:
        from waystation.cli.commands import runtime_top

        runtime_top.run(output, address, interval_s=interval, once=once)
