"""Calls of handlers: both phases of all checkpointables of one save or load, on one event loop.

`begin` runs the first phases in the thread of the caller, all at once; `finish` awaits what they returned,
unless `start` has had that awaited in a thread of its own, and then waits for it. One loop serves both, so
that a task that a handler started in its first phase goes on in the second. Invariants: an error names the
checkpointable, and is typed; when one fails, the others are cancelled and waited for; nothing that was begun
outlives `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from waystation._errors import Cancelled, HandlerFailed, Unsupported, WaystationError, from_os_error

Results = dict[str, Any]


class HandlerCalls:
    """The calls of one save or load.

    Args:
        action: What the handlers are called for, completing "could not …": "save" or "load".
    """

    def __init__(self, action: str) -> None:
        self._action = action
        self._context = contextvars.copy_context()
        self._loop = asyncio.new_event_loop()
        self._rest: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self._results: Results = {}
        self._error: BaseException | None = None
        self._is_reading = False

    def begin(self, calls: Mapping[str, Callable[[], Awaitable[Any]]]) -> None:
        """Runs the first phases, one for each checkpointable.

        Raises:
            WaystationError: One failed, the first of them in order; the others have ended.
        """
        self._rest = self.ask(calls)

    def ask(self, calls: Mapping[str, Callable[[], Awaitable[Any]]]) -> Results:
        """Runs calls of one phase, and returns what they gave."""
        answers: Results = self._run(self._together({name: _called(call) for name, call in calls.items()}))
        return answers

    def start(self) -> None:
        """Has the second phases run in the background."""
        self._thread = threading.Thread(
            target=self._context.run,
            args=(self._run_rest, self._second_phases()),
            name="waystation: handlers",
            daemon=False,
        )
        self._thread.start()

    def _second_phases(self) -> Coroutine[Any, Any, Results]:
        # As with Orbax, whatever goes wrong here in a load is one kind of error.
        self._is_reading = self._action == "load"
        rest, self._rest = self._rest, {}
        return self._together({name: _awaited(awaitable) for name, awaitable in rest.items()})

    def _run_rest(self, work: Coroutine[Any, Any, Results]) -> None:
        try:
            self._results = self._loop.run_until_complete(work)
        except BaseException as error:
            self._error = error

    def finish(self) -> Results:
        """The second phases, to their end; returns what each gave.

        Raises:
            WaystationError: One failed, the first of them in order; the others have ended.
        """
        if self._thread is None:
            results: Results = self._run(self._second_phases())
            return results
        self._thread.join()
        if isinstance(self._error, asyncio.CancelledError):
            raise Cancelled(f"handlers were told to stop before they could {self._action}")
        if self._error is not None:
            raise self._error
        return self._results

    def progress(self) -> tuple[int, int]:
        """Handlers do not tell how far they are."""
        return 0, 0

    def cancel(self) -> None:
        """Stops what runs in the background."""
        if self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has ended, and its loop was closed, meanwhile
                self._loop.call_soon_threadsafe(self._cancel_all)

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def close(self) -> None:
        """Ends what still runs, and forgets what was not awaited; idempotent."""
        if self._loop.is_closed():
            return
        if self._thread is not None:
            self.cancel()
            self._thread.join()
        for awaitable in self._rest.values():
            if asyncio.iscoroutine(awaitable):
                awaitable.close()
        self._rest = {}
        self._run(self._clear())
        self._loop.close()

    async def _clear(self) -> None:
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()

    def _run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine to its end, also where the thread runs another loop (a notebook)."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(main)
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.append((self._loop.run_until_complete(main), None))
            except BaseException as error:
                outcome.append((None, error))

        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
        thread.start()
        thread.join()
        ((value, error),) = outcome
        if error is not None:
            raise error
        return value

    async def _together(self, awaitables: Mapping[str, Coroutine[Any, Any, Any]]) -> Results:
        tasks = {name: self._loop.create_task(work) for name, work in awaitables.items()}
        if not tasks:
            return {}
        try:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.wait(tasks.values())
        # Every error is asked for: asyncio complains about those that nobody has seen.
        errors = {name: None if task.cancelled() else task.exception() for name, task in tasks.items()}
        for name, error in errors.items():
            if error is not None:
                self._raise(name, error)
        for name, task in tasks.items():
            if task.cancelled():
                raise Cancelled(
                    f"the handler of checkpointable '{name}' was cancelled: it could not {self._action}",
                    checkpointable=name,
                )
        return {name: task.result() for name, task in tasks.items()}

    def _raise(self, name: str, error: BaseException) -> None:
        """Raises what a handler has raised, typed, and saying for which checkpointable."""
        if isinstance(error, WaystationError):
            raise error.where(checkpointable=name)
        if not isinstance(error, Exception):
            raise error
        what = f"could not {self._action} checkpointable '{name}': its handler raised {type(error).__name__}"
        if self._is_reading:
            raise HandlerFailed(f"{what}: {error}", checkpointable=name) from error
        if isinstance(error, OSError):
            typed = from_os_error(error, self._action, str(error.filename or name))
            typed.message = f"{what}: {error}"
            raise typed.where(checkpointable=name) from error
        kind = Unsupported if isinstance(error, TypeError | NotImplementedError) else HandlerFailed
        raise kind(f"{what}: {error}", checkpointable=name) from error


async def _called(call: Callable[[], Awaitable[Any]]) -> Any:
    return await _awaited(call())


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    if not inspect.isawaitable(awaitable):
        raise TypeError(
            f"it returned {awaitable!r:.60} where an awaitable belongs: `save` and `load` are `async def`, "
            "and return another awaitable, for what is done in the background"
        )
    return await awaitable


# ---- the directory that a handler is given to save to ------------------------------------------
#
# A save makes the directories of all handlers before it calls any, once for all processes. So nobody waits.
# Invariant: only that directory is made; what a handler wants below it, it makes itself.


class CreatedPath:
    """A `PathAwaitingCreation` of a directory that is there already, or of a path below one."""

    def __init__(self, path: Any) -> None:
        self._path = path

    def __truediv__(self, other: str | os.PathLike[str]) -> CreatedPath:
        return CreatedPath(self._path / other)

    @property
    def path(self) -> Any:
        """The path: `pathlib.Path`, or what the option `file.path_class` makes of it."""
        return self._path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return Path(self._path).name

    async def await_creation(self) -> Any:
        """The path."""
        return self._path

    def __repr__(self) -> str:
        return f"CreatedPath({str(self._path)!r})"
