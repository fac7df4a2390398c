"""What a `Checkpointer` tells of each save and load, and to whom; and the saves that a log tells of."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

_log = logging.getLogger("waystation")

# An entry of a save, as Python writes a dict, whatever the program's format of logs puts before it.
_SAVE_ENTRY = re.compile(
    r"""\{'event_type': 'save', 'step': (\d{1,18}), 'directory': ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"), """
    r"'synchronous': (?:True|False), 'blocking_s': ([\d.e+-]+), 'waited_s': ([\d.e+-]+)\}"
)


class Logger(Protocol):
    """Is told of each save and load."""

    def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Takes one entry: a dict with `event_type` (`save` or `restore`), `step`, `directory`, and what the
        call took of the program's time, in seconds (`blocking_s`); of a save also how much of that it waited
        for earlier saves and deletions (`waited_s`). The memory tier adds `memory_restore`,
        `memory_failure` with `failure` in place of the time, and at most once a minute `memory_skipped` with
        how many steps it has left out since it last said so (`skipped`) and why this one (`reason`)."""
        ...


class StandardLogger:
    """Writes entries to the log `waystation`."""

    def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Writes an entry, at level INFO."""
        _log.info("%s", msg)


@dataclass(frozen=True, slots=True)
class SaveCall:
    """A call of a `Checkpointer` that has saved a step, as a log tells of it.

    Attributes:
        step: The step.
        directory: Where the checkpoints are.
        blocking_s: What the call took of the program's time, in seconds.
        waited_s: How much of that it waited for earlier saves and deletions.
    """

    step: int
    directory: str
    blocking_s: float
    waited_s: float


def save_calls_in_log(lines: Iterable[str]) -> Iterator[SaveCall]:
    """The calls of which lines of a log tell, in their order; other lines are passed over.

    Args:
        lines: Of a log that has what `StandardLogger` writes.
    """
    for line in lines:
        found = _SAVE_ENTRY.search(line)
        if found is None:
            continue
        try:
            step, directory, blocking_s, waited_s = map(ast.literal_eval, found.groups())
        except (ValueError, SyntaxError):  # no line of ours
            continue
        yield SaveCall(step, directory, float(blocking_s), float(waited_s))
