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
        help="Look at a cluster that programs run on.",
        rich_help_panel=topics.PROGRAMS,
    )


@_COMMANDS.callback()
def _runtime() -> None:
    """Look at a cluster that programs run on."""


@_COMMANDS.command("status")
def _status(
    address: Annotated[
        str | None,
        typer.Argument(metavar="ADDRESS", help="Of the cluster; by default the one of this machine."),
    ] = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """List islands and hosts of a running cluster: devices, epochs, restarts, what runs.

    An island that has failed exits with 1.
    """
    with reporting(as_json, traceback) as output:
        from waystation.cli.commands import runtime_status

        runtime_status.run(output, address)


@_COMMANDS.command("top")
def _top(
    address: Annotated[
        str | None,
        typer.Argument(metavar="ADDRESS", help="Of the cluster; by default the one of this machine."),
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Time between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Watch a running cluster: islands, hosts, what runs, programs, whose arrays take how much, losses.

    With --json it looks once. With --json or --once an island that has failed exits with 1.
    """
    with reporting(as_json, traceback) as output:
        from waystation.cli.commands import runtime_top

        runtime_top.run(output, address, interval_s=interval, once=once)
