"""What the processes of a program do together where they load a published model, each its part.

It goes in rounds of a session, as everything does that processes do together: they agree on what is loaded,
and at the end on whether each has its part. Invariants: what fails in one process is raised by all; that one
has died or does not come is raised by all others, once the deadline has passed; a load that this process
makes alone waits for nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from waystation import coordination
from waystation._errors import InvalidInput
from waystation._options import Options
from waystation.coordination import Session
from waystation.frameworks import dtypes
from waystation.frameworks.base import Codec, Target
from waystation.safetensors.open_files import OpenFiles
from waystation.transfers import fit
from waystation.transfers.buffers import Incoming

T = TypeVar("T")

_WHAT = "load a published model"


class JaxCollective:
    """This process and those that load with it, if there are any.

    Args:
        session: Of these; None for this process alone.
    """

    def __init__(self, session: Session | None) -> None:
        self._session = session

    @property
    def is_alone(self) -> bool:
        """Whether this process loads for itself."""
        return self._session is None

    def decide(self, work: Callable[[], T], describe: Callable[[T], bytes]) -> T:
        """Decides something, in a round.

        Args:
            work: Decides.
            describe: Says what all processes have to decide alike.

        Raises:
            InvalidInput: They have not.
        """
        return self._round(work, describe, _same)

    def finish(self, work: Callable[[], T]) -> T:
        """Does this process's part, in a round."""
        return self._round(work, lambda _: b"", lambda _: b"")

    def _round(
        self,
        work: Callable[[], T],
        describe: Callable[[T], bytes],
        decide: Callable[[Sequence[bytes]], bytes],
    ) -> T:
        if self._session is None:
            return work()
        done: list[T] = []

        def part() -> bytes:
            done.append(work())
            return describe(done[0])

        self._session.round(part, decide)
        return done[0]

    def close(self) -> None:
        """Ends it; idempotent."""
        if self._session is not None:
            self._session.close()


def open_collective(
    codec: Codec, options: Options, *, sharding: Any, has_function: bool, together: bool | None
) -> JaxCollective:
    """Those that load together.

    Args:
        codec: Of what is loaded.
        options: `multiprocessing` counts.
        sharding: The one for all arrays, or None.
        has_function: Whether a function chooses shardings, which nobody knows before the files are open.
        together: What the caller says; None: all whose devices a sharding is over, and with a function all.
    """
    if together is False:
        return JaxCollective(None)
    holders: set[int] = set()
    if codec.row_exchange is not None and (sharding is not None or has_function):
        holders = codec.row_exchange.processes_of(sharding)
    are_several = len(holders) > 1
    if together is None and not are_several:
        return JaxCollective(None)
    coordinator = coordination.current()
    if coordinator.process_count == 1:
        return JaxCollective(None)
    multiprocessing = options.multiprocessing
    processes = multiprocessing.active_processes or (holders if are_several else None)
    if processes is not None and coordinator.process_index not in processes:
        return JaxCollective(None)
    primary = multiprocessing.primary_host
    if primary is None or (processes is not None and primary not in processes):
        primary = 0 if processes is None else min(processes)
    session = coordinator.open(
        _WHAT,
        deadline_s=multiprocessing.deadline_s,
        primary=primary,
        sequence=multiprocessing.barrier_sync_key_prefix or "",
        processes=processes,
    )
    return JaxCollective(session)


def _same(parts: Sequence[bytes]) -> bytes:
    other = next((index for index, part in enumerate(parts) if part != parts[0]), None)
    if other is not None:
        raise InvalidInput(
            f"processes 0 and {other} of those that load together were given different files or arguments "
            "for arrays that they share; give all of them the same, or together=False"
        )
    return b""


# ---- arrays that are read by rows, and then divided otherwise ----------------------------------
#
# A process that needs short parts of all rows of a tensor would read all of it, as would every other. Where
# processes load together, each reads as many whole rows instead, and the devices exchange the parts: so every
# byte is read once. Invariants: nothing is exchanged before all processes have read what they are to read; an
# array is there in both forms only while it is exchanged.

_LEAST_BYTES = 1 << 20  # what is smaller is read sooner than exchanged


def read_by_rows(
    opened: OpenFiles, codec: Codec, arrays: Sequence[Incoming], verify: bool | None
) -> dict[int, Target]:
    """Has arrays read by rows where that is better. Returns where they go in the end, by their leaves."""
    able = codec.row_exchange
    if able is None:
        return {}
    found: dict[int, Target] = {}
    least_bytes = opened.least_stretch_bytes(verify)
    for array in arrays:
        item_bytes = dtypes.of_stored(array.stored).host.itemsize
        if math.prod(array.stored.shape) * item_bytes < _LEAST_BYTES:
            continue
        reading = able.reading(array.target, item_bytes, least_bytes)
        if reading is not None:
            shape, place = reading
            found[array.leaf] = array.target
            stored = fit.reshaped(array.stored, shape)
            (array.target,) = codec.placed([stored], [array.target.dtype], [place])
    return found


def exchange_rows(codec: Codec, arrays: list[Any], targets: dict[int, Target]) -> None:
    """Divides arrays that were read by rows as they should be, one after the other."""
    able = codec.row_exchange
    for leaf, target in targets.items():
        assert able is not None, "it was asked before"
        arrays[leaf] = able.exchanged(arrays[leaf], target)
