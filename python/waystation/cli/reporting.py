"""How a command ends: its exit code, and every failure as one clear message.

Invariants: results go to stdout and all else to stderr; with `--json`, stdout holds exactly one JSON
document, also on failure (`{"error": …}`); no traceback is shown unless it is asked for.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback as tracebacks
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import typer

from waystation.cli.formatting import plain, without_number
from waystation.cli.output import Output

FAILED = 2
INTERRUPTED = 130
PIPE_CLOSED = 141  # as of a program that SIGPIPE ends

# Errors speak of the arguments of functions, which are options here.
_OPTIONS = {
    "--overwrite, overwrite=True": "--overwrite",
    "overwrite=True": "--overwrite",
    "bytes_per_second": "--bytes-per-second",
    "max_file_bytes": "--max-shard-bytes",
}


# How the message about a directory of checkpoints ends, and how it does of a command that takes them all.
_OF_ONE = "; give the path of one"
_OF_ALL = "; give the path of one, or --all to verify each"

_UNREACHABLE = "the store cannot be reached"
_HINT_OF_STORES = (
    "check the network, and the address of the store: --storage aws_endpoint=URL or AWS_ENDPOINT, where it "
    "is not that of Amazon"
)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

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
    output = Output(as_json=as_json)
    try:
        try:
            with _reaching(store or ()):
                yield output
        finally:
            sys.stdout.flush()
    except typer.Exit:
        raise
    except (KeyboardInterrupt, typer.Abort):  # Ctrl-C, also in answer to a question
        output.note("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # whoever read the output has gone, and needs no message
        _give_up_stdout()
        raise typer.Exit(PIPE_CLOSED) from None
    except Exception as error:
        if _is_full_output(error):
            _give_up_stdout()
        _report(output, told_of(error, verifies=verifies), show_traceback)
        raise typer.Exit(FAILED) from None


@dataclass(frozen=True, slots=True)
class Told:
    """What is said of an error.

    Attributes:
        kind: Of `waystation.errors`.
        message: What has failed.
        context: Where, as far as the message does not say so.
        hint: What to try next, where the message does not say so.
    """

    kind: str
    message: str
    context: dict[str, Any]
    hint: str | None

    def document(self) -> dict[str, Any]:
        """As commands print it for programs."""
        told = {"kind": self.kind, "message": self.message, "context": self.context, "hint": self.hint}
        return {"error": told}


def told_of(error: Exception, *, verifies: bool = False) -> Told:
    """What is said of an error that has ended a command, or would have.

    Args:
        error: Any.
        verifies: Whether the command is `verify`, which is then not advised.
    """
    from waystation.errors import WaystationError

    if isinstance(error, WaystationError):
        hint = None if verifies and error.kind == "Corrupt" else _HINTS.get(error.kind)
        message = error.message
        if verifies:
            message = message.removesuffix(_OF_ONE) + (_OF_ALL if message.endswith(_OF_ONE) else "")
        if _UNREACHABLE in message:
            hint = _HINT_OF_STORES
        for argument, option in _OPTIONS.items():
            message = message.replace(argument, option)
        told = _told(error.kind, message, _shown_context(error), hint)
        # What else there is to know, such as what a save that failed has left; others are tracebacks.
        notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
        return replace(told, message="; ".join([told.message, *notes]))
    if isinstance(error, MemoryError):
        message = "this machine has too little free memory for the command; free some, or use another machine"
        return _told("Unavailable", message, {}, None)
    if isinstance(error, OSError):
        return _told_of_system(error)
    return _told("Internal", f"unexpected {type(error).__name__}: {error}", {}, _HINTS["Internal"])


def _told(kind: str, message: str, context: dict[str, Any], hint: str | None) -> Told:
    message = without_number(message)
    return Told(kind, message, context, None if "waystation" in message or "; " in message else hint)


def _give_up_stdout() -> None:
    """Closes stdout: what is left in its buffer must not fail once more as the process ends."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.close()


def _is_full_output(error: Exception) -> bool:
    """Whether there was no room for the output: all else that is written has a name, or an error of ours."""
    return type(error) is OSError and error.filename is None and error.errno in _NO_ROOM


def _told_of_system(error: OSError) -> Told:
    """What the system has refused, at a place that expects no refusal."""
    from waystation._errors import from_os_error

    if _is_full_output(error):
        message = f"the output could not be written: {error.strerror}"
        return _told("Unavailable", message, {}, _HINTS["Unavailable"])
    if error.filename is None:
        message = f"the system refuses what the command needs: {error.strerror or error}"
        return _told("Unavailable", message, {}, _HINTS["Unavailable"])
    told = from_os_error(error, "use", str(error.filename))
    return _told(told.kind, told.message, _shown_context(told), _HINTS.get(told.kind))


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


def _report(output: Output, told: Told, show_traceback: bool) -> None:
    if show_traceback:
        output.note(tracebacks.format_exc().rstrip())
    lines = [plain(line) for line in told.message.split("\n")]
    output.note("\n".join([f"error: {lines[0]}", *lines[1:]]), style="red")
    for key, value in told.context.items():
        output.note(f"  {key}: {plain(str(value))}")
    if told.hint:
        output.note(f"  hint: {told.hint}")
    if output.as_json and not sys.stdout.closed:
        output.document(told.document())
