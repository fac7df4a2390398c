"""Load-and-broadcast, decided: what several processes need, and whether one reads it for the others.

Every process knows which boxes of which arrays several of them need (`frameworks.base.Replicas`). All say in
one round what they know, as a digest, and what their options wish; the primary decides. Invariants: the
decision is the same everywhere, and is for a broadcast only if all know the same, since a broadcast takes
the same steps in the same order in all processes. Nothing is read or sent here (`checkpoint/exchange.py`).

The cost model has no constants of storage or network in it, because both are measured on the load itself:
one sample of what is shared is read by everyone, another is broadcast, and all goes the way that took less
time per byte. That costs a load the samples, and what setting up collectives takes. So it is not done where
little can be gained: below `LEAST_RECEIVED_BYTES` for each process, or where everyone could read all of it
in `LEAST_READING_S`. Then every process reads for itself, as it does without replicas.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from waystation._errors import InvalidInput
from waystation._options import ArrayLoadingOptions
from waystation.frameworks.base import Broadcaster, Codec, Group, Replicas
from waystation.grid import Box, volume
from waystation.transfers.buffers import Incoming

EVERYONE, BROADCAST, TRY = b"everyone reads", b"broadcast", b"try"

LEAST_RECEIVED_BYTES = 32 << 20
LEAST_READING_S = 2.0
_SAMPLES = 128  # of which all that is shared consists; one goes each way to begin with
_MOST_OF_ARRAY = 1 / 4  # so that the samples of one array have nothing in common

_OPTION = "array.loading.load_and_broadcast"


@dataclass(slots=True, eq=False)
class Kind:
    """What shared arrays of one framework and one sharding have in common.

    Attributes:
        codec: Of the framework.
        replicas: What several processes need of each.
        own: What this process is part of, in the order of `replicas`: the group, and the number of the box
            among those that are wanted here.
        items: For each group the elements that its processes share.
    """

    codec: Codec
    replicas: Replicas
    own: list[tuple[Group, int]]
    items: dict[Group, int]
    digest: str

    @classmethod
    def of(cls, codec: Codec, replicas: Replicas, process_index: int, incoming: Incoming) -> Kind:
        """That of an array."""
        numbers = {box: number for number, box in enumerate(incoming.target.boxes)}
        pairs = list(zip(replicas.boxes, replicas.groups, strict=True))
        items: dict[Group, int] = {}
        for box, group in pairs:
            items[group] = items.get(group, 0) + volume(box)
        own = [(group, numbers[box]) for box, group in pairs if process_index in group]
        return cls(codec, replicas, own, items, hashlib.sha256(repr(pairs).encode()).hexdigest())


@dataclass(slots=True, eq=False)
class SharedArray:
    """An array of which several processes need the same.

    Attributes:
        incoming: What this process needs of it.
        kind: Who shares what.
        item_bytes: Of one element.
    """

    incoming: Incoming
    kind: Kind
    item_bytes: int

    @property
    def needed_bytes(self) -> int:
        """What the processes need of what they share, all of them together."""
        return self.item_bytes * sum(len(group) * items for group, items in self.kind.items.items())

    @property
    def received_bytes(self) -> int:
        """What of that they would not read if it was broadcast."""
        return self.item_bytes * sum((len(group) - 1) * items for group, items in self.kind.items.items())


@dataclass(slots=True)
class Plan:
    """What one load can broadcast.

    Attributes:
        wish: The option; False also where it would not be of use.
        arrays: In an order that is the same in all processes.
        broadcasters: Of the frameworks of these arrays, by the names of the codecs.
    """

    wish: bool | None
    arrays: list[SharedArray] = field(default_factory=list)
    broadcasters: dict[str, Broadcaster] = field(default_factory=dict)

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
            if able is not None and batch:
                targets = [incoming.target for incoming in batch]
                found = able.replicas(targets, loading.replica_axis, first)
                shared = [
                    (incoming, replicas)
                    for incoming, replicas in zip(batch, found, strict=True)
                    if replicas is not None and incoming.array is not None
                ]
                if shared:
                    plan._add(codec, able.broadcaster(targets), shared)
        return plan

    def _add(
        self, codec: Codec, broadcaster: Broadcaster, shared: Sequence[tuple[Incoming, Replicas]]
    ) -> None:
        self.broadcasters[codec.name] = broadcaster
        kinds: dict[int, Kind] = {}
        for incoming, replicas in shared:
            kind = kinds.get(id(replicas))
            if kind is None:
                kind = kinds[id(replicas)] = Kind.of(codec, replicas, broadcaster.process_index, incoming)
            self.arrays.append(SharedArray(incoming, kind, incoming.item_bytes))

    def proposal(self) -> bytes:
        """What this process tells the primary."""
        digest = hashlib.sha256()
        for shared in self.arrays:
            incoming = shared.incoming
            known = (incoming.leaf, incoming.array, incoming.target.dtype, shared.kind.digest)
            digest.update(repr(known).encode())
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


@dataclass(slots=True)
class Samples:
    """Parts of what is shared, by which both ways are compared. They are read, and let go of.

    Attributes:
        start: Little, read by everyone before the clock starts: what a first read takes counts for nobody.
        read: Read by everyone.
        sent: Broadcast; another part, so that no cache of the system helps.
    """

    start: list[SharedArray]
    read: list[SharedArray]
    sent: list[SharedArray]

    @classmethod
    def of(cls, plan: Plan) -> Samples:
        """Samples of the largest arrays, so that bytes are timed and not arrays."""
        by_size = sorted(plan.arrays, key=lambda shared: -shared.needed_bytes)
        most_bytes = needed_bytes(by_size) // _SAMPLES
        return cls(
            _sample(plan, by_size[:1], 1, at_end=False),
            _sample(plan, by_size, most_bytes, at_end=False),
            _sample(plan, by_size, most_bytes, at_end=True),
        )


def needed_bytes(arrays: Iterable[SharedArray]) -> int:
    """What the processes need of what they share of several arrays."""
    return sum(shared.needed_bytes for shared in arrays)


def _sample(plan: Plan, arrays: Iterable[SharedArray], nbytes: int, *, at_end: bool) -> list[SharedArray]:
    """Parts of arrays, from the start or the end of every box, of `nbytes` or more."""
    found: list[SharedArray] = []
    held = 0
    for shared in arrays:
        if held >= nbytes:
            break
        part = min(_MOST_OF_ARRAY, (nbytes - held) / shared.needed_bytes)
        found.append(_part(plan, shared, part, at_end=at_end))
        held += found[-1].needed_bytes
    return found


def _part(plan: Plan, shared: SharedArray, part: float, *, at_end: bool) -> SharedArray:
    kind, incoming = shared.kind, shared.incoming
    boxes = [_part_of_box(box, part, at_end=at_end) for box in kind.replicas.boxes]
    replicas = Replicas(tuple(boxes), kind.replicas.groups)
    target = dataclasses.replace(
        incoming.target,
        boxes=[_part_of_box(incoming.target.boxes[number], part, at_end=at_end) for _, number in kind.own],
    )
    sampled = dataclasses.replace(incoming, target=target, buffers=[])
    process_index = plan.broadcasters[kind.codec.name].process_index
    return SharedArray(sampled, Kind.of(kind.codec, replicas, process_index, sampled), shared.item_bytes)


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
