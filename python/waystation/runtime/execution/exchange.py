"""What a host gives its list for transfers: the seam to a transport, and one within a process.

A transfer is named by the run and its number in the program. Failure sequence: a transfer that will never
come ends `receive` with the error that says why; the list goes on, and what depends on it has that error.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from waystation._errors import WaystationError
from waystation.grid import Shape
from waystation.runtime.errors import ComputationFailed

Block = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Expected:
    """A transfer that a list will receive.

    Attributes:
        transfer: Its number.
        host: Who sends it.
        shape: The shape of the block.
        dtype: The name of its dtype.
        phase: How many calls and sends the list has before it. Those of one phase depend on nothing that the
            list does between them; those of a later one may, through another host.
    """

    transfer: int
    host: str
    shape: Shape
    dtype: str
    phase: int


class Exchange(Protocol):
    """Transfers of one host."""

    def meet(self, run: int, addresses: dict[str, str]) -> None:
        """Is told where the hosts are that a run receives from."""
        ...

    def expect(self, run: int, transfers: Sequence[Expected]) -> None:
        """Is told all that a run will receive, before its list begins."""
        ...

    def send(
        self, run: int, transfer: int, host: str, block: jax.Array, error: WaystationError | None = None
    ) -> None:
        """Offers a block to another host; returns at once.

        Args:
            run: The run.
            transfer: The number of the transfer.
            host: Who gets it.
            block: On one device, perhaps not computed yet. Nobody deletes or donates it.
            error: What kept the elements from being made; they are zeros then.
        """
        ...

    def receive(self, run: int, transfer: int) -> Block:
        """Waits for a block.

        Raises:
            WaystationError: It will never come.
        """
        ...

    def close(self, run: int) -> None:
        """Is told that the list of a run has ended: it receives nothing any more."""
        ...


class LocalExchange:
    """Transfers between hosts of this process: blocks are passed by reference."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._blocks: dict[tuple[int, int], jax.Array | WaystationError] = {}
        self._abandoned: dict[int, WaystationError] = {}

    def meet(self, run: int, addresses: dict[str, str]) -> None:
        """Needs no notice."""

    def expect(self, run: int, transfers: Sequence[Expected]) -> None:
        """Needs no notice."""

    def send(
        self, run: int, transfer: int, host: str, block: jax.Array, error: WaystationError | None = None
    ) -> None:
        """See `Exchange`."""
        del host  # a transfer has one receiver
        with self._changed:
            self._blocks[run, transfer] = error or block
            self._changed.notify_all()

    def receive(self, run: int, transfer: int) -> Block:
        """See `Exchange`."""
        place = run, transfer
        with self._changed:
            # How long a sender may take is for the program to say; one that fails is heard of.
            self._changed.wait_for(lambda: place in self._blocks or run in self._abandoned)
            block = self._blocks.pop(place) if place in self._blocks else self._abandoned[run]
        if isinstance(block, WaystationError):
            raise copy.copy(block)
        try:
            return np.asarray(block)
        except Exception as error:
            raise ComputationFailed(
                f"what was to be sent could not be computed: {type(error).__name__}: {error}"
            ) from error

    def close(self, run: int) -> None:
        """Needs no notice: every transfer of a list is received."""

    def abandon(self, run: int, error: WaystationError, *, has_ended: bool) -> None:
        """A run has failed somewhere: nobody waits for it, and nothing of it is kept once it has ended."""
        with self._changed:
            self._abandoned[run] = error
            if has_ended:
                del self._abandoned[run]
                for place in [place for place in self._blocks if place[0] == run]:
                    del self._blocks[place]
            self._changed.notify_all()
