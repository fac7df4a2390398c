"""Sizes, times and names as people read and write them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from waystation.errors import InvalidInput

if TYPE_CHECKING:  # help is to import neither NumPy nor the engine
    from waystation.layouts.native.records import LocalPart

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<prefix>[kmgtp]?)(?P<binary>i?)b?", re.IGNORECASE)
_AGE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[smhdw])")
# What the engine adds to the text of an error of the system. People need the text.
_OS_ERROR_NUMBER = re.compile(r" \(os error \d+\)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def size(nbytes: int) -> str:
    """A number of bytes in binary units: `1.5 MiB`."""
    value = float(nbytes)
    for unit in _BINARY:
        if value < 1024 or unit == _BINARY[-1]:
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def without_number(message: str) -> str:
    """The message of an error, without the number of an error of the system."""
    return _OS_ERROR_NUMBER.sub("", message)


def part(local: LocalPart) -> str:
    """What a checkpoint is that is one part of a save to local storage."""
    return f"part of process {local.process} of {local.process_count}, save {local.transaction}"


def parse_size(text: str) -> int:
    """The bytes that `5GB` (powers of 1000) or `5GiB` (of 1024) are.

    Raises:
        InvalidInput: The text is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found["binary"] and not found["prefix"]):
        raise InvalidInput(f"'{text}' is not a size; write it like 500MB, 5GB or 4GiB")
    power = "_kmgtp".index(found["prefix"].lower() or "_")
    return int(float(found["number"]) * (1024 if found["binary"] else 1000) ** power)


def age(seconds: float) -> str:
    """A time span in its largest fitting unit: `3 h`."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def parse_age(text: str) -> float:
    """The seconds that `90s`, `30m`, `12h`, `1d` or `2w` are.

    Raises:
        InvalidInput: The text is no age.
    """
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(f"'{text}' is not an age; write it like 90s, 30m, 12h, 1d or 2w")
    return float(found["number"]) * _SECONDS[found["unit"]]


def moment(nanoseconds: int) -> str:
    """A time as ISO 8601 in UTC, to the second."""
    return f"{_moment(nanoseconds):%Y-%m-%dT%H:%M:%SZ}"


def shown_moment(nanoseconds: int) -> str:
    """A time for people, in UTC."""
    return f"{_moment(nanoseconds):%Y-%m-%d %H:%M:%S} UTC"


def _moment(nanoseconds: int) -> datetime.datetime:
    try:
        return datetime.datetime.fromtimestamp(nanoseconds // 10**9, datetime.UTC)
    except (OverflowError, ValueError, OSError):  # a file may hold any number
        return datetime.datetime.fromtimestamp(0, datetime.UTC)


def shape(extents: Sequence[int]) -> str:
    """A shape as arrays show it after their dtype: `[3, 4]`."""
    return f"[{', '.join(map(str, extents))}]"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """`1 array`, `2 arrays`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def plain(text: str) -> str:
    """The text with every character escaped that could control a terminal or cannot be encoded."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
