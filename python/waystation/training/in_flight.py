"""What a `Checkpointer` has in the background: saves, of which there may be several, and deletions.

A failure is told once: by the response, if the program asks that, or else by whatever the program asks the
`Checkpointer` for next. Of several failures the first is raised, and has the others as notes. Safe to use
from several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from waystation import _forks
from waystation.transfers.handle import AsyncResponse, Progress


class StepResponse(AsyncResponse[bool]):
    """The result of something that is done to the checkpoint of a step in the background.

    Attributes:
        step: The step.
        is_save: Whether it is being saved, not deleted.
    """

    def __init__(self, step: int, what: str, work: Callable[[Progress], bool], *, is_save: bool) -> None:
        self.step = step
        self.is_save = is_save
        self.was_asked: bool = False
        super().__init__(what, work)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `AsyncResponse.exception`; the `Checkpointer` does not raise that error any more."""
        error = super().exception(timeout)
        self.was_asked = True
        return error


class SavesInFlight:
    """What goes on in the background.

    Args:
        most_saves: How many saves there may be at a time.
    """

    def __init__(self, most_saves: int) -> None:
        self._most_saves = most_saves
        self._lock = threading.Lock()
        _forks.watch(self)
        self._responses: list[StepResponse] = []

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`."""
        self._lock = threading.Lock()

    def add(self, response: StepResponse) -> None:
        """Something has begun."""
        with self._lock:
            self._responses.append(response)

    def running(self, *, saves: bool = True, deletions: bool = True) -> list[StepResponse]:
        """What has not ended, in the order in which it began."""
        with self._lock:
            return [
                response
                for response in self._responses
                if not response.done() and (saves if response.is_save else deletions)
            ]

    def has_room(self) -> bool:
        """Whether another save can begin without waiting."""
        return len(self.running(deletions=False)) < self._most_saves

    def wait_for_step(self, step: int) -> None:
        """Waits until nothing is being done to a step any more."""
        for response in self.running():
            if response.step == step:
                response.wait()

    def wait_for_room(self) -> None:
        """Waits until another save can begin: for the oldest ones, and for every deletion.

        Raises:
            WaystationError: Something has failed of which nobody has heard.
        """
        for deletion in self.running(saves=False):
            deletion.wait()
        while len(saves := self.running(deletions=False)) >= self._most_saves:
            saves[0].wait()
        self.raise_failure()

    def wait(self) -> None:
        """Waits for everything.

        Raises:
            WaystationError: Something has failed of which nobody has heard.
        """
        while running := self.running():
            running[0].wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises what has failed, unless somebody has heard of it; forgets what has ended."""
        with self._lock:
            ended = [response for response in self._responses if response.done()]
            self._responses = [response for response in self._responses if response not in ended]
            unheard = [response for response in ended if not response.was_asked]
            errors = [error for response in unheard if (error := response.exception()) is not None]
        if not errors:
            return
        first, *others = errors
        for other in others:
            first.add_note(f"Another save in the background has failed too: {other}")
        raise first
