"""Load-and-broadcast, done: a process reads what it is to read, and the processes exchange it.

Everything goes in rounds of the session of the load. A process whose reading fails has everybody raise its
error before any enters a collective, and memory for what is received is taken with the reading, so that
little can fail after it. Collectives run in the thread that loads. Invariants: the bytes that a group shares
are its boxes one after another in the order of the plan, in all of its processes; they go in pieces of two
sizes, so that a framework that compiles does it twice at most; bytes are carried as bytes, so that no dtype
and no value is anything special.
"""

from __future__ import annotations

import functools
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from waystation.checkpoint.broadcast import (
    BROADCAST,
    LEAST_READING_S,
    TRY,
    Plan,
    Samples,
    SharedArray,
    needed_bytes,
)
from waystation.checkpoint.paths import naming_checkpoint
from waystation.coordination import Session, collective
from waystation.frameworks.base import Broadcaster, Group
from waystation.transfers.buffers import Buffer, Incoming, Reading, allocate_boxes, fill_buffers

Bytes = NDArray[np.uint8]

_MOST_PIECE_BYTES = 8 << 20  # larger ones leave the caches of processors, and are slower
_LEAST_PIECE_BYTES = 256 << 10
_SMALL_PIECES = 16  # in a piece; what is left at the end goes in these
# What exists of a piece at a time: packed, on its way to the devices that carry it, on these twice.
_COPIES = 4


class Exchange:
    """The shared arrays of one load, on their way into the buffers of this process.

    Args:
        session: Of the load.
        plan: What is shared.
        reading: How it is read.
        target: The checkpoint, for errors.
    """

    def __init__(self, session: Session, plan: Plan, reading: Reading, target: str) -> None:
        self._session = session
        self._plan = plan
        self._reading = reading
        self._target = target
        self._piece_bytes = _piece_bytes(reading)

    def run(self, decision: bytes) -> int:
        """Fills the buffers of shared arrays, as was decided (`broadcast.decide`). Those that every process
        is to read for itself may be left as they are.

        Returns:
            The bytes that this process was sent.
        """
        if decision == BROADCAST or (decision == TRY and self._is_faster()):
            self._round(lambda: self._read(self._plan.arrays, by_all=False))
            self._round(lambda: self._send(self._plan.arrays), carries=True)
            return sum(
                shared.incoming.buffers[number].nbytes
                for shared in self._plan.arrays
                for number in self._absent(shared)
            )
        return 0

    def _is_faster(self) -> bool:
        """Whether a broadcast is, by what samples took."""
        bytes_needed = self._reading.statistics.bytes_needed  # to which samples do not add
        samples = Samples.of(self._plan)
        try:
            reading_s = self._round(
                lambda: self._read(samples.start, by_all=True),
                lambda: self._read(samples.read, by_all=True),
            )
            reading_s /= needed_bytes(samples.read)
            if reading_s * needed_bytes(self._plan.arrays) < LEAST_READING_S:
                return False
            sending_s = self._round(lambda: self._read(samples.sent, by_all=False))
            # Sent twice: the first time, connections are made and programs compiled.
            send = functools.partial(self._send, samples.sent)
            sending_s += self._round(send, send, carries=True)
            return sending_s / needed_bytes(samples.sent) < reading_s
        finally:
            self._reading.statistics.bytes_needed = bytes_needed

    def _round(self, *steps: Callable[[], None], carries: bool = False) -> float:
        """Does something in a round of all processes. Returns the longest time that the last step took in
        any of them, in seconds."""

        def timed() -> float:
            begun_s = 0.0
            with naming_checkpoint(self._target):
                for step in steps:
                    begun_s = time.monotonic()
                    step()
            return time.monotonic() - begun_s

        _, longest = collective.attempt(
            self._session, timed, lambda own_s: repr(own_s).encode(), _longest, carries=carries
        )
        return float(longest)

    # ---- reading -------------------------------------------------------------------------------

    def _absent(self, shared: SharedArray) -> list[int]:
        """The numbers of the boxes that others read for this process."""
        here = self._plan.broadcasters[shared.kind.codec.name].process_index
        return [number for group, number in shared.kind.own if group[0] != here]

    def _read(self, arrays: Sequence[SharedArray], *, by_all: bool) -> None:
        """Reads what this process is to read; gives the rest its memory."""
        whole: list[Incoming] = []
        parts: list[tuple[Incoming, Incoming, list[int]]] = []
        absent: list[tuple[Incoming, int]] = []
        for shared in arrays:
            incoming = shared.incoming
            numbers = [] if by_all else self._absent(shared)
            if not numbers:
                whole.append(incoming)
                continue
            incoming.buffers = [np.empty(0)] * len(incoming.target.boxes)
            absent += [(incoming, number) for number in numbers]
            kept = sorted(set(range(len(incoming.buffers))) - set(numbers))
            if kept:
                parts.append((incoming, incoming.only(kept), kept))
        fill_buffers(self._reading, [*whole, *(part for _, part, _ in parts)])
        for incoming, part, kept in parts:
            for number, buffer in zip(kept, part.buffers, strict=True):
                incoming.buffers[number] = buffer
        allocate_boxes(absent)

    # ---- sending -------------------------------------------------------------------------------

    def _send(self, arrays: Sequence[SharedArray]) -> None:
        """Sends what this process has read for others, and receives what others have read for it."""
        for name, broadcaster in self._plan.broadcasters.items():
            lengths: dict[Group, int] = {}
            boxes: dict[Group, list[Bytes]] = {}
            for shared in arrays:
                if shared.kind.codec.name != name:
                    continue
                for group, items in shared.kind.items.items():
                    lengths[group] = lengths.get(group, 0) + items * shared.item_bytes
                for group, number in shared.kind.own:
                    boxes.setdefault(group, []).append(_bytes_of(shared.incoming.buffers[number]))
            for layer in layers(lengths):
                own = next((group for group in layer if broadcaster.process_index in group), None)
                if own is not None:
                    longest = max(lengths[group] for group in layer)
                    self._send_layer(broadcaster, layer, longest, _Stream(boxes[own]), own)

    def _send_layer(
        self, broadcaster: Broadcaster, layer: Sequence[Group], longest: int, stream: _Stream, own: Group
    ) -> None:
        """Sends, in all groups of a layer, one piece after another of what their processes share."""
        sends = own[0] == broadcaster.process_index
        packed: Bytes = np.empty(min(self._piece_bytes, stream.nbytes), np.uint8)
        for begin, nbytes in _pieces(longest, self._piece_bytes):
            parts = list(stream.parts(begin, begin + nbytes))
            if len(parts) == 1 and parts[0].flags.writeable:
                broadcaster.broadcast(layer, nbytes, parts[0])
                continue
            piece = packed[: sum(part.size for part in parts)]
            if sends and parts:
                np.concatenate(parts, out=piece)
            broadcaster.broadcast(layer, nbytes, piece)
            if not sends:
                _unpack(piece, parts)


class _Stream:
    """Boxes as bytes one after another."""

    def __init__(self, boxes: Sequence[Bytes]) -> None:
        self._boxes = boxes
        self._ends = list(accumulate(box.size for box in boxes))
        self.nbytes = self._ends[-1]

    def parts(self, begin: int, end: int) -> Iterator[Bytes]:
        """What there is from `begin` to `end`; none of it is empty."""
        end = min(end, self.nbytes)
        number = bisect_right(self._ends, begin)
        while begin < end:
            start = self._ends[number] - self._boxes[number].size
            stop = min(end, self._ends[number])
            yield self._boxes[number][begin - start : stop - start]
            begin = stop
            number += 1


def layers(groups: Iterable[Group]) -> list[tuple[Group, ...]]:
    """Puts groups together that can be served at once: of equally many processes, none in two of them.

    The same in all processes, whatever the order in which they give the groups.
    """
    found: list[tuple[set[int], list[Group]]] = []
    for group in sorted(groups, key=lambda group: (len(group), group)):
        fitting = (
            (taken, layer)
            for taken, layer in found
            if len(layer[0]) == len(group) and taken.isdisjoint(group)
        )
        layer = next(fitting, None)
        if layer is None:
            found.append((set(group), [group]))
        else:
            layer[0].update(group)
            layer[1].append(group)
    return [tuple(layer) for _, layer in found]


def _pieces(length: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Where the pieces begin in which so many bytes go, and what room each has; the last may not fill it."""
    whole = length // piece_bytes * piece_bytes
    for begin in range(0, whole, piece_bytes):
        yield begin, piece_bytes
    for begin in range(whole, length, piece_bytes // _SMALL_PIECES):
        yield begin, piece_bytes // _SMALL_PIECES


def _bytes_of(buffer: Buffer) -> Bytes:
    view: Bytes = buffer.reshape(-1).view(np.uint8)
    return view


def _unpack(piece: Bytes, parts: Sequence[Bytes]) -> None:
    begin = 0
    for part in parts:
        part[...] = piece[begin : begin + part.size]
        begin += part.size


def _longest(parts: Sequence[bytes]) -> bytes:
    return max(parts, key=float)


def _piece_bytes(reading: Reading) -> int:
    """A power of two, so that devices in any usual number can divide it."""
    limits = (
        reading.options.array.loading.broadcast_concurrent_bytes,
        reading.options.memory.read_concurrent_bytes,
    )
    set_limits = [limit for limit in limits if limit is not None]
    most = min(set_limits, default=_COPIES * _MOST_PIECE_BYTES) // _COPIES
    bounded = max(_LEAST_PIECE_BYTES, min(most, _MOST_PIECE_BYTES))
    return 1 << (bounded.bit_length() - 1)
