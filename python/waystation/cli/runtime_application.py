"""Declares the commands of the runtime, as `application` does the others. Nothing is done here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from waystation.cli.arguments import PROGRAMS, AsJson, GroupByTopic, Traceback
from waystation.cli.reporting import reporting

_COMMANDS = typer.Typer(cls=GroupByTopic, no_args_is_help=True, rich_markup_mode=None)
_PROGRAM_COMMANDS = typer.Typer(cls=GroupByTopic, no_args_is_help=True, rich_markup_mode=None)


def declare(application: typer.Typer) -> None:
    """Adds them, under names of their own."""
    application.add_typer(
        _COMMANDS,
        name="runtime",
        help="Show the state of a running cluster.",
        rich_help_panel=PROGRAMS,
    )
    application.add_typer(
        _PROGRAM_COMMANDS, name="program", help="Show programs of the runtime.", rich_help_panel=PROGRAMS
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


@_PROGRAM_COMMANDS.callback()
def _program() -> None:
    """Look at programs of the runtime."""


@_PROGRAM_COMMANDS.command("show")
def _show(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|MODULE:NAME",
            help="A file with a program, as text or bytes, or a program of a module to import.",
        ),
    ],
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="PNG", help="Also draw its graph (needs matplotlib).")
    ] = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Show a program: its text, its size, and a picture of its graph.

    NAME is a program that was traced while the module was imported, or a function without arguments that
    returns one.
    """
    with reporting(as_json, traceback) as output:
        from waystation.cli.commands import program_show

        program_show.run(output, source, picture)
