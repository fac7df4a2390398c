"""`load_in_group`: a model that the processes of a torch program load together.

`placement.py` says what each process gets, `group_plan.py` who reads what. Each process then reads what it
alone needs straight to where it stays. The rest it reads likewise where all share a page cache. Otherwise the
rest goes over the devices in steps: every process reads some pieces, all make sure that each has its own, and
then they are sent. Invariants: what one process cannot open, decide or read fails in all of them, before any
waits for what never comes; beyond its tensors a process holds what it reads ahead and what is just being
sent, within its limit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from waystation._arguments import require_boolean_or_none
from waystation._collection import paused_collection
from waystation._options import Options
from waystation.coordination import Session, collective
from waystation.frameworks import casts, dtypes
from waystation.frameworks.base import Codec
from waystation.grid import Box, intersect, relative_to, slices_of_box, volume
from waystation.layouts.opened import ReadStatistics
from waystation.safetensors import same_model
from waystation.safetensors.choices import DType, Rename, Select, dtype_chooser
from waystation.safetensors.composed import Composed, Composition
from waystation.safetensors.group_plan import GroupPlan, Piece, Step
from waystation.safetensors.handle import Tensors
from waystation.safetensors.headers import Header
from waystation.safetensors.load import statistics_of
from waystation.safetensors.making import Made, Wanted, calling_arrays_tensors, codec_of, incoming_of
from waystation.safetensors.open_files import OpenFiles
from waystation.safetensors.placement import Joined, Placement, part_of, results_of
from waystation.safetensors.request import failures_of, options_of
from waystation.safetensors.sources import Files, find
from waystation.safetensors.stream import stream_arrays
from waystation.transfers.buffers import Incoming
from waystation.transfers.filling import Filling
from waystation.transfers.handle import Progress
from waystation.transfers.statistics import failures_published, tell

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
            machine that has the memory to cache what they need. What is in an object store is sent.

    Returns:
        The tensors by name, in the order of the files.

    Raises:
        InvalidInput: The processes were given other files or arguments, or something cannot be had as
            wanted. Processes that have opened different files, such as copies of a model on several hosts,
            compare their headers, and samples of up to 256 tensors.
        TensorNotFound: A tensor is named that is not there.
        NotFound, Corrupt, Conflict, Unsupported: As `load` does. What one process raises, all
            raise; the context of the error then names that `process`, by its rank in the program.
        Cancelled: Another process was interrupted, as by Ctrl-C. Where that was while tensors were sent, the
            group carries nothing more, and further loads by it raise InvalidInput.
        Unavailable: A process has died, which the error names, or has not come within the deadline
            (`multiprocessing.deadline_s`).
    """
    begun_s = time.monotonic()
    codec = codec_of("torch")
    from waystation.frameworks import torch_groups, torch_tensors

    processes = torch_groups.of_group(group)

    @paused_collection()
    def decide() -> _Decided:
        processes.require_usable()
        require_boolean_or_none("send", send)
        options = options_of(memory_limit, verify)
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
            run_bytes=_run_bytes(options),
            least_stretch_bytes=opened.least_stretch_bytes(options.array.loading.verify),
        )
        return _Decided(opened, plan, options, place)

    with processes.opened("load a published model in a group") as session:
        with failures_of(files):
            decided, sends = _agree(session, decide, send)
        plan = decided.plan
        loading = _Loading(decided, codec, processes, begun_s)
        with failures_published("load", decided.opened.path, begun_s):
            processes.attempt(loading.read_own)
            if plan.sent and not sends:
                processes.attempt(loading.read_cached)
            elif plan.sent:
                with processes.sending():
                    loading.send()
    loading.report()
    return {plan.results[number].name: found for number, found in sorted(loading.found.items())}


class _Decided(NamedTuple):
    """What one process has found, for its part.

    Attributes:
        opened: The files.
        plan: Who reads what.
        options: How to read.
        place: Where tensors go.
    """

    opened: OpenFiles
    plan: GroupPlan
    options: Options
    place: Any


def _agree(session: Session, decide: Callable[[], _Decided], send: bool | None) -> tuple[_Decided, bool]:
    """What this process has found, and whether all send, once they have found the same."""
    if session.process_count == 1:
        return decide(), False
    decided, chosen = collective.attempt(session, decide, functools.partial(_described, send=send), _chosen)
    sends, are_same = json.loads(chosen)
    if not are_same:
        same_model.require_same(session, decided.opened, decided.plan.tensors())
    return decided, sends


def _described(decided: _Decided, send: bool | None) -> bytes:
    """What it says of that to the others."""
    opened, plan, options, place = decided
    view = View.of(opened.headers, options, is_on_host=place.device.type == "cpu" and opened.is_local)
    digest = plan.digest()
    said = digest, send, plan.page_cache_bytes() if plan.sent else 0
    given = plan.aspects() | {"memory_limit or verify": digest, "send": send}
    return json.dumps([said, view, given]).encode()


def _chosen(parts: Sequence[bytes]) -> bytes:
    """Whether to send: as all processes wish, or else unless the page cache does it. And whether all have
    opened the same files."""
    said = [json.loads(part) for part in parts]
    same = [repr(own).encode() for own, _, _ in said]
    collective.require_same(same, remedy="", aspects=[given for _, _, given in said])
    (_, wish, needed_bytes), _, _ = said[0]
    views = [View(*view) for _, view, _ in said]
    shares = wish is None and share_page_cache(views, needed_bytes)
    sends = not shares and wish is not False
    return json.dumps([sends, len({view.files for view in views}) == 1]).encode()


def _run_bytes(options: Options) -> int:
    """How much is sent together."""
    limit_bytes = options.memory.read_concurrent_bytes or 0
    return max(_LEAST_RUN_BYTES, min(limit_bytes // _RUNS_IN_LIMIT, _RUN_BYTES))


def _less(options: Options, nbytes: int) -> Options:
    """The options with a bound on memory that is so much lower."""
    chosen = options.thawed()
    # A limit that leaves nothing bounds what it can, and makes no load fail.
    chosen.memory.read_concurrent_bytes = max(1, (options.memory.read_concurrent_bytes or 0) - nbytes)
    return chosen.frozen()


class _Loading:
    """One load: what its steps have in common.

    Args:
        decided: What is loaded.
        codec: What makes tensors.
        processes: Those that load.
        begun_s: When it was called, by the monotonic clock.
    """

    def __init__(self, decided: _Decided, codec: Codec, processes: Any, begun_s: float) -> None:
        from waystation.frameworks import torch_groups

        self._torch = torch_groups
        self._opened, self._plan, self._options, self._place = decided
        self._codec = codec
        self._device = str(self._place.device)
        self._processes = processes
        self._rank, self._size = processes.rank, processes.size
        self.found: dict[int, Any] = {}  # what this process gets, by the number of the result
        self.statistics = ReadStatistics()
        self.bytes_received = 0  # from other processes
        self._begun_s = begun_s

    def report(self) -> None:
        """Tells what was read and received."""
        duration_s = time.monotonic() - self._begun_s
        self.statistics.bytes_needed = self._needed_bytes()
        statistics = statistics_of(self._opened, self.statistics, duration_s, self.bytes_received)
        tell([statistics], self._options.array.loading.on_statistics, "array.loading.on_statistics")

    def _needed_bytes(self) -> int:
        """Of all that this process gets, as it is stored, whoever reads it."""
        compositions = map(self._composition, range(len(self._plan.results)))
        parts = [
            part for composition in compositions if composition is not None for part in composition.parts
        ]
        return sum(
            volume(part.box) * dtypes.of_stored(self._opened.array(part.tensor)).host.itemsize
            for part in parts
        )

    # ---- reading -------------------------------------------------------------------------------

    def read_own(self) -> None:
        """Reads what this process reads for itself."""
        self._read(self._plan.own, self._options)

    def read_cached(self) -> None:
        """Reads its part of what several processes need, through the page cache."""
        chosen = self._options.thawed()
        chosen.engine.read_mode = "buffered"
        self._read(self._plan.sent, chosen.frozen(), (self._rank, self._size))

    def _read(self, numbers: Sequence[int], options: Options, among: tuple[int, int] | None = None) -> None:
        with paused_collection():
            compositions: dict[int, Composition] = {}
            for number in numbers:
                composition = self._composition(number)
                if composition is not None:
                    compositions[number] = composition
            composed = Composed(self._opened, list(compositions.values()), among)
            incoming = self._incoming(composed, list(compositions))
        made = Made(composed, len(incoming))
        batches = [(self._codec, incoming)]
        filling = Filling(composed, options, Progress(), None, batches, statistics=self.statistics)
        with calling_arrays_tensors(composed):
            filling.finish(made)
        self.found |= zip(compositions, made.arrays, strict=True)

    def _composition(self, number: int) -> Composition | None:
        """What this process gets of a result."""
        return self._plan.results[number].composition(self._rank, self._size)

    def _incoming(self, composed: Composed, results: Sequence[int]) -> list[Incoming]:
        """The arrays of compositions, each of which is (a part of) one of the results."""
        numbers = range(len(results))
        dtypes = [self._plan.dtypes[result] for result in results]
        places = [self._place] * len(results)
        wanted = Wanted(numbers, composed.labels, composed.arrays(numbers), dtypes, places)
        return incoming_of(composed, self._codec, wanted, casts.rule_of_loads(self._options))

    def _stream(self, pieces: Sequence[Piece], options: Options) -> Generator[Any, None, None]:
        """Reads pieces, as tensors on the device, one after another."""
        parts = [part_of(self._plan.source_of(piece), piece.box) for piece in pieces]
        composed = Composed(self._opened, parts)
        incoming = self._incoming(composed, [piece.result for piece in pieces])
        return stream_arrays(composed, self._codec, incoming, options, self.statistics)

    # ---- sending -------------------------------------------------------------------------------

    def send(self) -> None:
        """Reads its share of what goes over the devices, and sends it to all that need it."""
        for number in self._plan.sent:
            composition = self._composition(number)
            if composition is not None and not self._plan.goes_whole(number):
                dtype = self._plan.dtypes[number]
                self.found[number] = self._torch.empty(composition.shape, dtype, self._device)
        steps = [*self._plan.divided, *self._plan.replicated]
        own = [piece for step in steps for piece in step[self._rank]]
        options = _less(self._options, _COPIES * _run_bytes(self._options))
        with contextlib.closing(self._stream(own, options)) as coming:
            for step in self._plan.divided:
                self._send_divided(step, self._next(coming, step[self._rank]))
            for step in self._plan.replicated:
                held = self._next(coming, step[self._rank])
                for source, run in enumerate(step):
                    self._send_replicated(run, held if source == self._rank else None, source)

    def _next(self, coming: Iterator[Any], run: Sequence[Piece]) -> list[Any]:
        """The pieces that this process sends next, once every process has its own."""
        held: list[Any] = self._processes.attempt(lambda: [next(coming) for _ in run])
        return held

    def _send_divided(self, step: Step, held: Sequence[Any]) -> None:
        """Sends each process its part of the pieces of every process."""
        parts = [
            [
                self._bytes_of(tensor, piece.box, box)
                for piece, tensor in zip(step[self._rank], held, strict=True)
                for box in self._common(piece, other)
            ]
            for other in range(self._size)
        ]
        boxes = [[(piece, box) for piece in run for box in self._common(piece, self._rank)] for run in step]
        sizes = [
            [volume(box) * self.found[piece.result].element_size() for piece, box in own] for own in boxes
        ]
        self.bytes_received += sum(sum(own) for rank, own in enumerate(sizes) if rank != self._rank)
        received = self._processes.exchange(parts, [sum(own) for own in sizes], self._device)
        begin = 0
        for (piece, box), nbytes in zip(itertools.chain(*boxes), itertools.chain(*sizes), strict=True):
            self._put(piece, box, received[begin : begin + nbytes])
            begin += nbytes

    def _send_replicated(self, run: Sequence[Piece], held: Sequence[Any] | None, source: int) -> None:
        """Sends all of the pieces of one process to all."""
        shapes = [piece.box[1] for piece in run]
        dtypes = [self._plan.dtypes[piece.result] for piece in run]
        values: list[Any] = []
        if len(run) == 1:
            values = [self._torch.empty(shapes[0], dtypes[0], self._device) if held is None else held[0]]
            self._processes.broadcast(values[0], source)
        elif run:
            values = self._processes.broadcast_joined(
                held, shapes, dtypes, source, self._device, _ALIGN_BYTES
            )
        if held is None:
            self.bytes_received += sum(value.nbytes for value in values)
        for piece, value in zip(run, values, strict=True):
            if self._plan.goes_whole(piece.result):
                self.found[piece.result] = value
                continue
            for box in self._common(piece, self._rank):
                self._put(piece, box, self._bytes_of(value, piece.box, box))

    def _common(self, piece: Piece, rank: int) -> list[Box]:
        """What a process gets of a piece: one box of its tensor, or nothing."""
        box = self._plan.source_of(piece).box(rank, self._size)
        common = None if box is None else intersect(box, piece.box)
        return [] if common is None else [common]

    def _put(self, piece: Piece, box: Box, data: Any) -> None:
        """Puts the bytes of a box of a tensor where they belong."""
        composition = self._composition(piece.result)
        assert composition is not None, "what only one process gets is not sent"
        part = composition.parts[piece.source]
        begin = relative_to(box, part.box[0])[0]
        own = tuple(at + offset for at, offset in zip(begin, part.offset, strict=True)), box[1]
        place = self._torch.byte_array(self.found[piece.result])[slices_of_box(own)]
        place.copy_(data.reshape(place.shape))

    def _bytes_of(self, tensor: Any, held: Box, box: Box) -> Any:
        """A box of an array, of which a tensor holds a larger one, as bytes."""
        return self._torch.byte_array(tensor)[slices_of_box(relative_to(box, held[0]))]


# ---- a page cache that all processes share -----------------------------------------------------
#
# What several processes need can be read by one and sent to the others. Where all are on the CPUs of one
# machine that costs more than it saves: sending copies every byte several times, and the page cache copies it
# once, to where it stays. So each process reads all that it needs through the page cache, and begins with
# another part of the files: what one has read from the disk, the others find cached. Invariants: all
# processes come to the same answer from what all of them say; only speed depends on it.

_MEMORY = Path("/proc/meminfo")
_AVAILABLE = "MemAvailable:"


class View(NamedTuple):
    """What one process says.

    Attributes:
        files: What tells the files that it has opened from others, see `same_model.mark_of`. Machines that
            are copies of each other may say the same; then each reads from its own disk.
        is_able: Whether it can read through the page cache, and its arrays stay in the memory of the machine.
        available_bytes: Memory that is still to be had.
    """

    files: str
    is_able: bool
    available_bytes: int

    @classmethod
    def of(cls, headers: Sequence[Header], options: Options, *, is_on_host: bool) -> View:
        """That of this process, which is to read these files to its own memory or to a device."""
        is_able = is_on_host and options.engine.read_mode in (None, "buffered")
        return cls(same_model.mark_of(headers), is_able, _available_bytes())


def share_page_cache(views: Sequence[View], needed_bytes: int) -> bool:
    """Whether processes with these views should read through the page cache.

    Args:
        views: What all of them say.
        needed_bytes: What their arrays and the cached files take together. With less memory the page cache
            would forget what the others have not read yet.
    """
    first = views[0]
    return (
        all(view.is_able and view.files == first.files for view in views)
        and min(view.available_bytes for view in views) >= needed_bytes
    )


def _available_bytes() -> int:
    with contextlib.suppress(OSError):
        for line in _MEMORY.read_text().splitlines():
            if line.startswith(_AVAILABLE):
                return int(line.split()[1]) << 10
    return 0
