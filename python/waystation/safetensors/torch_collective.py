"""`load_in_group`: a model that the processes of a torch program load together.

`placement.py` says what each process gets, `group_plan.py` who reads what. Each process then reads what it
alone needs straight to where it stays. The rest it reads likewise where all share a page cache
(`shared_page_cache.py`). Otherwise the rest goes over the devices in turns: every process reads some pieces,
all make sure that each has its own, and then they are sent. Invariants: what one process cannot open,
decide or read fails in all of them, before any waits for what never comes; beyond its tensors a process holds
what it reads ahead and what is just being sent, within its limit.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from waystation._options import Options
from waystation.coordination import collective
from waystation.frameworks import casts
from waystation.frameworks.base import Codec
from waystation.grid import Box, intersect, relative_to, slices_of_box, volume
from waystation.safetensors.choices import DType, Rename, Select, dtype_chooser
from waystation.safetensors.composed import Composed, Composition
from waystation.safetensors.group_plan import GroupPlan, Piece
from waystation.safetensors.handle import Tensors
from waystation.safetensors.making import Made, Wanted, calling_arrays_tensors, codec_of, incoming_of
from waystation.safetensors.open_files import OpenFiles
from waystation.safetensors.placement import Joined, Placement, part_of, results_of
from waystation.safetensors.request import options_of
from waystation.safetensors.shared_page_cache import View, share_page_cache
from waystation.safetensors.sources import Files, find
from waystation.safetensors.stream import stream_arrays
from waystation.transfers.filling import Filling
from waystation.transfers.handle import Progress

# Small tensors are sent together, and large ones that are divided in pieces of this size.
_RUN_BYTES = 16 << 20
_LEAST_RUN_BYTES = 128 << 10
_RUNS_IN_LIMIT = 16
# What exists of a run beside what is read ahead: as it was read, as it is sent, and as it comes.
_COPIES = 3
_ALIGN_BYTES = 256


def load_in_group(
    files: Files | Tensors,
    *,
    group: Any,
    device: Any = None,
    placement: Placement | None = None,
    join: Mapping[str, Joined] | None = None,
    dtype: DType = None,
    select: Select | None = None,
    rename: Rename | None = None,
    memory_limit: int | None = None,
    verify: bool | None = None,
    send: bool | None = None,
) -> dict[str, Any]:
    """Loads a published model into torch, in all processes of a group at once: each reads a share of it.

    All processes call it, with the same arguments but for the device.

    Args:
        files: What `load` takes.
        group: A process group of torch; None for this process alone.
        device: Where tensors go: a device or its name, by default the CPU. The group has to reach it.
        placement: What each process gets of a tensor: `Divided(axis)` is one block to each, `Only(rank)` all
            of it to one of them and nothing to the others; None, or a name that is left out, is all of it to
            all. By the names of tensors in the files, or a function of such a name and a shape.
        join: Arrays that are made of several tensors, by their new names: `Joined(names, axis)` is what this
            process gets of each, one after another along an axis, such as of the queries, keys and values of
            attention. The tensors themselves are not returned.
        dtype: What `load` takes, as are the next.
        select: Load only some tensors.
        rename: Names of arrays by names of tensors.
        memory_limit: Most bytes of host memory that are read ahead and on their way to the device.
        verify: Check the checksum of every block that is read.
        send: Whether what several processes need is read by one of them and sent to the others; else each
            reads all that it needs itself, through the page cache, and the processes of a machine begin at
            different places, so that its disk is read once. None: send, unless all are on CPUs of one
            machine that has the memory to cache what they need.

    Returns:
        The tensors by name, in the order of the files.

    Raises:
        InvalidInput: The processes were given other files or arguments, or something cannot be had as
            wanted.
        TensorNotFound: A tensor is named that is not there.
        NotFound, Corrupt, Conflict, Unsupported: As `load` does. What one process raises, all
            raise; the context of the error then names that `process`, by its rank in the program.
        Unavailable: A process has died, which the error names, or has not come within the deadline
            (`multiprocessing.deadline_s`).
    """
    codec = codec_of("torch")
    from waystation.frameworks import torch_groups, torch_tensors

    processes = torch_groups.of_group(group)
    options = options_of(memory_limit, verify)
    limit_bytes = options.memory.read_concurrent_bytes or 0
    run_bytes = max(_LEAST_RUN_BYTES, min(limit_bytes // _RUNS_IN_LIMIT, _RUN_BYTES))

    def decide() -> tuple[OpenFiles, GroupPlan, Any]:
        place = torch_tensors.CODEC.place_of(device)
        torch_groups.use_device(str(place.device))  # which the group needs to agree on anything
        opened = files.opened if isinstance(files, Tensors) else OpenFiles(find(files))
        results = results_of(
            opened, processes.size, placement=placement, join=join, select=select, rename=rename
        )
        plan = GroupPlan(
            opened,
            results,
            dtype_chooser(dtype),
            size=processes.size,
            run_bytes=run_bytes,
            least_stretch_bytes=opened.least_stretch_bytes(options.array.loading.verify),
        )
        return opened, plan, place

    def describe(decided: tuple[OpenFiles, GroupPlan, Any]) -> bytes:
        opened, plan, place = decided
        view = View.of(opened.headers, options, is_on_host=place.device.type == "cpu")
        said = plan.digest(), send, plan.page_cache_bytes() if plan.sent else 0
        return json.dumps([said, view]).encode()

    def choose(parts: Sequence[bytes]) -> bytes:
        """Whether to send: as all processes wish, or else unless the page cache does it."""
        said = [json.loads(part) for part in parts]
        collective.require_same([repr(own).encode() for own, _ in said], remedy="")
        (_, wish, needed_bytes), _ = said[0]
        shares = wish is None and share_page_cache([View(*view) for _, view in said], needed_bytes)
        return b"" if shares or wish is False else b"send"

    with contextlib.closing(processes.open("load a published model in a group")) as session:
        (opened, plan, place), sends = collective.attempt(session, decide, describe, choose)
    loading = _Loading(opened, plan, options, codec, place, processes)
    found = processes.attempt(loading.read_own)
    if plan.sent and not sends:
        found |= processes.attempt(loading.read_cached)
    elif plan.sent:
        sending = _Sending(loading, _less(options, _COPIES * run_bytes))
        found |= sending.run()
    return {result.name: found[number] for number, result in enumerate(plan.results) if number in found}


def _less(options: Options, nbytes: int) -> Options:
    """The options with a bound on memory that is so much lower."""
    chosen = options.thawed()
    chosen.memory.read_concurrent_bytes = max(0, (options.memory.read_concurrent_bytes or 0) - nbytes)
    return chosen.frozen()


class _Loading:
    """What the steps of one load have in common, and its first: what this process reads for itself."""

    def __init__(
        self,
        opened: OpenFiles,
        plan: GroupPlan,
        options: Options,
        codec: Codec,
        place: Any,
        collectives: Any,
    ) -> None:
        self.opened = opened
        self.plan = plan
        self.options = options
        self.codec = codec
        self.place = place
        self.collectives = collectives

    def read_own(self) -> dict[int, Any]:
        """What this process reads for itself, by the number of the result."""
        return self._read(self.plan.own, self.options)

    def read_cached(self) -> dict[int, Any]:
        """Its part of what several processes need, through the page cache."""
        chosen = self.options.thawed()
        chosen.engine.read_mode = "buffered"
        return self._read(self.plan.sent, chosen.frozen(), (self.collectives.rank, self.collectives.size))

    def _read(
        self, numbers: Sequence[int], options: Options, among: tuple[int, int] | None = None
    ) -> dict[int, Any]:
        compositions: dict[int, Composition] = {}
        for number in numbers:
            composition = self.composition(number)
            if composition is not None:
                compositions[number] = composition
        composed = Composed(self.opened, list(compositions.values()), among)
        wanted = self.wanted(composed, list(compositions))
        incoming = incoming_of(composed, self.codec, wanted, casts.rule_of_loads(options))
        made = Made(composed, len(incoming))
        filling = Filling(composed, options, Progress(), None, [(self.codec, incoming)])
        with calling_arrays_tensors():
            filling.finish(made)
        return dict(zip(compositions, made.arrays, strict=True))

    def composition(self, number: int) -> Composition | None:
        """What this process gets of a result."""
        return self.plan.results[number].composition(self.collectives.rank, self.collectives.size)

    def wanted(self, composed: Composed, results: Sequence[int]) -> Wanted:
        """The arrays of compositions, each of which is (a part of) one of the results."""
        numbers = range(len(results))
        dtypes = [self.plan.dtypes[result] for result in results]
        places = [self.place] * len(results)
        return Wanted(numbers, composed.labels, composed.arrays(numbers), dtypes, places)


class _Sending:
    """What goes over the devices: it is read by one process, and sent to all that need it.

    Args:
        loading: Of which this is a part.
        options: How pieces are read.
    """

    def __init__(self, loading: _Loading, options: Options) -> None:
        self._loading = loading
        self._options = options
        self._plan = loading.plan
        self._collectives = loading.collectives
        self._device = str(loading.place.device)
        self._found: dict[int, Any] = {}

    def run(self) -> dict[int, Any]:
        """What this process gets of it, by the number of the result."""
        for number in self._plan.sent:
            if not self._plan.goes_whole(number):
                self._make_room(number)
        turns = [turn[self._collectives.rank] for turn in (*self._plan.dealt, *self._plan.shared)]
        with contextlib.closing(self._read([piece for run in turns for piece in run])) as coming:
            for turn in self._plan.dealt:
                self._deal(turn, self._next(coming, turn[self._collectives.rank]))
            for turn in self._plan.shared:
                held = self._next(coming, turn[self._collectives.rank])
                for source, run in enumerate(turn):
                    self._share(run, held if source == self._collectives.rank else None, source)
        return self._found

    def _make_room(self, number: int) -> None:
        """Makes the tensor of a result that comes in pieces."""
        from waystation.frameworks import torch_groups

        shape = self._composition(number).shape
        self._found[number] = torch_groups.empty(shape, self._plan.dtypes[number], self._device)

    def _composition(self, number: int) -> Composition:
        composition = self._loading.composition(number)
        assert composition is not None, "what only one process gets is not sent"
        return composition

    # ---- reading -------------------------------------------------------------------------------

    def _read(self, pieces: Sequence[Piece]) -> Generator[Any, None, None]:
        """The pieces of this process, as tensors on the device, one after another."""
        composed = Composed(
            self._loading.opened, [part_of(self._plan.source_of(piece), piece.box) for piece in pieces]
        )
        wanted = self._loading.wanted(composed, [piece.result for piece in pieces])
        incoming = incoming_of(composed, self._loading.codec, wanted, casts.rule_of_loads(self._options))
        return stream_arrays(composed, self._loading.codec, incoming, self._options)

    def _next(self, coming: Iterator[Any], run: Sequence[Piece]) -> list[Any]:
        """The pieces that this process sends next, once every process has its own."""
        held: list[Any] = self._collectives.attempt(lambda: [next(coming) for _ in run])
        return held

    # ---- sending -------------------------------------------------------------------------------

    def _deal(self, turn: Sequence[Sequence[Piece]], held: Sequence[Any]) -> None:
        """Sends each process its part of the pieces of every process."""
        from waystation.frameworks import torch_groups

        rank, size = self._collectives.rank, self._collectives.size
        parts = [
            [
                torch_groups.byte_array(tensor)[slices_of_box(relative_to(box, piece.box[0]))]
                for piece, tensor in zip(turn[rank], held, strict=True)
                for box in self._common(piece, other)
            ]
            for other in range(size)
        ]
        sizes = [
            sum(self._nbytes(piece, box) for piece in run for box in self._common(piece, rank))
            for run in turn
        ]
        received = self._collectives.exchange(parts, sizes, self._device)
        begin = 0
        for piece in (piece for run in turn for piece in run):
            for box in self._common(piece, rank):
                end = begin + self._nbytes(piece, box)
                self._put(piece, box, received[begin:end])
                begin = end

    def _share(self, run: Sequence[Piece], held: Sequence[Any] | None, source: int) -> None:
        """Sends all of the pieces of one process to all."""
        from waystation.frameworks import torch_groups

        shapes = [piece.box[1] for piece in run]
        dtypes = [self._plan.dtypes[piece.result] for piece in run]
        if len(run) == 1:
            value = torch_groups.empty(shapes[0], dtypes[0], self._device) if held is None else held[0]
            self._collectives.broadcast(value, source)
            values = [value]
        elif run:
            values = self._collectives.broadcast_joined(
                held, shapes, dtypes, source, self._device, _ALIGN_BYTES
            )
        for piece, value in zip(run, values if run else [], strict=True):
            if self._plan.goes_whole(piece.result):
                self._found[piece.result] = value
                continue
            for box in self._common(piece, self._collectives.rank):
                part = torch_groups.byte_array(value)[slices_of_box(relative_to(box, piece.box[0]))]
                self._put(piece, box, part)

    def _common(self, piece: Piece, rank: int) -> list[Box]:
        """What a process gets of a piece: one box of its tensor, or nothing."""
        box = self._plan.source_of(piece).box(rank, self._collectives.size)
        common = None if box is None else intersect(box, piece.box)
        return [] if common is None else [common]

    def _nbytes(self, piece: Piece, box: Box) -> int:
        return volume(box) * int(self._found[piece.result].element_size())

    def _put(self, piece: Piece, box: Box, data: Any) -> None:
        """Puts the bytes of a box of a tensor where they belong."""
        from waystation.frameworks import torch_groups

        part = self._composition(piece.result).parts[piece.source]
        begin = relative_to(box, part.box[0])[0]
        own = tuple(at + offset for at, offset in zip(begin, part.offset, strict=True)), box[1]
        place = torch_groups.byte_array(self._found[piece.result])[slices_of_box(own)]
        place.copy_(data.reshape(place.shape))
