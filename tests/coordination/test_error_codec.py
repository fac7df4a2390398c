"""Errors arrive as they were, whatever they hold; nothing that arrives can do harm."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation import _errors
from waystation.coordination import error_codec
from waystation.errors import Cancelled, DiskFull, NotFound, ProcessFailed, WaystationError

CLASSES = [
    value
    for value in vars(_errors).values()
    if isinstance(value, type) and issubclass(value, WaystationError) and value is not WaystationError
]

# Lone surrogates are what Python makes of file names that are no UTF-8.
texts = st.text(st.characters(exclude_categories=()), max_size=200)
plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | texts
contexts = st.dictionaries(st.sampled_from(["path", "array", "step", "offset", "errno", "détail"]), plain)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this")


class LibraryNotFound(NotFound, KeyError):
    """What a layer above may make of one of the classes."""


@given(cls=st.sampled_from(CLASSES), message=texts, context=contexts, process=st.integers(0, 99_999))
def test_errors_arrive_as_they_were(
    cls: type[WaystationError], message: str, context: dict[str, Any], process: int
) -> None:
    number = context.pop("errno", None)
    if isinstance(number, int) and abs(number) < 2**31:
        context["errno"] = int(number)
    error = cls(message, **context)
    arrived = error_codec.decode(error_codec.encode(error, process))
    assert type(arrived) is cls
    assert arrived.message == message
    assert arrived.context == {**error.context, "process": process}
    assert getattr(arrived, "errno", None) == getattr(error, "errno", None)
    assert len(arrived.__notes__) == 1


@given(st.binary(max_size=300))
def test_any_bytes_are_some_error(encoded: bytes) -> None:
    assert isinstance(error_codec.decode(encoded), WaystationError)


@given(st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=10))
def test_any_document_is_some_error(document: Any) -> None:
    damaged = json.loads(error_codec.encode(NotFound("x", step=1), 3))
    for key in damaged:
        encoded = json.dumps({**damaged, key: document}).encode()
        assert isinstance(error_codec.decode(encoded), WaystationError)
    assert isinstance(error_codec.decode(json.dumps(document).encode()), WaystationError)


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_the_traceback_is_a_note() -> None:
    cause = _raised(OSError("the disk"))
    error = NotFound("nothing", path="/x")
    error.add_note("look elsewhere")
    try:
        raise error from cause
    except NotFound as caught:
        arrived = error_codec.decode(error_codec.encode(caught, 4))
    (note,) = arrived.__notes__
    assert note.startswith("In process 4:\nTraceback (most recent call last):\n")
    assert "raise error from cause\nwaystation.errors.NotFound: nothing (path: /x)\nlook elsewhere" in note
    assert "OSError: the disk\n\nThe above exception was the direct cause" in note


@pytest.mark.parametrize(
    ("error", "cls", "message"),
    [
        (ValueError("bad"), ProcessFailed, "process 7 raised ValueError: bad"),
        (FileNotFoundError(2, "No such file", "/x"), ProcessFailed, None),
        (MemoryError(), ProcessFailed, "process 7 raised MemoryError"),
        (Unprintable(), ProcessFailed, "process 7 raised Unprintable: <Unprintable that cannot be shown>"),
        (ExceptionGroup("two", [ValueError("1"), KeyError("2")]), ProcessFailed, None),
        (KeyboardInterrupt(), Cancelled, "process 7 was stopped by KeyboardInterrupt"),
        (SystemExit(3), Cancelled, "process 7 was stopped by SystemExit: 3"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_errors_of_others(error: BaseException, cls: type[WaystationError], message: str | None) -> None:
    arrived = error_codec.decode(error_codec.encode(_raised(error), 7))
    assert type(arrived) is cls
    assert arrived.context == {"process": 7}
    assert type(error).__name__ in arrived.message
    assert message in (None, arrived.message)


def test_a_class_of_a_higher_layer_arrives_as_what_it_is_made_of() -> None:
    assert type(error_codec.decode(error_codec.encode(LibraryNotFound("gone"), 0))) is NotFound


def test_a_class_of_another_version_arrives_as_its_kind() -> None:
    document = {**json.loads(error_codec.encode(DiskFull("full"), 1)), "class": "QuotaReached"}
    arrived = error_codec.decode(json.dumps(document).encode())
    assert (type(arrived).__name__, arrived.message) == ("Unavailable", "full")


def test_a_process_that_the_error_names_already_stays() -> None:
    error = NotFound("the table of process 5 is missing", process=5)
    arrived = error_codec.decode(error_codec.encode(error, 0))
    assert arrived.context == {"process": 5}
    assert arrived.__notes__[0].startswith("In process 0:\n")


def test_what_json_cannot_hold_arrives_as_text() -> None:
    error = NotFound("x", path=Path("/a"), big=10**30, several=[1, 2], nothing=Unprintable(), part=math.nan)
    arrived = error_codec.decode(error_codec.encode(error, 0)).context
    assert math.isnan(arrived.pop("part"))
    assert arrived == {
        "path": "/a",
        "big": "1" + 30 * "0",
        "several": "[1, 2]",
        "nothing": "<Unprintable that cannot be shown>",
        "process": 0,
    }


@pytest.mark.share(6)
@pytest.mark.parametrize("character", ["a", "\x00", "ß", "\U0001f600", "\udcff"])
def test_the_largest_errors_fit_into_a_message(character: str) -> None:
    text = character * 1_000_000
    error = NotFound(text, **{f"{number}{text}": text for number in range(100)})
    encoded = error_codec.encode(_raised(error), 0)
    assert len(encoded) <= error_codec.MOST_BYTES
    arrived = error_codec.decode(encoded)
    assert type(arrived) is NotFound
    assert arrived.message.startswith(character * 10_000)
    assert arrived.message.endswith(" … (1000000 characters)"[:20])
