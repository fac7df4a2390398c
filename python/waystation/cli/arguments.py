"""What all commands share: the options that each has, and how help lists them.

Help lists commands by topic, each with the whole first paragraph of its description. The topic is typer's
`rich_help_panel`. Typer itself groups by it only with rich, which takes longer to import than everything else
that help needs.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where in Waystation an error arose.")]


CHECKPOINTS = "Checkpoints"
GETTING_STARTED = "Getting started"
PROGRAMS = "Programs and clusters"
MEMORY = "Memory tier"

_NO_TOPIC = "Commands"


class GroupByTopic(TyperGroup):
    """A group of commands whose help says of each command what it does."""

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
