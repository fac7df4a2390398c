"""Who keeps the versions of a sequence of checkpoints, as a tier sees them.

A `VersionStore` is the agent of one host (`host.OneHostStore`), which does what the program's processes
decide in their rounds, or one of the agents of several hosts (`hosts.ManyHostsStore`), which decide together
what is whole, and bring it where it is needed. Invariants that both keep: what is offered was whole when it
was; a version is offered under the same name to all processes, for all of them hear it in a round.
"""

from __future__ import annotations

from typing import Protocol

from waystation import _native
from waystation.coordination import Session
from waystation.memory.opened import ShardSource
from waystation.memory.versions import Version, Whole


class VersionStore(Protocol):
    """Whoever keeps them, since the program has begun.

    Attributes:
        epoch: The one in which versions are saved now.
        kept: How many of the newest versions can be loaded when a save has ended.
        kept_while_saving: How many can while the next is saved.
        doubted: Versions that programs began with in vain too often, as `offered` has found last.
        lost: The newest commit, if it can be restored no more, as `offered` has found last.
        disagreement: Why nothing is saved and what is offered is only what the hosts of this program have;
            None where that is not so.
    """

    epoch: int
    kept: int
    kept_while_saving: int
    doubted: frozenset[Version]
    lost: Version | None
    disagreement: str | None

    @property
    def sequence(self) -> str:
        """The sequence, as the shards are named."""
        ...

    @property
    def saver(self) -> _native.AgentClient:
        """The agent that takes this process's shard."""
        ...

    @property
    def source(self) -> ShardSource:
        """Where this process finds shards."""
        ...

    def transfer_s(self) -> float:
        """For how long agents have brought shards to where the program begins with them; 0 if that is not
        known."""
        ...

    def before_save(self, session: Session, *, goes_back: bool, waits: bool) -> bool:
        """Agrees with the other processes on the epoch of a save.

        Args:
            session: Theirs.
            goes_back: Whether the step is not newer than one that this epoch has.
            waits: Whether to wait for agents that do not agree yet.

        Returns:
            Whether the version may be written now; never False if `waits`.

        Raises:
            Fenced: Another program has begun.
            Unavailable: Agents do not agree, or are not there.
        """
        ...

    def ask(self, session: Session) -> None:
        """Asks the agents of all processes whether they are there.

        Raises:
            Unavailable: One of them does not answer.
        """
        ...

    def confirm(self, session: Session, version: Version, shard_bytes: int, *, is_awaited: bool) -> None:
        """Waits until a version whose shards are all sealed is as safe as it will be.

        Args:
            session: That of the save.
            version: The version.
            shard_bytes: What this process has of it.
            is_awaited: Whether the next save waits for that, so that it must not take long.

        Raises:
            Unavailable: It has not come to that in time.
        """
        ...

    def offered(self, session: Session) -> list[Whole]:
        """The versions that can be loaded, if only together with the disk; the newest first, as all processes
        hear it."""
        ...

    def mend(self) -> None:
        """Has the agent mend what it can, and let go of what is damaged beyond that, since other hosts may
        have it. All processes have released what they held.

        Raises:
            WaystationError: The agent did not answer.
        """
        ...

    def is_own(self, version: Version) -> bool:
        """Whether this program has saved it, not one before."""
        ...

    def commit(self, version: Version) -> bool:
        """Has a version committed that is whole; returns whether that is done. If not, it is tried again
        before the next save: a version need not be committed to be loaded."""
        ...

    def give_up(self, version: Version) -> None:
        """Frees what is sealed here of a version that will not be whole, if anybody can be told."""
        ...

    def discard(self, version: Version) -> bool:
        """Offers a version no more; returns whether later programs are not offered it either."""
        ...

    def retire_before(self, version: Version) -> None:
        """Frees the slots of all earlier versions of whatever shards, where that is not done anyway."""
        ...
