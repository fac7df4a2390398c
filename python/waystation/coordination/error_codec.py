"""Errors of one process as bytes for the others: JSON, never pickles.

What arrives is an error of the same class of `waystation.errors`, with the same message and context, the
context's `process` saying whose it is (unless it names another already) and a note that holds the traceback
of that process. Errors of other libraries arrive as ProcessFailed that names their type; what ends a process
from outside of its work (KeyboardInterrupt, SystemExit) arrives as Cancelled.

Invariants: encoding never fails, whatever the error does when it is printed; decoding never fails, whatever
the bytes are; an encoded error fits into one message of every store (`MOST_BYTES`).
"""

from __future__ import annotations

import json
import traceback
from typing import Any

from waystation import _errors
from waystation._errors import Cancelled, Internal, ProcessFailed, WaystationError

MOST_BYTES = 1 << 20

# Characters, each of up to four bytes, and as many again where JSON escapes them: below MOST_BYTES together.
_MOST_MESSAGE, _MOST_TRACEBACK, _MOST_CONTEXT, _MOST_VALUE = 50_000, 50_000, 30, 1_000
_MOST_INTEGER = 1 << 64

_CLASSES = {
    name: value
    for name, value in vars(_errors).items()
    if isinstance(value, type) and issubclass(value, WaystationError)
}


def encode(error: BaseException, process: int) -> bytes:
    """An error of this process, for the others."""
    told = _as_waystation(error, process)
    cls = next(base for base in type(told).__mro__ if _CLASSES.get(base.__name__) is base)
    document = {
        "class": cls.__name__,
        "kind": cls.kind,
        "message": _cut(told.message, _MOST_MESSAGE),
        "context": _plain_context(told.context),
        "process": process,
        "traceback": _traceback(error),
    }
    # Not escaped to ASCII: of two lone surrogates in a row (odd file names) that would make one character.
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")


def decode(encoded: bytes) -> WaystationError:
    """The error to raise here for one of another process."""
    try:
        document = json.loads(encoded.decode("utf-8", "surrogatepass"))
        return _decoded(document)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return Internal(
            f"another process failed, and what it reported is not understood ({len(encoded)} bytes); "
            "see its output, and check that all processes run the same version of Waystation"
        )


def _decoded(document: Any) -> WaystationError:
    cls = _CLASSES.get(document["class"]) or _errors.KINDS.get(document["kind"], Internal)
    context: dict[str, Any] = dict(document["context"].items())
    code, path = context.get("errno"), context.get("path")
    error = cls(str(document["message"]), errno=code if type(code) is int else None, path=path)
    error.context = context
    error.where(process=int(document["process"]))
    error.add_note(f"In process {document['process']}:\n{str(document['traceback']).rstrip()}")
    return error


def _as_waystation(error: BaseException, process: int) -> WaystationError:
    if isinstance(error, WaystationError):
        return error
    told = ": ".join(part for part in (type(error).__name__, _text(error)) if part)
    if isinstance(error, Exception):
        return ProcessFailed(f"process {process} raised {told}")
    return Cancelled(f"process {process} was stopped by {told}")


def _plain_context(context: dict[str, Any]) -> dict[str, Any]:
    first = list(context.items())[:_MOST_CONTEXT]
    return {_cut(_text(key), _MOST_VALUE): _plain(value) for key, value in first}


def _plain(value: Any) -> Any:
    """The value, if it is one of those that JSON gives back as they are; else its text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < _MOST_INTEGER:
        return int(value)
    if isinstance(value, float):
        return float(value)
    return _cut(_text(value), _MOST_VALUE)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # of a foreign class, whose text is not worth failing for
        return f"<{type(value).__name__} that cannot be shown>"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 20]} … ({len(text)} characters)"[:most]


def _traceback(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # likewise
        text = f"{type(error).__name__}, whose traceback cannot be shown"
    # Its end says most.
    return text[-_MOST_TRACEBACK:]
