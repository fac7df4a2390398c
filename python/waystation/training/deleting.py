"""Deletes the checkpoint of a step, or one checkpointable of it, because the program says so.

What is deleted whole is off the list at once, in the background as well. Nothing protects it: neither a
policy nor somebody who reads it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from waystation import storage
from waystation._errors import WrongType
from waystation._options import Options
from waystation.checkpoint.delete import delete_async
from waystation.checkpoint.paths import is_absent
from waystation.training.collection import remove_step
from waystation.training.errors import StepNotFoundError
from waystation.training.in_flight import StepResponse
from waystation.training.place import Place
from waystation.transfers.handle import Progress


class Deleter:
    """Deletes from one `Checkpointer`'s directory."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def begin(
        self, step: int, checkpointable_name: str | None, options: Options, *, missing_ok: bool
    ) -> StepResponse:
        """Begins to delete; all earlier saves and deletions have ended.

        Raises:
            StepNotFoundError: The step has no checkpoint, and `missing_ok` is False.
        """
        path = self._place.path_of(step)
        session = self._place.session(f"delete step {step}", options)
        try:
            is_mine = session.is_primary or options.multiprocessing.primary_host is None

            def look() -> bytes:
                return b"yes" if is_mine and not is_absent(path) else b""

            exists = bool(session.round(look, max))
        finally:
            session.close()
        if not exists and not missing_ok:
            raise StepNotFoundError(
                f"there is no checkpoint of step {step} in '{self._place.root}'",
                step=step,
                path=os.fspath(path),
            )
        if self._place.removed_to is not None and checkpointable_name is None:
            move = self._moving(step, path, options)
        else:
            deletion = delete_async(path, checkpointable_name=checkpointable_name, missing_ok=missing_ok)
            move = deletion.result
        if checkpointable_name is None:
            self._place.catalogue.drop([step])

        def work(progress: Progress) -> bool:
            return move()

        return StepResponse(step, f"deleting step {step} in '{self._place.root}'", work, is_save=False)

    def _moving(self, step: int, path: storage.AnyPath, options: Options) -> Callable[[], bool]:
        """What moves a step away, and returns whether it was there."""
        session = self._place.session(f"move step {step} away", options)

        def move(_: Sequence[bytes]) -> bytes:
            if is_absent(path):
                return b""
            remove_step(self._place, path)
            return b"yes"

        def work() -> bool:
            try:
                return bool(session.round(lambda: b"", move))
            finally:
                session.close()

        return work


def check_arguments(checkpointable_name: object, missing_ok: object) -> None:
    """Refuses arguments of wrong types.

    Raises:
        WrongType: One of them is.
    """
    if checkpointable_name is not None and not isinstance(checkpointable_name, str):
        raise WrongType(f"checkpointable_name must be a string or None, not {checkpointable_name!r}")
    if not isinstance(missing_ok, bool):
        raise WrongType(f"missing_ok must be True or False, not {missing_ok!r}")
