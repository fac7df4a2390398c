"""This host's agent, as one sequence of checkpoints uses it.

Connected when it is first needed, and greeted anew if that failed. All processes of the program take the
same steps together: they agree on an epoch that is above every one that an agent knows, so that whatever an
earlier program still runs is refused; then what memory holds is settled: whole versions are committed, torn
ones given up. Invariant: an inventory that is decided upon was taken after its agent had refused all earlier
epochs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

from waystation import _native
from waystation._errors import Fenced, WaystationError
from waystation.coordination import Session
from waystation.memory.versions import Stock, Version, Whole, take_stock

# How long a save waits for an agent that has gone and may come back.
PATIENCE_S = 2.0


class Host:
    """The agent of this host.

    Args:
        directory: Of its store.
        run: The id that the store must have; None for any.
        sequence: The sequence of checkpoints, see `versions.shard_name`. What the primary says counts for
            all.
        deadline_s: How long to wait for it.

    Attributes:
        epoch: That of this program; 0 until it has been agreed upon.
        versions_kept: How many versions of a shard the store keeps.
    """

    def __init__(self, directory: str, run: str | None, sequence: str, deadline_s: float) -> None:
        self.epoch = 0
        self.versions_kept = 2
        self.directory = directory
        self.sequence = sequence
        self._run = run
        self._deadline_s = deadline_s
        self._clients: dict[float, _native.AgentClient] = {}

    @property
    def client(self) -> _native.AgentClient:
        """Its agent, for what a program waits for before it goes on.

        Raises:
            Unavailable: None is there.
            Conflict: It is that of another run.
        """
        return self._greeted(self._deadline_s)

    @property
    def saver(self) -> _native.AgentClient:
        """Its agent, for what a program rather goes on without: saves."""
        return self._greeted(min(self._deadline_s, PATIENCE_S))

    def _greeted(self, timeout_s: float) -> _native.AgentClient:
        client = self._clients.get(timeout_s)
        if client is None:
            client = _native.AgentClient(self.directory, run=self._run, timeout_s=timeout_s)
            self._clients[timeout_s] = client
        return client

    def raise_epoch(self, session: Session, *, is_waited_for: bool) -> None:
        """Begins an epoch, together with the other processes.

        Args:
            session: Theirs.
            is_waited_for: Whether the program waits for an agent that is not there yet.
        """

        def work() -> bytes:
            status = (self.client if is_waited_for else self.saver).status()
            self.versions_kept = status["versions_per_shard"]
            return str(status["epoch"]).encode()

        def decide(parts: Sequence[bytes]) -> bytes:
            return json.dumps([1 + max(map(int, parts)), self.sequence]).encode()

        epoch, sequence = json.loads(session.round(work, decide))

        def begin() -> bytes:
            if self.saver.raise_epoch(epoch) != epoch:
                raise Fenced(
                    f"another program has begun a later epoch than {epoch} at the agent in '{self.directory}'"
                )
            return b""

        session.round(begin, lambda _: b"")
        self.epoch, self.sequence = epoch, sequence

    def settle(self, session: Session) -> list[Whole]:
        """Finds out what memory holds, and has agents do what follows from that; returns the versions that
        can be loaded, the newest first."""
        stock = self.take_stock(session)
        for entry in stock.whole:
            self.commit(entry.version)
        for version in stock.torn:
            with contextlib.suppress(WaystationError):
                self.client.give_up(version.epoch, version.step)
        return stock.whole

    def take_stock(self, session: Session) -> Stock:
        """What the memory of all hosts holds of this sequence; an agent that is not there holds nothing."""

        def work() -> bytes:
            try:
                slots = self.client.inventory()
            except WaystationError:
                slots = []
            return json.dumps([slot for slot in slots if slot["state"] in ("sealed", "committed")]).encode()

        def decide(parts: Sequence[bytes]) -> bytes:
            stock = take_stock(self.sequence, map(json.loads, parts))
            torn = [[version.epoch, version.step] for version in stock.torn]
            return json.dumps([[entry.to_json() for entry in stock.whole], torn]).encode()

        whole, torn = json.loads(session.round(work, decide))
        return Stock([Whole.from_json(entry) for entry in whole], [Version(*pair) for pair in torn])

    def commit(self, version: Version) -> bool:
        """Has the agent commit a version that is whole; returns whether it could be told. If not, it is
        told before the next save: a version need not be committed to be loaded."""
        try:
            self.saver.commit(version.epoch, version.step)
        except WaystationError:
            return False
        return True

    def discard(self, version: Version) -> None:
        """Frees the slots of a version that is not to be loaded any more, if the agent can be told."""
        with contextlib.suppress(WaystationError):
            for slot in self.saver.quarantine(version.epoch, version.step):
                self.saver.discard_quarantined(slot)

    def retire_before(self, version: Version) -> None:
        """Frees the slots of all earlier versions of whatever shards, if the agent can be told."""
        with contextlib.suppress(WaystationError):
            self.saver.retire_before(version.epoch, version.step)
