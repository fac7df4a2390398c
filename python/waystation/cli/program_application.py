"""Declares the commands that look at programs of the runtime, as `application` does the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from waystation.cli import topics
from waystation.cli.arguments import AsJson, Traceback
from waystation.cli.reporting import reporting

_COMMANDS = typer.Typer(cls=topics.GroupByTopic, no_args_is_help=True, rich_markup_mode=None)


def declare(application: typer.Typer) -> None:
    """Adds them, under a name of their own."""
    application.add_typer(
        _COMMANDS, name="program", help="Show programs of the runtime.", rich_help_panel=topics.PROGRAMS
    )


@_COMMANDS.callback()
def _program() -> None:
    """Look at programs of the runtime."""


@_COMMANDS.command("show")
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
