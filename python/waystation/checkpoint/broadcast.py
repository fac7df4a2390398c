"""Load-and-broadcast: what several processes need is read by one of them and sent to the others.

Every process knows which boxes of which arrays several of them need, and which of these reads them
(`frameworks.base.Replicas`). In one round all say what they know, as a digest, and what their options wish;
the primary decides (`decide`). Then each process reads what it is to read, and the processes send it to each
other (`Broadcast`): a process whose reading fails has all raise its error before any enters a collective, and
memory for what is received is taken with the reading, so that little can fail after it. Invariants: the
decision is for a broadcast only if all know the same, since all then take the same steps in the same order;
the bytes that a group shares are its boxes one after another in the order of the plan, in all of its
processes; they go in pieces of two sizes, so that a framework that compiles does it twice at most; bytes are
carried as bytes, so that no dtype and no value is anything special.

The cost model has no constants of storage or network in it, because both are measured on the load itself:
one sample of what is shared is read by everyone, another is broadcast, and all goes the way that took less
time per byte. That costs a load the samples, and what setting up collectives takes. So it is not done where
little can be gained: below `LEAST_RECEIVED_BYTES` for each process, or where everyone could read all of it
in `LEAST_READING_S`. Then every process reads for itself, as it does without replicas.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from waystation._errors import InvalidInput
from waystation._options import ArrayLoadingOptions
from waystation.checkpoint.paths import naming_checkpoint
from waystation.coordination import Session, collective
from waystation.frameworks import dtypes
from waystation.frameworks.base import Broadcaster, Codec, Group, Replicas
from waystation.grid import Box, volume
from waystation.transfers import fit
from waystation.transfers.buffers import Incoming, Reading, allocate_boxes, fill_buffers

Bytes = NDArray[np.uint8]

EVERYONE, BROADCAST, TRY = b"everyone reads", b"broadcast", b"try"

LEAST_RECEIVED_BYTES = 32 << 20
LEAST_READING_S = 2.0
_SAMPLES = 128  # of which all that is shared consists; one goes each way to begin with
_MOST_OF_ARRAY = 1 / 4  # so that the samples of one array have nothing in common

_MOST_PIECE_BYTES = 8 << 20  # larger ones leave the caches of processors, and are slower
_LEAST_PIECE_BYTES = 256 << 10
_SMALL_PIECES = 16  # in a piece; what is left at the end goes in these
# What exists of a piece at a time: packed, on its way to the devices that carry it, on these twice.
_COPIES = 4

_OPTION = "array.loading.load_and_broadcast"

# ---- what is shared ----------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class SharedArray:
    """An array of which several processes need the same.

    Attributes:
        incoming: What this process needs of it.
        replicas: Which boxes several processes need, and which.
        own: Of these, those that this process needs: the group, and the number of the box among those of
            `incoming`.
        carrier: What carries bytes from one process of a group to the others.
        item_bytes: Of one element.
    """

    incoming: Incoming
    replicas: Replicas
    own: list[tuple[Group, int]]
    carrier: Broadcaster
    item_bytes: int

    @property
    def needed_bytes(self) -> int:
        """What the processes need of what they share, all of them together."""
        return self.item_bytes * self.replicas.needed_items

    @property
    def received_bytes(self) -> int:
        """What of that they would not read if it was broadcast."""
        return self.item_bytes * self.replicas.received_items

    @property
    def received(self) -> list[int]:
        """The numbers of the boxes that others read for this process."""
        index = self.carrier.process_index
        return [number for group, number in self.own if group[0] != index]

    def sample(self, part: float, *, at_end: bool) -> SharedArray:
        """A part of every box, from its start or its end."""
        boxes = tuple(_part_of_box(box, part, at_end=at_end) for box in self.replicas.boxes)
        own = [self.incoming.target.boxes[number] for _, number in self.own]
        target = dataclasses.replace(
            self.incoming.target, boxes=[_part_of_box(box, part, at_end=at_end) for box in own]
        )
        return dataclasses.replace(
            self,
            incoming=dataclasses.replace(self.incoming, target=target, buffers=[]),
            replicas=Replicas(boxes, self.replicas.groups),
            own=[(group, number) for number, (group, _) in enumerate(self.own)],
        )


@dataclass(slots=True)
class Plan:
    """What one load can broadcast.

    Attributes:
        wish: The option; False also where it would not be of use.
        arrays: In an order that is the same in all processes.
    """

    wish: bool | None
    arrays: list[SharedArray] = field(default_factory=list)

    @classmethod
    def of(
        cls, arrays: Iterable[tuple[Codec, list[Incoming]]], loading: ArrayLoadingOptions, wish: bool | None
    ) -> Plan:
        """What can be broadcast of the given arrays.

        Raises:
            InvalidInput: There is no such axis as `array.loading.replica_axis`.
        """
        plan = cls(wish)
        if wish is False:
            return plan
        first = loading.load_and_broadcast_options.primary_replica_id or 0
        for codec, batch in sorted(arrays, key=lambda pair: pair[0].name):
            able = codec.broadcasting
            if able is None or not batch:
                continue
            targets = [incoming.target for incoming in batch]
            found = able.replicas(targets, loading.replica_axis, first)
            if any(replicas is not None for replicas in found):
                plan._add(able.broadcaster(targets), batch, found)
        return plan

    def _add(self, carrier: Broadcaster, batch: Iterable[Incoming], found: Iterable[Replicas | None]) -> None:
        owns: dict[int, list[tuple[Group, int]]] = {}  # arrays of one shape and sharding share it
        item_bytes: dict[tuple[int, int], int] = {}  # and those that are described alike this
        for incoming, replicas in zip(batch, found, strict=True):
            if replicas is None or incoming.array is None:
                continue
            if id(replicas) not in owns:
                numbers = {box: number for number, box in enumerate(incoming.target.boxes)}
                pairs = zip(replicas.boxes, replicas.groups, strict=True)
                owns[id(replicas)] = [
                    (group, numbers[box]) for box, group in pairs if carrier.process_index in group
                ]
            kind = id(incoming.target), id(incoming.stored)
            if kind not in item_bytes:
                item_bytes[kind] = incoming.item_bytes
            own = owns[id(replicas)]
            self.arrays.append(SharedArray(incoming, replicas, own, carrier, item_bytes[kind]))

    def proposal(self) -> bytes:
        """What this process tells the primary."""
        kinds: dict[tuple[str, str], int] = {}
        known: list[int | None] = []
        for shared in self.arrays:
            incoming = shared.incoming
            kind = kinds.setdefault((incoming.target.dtype, shared.replicas.digest), len(kinds))
            known += (incoming.leaf, incoming.array, kind)
        digest = hashlib.sha256(repr((list(kinds), known)).encode())
        received = sum(shared.received_bytes for shared in self.arrays)
        return _Proposal(self.wish, digest.hexdigest(), received).encode()


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What a process knows and wishes."""

    wish: bool | None
    digest: str
    received_bytes: int

    def encode(self) -> bytes:
        return json.dumps(dataclasses.astuple(self)).encode()

    @classmethod
    def decode(cls, part: bytes) -> _Proposal:
        return cls(*json.loads(part))


def decide(parts: Sequence[bytes]) -> bytes:
    """The primary's decision on what all processes propose: `EVERYONE`, `BROADCAST` or `TRY`.

    Raises:
        InvalidInput: A broadcast is insisted on that the processes are not agreed on.
    """
    proposals = [_Proposal.decode(part) for part in parts]
    first = proposals[0]
    differing = next((index for index, other in enumerate(proposals) if other != first), None)
    if differing is not None:
        if any(proposal.wish for proposal in proposals):
            raise _disagreement(first, proposals[differing], differing)
        return EVERYONE
    if first.wish is False or not first.received_bytes:
        return EVERYONE
    if first.wish:
        return BROADCAST
    return TRY if first.received_bytes >= LEAST_RECEIVED_BYTES * len(proposals) else EVERYONE


def _disagreement(first: _Proposal, other: _Proposal, index: int) -> InvalidInput:
    if first.wish != other.wish:
        return InvalidInput(
            f"the option {_OPTION} is {first.wish} in process 0 and {other.wish} in process {index}; "
            "set it to the same in all processes",
            option=_OPTION,
        )
    return InvalidInput(
        f"processes 0 and {index} ask for different arrays, dtypes or shardings, so that one cannot read "
        f"for the other as the option {_OPTION} demands; give all processes the same abstract state, or set "
        "the option to False",
        option=_OPTION,
    )


# ---- samples -----------------------------------------------------------------------------------


def needed_bytes(arrays: Iterable[SharedArray]) -> int:
    """What the processes need of what they share of several arrays."""
    return sum(shared.needed_bytes for shared in arrays)


def samples(arrays: Iterable[SharedArray], nbytes: int, *, at_end: bool = False) -> list[SharedArray]:
    """Parts of arrays, from the start or the end of every box, of `nbytes` or more. They are read, and let
    go of."""
    found: list[SharedArray] = []
    held = 0
    for shared in arrays:
        if held >= nbytes:
            break
        part = min(_MOST_OF_ARRAY, (nbytes - held) / shared.needed_bytes)
        found.append(shared.sample(part, at_end=at_end))
        held += found[-1].needed_bytes
    return found


def _part_of_box(box: Box, part: float, *, at_end: bool) -> Box:
    """What follows one another in a box: of its first axis that has anything to divide."""
    offset, shape = list(box[0]), list(box[1])
    axis = next((axis for axis, extent in enumerate(shape) if extent > 1), None)
    if axis is None:
        return box
    extent = math.ceil(shape[axis] * part)
    offset[axis] += shape[axis] - extent if at_end else 0
    shape[axis] = extent
    return tuple(offset), tuple(shape)


# ---- reading and sending -----------------------------------------------------------------------


def _stored_bytes(incoming: Incoming, number: int) -> int:
    """What one of the boxes of an array takes where it is stored."""
    part = fit.stored_part(incoming.stored, incoming.target.boxes[number])
    form = dtypes.of_stored(incoming.stored)
    item_bytes = form.host.itemsize * math.prod(form.host_trailing)
    return 0 if part is None else item_bytes * volume(part)


class Broadcast:
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
            received = [
                (shared.incoming, number) for shared in self._plan.arrays for number in shared.received
            ]
            self._reading.statistics.bytes_needed += sum(itertools.starmap(_stored_bytes, received))
            return sum(incoming.buffers[number].nbytes for incoming, number in received)
        return 0

    def _is_faster(self) -> bool:
        """Whether a broadcast is, by what samples took."""
        bytes_needed = self._reading.statistics.bytes_needed  # to which samples do not add
        # The largest arrays, so that bytes are timed and not arrays.
        by_size = sorted(self._plan.arrays, key=lambda shared: -shared.needed_bytes)
        sample_bytes = needed_bytes(by_size) // _SAMPLES
        # Little, read by everyone before the clock starts: what a first read takes counts for nobody.
        start = samples(by_size[:1], 1)
        read = samples(by_size, sample_bytes)
        sent = samples(by_size, sample_bytes, at_end=True)  # other parts, so that no cache helps
        try:
            reading_s = self._round(
                lambda: self._read(start, by_all=True),
                lambda: self._read(read, by_all=True),
            )
            reading_s /= needed_bytes(read)
            if reading_s * needed_bytes(self._plan.arrays) < LEAST_READING_S:
                return False
            sending_s = self._round(lambda: self._read(sent, by_all=False))
            # Sent twice: the first time, connections are made and programs compiled.
            send = functools.partial(self._send, sent)
            sending_s += self._round(send, send, carries=True)
            return sending_s / needed_bytes(sent) < reading_s
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

    def _read(self, arrays: Sequence[SharedArray], *, by_all: bool) -> None:
        """Reads what this process is to read; gives the rest its memory."""
        whole: list[Incoming] = []
        parts: list[tuple[Incoming, Incoming, list[int]]] = []
        absent: list[tuple[Incoming, int]] = []
        for shared in arrays:
            incoming = shared.incoming
            numbers = [] if by_all else shared.received
            if not numbers:
                whole.append(incoming)
                continue
            incoming.buffers = [np.empty(0)] * len(incoming.target.boxes)
            absent += [(incoming, number) for number in numbers]
            if len(numbers) < len(incoming.buffers):
                kept = sorted(set(range(len(incoming.buffers))) - set(numbers))
                parts.append((incoming, incoming.only(kept), kept))
        fill_buffers(self._reading, [*whole, *(part for _, part, _ in parts)])
        for incoming, part, kept in parts:
            for number, buffer in zip(kept, part.buffers, strict=True):
                incoming.buffers[number] = buffer
        allocate_boxes(absent)

    # ---- sending -------------------------------------------------------------------------------

    def _send(self, arrays: Sequence[SharedArray]) -> None:
        """Sends what this process has read for others, and receives what others have read for it."""
        for carrier in dict.fromkeys(shared.carrier for shared in arrays):
            lengths: dict[Group, int] = {}
            boxes: dict[Group, list[Bytes]] = {}
            for shared in arrays:
                if shared.carrier is not carrier:
                    continue
                for group, items in shared.replicas.items.items():
                    lengths[group] = lengths.get(group, 0) + items * shared.item_bytes
                for group, number in shared.own:
                    buffer = shared.incoming.buffers[number]
                    boxes.setdefault(group, []).append(buffer.reshape(-1).view(np.uint8))
            for layer in layers(lengths):
                own = next((group for group in layer if carrier.process_index in group), None)
                if own is not None:
                    longest = max(lengths[group] for group in layer)
                    self._send_layer(carrier, layer, longest, _Stream(boxes[own]), own)

    def _send_layer(
        self, carrier: Broadcaster, layer: Sequence[Group], longest: int, stream: _Stream, own: Group
    ) -> None:
        """Sends, in all groups of a layer, one piece after another of what their processes share."""
        sends = own[0] == carrier.process_index
        packed: Bytes = np.empty(min(self._piece_bytes, stream.nbytes), np.uint8)
        for begin, nbytes in _pieces(longest, self._piece_bytes):
            parts = list(stream.parts(begin, begin + nbytes))
            if len(parts) == 1 and parts[0].flags.writeable:
                carrier.broadcast(layer, nbytes, parts[0])
                continue
            piece = packed[: sum(part.size for part in parts)]
            if sends and parts:
                np.concatenate(parts, out=piece)
            carrier.broadcast(layer, nbytes, piece)
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
