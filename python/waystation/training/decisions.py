"""Whether to save at a step: asks the policy, and has all processes of the program do the same.

Every process asks its own policy, whose answer in the primary counts for all; so clocks may differ, and a
policy may talk to those of the other processes. Where a policy says the same everywhere and says no, nothing
is sent. Safe to use from several threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from waystation import _forks
from waystation._options import Options
from waystation.checkpoint.sessions import process_count
from waystation.coordination import jax_preemption
from waystation.training import preemption
from waystation.training.catalogue import Info
from waystation.training.costs import SaveCosts
from waystation.training.in_flight import SavesInFlight
from waystation.training.place import Place
from waystation.training.save_decision_policies import (
    DecisionContext,
    SaveDecisionPolicy,
    is_same_everywhere,
)
from waystation.training.step_metadata import CheckpointMetadata

_YES, _NO = b"yes", b""


class Decisions:
    """Decides at which steps one `Checkpointer` saves.

    Attributes:
        is_preempted: Whether the program was told that it will be ended.
        known: Returns the steps that are there or being saved, by age.
    """

    def __init__(
        self, place: Place, in_flight: SavesInFlight, costs: SaveCosts, policy: SaveDecisionPolicy
    ) -> None:
        self.is_preempted: bool = False
        self.known: Callable[[], list[Info]] = place.catalogue.known_by_age
        self._place = place
        self._in_flight = in_flight
        self._costs = costs
        self._policy = policy
        self._lock = threading.Lock()
        _forks.watch(self)
        self._last_save: float | None = None
        self._has_saved_for_preemption = False

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`."""
        self._lock = threading.Lock()

    def should_save(self, step: int, options: Options, *, replaced: bool = False) -> bool:
        """Whether to save at a step.

        Args:
            step: The step.
            options: Those of the call.
            replaced: Whether a checkpoint of this step counts as if it were not there.
        """
        reached = self.reached_preemption(step, options)
        if process_count(options) == 1:
            return self._is_next(step, replaced) and self._ask(step, reached, options, replaced)
        if is_same_everywhere(self._policy) and not self._ask(step, reached, options, replaced):
            return False
        session = self._place.session(f"decide whether to save step {step}", options)
        try:

            def answer() -> bytes:
                wanted = self._ask(step, reached, options, replaced) and self._is_next(step, replaced)
                return _YES if wanted else _NO

            return session.round(answer, lambda parts: parts[session.primary]) == _YES
        finally:
            session.close()

    def reached_preemption(self, step: int, options: Options) -> bool:
        """Whether this is the step to save at because the program will be ended."""
        reached = jax_preemption.reached_sync_point(step)
        if preemption.is_handled() and self._was_anybody_told(step, options):
            self.is_preempted = True
            reached = reached or not self._has_saved_for_preemption
        self.is_preempted |= reached
        return reached

    def _was_anybody_told(self, step: int, options: Options) -> bool:
        told = preemption.was_received()
        if process_count(options) == 1:
            return told
        session = self._place.session(f"ask whether step {step} is the last", options)
        try:
            part = _YES if told else _NO
            return session.round(lambda: part, max) == _YES
        finally:
            session.close()

    def has_saved(self) -> None:
        """A save has begun, and the program goes on."""
        with self._lock:
            self._last_save = time.monotonic()
            self._has_saved_for_preemption |= self.is_preempted

    def _is_next(self, step: int, replaced: bool) -> bool:
        """Whether a step comes after the one that was saved last."""
        others = self._others(step, replaced)
        return not others or others[-1].step < step

    def _others(self, step: int, replaced: bool) -> list[Info]:
        """The steps that are there or being saved, by age."""
        return [info for info in self.known() if not (replaced and info.step == step)]

    def _ask(self, step: int, reached: bool, options: Options, replaced: bool) -> bool:
        previous = self._others(step, replaced)
        present = CheckpointMetadata(
            step,
            self._place.path_of(step),
            metadata=None,
            init_timestamp_nsecs=time.time_ns(),
        )
        with self._lock:
            last_save = self._last_save
        context = DecisionContext(
            is_saving_in_progress=not self._in_flight.has_room(),
            reached_preemption=reached,
            multiprocessing_options=options.multiprocessing,
            save_cost=self._costs.estimate(),
            since_last_save_s=None if last_save is None else time.monotonic() - last_save,
        )
        return bool(self._policy.should_save(present, previous, context=context))
