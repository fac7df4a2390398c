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
from waystation.runtime.errors import ComputationFailed, ObjectLost

Block = np.ndarray[Any, np.dtype[Any]]
_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Expected:
    """A transfer that a list will receive.

    Attributes:
        transfer: Its number.
        host: Who sends it.
        shape: The shape of the block.
        dtype: The name of its dtype.
    """

    transfer: int
    host: str
    shape: Shape
    dtype: str


class Exchange(Protocol):
    """Transfers of one host."""

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
            if not self._changed.wait_for(lambda: place in self._blocks, _DEADLINE_S):
                raise ObjectLost(f"transfer {transfer} of run {run} has not come in {_DEADLINE_S:g} s")
            block = self._blocks.pop(place)
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
