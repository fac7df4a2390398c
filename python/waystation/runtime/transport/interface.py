"""What hosts need of a transport: to offer blocks, and to fetch what others offer, whatever carries them.

A *block* is a C-contiguous box of an array in host memory. It is known by its *key*: which run, of which
epoch, and which transfer of that run; each is offered once and fetched once. A consumer may ask before or
after the producer offers: whoever is first waits for the other, the consumer at most until its deadline. The
producer never waits: it holds what it has offered, by reference, until the consumer has it, or until its
run is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from waystation._errors import WaystationError
from waystation.grid import Shape

Block: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Key(NamedTuple):
    """Which block.

    Attributes:
        run: The run, a number below 2**63 that is never used again.
        epoch: The epoch of the run's island; a run that is repeated in a later epoch has other keys.
        transfer: The number of the transfer within the run (`ir.low.Send.transfer`).
    """

    run: int
    epoch: int
    transfer: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block that a consumer fetches.

    Attributes:
        key: Which one.
        shape: Its shape.
        dtype: Its dtype. A block of another size is refused; that it is of this shape and dtype is for the
            program to know.
        into: Where it goes: writable, C-contiguous, of this shape and dtype. None for new memory from the
            arena, at a multiple of 256 bytes, which JAX aliases on CPU.
    """

    key: Key
    shape: Shape
    dtype: np.dtype[Any]
    into: Block | None = None


class Fetch(Protocol):
    """Blocks that are on their way."""

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""

    def result(self, timeout_s: float | None = None) -> list[Block]:
        """Waits for all blocks; returns them in the order in which they were asked for.

        Args:
            timeout_s: How long to wait in this call; None for as long as the fetch takes, which its deadline
                bounds.

        Raises:
            TimeoutError: They are not there yet; they still come.
            Unavailable: The deadline is over, or the producer cannot be reached or has died.
            Cancelled: The run was dropped, or the transport closed, here or where the block was asked for.
            Corrupt: What came is not what was sent.
            InvalidInput: A block has another size than was asked for.
            WaystationError: What the run or the address was poisoned with.
        """


class Transport(Protocol):
    """Bytes between hosts. All methods may be called from any thread."""

    @property
    def address(self) -> str:
        """What other hosts fetch from this one by."""

    @property
    def held_bytes(self) -> int:
        """Bytes that are offered here, and that nobody has fetched yet."""

    def offer(self, blocks: Mapping[Key, Block]) -> None:
        """Offers blocks to whoever fetches them; returns at once.

        A C-contiguous block is held by reference and must not change until it is fetched or dropped; of any
        other, a copy is made. Blocks of a run that has been dropped here are let go at once.

        Raises:
            Conflict: A key is offered already.
        """

    def fetch(self, address: str, wanted: Sequence[Wanted], *, deadline_s: float) -> Fetch:
        """Asks one host for blocks, all in one message, and returns at once.

        Args:
            address: The `address` of that host's transport.
            wanted: The blocks.
            deadline_s: After so many seconds it fails.
        """

    def drop(self, run: int, epoch: int | None = None) -> None:
        """A run is over, or was given up: lets go of what it offers here, and fails who still waits for it.

        What other hosts have not fetched yet is lost to them. So a run that goes well needs no `drop`, since
        what is fetched is let go by itself; and who has only come to the end of its own list must not call
        it.

        Args:
            run: The run.
            epoch: Only what it did in this epoch; None for all.
        """

    def poison(self, error: WaystationError, *, address: str | None = None, run: int | None = None) -> None:
        """Has everybody fail at once who waits, or comes to wait, for a host or a run.

        Args:
            error: What `Fetch.result` raises. Other hosts that wait for blocks of the run here get an error
                of the same kind and message.
            address: A host that is lost.
            run: A run that has failed.
        """

    def wait_for_room(self, limit_bytes: int, *, deadline_s: float) -> None:
        """Waits until less than so many bytes are held: for whoever is about to begin a run that offers more.

        To wait between the sends of one run could make hosts wait for each other in a circle.

        Raises:
            Unavailable: It took too long; the message says how much is held, and for how many blocks.
        """

    def close(self) -> None:
        """Ends all connections and threads; whoever still waits here fails."""
