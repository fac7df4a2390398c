"""The transport over TCP, and past it where both hosts are processes of one machine.

Bytes are *pulled*: a consumer says what it wants and where it goes, so memory is taken only by who has asked
for it, and a slow consumer holds up only itself. A request may come before the offer and stands at the
producer until then, so whoever asks early waits no longer than if the bytes were pushed. Hosts of one machine
read each other's memory by the kernel (`process_vm_readv`), in one copy instead of two,
where the system lets them; `benchmarks.transport` measures both. Hosts prove to each other that they know the
cluster's secret before anything else is said. Between machines everything is encrypted, and blocks are
checksummed.

The threads are the engine's (`waystation-transport`). One thread of Python lets go of arrays once the engine
needs them no more.
"""

from __future__ import annotations

import copy
import ipaddress
import itertools
import math
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from waystation import _forks, _native, _plans
from waystation._errors import Cancelled, InvalidInput, WaystationError
from waystation.runtime.transport.interface import Block, Key, Wanted

_ALIGNMENT_BYTES = 256
# Blocks that are fetched together share memory up to this, so that one that is kept pins no more.
_SHARED_BYTES = 64 << 20
_JOIN_S = 10.0
# Of so many poisonings the errors are kept as they were; older ones are told by kind and message.
_REASONS_KEPT = 1024


class TcpTransport:
    """A host's end of the transport.

    Args:
        name: Which host this is, and of which epoch: whoever fetches from it must mean that name, so one that
        comes later
            at the same address is not taken for it.
        secret: What all hosts of a cluster know and nobody else does, at least 16 bytes; it is never sent.
        listen_at: `IP:PORT` by which other hosts reach this one; without a port, the system chooses one.
        reads_memory: Whether to read the memory of hosts of this machine, where the system permits it.

    Raises:
        InvalidInput: The name, secret or address is none; an address that stands for all of a host's is
        refused. Conflict: Another process listens there.
    """

    def __init__(
        self, name: str, secret: bytes, listen_at: str = "127.0.0.1", *, reads_memory: bool = True
    ) -> None:
        self._native = native = _native.BlockTransport(name, secret, _with_port(listen_at), reads_memory)
        self._numbers = itertools.count()
        # What the engine uses, by number, until it says that it does not any more.
        self._lent: dict[int, Any] = {}
        self._reasons: dict[tuple[str, str], WaystationError] = {}
        self._reaper = threading.Thread(
            target=_take_back, args=(native, self._lent), name="waystation-transport", daemon=True
        )
        self._reaper.start()
        self._close = weakref.finalize(self, _close, native, self._reaper, _forks.Owner())

    @property
    def address(self) -> str:
        """What other hosts fetch from this one by."""
        return self._native.address

    @property
    def held_bytes(self) -> int:
        """Bytes that are offered here, and that nobody has fetched yet."""
        return self._native.held()[0]

    def offer(self, blocks: Mapping[Key, Block]) -> None:
        """See `Transport.offer`."""
        offers = []
        lent = {}
        for key, block in blocks.items():
            number = next(self._numbers)
            lent[number] = array = np.ascontiguousarray(block)
            offers.append((*key, array.ctypes.data, array.nbytes, number))
        self._lent.update(lent)
        try:
            self._native.offer(_plans.of_rows(_plans.OFFER, offers))
        except BaseException:
            for number in lent:
                self._lent.pop(number, None)
            raise

    def fetch(self, address: str, wanted: Sequence[Wanted], *, deadline_s: float) -> TcpFetch:
        """See `Transport.fetch`.

        Raises:
            InvalidInput: The address is none, an array to receive into is not what is asked for, or more
            blocks are asked
                for than one host may be at a time.
        """
        blocks = _memory(wanted)
        places = [(block.ctypes.data, block.nbytes) for block in blocks]
        rows = [(*each.key, *place) for each, place in zip(wanted, places, strict=True)]
        number = next(self._numbers)
        self._lent[number] = blocks
        try:
            native = self._native.fetch(address, _plans.of_rows(_plans.FETCH, rows), number, deadline_s)
        except BaseException:
            self._lent.pop(number, None)
            raise
        return TcpFetch(native, blocks, self._reasons)

    def drop(self, run: int, epoch: int | None = None) -> None:
        """See `Transport.drop`."""
        where = "" if epoch is None else f" of epoch {epoch}"
        self._native.end(Cancelled.kind, f"run {run}{where} was dropped here", run, epoch)

    def poison(self, error: WaystationError, *, address: str | None = None, run: int | None = None) -> None:
        """See `Transport.poison`."""
        said = error.kind, str(error)
        self._reasons[said] = error
        if len(self._reasons) > _REASONS_KEPT:
            del self._reasons[next(iter(self._reasons))]
        if address is not None:
            self._native.lose(*said, address)
        if run is not None:
            self._native.end(*said, run, None)

    def wait_for_room(self, limit_bytes: int, *, deadline_s: float) -> None:
        """See `Transport.wait_for_room`."""
        self._native.wait_below(limit_bytes, deadline_s)

    def close(self) -> None:
        """See `Transport.close`."""
        self._close()


class TcpFetch:
    """Blocks that are on their way."""

    def __init__(
        self,
        native: _native.BlockFetch,
        blocks: list[Block],
        reasons: Mapping[tuple[str, str], WaystationError],
    ) -> None:
        self._native = native
        self._blocks = blocks
        self._reasons = reasons
        self._error: WaystationError | None = None

    def done(self) -> bool:
        """See `Fetch.done`."""
        return self._native.done()

    def result(self, timeout_s: float | None = None) -> list[Block]:
        """See `Fetch.result`."""
        if self._error is not None:
            raise copy.copy(self._error)
        try:
            there = self._native.wait(timeout_s)
        except WaystationError as error:
            # What the engine was told in words is raised as the error that it was, with its class.
            self._error = self._reasons.get((error.kind, error.message), error)
            self._native.release()
            raise copy.copy(self._error) from None
        if not there:
            raise TimeoutError(f"blocks have not come within {timeout_s} s; they still may")
        self._native.release()
        return self._blocks


def _with_port(listen_at: str) -> str:
    try:
        address = ipaddress.ip_address(listen_at)
    except ValueError:
        return listen_at
    return f"[{address}]:0" if address.version == 6 else f"{address}:0"


def _memory(wanted: Sequence[Wanted]) -> list[Block]:
    """Where blocks go: what was given, else new memory, shared by small ones."""
    sizes = [math.prod(each.shape) * each.dtype.itemsize for each in wanted]
    for each, nbytes in zip(wanted, sizes, strict=True):
        if each.into is not None:
            _check(each.into, each, nbytes)
    made: dict[int, Block] = {}
    for group in _groups((place, nbytes) for place, nbytes in enumerate(sizes) if wanted[place].into is None):
        slab = _native.allocate(sum(_aligned(sizes[place]) for place in group))
        offset = 0
        for place in group:
            each = wanted[place]
            part = np.frombuffer(slab, np.uint8, sizes[place], offset)
            made[place] = part.view(each.dtype).reshape(each.shape)
            offset += _aligned(sizes[place])
    return [made[place] if each.into is None else each.into for place, each in enumerate(wanted)]


def _groups(sizes: Iterable[tuple[int, int]]) -> Iterable[list[int]]:
    """Blocks that share memory: in order, up to a size."""
    group: list[int] = []
    total = 0
    for place, nbytes in sizes:
        if group and total + nbytes > _SHARED_BYTES:
            yield group
            group, total = [], 0
        group.append(place)
        total += _aligned(nbytes)
    if group:
        yield group


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES or _ALIGNMENT_BYTES


def _check(array: Block, wanted: Wanted, nbytes: int) -> None:
    flags = array.flags
    if (array.shape, array.dtype, array.nbytes) != (wanted.shape, wanted.dtype, nbytes):
        raise InvalidInput(
            f"a block of {wanted.shape}, {wanted.dtype} is to be fetched into an array of {array.shape}, "
            f"{array.dtype}"
        )
    if not (flags.c_contiguous and flags.writeable):
        raise InvalidInput("an array that a block is fetched into must be C-contiguous and writable")


def _take_back(native: _native.BlockTransport, lent: dict[int, Any]) -> None:
    """Lets go of what the engine uses no more, until it is closed and uses nothing."""
    while (numbers := native.released()) is not None:
        for number in numbers:
            lent.pop(number, None)


def _close(native: _native.BlockTransport, reaper: threading.Thread, owner: _forks.Owner) -> None:
    if owner.is_here:  # and not a child of that process, which has none of the threads
        native.close()
        reaper.join(_JOIN_S)
