"""What a load or save has moved, or why it failed: `LoadStatistics`, `SaveStatistics`, `TransferFailure`.

Each save and load of this process publishes one of them when it ends: as a line of the log, and to the
observers of the process. A failing observer fails nothing but itself.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from waystation._errors import naming_memory

_log = logging.getLogger("waystation")

_LOAD_LESS = "load fewer arrays at once, shard them over more processes, or free memory first"

_SAVED = (
    "saved '%s': %d bytes at %.1f MB/s, %d shared; %.3f s: blocked %.3f s, written after %.3f s, "
    "synced after %.3f s"
)
# A line that a save has written, whatever the program's format of logs puts before it.
_SAVED_LINE = re.compile(
    re.sub(r"%\\\.\df", r"(\\d+\\.\\d+)", re.escape(_SAVED).replace("%s", "(.*)").replace("%d", r"(\d+)"))
)


@dataclass(frozen=True, slots=True)
class LoadStatistics:
    """What this process has got of one checkpointable, and read for that.

    Of a `stream`, what was read until it ended or was closed, and the time includes that of the caller.

    Attributes:
        path: The checkpoint; of a published model, the file, or the directory of its files.
        bytes_needed: Bytes of the parts of arrays that this process needed, as they are stored, whether it
            read them, got them from others, or mapped them.
        bytes_read: Bytes that it read: of whole blocks of 256 KiB where they are verified, and of the headers
            of data files; of samples, where a load has tried to broadcast; and of what it read for other
            processes. With a cache, of whole blocks of 8 MiB, and only of what was not in it. Nothing of
            arrays that are mapped (`mmap`): the system reads what of them is used, when it is used.
        duration_s: From the call, before anything is opened, to the last array made, in seconds.
        cached_bytes: Bytes that came from the cache of this machine (`Context.storage.cache_directory`).
        repeated_requests: Requests to a store that were sent a second time, because the first took far longer
            than others.
        first_touch_s: Time, in seconds, added up over all threads, in which the system provided the memory
            that arrays were read to: next to none where memory of earlier arrays was used again.
        bytes_received: Bytes that other processes have read for this one, and sent to it, as they were sent.
        checkpointable: The name of the checkpointable; None of a state without one.
    """

    path: str
    bytes_needed: int
    bytes_read: int
    duration_s: float
    bytes_received: int = 0
    first_touch_s: float = 0.0
    checkpointable: str | None = None
    cached_bytes: int = 0
    repeated_requests: int = 0

    @property
    def read_ratio(self) -> float:
        """Bytes read for each byte needed; 1.0 where nothing was needed. Less than 1 where something was
        received, mapped or cached."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    def log(self) -> None:
        """Writes one line to the logger `waystation`, at the level INFO."""
        _log.info(
            "loaded '%s'%s: %d bytes needed, %d read (%.2f times), %d from the cache, %d received, %.3f s, "
            "first touch %.3f s",
            self.path,
            "" if self.checkpointable is None else f" ('{self.checkpointable}')",
            self.bytes_needed,
            self.bytes_read,
            self.read_ratio,
            self.cached_bytes,
            self.bytes_received,
            self.duration_s,
            self.first_touch_s,
        )


@dataclass(frozen=True, slots=True)
class SaveStatistics:
    """What this process has written in one save. All times count from the call, in seconds.

    Attributes:
        path: The checkpoint.
        bytes_written: Bytes of the data files that this process has written: arrays, headers and what lies
            between arrays; not the index of a published model.
        blocked_s: When the caller could change the state: of `save`, when it returned.
        written_s: When this process had handed all bytes to the system; of fastsafetensors' savers, the same
            as `duration_s`.
        synced_s: When they were on stable storage.
        duration_s: When the checkpoint was committed.
        bytes_shared: Bytes of arrays that this process has not written, because they stand in data files that
            the checkpoint shares with an earlier one.
    """

    path: str
    bytes_written: int
    blocked_s: float
    written_s: float
    synced_s: float
    duration_s: float
    bytes_shared: int = 0

    @property
    def bytes_per_s(self) -> float:
        """Bytes written for each second from the call to the commit."""
        return self.bytes_written / self.duration_s

    def log(self) -> None:
        """Writes one line to the logger `waystation`, at the level INFO."""
        _log.info(
            _SAVED,
            self.path,
            self.bytes_written,
            self.bytes_per_s / 1e6,
            self.bytes_shared,
            self.duration_s,
            self.blocked_s,
            self.written_s,
            self.synced_s,
        )


@dataclass(frozen=True, slots=True)
class TransferFailure:
    """A save or load of this process that has failed.

    Attributes:
        operation: What it was.
        path: The checkpoint; of a published model, the file, or the directory of its files.
        duration_s: From the call to the failure, in seconds.
        error: What it failed with.
    """

    operation: Literal["save", "load"]
    path: str
    duration_s: float
    error: BaseException

    @property
    def kind(self) -> str:
        """The stable kind of the error, as in `waystation.errors`; of other errors, the name of the class."""
        kind = getattr(self.error, "kind", None)
        return kind if isinstance(kind, str) else type(self.error).__name__

    def log(self) -> None:
        """Writes one line to the logger `waystation`, at the level INFO: the program gets the error."""
        what = self.operation, self.path, self.duration_s, self.error
        _log.info("%s of '%s' failed after %.3f s: %s", *what)


def saves_in_log(lines: Iterable[str]) -> Iterator[SaveStatistics]:
    """The saves of which lines of a log tell, in their order; other lines are passed over.

    Args:
        lines: Of a log that has what `SaveStatistics.log` writes, after whatever the program puts before it.
    """
    for line in lines:
        found = _SAVED_LINE.search(line)
        if found is not None:
            path, nbytes, _, shared, took_s, blocked_s, written_s, synced_s = found.groups()
            times = float(blocked_s), float(written_s), float(synced_s), float(took_s)
            yield SaveStatistics(path, int(nbytes), *times, int(shared))


Ended: TypeAlias = LoadStatistics | SaveStatistics | TransferFailure
Observer: TypeAlias = Callable[[Ended], object]

# To add and to remove are one act each, so a child that is forked meanwhile finds no lock that is held.
_observers: list[Observer] = []


def observe(observer: Observer) -> Callable[[], None]:
    """Has a function called with every save and load that ends in this process, in the thread where it ends.

    Returns:
        Ends that; idempotent.
    """
    _observers.append(observer)

    def end() -> None:
        with contextlib.suppress(ValueError):
            _observers.remove(observer)

    return end


def publish(ended: Ended) -> None:
    """Logs how a save or load has ended, and tells the observers. What ends with the interpreter, such as a
    stream that the program has kept, is told to nobody: half of the modules are gone then."""
    if sys.is_finalizing():
        return
    ended.log()
    for observer in tuple(_observers):
        try:
            observer(ended)
        except Exception:
            _log.exception("an observer of saves and loads has failed; '%s' is not affected", ended.path)


@contextlib.contextmanager
def failures_published(operation: Literal["save", "load"], path: str, begun_s: float) -> Iterator[None]:
    """Publishes what the block raises as the failure of an operation, but not that a generator is closed:
    whoever takes its arrays wants no more.

    Args:
        operation: What it is.
        path: Of what.
        begun_s: When it was called, by the monotonic clock.
    """
    try:
        if operation == "load":
            with naming_memory("to load", path, _LOAD_LESS):
                yield
        else:
            yield
    except GeneratorExit:
        raise
    except BaseException as error:
        publish(TransferFailure(operation, path, time.monotonic() - begun_s, error))
        raise


def give(
    statistics: LoadStatistics | SaveStatistics, on_statistics: Callable[[Any], object] | None, option: str
) -> None:
    """Calls the function that the program gave as `option`, if it gave one.

    What the function raises gets a note that the checkpoint is whole: of the error alone, a program could
    not tell.
    """
    if on_statistics is None or sys.is_finalizing():
        return
    try:
        on_statistics(statistics)
    except BaseException as error:
        error.add_note(f"raised by {option}; '{statistics.path}' is whole")
        raise


def tell(
    ended: Sequence[LoadStatistics] | Sequence[SaveStatistics],
    on_statistics: Callable[[Any], object] | None,
    option: str,
) -> None:
    """Publishes what has ended well, and gives it to the function of the program, see `give`.

    It comes after the block of `failures_published`: what the function raises is no failure of the operation.
    """
    for statistics in ended:
        publish(statistics)
    for statistics in ended:
        give(statistics, on_statistics, option)
