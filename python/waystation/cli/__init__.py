"""The command `waystation`: what people do with checkpoints from a shell.

`application` declares the commands, `commands` holds one module for each, imported when it runs.
"""

from __future__ import annotations


def main() -> None:
    """Runs the command line; ends the process with its exit code."""
    from waystation.cli.application import application

    application(prog_name="waystation")
