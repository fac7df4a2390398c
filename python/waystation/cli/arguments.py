"""Options that every command has."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where in Waystation an error arose.")]
