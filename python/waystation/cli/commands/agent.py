"""`waystation agent`: becomes the agent of this host, whose options it hands on as they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn

import typer

from waystation.cli.formatting import plain
from waystation.cli.output import Output
from waystation.memory import agent_program

NO_STORE = 1
_DIRECTORY = "--directory"
_LOCK = "lock"  # which a discarded store leaves


def run(output: Output, arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by the agent: signals, exit code and process id are the agent's.

    Raises:
        NotFound: The agent is not installed.
    """
    program = agent_program()
    directory = _discarded(arguments)
    # The agent makes the directory that it is given: a mistyped one would look like a store that was removed.
    if directory is not None and not _may_hold_store(directory):
        output.note(
            f"error: '{plain(directory)}' holds no store of an agent, so nothing was removed; give the "
            "directory that 'waystation launch --agent' or 'waystation agent run --directory' was given",
            style="red",
        )
        raise typer.Exit(NO_STORE)
    os.execv(program, [str(program), *(arguments or ["--help"])])


def _discarded(arguments: Sequence[str]) -> str | None:
    """The directory whose store is to be removed; None for anything else, which the agent reads by itself."""
    match arguments:
        case ["discard", *options]:
            options = [option for option in options if option != "--allow-disk"]
        case _:
            return None
    match options:
        case [name, directory] if name == _DIRECTORY:
            return directory
        case [option] if option.startswith(f"{_DIRECTORY}="):
            return option.removeprefix(f"{_DIRECTORY}=")
        case _:
            return None


def _may_hold_store(directory: str) -> bool:
    try:
        return any(name != _LOCK for name in os.listdir(directory))
    except FileNotFoundError:
        return os.path.islink(directory)
    except OSError:
        return True  # the agent says what is wrong with it
