"""What a forked child makes of the locks, threads and connections of its parent.

A child has one thread, a copy of the one that forked. So a lock that another thread of the parent held is
held for ever in the child, a queue has nobody who reads it, and a connection is shared with the parent. These
rules hold for what can be reached in a child:

- Locks of what the child may use by itself are made anew (`watch`, and a method `begin_in_child`).
- What works by threads or connections of the parent belongs to the parent. Its methods raise InvalidInput at
  once (`not_of_this_process`), and closing or dropping it does nothing that the parent could notice.
- What stands in the file system for the parent, such as attempts and leases, is removed by the parent only
  (`Owner`).

What cannot be mended here: a module that another thread is importing while this one forks can never be
imported in the child, as Python keeps a lock for each.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, TypeVar

from waystation._errors import InvalidInput


class Watched(Protocol):
    """What is told that it is in a forked child."""

    def begin_in_child(self) -> None:
        """Makes locks anew, and lets go of what belongs to the parent; raises nothing, and never waits."""
        ...


_watched: weakref.WeakValueDictionary[int, Watched] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def watch(watched: Watched) -> None:
    """Has something told in each child that is forked from now on, for as long as it is there."""
    _watched[next(_numbers)] = watched


def _begin_in_child() -> None:
    for watched in list(_watched.values()):
        watched.begin_in_child()


os.register_at_fork(after_in_child=_begin_in_child)


class Closable(Protocol):
    """What is closed at its end."""

    def close(self) -> object:
        """Closes it."""
        ...


AnyClosable = TypeVar("AnyClosable", bound=Closable)


class Owner:
    """The process that made this, and no child of it."""

    # Not looked up in modules: what the program keeps to its end is let go of when these are empty.
    _getpid = staticmethod(os.getpid)
    _is_finalizing = staticmethod(sys.is_finalizing)

    def __init__(self) -> None:
        self.process_id = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether it is this process."""
        return self._getpid() == self.process_id

    @property
    def may_close(self) -> bool:
        """Whether it is this process, and its interpreter is not ending: then there is nothing in memory to
        put in order any more, and nothing to do it with."""
        return self.is_here and not self._is_finalizing()

    def require(self, what: str, advice: str) -> None:
        """Refuses to go on in a child.

        Args:
            what: What belongs to the process.
            advice: What to do.

        Raises:
            InvalidInput: This is not that process.
        """
        if not self.is_here:
            raise not_of_this_process(what, self.process_id, advice)

    @contextlib.contextmanager
    def closing(self, thing: AnyClosable) -> Iterator[AnyClosable]:
        """Closes something at the end of the block, but not in a child, as it is the process's, nor while the
        interpreter ends."""
        try:
            yield thing
        finally:
            if self.may_close:
                thing.close()


def not_of_this_process(what: str, process_id: int, advice: str) -> InvalidInput:
    """The error of whoever uses in a forked child what belongs to its parent."""
    return InvalidInput(f"{what} belongs to process {process_id}, from which this one was forked; {advice}")


class LockOfParent:
    """Takes the place, in a child, of a lock of what belongs to the parent: it cannot be taken.

    Args:
        error: What is raised instead.
    """

    def __init__(self, error: InvalidInput) -> None:
        self._error = error

    def __enter__(self) -> bool:
        raise InvalidInput(self._error.message)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class WatchedLock:
    """A lock of a module, which is made anew in each child.

    A block of the thread that forks goes on to hold the lock that it has taken.
    """

    def __init__(self) -> None:
        self.begin_in_child()
        watch(self)

    def begin_in_child(self) -> None:
        """See `Watched`."""
        self.lock = threading.RLock()
