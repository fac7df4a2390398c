"""Reads text in Prometheus' exposition format, version 0.0.4: what agents tell those who watch them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from waystation._errors import Corrupt

_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*"
)
_LABEL = re.compile(r'\s*(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"(?P<value>(?:[^"\\]|\\.)*)"\s*,?')
_ESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    """A number with a name and labels."""

    name: str
    labels: dict[str, str]
    value: int | float


def samples_of(text: str) -> Iterator[Sample]:
    """All samples of a text, in order.

    Raises:
        Corrupt: A line has no meaning.
    """
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _SAMPLE.fullmatch(line)
        try:
            if found is None:
                raise ValueError
            yield Sample(found["name"], _labels(found["labels"] or ""), _number(found["value"]))
        except ValueError:
            raise Corrupt(f"'{line[:200]}' is no sample of the exposition format") from None


def _labels(text: str) -> dict[str, str]:
    labels = {}
    position = 0
    while position < len(text):
        found = _LABEL.match(text, position)
        if found is None:
            raise ValueError
        labels[found["name"]] = re.sub(r"\\.", lambda escape: _ESCAPED[escape.group()], found["value"])
        position = found.end()
    return labels


def _number(text: str) -> int | float:
    # Whole numbers stay whole: epochs are larger than what a float holds.
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
