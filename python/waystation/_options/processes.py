"""How the processes of a program act together, and what goes on in the background."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from waystation._options import checks
from waystation._options.base import OptionGroup


@dataclass(kw_only=True)
class AsyncOptions(OptionGroup):
    """What goes on in the background.

    Attributes:
        timeout_secs: How long a process waits for the others in one step of an asynchronous save, in
            seconds, where that is less than `multiprocessing.deadline_s`.
        post_finalization_callback: Called without arguments in every process when an asynchronous save is
            committed, in its thread. What it raises, the handle raises.
        create_directories_asynchronously: Taken for Orbax's sake: directories are made in the background.
    """

    timeout_secs: float = 1200
    post_finalization_callback: Callable[[], object] | None = None
    create_directories_asynchronously: bool = True
    _checks: ClassVar = {
        "timeout_secs": checks.seconds,
        "post_finalization_callback": checks.callable_or_none,
        "create_directories_asynchronously": checks.boolean,
    }


@dataclass(kw_only=True)
class MultiprocessingOptions(OptionGroup):
    """How the processes of a program act together.

    Attributes:
        primary_host: The process that decides, and writes what every process has a value of its own of.
            None: every process has a storage of its own that the others do not see, to which it writes
            all that it holds, and from which it loads.
        deadline_s: How long a process waits for the others in one step of an operation, in seconds.
        active_processes: The processes that take part; they alone make the call, and `primary_host` is one of
            them. Nobody waits for the others. Between them they hold all of every array that is saved. None:
            all processes of the program.
        barrier_sync_key_prefix: Names a sequence of operations. Those of one name (None is one too) come in
            the same order in all processes; those of different names need not.
    """

    primary_host: int | None = 0
    deadline_s: float = 1200.0
    active_processes: frozenset[int] | set[int] | None = None
    barrier_sync_key_prefix: str | None = None
    _checks: ClassVar = {
        "primary_host": checks.natural_or_none,
        "deadline_s": checks.seconds,
        "active_processes": checks.processes_or_none,
        "barrier_sync_key_prefix": checks.text_or_none,
    }
