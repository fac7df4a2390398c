"""What all commands share: the options that each has, how paths are typed, and how help lists commands.

Help lists commands by topic, each with the whole first paragraph of its description. The topic is typer's
`rich_help_panel`. Typer itself groups by it only with rich, which takes longer to import than everything else
that help needs.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from waystation.cli.output import Output

_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # of the click that typer has

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where in Waystation an error arose.")]
Storage = Annotated[
    list[str] | None,
    typer.Option(
        "--storage",
        metavar="NAME=VALUE",
        help="How an object store is reached, such as aws_region=eu-west-1, skip_signature=true for what is "
        "public, or deadline_s=300 for each request; may be repeated. The environment (AWS_…, GOOGLE_…, "
        "AZURE_…) is read first, and is the place for credentials: others can see the arguments of "
        "a process.",
    ),
]

# Which agents are watched.
AgentDirectory = Annotated[
    Path | None,
    typer.Option(
        "--directory", metavar="DIR", help="Directory of an agent on this host, see 'launch --agent'."
    ),
]
AgentMetrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metrics", metavar="HOST:PORT", help="Address at which an agent serves metrics; repeatable."
    ),
]
AgentHosts = Annotated[
    Path | None,
    typer.Option("--hosts", metavar="FILE", help="JSON file that lists the hosts of the agents."),
]
AgentMetricsPort = Annotated[
    int, typer.Option("--metrics-port", help="Port at which the agents of the file serve metrics.")
]

CHECKPOINTS = "Checkpoints"
GETTING_STARTED = "Getting started"
PROGRAMS = "Programs and clusters"
MEMORY = "Memory tier"

_NO_TOPIC = "Commands"


class GroupByTopic(TyperGroup):
    """A group of commands whose help says of each command what it does."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; that it was called wrongly is a document as well, if documents are wanted."""
        given = [*ctx._protected_args, *ctx.args]
        as_json = ctx.parent is None and "--json" in itertools.takewhile(lambda part: part != "--", given)
        try:
            return super().invoke(ctx)
        except _USAGE_ERROR as error:
            if as_json:
                told = {"kind": "InvalidInput", "message": error.format_message()}
                Output(as_json=True).document({"error": {**told, "context": {}, "hint": None}})
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes a section for each topic, in the order in which topics and commands were declared."""
        topics: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is None or command.hidden:
                continue
            paragraph = (command.help or "").strip().partition("\n\n")[0]
            topic = getattr(command, "rich_help_panel", None) or _NO_TOPIC
            topics.setdefault(topic, []).append((name, " ".join(paragraph.split())))
        for topic, rows in topics.items():
            with formatter.section(topic):
                formatter.write_dl(rows)


def complete_path(incomplete: str) -> list[str]:
    """Directories that begin with what has been typed; the shell takes one and asks again."""
    head, tail = os.path.split(incomplete)
    try:
        with os.scandir(head or ".") as entries:
            names = sorted(entry.name for entry in entries if entry.name.startswith(tail) and entry.is_dir())
    except OSError:
        return []
    return [os.path.join(head, name) for name in names if tail or not name.startswith(".")]


def local_path(given: str | Path) -> Path:
    """A path as it was typed, or the default; `Path` alone would make a path of a URL."""
    text = _given(os.fspath(given))
    if "://" in text:
        raise typer.BadParameter("this is a URL, and a path of a mounted file system is needed here")
    return Path(text)


def place(text: str) -> str:
    """A path as it was typed, or the location that it is: without what may be a signature."""
    text = _given(text)
    if "://" not in text:
        return os.fspath(Path(text))
    return _located(text)


def _given(text: str) -> str:
    """What was typed, a URL of a file as the path that it stands for."""
    if not text:
        raise typer.BadParameter("this is empty; give a path ('.' is the working directory)")
    return _located(text) if text.lower().startswith("file://") else text


def _located(text: str) -> str:
    from waystation import storage
    from waystation.errors import InvalidInput

    try:
        return storage.located(text)
    except InvalidInput as error:
        raise typer.BadParameter(error.message) from None
