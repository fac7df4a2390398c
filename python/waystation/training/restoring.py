"""Loads a step, by default the newest that is whole.

The primary chooses a step, holds a lease on it, and tells the others; then all load it together. If that
shows that the checkpoint is damaged, and no step was asked for by number, the next older one is tried, and a
warning names what was passed over. Damage is found where it is: in the records when a checkpoint is opened,
in the data by their checksums while they are loaded.

In the background the same is done. Nothing orders what several threads do in one process as in another, so
what a load in the background agrees on after it has begun is a sequence of its own, which the primary names.

Invariant: all processes try the same steps, or raise. Whether an error means damage is agreed upon.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from waystation import storage
from waystation._errors import Corrupt, WaystationError
from waystation._options import Options
from waystation._options.in_effect import current_options
from waystation.checkpoint.context import copy_of_current
from waystation.training import step_records
from waystation.training.catalogue import Info, Listing, described, from_json, relocated, to_json
from waystation.training.errors import DamagedCheckpointWarning, StepNotFoundError
from waystation.training.place import Place
from waystation.training.tiers import merged
from waystation.transfers.handle import AsyncResponse

T = TypeVar("T")

# For how long, and after how long, it is looked again whether a checkpoint is to be removed.
_LOOK_FOR_S, _LOOK_AGAIN_S = 2.0, 0.01

_ABOVE = 5  # frames of this package between a warning and the program's own call


@dataclass(frozen=True, slots=True)
class Chosen:
    """A checkpoint that is to be loaded, and is not collected meanwhile.

    Attributes:
        info: What is known of it.
        token: Names the choice: the same in all processes, and no other choice.
    """

    info: Info
    token: str


class Restorer:
    """Loads the steps of one `Checkpointer`.

    Attributes:
        remote: Where steps are that the directory may not have, or not whole.
        in_remote: The checkpoints that can be loaded from there, ascending.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self.remote: Place | None = None
        self.in_remote: Callable[[], list[Info]] = list

    def existing(self, step: int | None) -> Info:
        """The checkpoint of a step, or the newest.

        Raises:
            StepNotFoundError: There is none.
        """
        catalogue = self._place.catalogue
        committed = self._committed()
        if step is not None:
            whole = [info for info in committed if info.step == step]
            found = whole[0] if whole else catalogue.find(step)
            if found is not None:
                return found
            if step in catalogue.in_flight():
                raise StepNotFoundError(
                    f"step {step} is being saved and has no checkpoint yet; call wait() before",
                    step=step,
                    path=os.fspath(self._place.path_of(step)),
                )
            present = ", ".join(str(info.step) for info in committed[-5:]) or "none"
            raise StepNotFoundError(
                f"there is no checkpoint of step {step} in '{self._place.root}'; the last ones are: "
                f"{present}",
                step=step,
                path=os.fspath(self._place.path_of(step)),
            )
        if committed:
            return committed[-1]
        damaged = catalogue.damaged()
        if damaged:
            raise Corrupt(
                f"every checkpoint in '{self._place.root}' is damaged: {_named(damaged)}; "
                "'waystation verify' tells what is wrong with each",
                path=self._place.root,
            )
        raise StepNotFoundError(f"there is no checkpoint in '{self._place.root}' yet", path=self._place.root)

    def _committed(self) -> list[Info]:
        """What can be loaded, ascending; from the directory, if that has it."""
        found = self._place.catalogue.committed()
        return found if self.remote is None else merged(found, self.in_remote(), preferred=0)

    def _of(self, info: Info) -> Place:
        """Where a checkpoint is."""
        is_remote = self.remote is not None and os.path.dirname(os.fspath(info.path)) == self.remote.root
        return self.remote if is_remote and self.remote is not None else self._place

    def run(
        self,
        step: int | None,
        options: Options,
        load: Callable[[storage.AnyPath], T],
        passed: tuple[Info, ...] = (),
    ) -> tuple[Info, T]:
        """Loads a step, or the newest that is whole.

        Args:
            step: The step; None for the newest.
            options: Of the call.
            load: Loads the checkpoint at a path.
            passed: The checkpoints that have been passed over, because they were damaged.

        Returns:
            What is known of the step, and what `load` gave.
        """
        while True:
            with self.held(step, options) as chosen:
                try:
                    loaded = load(chosen.info.path)
                except WaystationError as error:
                    self._require_damage(step, chosen.info, error, options)
                else:
                    self._warn(passed, chosen.info)
                    return chosen.info, loaded
            passed = self._passed_over(chosen.info, passed)

    def begin(
        self,
        step: int | None,
        options: Options,
        begin: Callable[[storage.AnyPath], AsyncResponse[T]],
        load: Callable[[storage.AnyPath], T],
    ) -> Callable[[], T]:
        """Begins to load a step, or the newest that is whole, together with the other processes.

        Args:
            step: The step; None for the newest.
            options: Of the call.
            begin: Begins to load the checkpoint at a path in the background.
            load: Loads that at another path, if the first turns out to be damaged.

        Returns:
            What gives what was loaded, in whatever thread.
        """
        passed: tuple[Info, ...] = ()
        while True:
            with contextlib.ExitStack() as stack:
                chosen = stack.enter_context(self.held(step, options))
                try:
                    loading = begin(chosen.info.path)
                except WaystationError as error:
                    self._require_damage(step, chosen.info, error, options)
                else:
                    until = stack.pop_all()
                    break
            passed = self._passed_over(chosen.info, passed)
        context = copy_of_current()
        prefix = options.multiprocessing.barrier_sync_key_prefix or ""
        context.multiprocessing.barrier_sync_key_prefix = f"{prefix}/load {chosen.token}"
        if context.array.loading.load_and_broadcast is None:
            context.array.loading.load_and_broadcast = False  # collectives would come at any time

        def finish() -> T:
            with context:
                own = current_options()
                with until:
                    try:
                        loaded = loading.result()
                    except WaystationError as error:
                        self._require_damage(step, chosen.info, error, own)
                    else:
                        self._warn(passed, chosen.info)
                        return loaded
                return self.run(step, own, load, self._passed_over(chosen.info, passed))[1]

        return finish

    def _passed_over(self, info: Info, passed: tuple[Info, ...]) -> tuple[Info, ...]:
        self._of(info).catalogue.mark_damaged(info.step)
        return (*passed, info)

    @contextlib.contextmanager
    def held(self, step: int | None, options: Options) -> Iterator[Chosen]:
        """A checkpoint that is not collected within the block: that of a step, or the newest."""
        session = self._place.session("choose a step to load", options)
        with contextlib.ExitStack() as stack:
            try:

                def choose() -> bytes:
                    return json.dumps([to_json(self._hold(step, stack)), secrets.token_hex(8)]).encode()

                entry, token = json.loads(session.broadcast(choose))
            finally:
                session.close()
            info = from_json(entry)
            yield Chosen(info if session.is_primary else self._own(info), token)

    def _own(self, info: Info) -> Info:
        """What this process has of a checkpoint that the primary has chosen."""
        if self._of(info) is self.remote:
            return info
        return self._place.catalogue.find(info.step) or relocated(info, self._place.root)

    def _hold(self, step: int | None, until: contextlib.ExitStack) -> Info:
        condemned: set[int] = set()
        while True:
            info = self.existing(step)
            until_s = time.monotonic() + _LOOK_FOR_S
            while info.step not in condemned:
                if time.monotonic() > until_s:
                    condemned.add(info.step)  # as far as can be told, also by a collector that was killed
                with contextlib.ExitStack() as lease:
                    may_read = lease.enter_context(self._of(info).leases.hold(info.path.name))
                    if not step_records.is_committed(info.path):
                        break  # another program has removed it
                    if may_read:
                        until.push(lease.pop_all())
                        return info
                time.sleep(_LOOK_AGAIN_S)  # a collector removes it, or gives way to a reader
            self._of(info).catalogue.drop([info.step])
            if step is None:
                self._look_again(condemned)

    def _look_again(self, condemned: Collection[int]) -> None:
        """Takes up what other programs have committed since it was looked: whoever removes a step has usually
        saved a newer one."""
        listing = Listing.read(self._place.root, self._place.name_format, with_records=False)
        new = [
            info
            for info in listing.committed
            if info.step not in condemned and self._place.catalogue.find(info.step) is None
        ]
        self._place.catalogue.add(new)
        with contextlib.suppress(Corrupt):  # a load will tell
            self._place.catalogue.describe(map(described, new))

    def _require_damage(self, step: int | None, info: Info, error: WaystationError, options: Options) -> None:
        """Raises an error again that an older step would not help against, or that is about the step that was
        asked for by number."""
        # Whether another place has the step, the primary knows.
        if (step is not None and self.remote is None) or not self._is_damaged(step, info, error, options):
            raise error

    def _is_damaged(self, step: int | None, info: Info, error: WaystationError, options: Options) -> bool:
        """Whether what all processes have met, each its own, means that a checkpoint is damaged, and another
        one is to be tried."""
        session = self._place.session(f"find out whether step {info.step} is damaged", options)
        try:
            means_damage = step_records.is_damage(error, info.path)
            part = b"damage" if means_damage else b"other"

            def decide(parts: Sequence[bytes]) -> bytes:
                helps = step is None or self._is_elsewhere(info)
                return b"damage" if b"damage" in parts and helps else b"other"

            decision = session.round(lambda: part, decide)
            return decision == b"damage"
        finally:
            session.close()

    def _is_elsewhere(self, info: Info) -> bool:
        """Whether the remote has a step of the directory."""
        if self.remote is None or self._of(info) is self.remote:
            return False
        return any(other.step == info.step for other in self.in_remote())

    def _warn(self, passed: tuple[Info, ...], loaded: Info) -> None:
        if passed:
            where = "' and '".join({self._of(info).root: None for info in passed})
            what = "an older one" if loaded.step != passed[0].step else f"'{loaded.path}'"
            warnings.warn(
                f"passed over damaged checkpoints in '{where}': {_named(passed)}; {what} "
                "was loaded. 'waystation verify' tells what is wrong with them",
                DamagedCheckpointWarning,
                stacklevel=_ABOVE,
            )


def _named(infos: Sequence[Info]) -> str:
    return ", ".join(f"step {info.step} ('{info.path.name}')" for info in infos)
