"""An agent that is alone, as one sequence of checkpoints uses it.

All processes of the program take the same steps together: they agree on an epoch that is above every one that
an agent knows, so that whatever an earlier program still runs is refused; then what memory holds is settled:
whole versions are committed, torn ones given up. Invariant: an inventory that is decided upon was taken after
its agent had refused all earlier epochs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

from waystation import _native
from waystation._errors import Fenced, NotFound, WaystationError
from waystation.coordination import Session
from waystation.memory.agent import OwnAgent
from waystation.memory.opened import HeldShard, ShardSource
from waystation.memory.versions import Stock, Version, Whole, is_listed, take_stock


class OneHostStore:
    """That agent.

    Args:
        agent: It.
        sequence: The sequence of checkpoints, see `versions.shard_name`.
        versions_per_shard: How many versions of a shard its store keeps.

    Attributes:
        epoch: That of this program; 0 until it has begun.
        kept: See `VersionStore`.
        kept_while_saving: See `VersionStore`.
        doubted: See `VersionStore`; programs themselves remember that.
        lost: See `VersionStore`; known where the agent has found the version damaged, or has noted what was
            in the slot that is gone.
    """

    kept: int
    kept_while_saving: int

    doubted: frozenset[Version] = frozenset()

    def __init__(self, agent: OwnAgent, sequence: str, versions_per_shard: int) -> None:
        self.epoch: int = 0
        self.lost: Version | None = None
        self.disagreement: str | None = None
        self.kept, self.kept_while_saving = versions_per_shard, versions_per_shard - 1
        self._agent = agent
        self._sequence = sequence

    @property
    def sequence(self) -> str:
        """See `VersionStore`."""
        return self._sequence

    @property
    def saver(self) -> _native.AgentClient:
        """See `VersionStore`."""
        return self._agent.saver

    @property
    def source(self) -> ShardSource:
        """See `VersionStore`."""
        return _HereAlone(self._agent.client)

    def begin(self, session: Session, epoch: int) -> list[Whole]:
        """Begins an epoch, together with the other processes, and has agents do what follows from what memory
        holds; returns the versions that can be loaded, the newest first."""
        self._raise_epoch(session, epoch)
        stock = self._take_stock(session)
        for entry in stock.whole:
            self.commit(entry.version)
        for version in stock.torn:
            with contextlib.suppress(WaystationError):
                self._agent.client.give_up(version.epoch, version.step)
        return sorted([*stock.whole, *stock.remains], reverse=True)

    def transfer_s(self) -> float:
        """See `VersionStore`. Nothing is brought."""
        return 0.0

    def before_save(self, session: Session, *, goes_back: bool, waits: bool) -> bool:
        """See `VersionStore`. The agent is not asked for each save, since it grants the slot."""
        if goes_back:
            self._raise_epoch(session, self._newest_epoch(session) + 1)
        return True

    def ask(self, session: Session) -> None:
        """See `VersionStore`."""
        self._newest_epoch(session)

    def _newest_epoch(self, session: Session) -> int:
        """The newest epoch that agents know."""

        def decide(parts: Sequence[bytes]) -> bytes:
            return str(max(map(int, parts))).encode()

        return int(session.round(lambda: str(self.saver.status()["epoch"]).encode(), decide))

    def _raise_epoch(self, session: Session, epoch: int) -> None:
        def begin() -> bytes:
            if self.saver.raise_epoch(epoch) != epoch:
                raise Fenced(
                    f"another program has begun a later epoch than {epoch} at the agent in "
                    f"'{self._agent.directory}'"
                )
            return b""

        session.round(begin, lambda _: b"")
        self.epoch = epoch

    def confirm(self, session: Session, version: Version, shard_bytes: int, *, is_awaited: bool) -> None:
        """Nothing more happens to it."""

    def offered(self, session: Session) -> list[Whole]:
        """See `VersionStore`."""
        stock = self._take_stock(session)
        return sorted([*stock.whole, *stock.remains], reverse=True)

    def _take_stock(self, session: Session) -> Stock:
        """What the memory of all hosts holds of this sequence; an agent that is not there holds nothing."""

        def work() -> bytes:
            try:
                slots = self._agent.client.inventory()
            except WaystationError:
                slots = []
            return json.dumps([slot for slot in slots if is_listed(slot)]).encode()

        def decide(parts: Sequence[bytes]) -> bytes:
            stock = take_stock(self._sequence, map(json.loads, parts))
            listed = [[entry.to_json() for entry in found] for found in (stock.whole, stock.remains)]
            torn, lost = (
                [[version.epoch, version.step] for version in versions]
                for versions in (stock.torn, [] if stock.lost is None else [stock.lost])
            )
            return json.dumps([*listed, torn, lost]).encode()

        *listed, torn, lost = json.loads(session.round(work, decide))
        whole, remains = ([Whole.from_json(entry) for entry in found] for found in listed)
        self.lost = next((Version(*pair) for pair in lost), None)
        return Stock(whole, remains, [Version(*pair) for pair in torn], self.lost)

    def mend(self) -> None:
        """See `VersionStore`. There is no other copy in memory, but the agent knows the headers."""
        self._agent.client.verify()

    def is_own(self, version: Version) -> bool:
        """See `VersionStore`."""
        return version.epoch == self.epoch

    def commit(self, version: Version) -> bool:
        """See `VersionStore`."""
        try:
            self.saver.commit(version.epoch, version.step)
        except WaystationError:
            return False
        return True

    def give_up(self, version: Version) -> None:
        """See `VersionStore`."""
        with contextlib.suppress(WaystationError):
            self.saver.give_up(version.epoch, version.step)

    def discard(self, version: Version) -> bool:
        """Frees its slots, if the agent can be told."""
        try:
            for slot in self.saver.quarantine(version.epoch, version.step):
                self.saver.discard_quarantined(slot)
        except WaystationError:
            return False
        return True

    def retire_before(self, version: Version) -> None:
        """See `VersionStore`."""
        with contextlib.suppress(WaystationError):
            self.saver.retire_before(version.epoch, version.step)


class _HereAlone:
    """The shards in the memory of this host: nothing can be brought here."""

    def __init__(self, client: _native.AgentClient) -> None:
        self._client = client

    def hold(self, epoch: int, step: int, shard: str, /) -> HeldShard:
        return self._client.hold(epoch, step, shard)

    def bring(self, epoch: int, step: int, shard: str, /) -> HeldShard:
        raise NotFound(
            "a shard is in the memory of another host, and the agent of this one is alone; load it from the "
            "disk, or with the same processes on the same hosts as it was saved",
            shard=shard,
            epoch=epoch,
            step=step,
        )
