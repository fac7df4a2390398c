"""How the processes of a program act together, and what goes on in the background."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from waystation._options import checks
from waystation._options.base import OptionGroup


@dataclass(kw_only=True)
class AsyncOptions(OptionGroup):
    """Operations in the background.

    Attributes:
        timeout_secs: Maximum time that a process waits for the others in one step of an asynchronous save,
            in seconds, if it is less than `multiprocessing.deadline_s`.
        post_finalization_callback: Function that is called without arguments in every process when an
            asynchronous save is committed, in the thread of the save. The handle raises what it raises.
        create_directories_asynchronously: Accepted for compatibility with Orbax, and without effect:
            directories are created in the background.
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
        primary_host: The process that decides, and that writes values which every process has for itself.
            None means that every process has its own storage, which the others do not see. It writes
            everything that it holds to that storage, and loads from it.
        deadline_s: Maximum time that a process waits for the others in one step of an operation, in seconds.
        active_processes: The processes that take part. Only they make the call, `primary_host` is one of
            them, and other processes do not wait. Together they hold all of every array that is saved. None
            means all processes of the program.
        barrier_sync_key_prefix: Name of a sequence of operations. Operations with the same name (or None)
            come in the same order in all processes. Those with different names may come in any order.
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
