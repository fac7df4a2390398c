"""The directory on disk that the memory tier falls back to: its saves of steps that memory has, or has lost.

Invariant: within a session the primary alone looks at the directory, so that all processes hear the same.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from waystation._options import Options
from waystation.coordination import Session
from waystation.memory.versions import Whole
from waystation.training.place import Place
from waystation.training.restoring import Restorer


class DiskFallback:
    """The directory of a `Checkpointer`.

    Args:
        place: It.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def newest(self) -> int | None:
        """The newest step that it has; None if it has none."""
        committed = self._place.catalogue.committed()
        return committed[-1].step if committed else None

    def has(self, step: int) -> bool:
        """Whether it has a step."""
        return any(info.step == step for info in self._place.catalogue.committed())

    def loadable(self, offered: list[Whole], session: Session) -> list[Whole]:
        """The versions that need no disk, or whose step the directory has."""

        def choose() -> bytes:
            kept = [entry for entry in offered if not entry.needs_disk or self.has(entry.version.step)]
            return json.dumps([entry.to_json() for entry in kept]).encode()

        if not any(entry.needs_disk for entry in offered):
            return offered
        return [Whole.from_json(entry) for entry in json.loads(session.broadcast(choose))]

    @contextlib.contextmanager
    def held(self, step: int, options: Options) -> Iterator[Path]:
        """The checkpoint of a step, which nobody removes within the block; entered by all processes.

        Raises:
            StepNotFoundError: There is none.
        """
        with Restorer(self._place).held(step, options) as chosen:
            yield chosen.info.path
