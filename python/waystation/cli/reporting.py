"""How a command ends: its exit code, and every failure as one clear message.

Invariants: results go to stdout and all else to stderr; with `--json`, stdout holds exactly one JSON
document, also on failure (`{"error": …}`); no traceback is shown unless it is asked for.
"""

from __future__ import annotations

import contextlib
import sys
import traceback as tracebacks
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from waystation.cli.formatting import plain
from waystation.cli.output import Output

FAILED = 2
INTERRUPTED = 130
PIPE_CLOSED = 141  # as of a program that SIGPIPE ends

# Errors speak of the arguments of functions, which are options here.
_OPTIONS = {"overwrite=True": "--overwrite", "bytes_per_second": "--bytes-per-second"}

# What to try next, by kind, where the message of the error itself does not say.
_HINTS = {
    "Corrupt": "restore another one; where there are checksums, 'waystation verify PATH' lists all damage",
    "Unavailable": "fix the cause that the message names, then run the command again",
    "Internal": "please report this, with what --traceback shows",
}


@contextmanager
def reporting(
    as_json: bool, show_traceback: bool, store: Sequence[str] | None = None, *, verifies: bool = False
) -> Iterator[Output]:
    """Gives a command its output, and ends the process with the exit code that belongs to its outcome.

    Args:
        as_json: Whether stdout is for one JSON document.
        show_traceback: Whether to show the traceback of an error.
        store: How object stores are reached, `NAME=VALUE` each.
        verifies: Whether the command is `verify`, which is then not advised.
    """
    from waystation.errors import WaystationError

    output = Output(as_json=as_json)
    try:
        try:
            with _reaching(store or ()):
                yield output
        finally:
            sys.stdout.flush()
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        output.note("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # whoever read the output has gone, and needs no message
        with contextlib.suppress(OSError, ValueError):  # what is left must not fail as the process ends
            sys.stdout.close()
        raise typer.Exit(PIPE_CLOSED) from None
    except WaystationError as error:
        hint = None if verifies and error.kind == "Corrupt" else _HINTS.get(error.kind)
        message = error.message
        for argument, option in _OPTIONS.items():
            message = message.replace(argument, option)
        _report(output, error.kind, message, _shown_context(error), hint, show_traceback)
        raise typer.Exit(FAILED) from None
    except Exception as error:
        message = f"unexpected {type(error).__name__}: {error}"
        _report(output, "Internal", message, {}, _HINTS["Internal"], show_traceback)
        raise typer.Exit(FAILED) from None


@contextmanager
def _reaching(store: Sequence[str]) -> Iterator[None]:
    """Has object stores reached as options say. What is wrong with one is told without its value."""
    if not store:
        yield
        return
    from waystation.checkpoint.context import Context
    from waystation.errors import InvalidInput

    pairs = [text.partition("=") for text in store]
    if not all(name and equals for name, equals, _ in pairs):
        raise InvalidInput(
            "--storage takes NAME=VALUE, such as --storage aws_region=eu-west-1; the names are 'deadline_s' "
            "and those of Context.storage.settings"
        )
    context = Context()
    settings = {name: value for name, _, value in pairs}
    deadline_s = settings.pop("deadline_s", None)
    if deadline_s is not None:
        try:
            context.storage.deadline_s = float(deadline_s)
        except ValueError:
            raise InvalidInput(
                f"--storage deadline_s is a number of seconds, such as 300, not '{deadline_s}'"
            ) from None
    context.storage.settings = settings
    with context:
        yield


def _shown_context(error: Any) -> dict[str, Any]:
    """Where it happened, as far as the message does not say so itself."""
    return {
        key: value
        for key, value in error.context.items()
        if key != "errno" and f"{value}" not in error.message
    }


def _report(
    output: Output, kind: str, message: str, context: dict[str, Any], hint: str | None, show_traceback: bool
) -> None:
    if show_traceback:
        output.note(tracebacks.format_exc().rstrip())
    hint = None if "waystation" in message or "; " in message else hint
    lines = [plain(line) for line in message.split("\n")]
    output.note("\n".join([f"error: {lines[0]}", *lines[1:]]), style="red")
    for key, value in context.items():
        output.note(f"  {key}: {plain(str(value))}")
    if hint:
        output.note(f"  hint: {hint}")
    if output.as_json:
        output.document({"error": {"kind": kind, "message": message, "context": context, "hint": hint}})
