"""What a manager is, for programs that accept any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["AbstractCheckpointManager"]


class AbstractCheckpointManager(Protocol):
    """Manages the checkpoints of a run; see `CheckpointManager`."""

    @property
    def directory(self) -> Any:
        """The directory of the checkpoints."""
        ...

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """The steps."""
        ...

    def latest_step(self) -> int | None:
        """The step that was saved last."""
        ...

    def best_step(self) -> int | None:
        """The step with the best metrics."""
        ...

    def reload(self) -> None:
        """Looks into the directory again."""
        ...

    def reached_preemption(self, step: int) -> bool:
        """Whether this is the step to save at because the program will be ended."""
        ...

    def should_save(self, step: int) -> bool:
        """Whether `save` would save a step."""
        ...

    def delete(self, step: int) -> None:
        """Removes the checkpoint of a step."""
        ...

    def save(self, step: int, *args: Any, **kwargs: Any) -> bool:
        """Saves a step."""
        ...

    def restore(self, step: int | None, *args: Any, **kwargs: Any) -> Any:
        """Restores a step."""
        ...

    def item_metadata(self, step: int) -> Any:
        """What is known of the items of a step."""
        ...

    def metadata(self, step: int | None = None) -> Any:
        """What is known of a step, or of the whole sequence."""
        ...

    def metrics(self, step: int) -> Any:
        """The metrics of a step."""
        ...

    def wait_until_finished(self) -> None:
        """Waits for everything in the background."""
        ...

    def check_for_errors(self) -> None:
        """Raises what a save has failed with."""
        ...

    def close(self) -> None:
        """Lets go of everything."""
        ...
