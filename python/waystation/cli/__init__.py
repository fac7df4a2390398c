"""The command `waystation`: what people do with checkpoints from a shell.

`application` declares the commands, `commands` holds one module for each, imported when it runs.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; ends the process with its exit code."""
    try:
        from waystation.cli.application import application

        application(prog_name="waystation")
    except KeyboardInterrupt:  # before a command has begun, which tells itself
        sys.exit(130)
