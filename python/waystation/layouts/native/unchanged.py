"""Finds the arrays that are equal to those of an earlier checkpoint, and shares its data files.

A save that may refer to an earlier checkpoint asks here, before it plans its files. The answer is by bytes:
NaNs are equal if their bits are, and 0.0 is not -0.0. An array counts as equal if a chunk of the same box is
stored under the same label, with the same dtype and shape, and every block of the earlier file that it has
bytes in says so by its checksum. Blocks that hold one array or several equal ones are summed in memory. A
block that holds something else as well is read from the earlier file, verified, and summed with the new bytes
of the array in the place of the old. So a frozen array costs one pass over its memory, and a trained one a
single block.

A data file is shared as a whole, if at least half of its bytes belong to equal arrays. The rest is dead
weight, which no array of the new checkpoint names. The rule is applied anew at every save, so a checkpoint
never has more dead bytes in shared files than live ones. Equal arrays of other files go to files of their
own, apart from those that change, so that the next save can share these.

On a file system a shared file is a hard link. In an object store it stays where it is, and the new checkpoint
refers to it (`references`); there the two checkpoints lie beside each other.

What can go wrong: the earlier checkpoint is missing, damaged, on another file system, or in another run of a
store; one of its files is missing, has another length, or was written to after its checkpoint was committed;
a block that is read does not match its checksum. Then what is concerned is not shared, and the save writes it
like anything else. Damage that changes neither length nor time of a file, in a block that is not read, goes
unnoticed here, as it does in the earlier checkpoint until that is verified.

Files are shared before they are compared. From then on the save has names of its own for them, or references
to them, and whoever removes the earlier checkpoint takes nothing away.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from waystation import _native, _plans, grid, storage
from waystation._distinct import distinct, distinct_objects
from waystation._errors import Cancelled, Conflict, WaystationError
from waystation._options import Options
from waystation.frameworks.base import ArraySource, StoredArray
from waystation.layouts.native import commit, engine_job, names, places, read, read_job, tables
from waystation.layouts.native.chunks import Chunks
from waystation.layouts.native.read import OpenCheckpointable
from waystation.layouts.native.read_job import ReadFile
from waystation.layouts.native.records import DataPlace
from waystation.layouts.native.references import Owners, References
from waystation.layouts.native.write_plan import SharedFile, SharedFiles, segment_words

Integers = NDArray[np.int64]

_BLOCK = tables.BLOCK_BYTES
# Of the bytes of a file so many have to be live: one of two.
_LIVE_ONE_OF = 2
# More files of less than so many bytes are written again as one: finished arrays must not end as a file each.
_SMALL_BYTES = 8 << 20
_MOST_SMALL_FILES = 16
# Blocks that are read from earlier files for arrays of which no other block is equal.
_BLOCKS_ON_SUSPICION = 16
# Blocks that are read from earlier files at a time.
_BLOCKS_AT_A_TIME = 256

_log = logging.getLogger("waystation")


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier checkpoint.

    Attributes:
        root: Its directory, held open.
        states: Those of it that could be opened, by name.
        committed_ns: When its record was written, by the clock of the file system.
    """

    root: storage.Root
    states: dict[str, OpenCheckpointable]
    committed_ns: int

    @classmethod
    def open(cls, path: str, wanted: Sequence[str]) -> Earlier | None:
        """The states of these names in the checkpoint at a path; None if nothing of it can be shared."""
        try:
            root = storage.of(path).hold(path)
            record = commit.read_record(path, root)
            status = root.status(os.path.join(path, names.RECORD))
        except WaystationError as error:
            _log.warning("nothing of '%s' is shared, so all arrays are written: %s", path, error)
            return None
        if status is None or record.local is not None:
            return None
        states = {}
        for name in wanted:
            if name not in record.checkpointables:
                continue
            try:
                files = read.read_files(*record.entry(path, name), root)
                if files.contents:  # else it is no state
                    states[name] = read.decode_checkpointable(files, root)
            except WaystationError as error:
                _log.warning("no array of '%s' in '%s' is shared: %s", name, path, error)
        return cls(root, states, status.identity.modified_ns)

    def may_share_with(self, target: str) -> bool:
        """Whether a checkpoint at a path may have files of it, as far as the paths tell."""
        is_beside = os.path.dirname(self.root.path) == os.path.dirname(target)
        if is_beside or not (storage.is_in_store(target) or storage.is_in_store(self.root.path)):
            return True  # of file systems they tell themselves
        _log.warning(
            "nothing of '%s' is shared, so all arrays are written: in a store checkpoints share files only "
            "beside each other, and '%s' lies elsewhere",
            self.root.path,
            target,
        )
        return False

    def is_as_committed(self, source: str, nbytes: int, found: storage.Status | None) -> bool:
        """Whether a file of it, or a further name of one, is what its record vouches for, as far as its
        length and time tell.

        Args:
            source: The file, for the log.
            nbytes: Its length, by the tables.
            found: What is there.
        """
        is_whole = found is not None and found.kind == "file" and found.nbytes == nbytes
        if found is not None and is_whole and found.identity.modified_ns <= self.committed_ns:
            return True
        _log.warning("'%s' is not as it was committed, so its arrays are written again", source)
        return False

    def owners(self) -> Owners:
        """The checkpoints in a store that have its data, with the directories of these."""
        found: Owners = {}
        for opened in self.states.values():
            own = DataPlace(*map(os.path.basename, os.path.split(opened.directory)))
            for place in (own, *opened.record.places):
                found.setdefault(place.checkpoint, set()).add(place.directory)
        return found


@dataclass(frozen=True, slots=True)
class Place:
    """Where shared files get their names.

    Attributes:
        directory: The directory of the state in the attempt.
        process: The process that saves. It shares files that a process of this number has written, and so no
            file is shared twice.
        options: Of the save.
        on_job: Called with each job of the engine when it starts.
        heartbeat: Called from time to time while one runs.
    """

    directory: str
    process: int
    options: Options
    on_job: Callable[[_native.Job], None]
    heartbeat: Callable[[], None] = lambda: None


def share(
    earlier: Earlier,
    name: str,
    chunks: Chunks,
    sources: Sequence[ArraySource],
    labels: Sequence[str],
    place: Place,
) -> SharedFiles | None:
    """Shares data files of an earlier state.

    Args:
        earlier: The earlier checkpoint.
        name: Of the state.
        chunks: What this process saves of the state; their memory is final.
        sources: All arrays.
        labels: Their labels.
        place: Where the files get their names.

    Returns:
        What is shared, and which chunks are equal besides; None if no chunk is.
    """
    opened = earlier.states.get(name)
    if opened is None:
        return None
    try:
        candidates = _candidates(opened, chunks, sources, labels, place.process)
        files = _Files.share(earlier, opened, candidates, place)
    except Cancelled:
        raise
    except WaystationError as error:
        _log.warning("no array of '%s' in '%s' is shared: %s", name, earlier.root.path, error)
        return None
    try:
        found = _Comparison(candidates.of(files.numbers), files, chunks, sources, place).run()
        decided = _decide(found, files, chunks)
        files.settle()
        return decided
    except BaseException:
        files.drop_all()
        raise


# ---- chunks that may be equal ------------------------------------------------------------------


@dataclass(slots=True)
class _Candidates:
    """Chunks that are stored alike in an earlier file, sorted by their place there.

    Attributes:
        chunks: Their numbers among those that are saved.
        files: The number of the earlier file of each.
        offsets: Where each begins in it.
        lengths: Its bytes.
    """

    chunks: Integers
    files: Integers
    offsets: Integers
    lengths: Integers

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def ends(self) -> Integers:
        """Where each ends in its file."""
        return self.offsets + self.lengths

    def kept(self, mask: NDArray[np.bool_]) -> _Candidates:
        """Some of them."""
        return _Candidates(self.chunks[mask], self.files[mask], self.offsets[mask], self.lengths[mask])

    def of(self, files: Sequence[int]) -> _Candidates:
        """Those of some files."""
        return self.kept(np.isin(self.files, np.array(files, np.int64)))

    def bytes_of(self, file: int, mask: NDArray[np.bool_] | None = None) -> int:
        """How many bytes those of a file have, or some of them."""
        own = self.files == file
        return int(self.lengths[own if mask is None else own & mask].sum())


def _candidates(
    opened: OpenCheckpointable,
    chunks: Chunks,
    sources: Sequence[ArraySource],
    labels: Sequence[str],
    process: int,
) -> _Candidates:
    """The chunks that have an equal label, dtype, shape and box in a file of the process."""
    counterparts = _counterparts(opened, sources, labels)
    chosen = np.flatnonzero((counterparts[chunks.arrays] >= 0) & (chunks.lengths > 0))
    earlier = counterparts[chunks.arrays[chosen]]
    numbers = _chunk_numbers(opened.tables, chunks, chosen, earlier)
    chosen, earlier, numbers = (column[numbers >= 0] for column in (chosen, earlier, numbers))
    lengths = chunks.lengths[chosen]
    files, offsets = places.find_places(opened.tables, earlier, numbers, lengths)
    order = np.lexsort((offsets, files))
    found = _Candidates(chosen[order], files[order], offsets[order], lengths[order])
    own = np.flatnonzero(np.asarray(opened.tables.files["process"]) == process)
    is_own = np.isin(found.files, own)
    # The format lets chunks share bytes, which no save has made them do. One of them is not looked at then.
    overlaps = np.zeros(len(found), bool)
    overlaps[1:] = (found.files[1:] == found.files[:-1]) & (found.offsets[1:] < found.ends[:-1])
    return found.kept(is_own & ~overlaps)


def _counterparts(
    opened: OpenCheckpointable, sources: Sequence[ArraySource], labels: Sequence[str]
) -> Integers:
    """Of each array the number of the earlier one that has the same label, and bytes of the same kind; or
    -1."""
    by_label = {label: number for number, label in enumerate(opened.tree.labels)}
    found = np.array([by_label.get(label, -1) for label in labels], np.int64).reshape(-1)
    if not len(opened.tree.arrays):
        return np.full(len(labels), -1, np.int64)
    known: dict[tuple[str, tuple[int, ...]], int] = {}

    def forms(arrays: Sequence[ArraySource] | Sequence[StoredArray]) -> Integers:
        kinds, which = distinct_objects(arrays)
        own = [known.setdefault((kind.storage_dtype, kind.storage_shape), len(known)) for kind in kinds]
        return np.array(own, np.int64)[which]

    is_alike = forms(opened.tree.arrays)[found] == forms(sources)
    return np.where(is_alike, found, -1)


def _chunk_numbers(decoded: tables.Tables, chunks: Chunks, chosen: Integers, arrays: Integers) -> Integers:
    """Of each of these chunks the number of the one of the same box in an earlier array; -1 if there is
    none."""
    entries = decoded.arrays[arrays]
    is_single = (entries["kind"] == tables.REGULAR) & (entries["chunk_count"] == 1)
    numbers = np.where(is_single, 0, -1)
    places_of_others = np.flatnonzero(np.isin(chosen, list(chunks.others))) if chunks.others else ()
    for place in map(int, places_of_others):
        chunk = chunks.others[int(chosen[place])]
        if chunk.offset is not None:
            numbers[place] = _number_of_box(decoded, int(arrays[place]), (chunk.offset, chunk.shape))
    return numbers


def _number_of_box(decoded: tables.Tables, array: int, box: grid.Box) -> int:
    """The number of the chunk of an array that has this box; -1 if there is none."""
    entry, shape = decoded.arrays[array], decoded.array_shape(array)
    if int(entry["kind"]) in (tables.REGULAR, tables.RUNS):
        chunks = grid.ChunkGrid(shape, decoded.chunk_shape(array))
        number = 0
        for begin, step, count in zip(box[0], chunks.chunk_shape, chunks.counts, strict=True):
            number = number * count + begin // step
        return number if number < chunks.chunk_count and chunks.box(number) == box else -1
    begin = int(entry["first_dim"]) + len(shape)
    numbers, boxes = grid.irregular_chunks_meeting(decoded.dims, int(entry["chunk_count"]), box, begin)
    found = [grid.box_at(boxes, place) for place in range(len(numbers))]
    return int(numbers[0]) if found == [box] else -1


# ---- files -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Files:
    """Earlier files that have names in the attempt, or references.

    Attributes:
        opened: The earlier state.
        entries: `FILE_ENTRY` of all its files.
        references: Those of this process, in a store.
        paths: The path of each that is shared, by its number: in the attempt; in a store where it is.
    """

    opened: OpenCheckpointable
    entries: tables.Table
    references: References | None = None
    paths: dict[int, str] = field(default_factory=dict)

    @property
    def numbers(self) -> list[int]:
        """The numbers of those that are shared."""
        return list(self.paths)

    @classmethod
    def share(
        cls, earlier: Earlier, opened: OpenCheckpointable, candidates: _Candidates, place: Place
    ) -> _Files:
        """Shares the files for which it may pay, and which are as they were committed."""
        files = cls(opened, np.asarray(opened.tables.files[:]))
        wanted = [
            number
            for number in distinct(candidates.files).tolist()
            if candidates.bytes_of(number) * _LIVE_ONE_OF >= int(files.entries["file_bytes"][number])
        ]
        try:
            if storage.of(place.directory).renames is None:
                files._refer(earlier, wanted, place)
            else:
                for number in wanted:
                    files._link(earlier, number, place)
        except BaseException:
            files.drop_all()
            raise
        return files

    def _link(self, earlier: Earlier, number: int, place: Place) -> None:
        (source,) = self.opened.paths([number])
        target = os.path.join(place.directory, os.path.basename(source))
        renames = storage.of(place.directory).renames
        if renames is None or not renames.share(source, target, root=earlier.root):
            return
        self.paths[number] = target
        if not self._is_as_committed(number, storage.status(target, follow_links=False), earlier):
            self.drop([number])

    def _refer(self, earlier: Earlier, wanted: Sequence[int], place: Place) -> None:
        """Refers to files in a store, and then makes sure that whoever removes the earlier checkpoint has not
        begun before that."""
        if not wanted:
            return
        self.references = References(place.directory, place.process)
        self.paths = dict(zip(wanted, self.opened.paths(wanted), strict=True))
        self.settle()
        if not earlier.root.is_current():
            raise Conflict("it was replaced or deleted meanwhile", path=earlier.root.path)
        found = storage.side_by_side(place.directory, storage.status, self.paths.values())
        for number, status in zip(wanted, found, strict=True):
            if not self._is_as_committed(number, status, earlier):
                self.drop([number])

    def _is_as_committed(self, number: int, found: storage.Status | None, earlier: Earlier) -> bool:
        (source,) = self.opened.paths([number])
        return earlier.is_as_committed(source, int(self.entries["file_bytes"][number]), found)

    def drop(self, numbers: Sequence[int]) -> None:
        """Takes their names from some again; references to them go by `settle`."""
        for number in numbers:
            path = self.paths.pop(number)
            if self.references is None:
                storage.remove_file(path)

    def settle(self) -> None:
        """Refers to those that are shared now, and to no others."""
        if self.references is not None:
            self.references.put(
                (self.opened.place(number), os.path.basename(path)) for number, path in self.paths.items()
            )

    def drop_all(self) -> None:
        """Shares nothing any more."""
        self.drop(self.numbers)
        self.settle()

    @property
    def read_by(self) -> storage.Root | None:
        """What reads them: on a file system they have names of their own."""
        return None if self.references is None else self.opened.root

    def read_file(self, number: int) -> ReadFile:
        """What the engine has to know of one, to read and verify it."""
        nbytes = int(self.entries["file_bytes"][number])
        return self.paths[number], nbytes, self.opened.tables.file_checksums(number)

    def shared(self, number: int) -> SharedFile:
        """What the tables of the new checkpoint have of one."""
        place = None if self.references is None else self.opened.place(number)
        return SharedFile(self.entries[number], bytes(self.opened.tables.file_checksums(number)), place)


def _decide(
    equal: tuple[_Candidates, NDArray[np.bool_]], files: _Files, chunks: Chunks
) -> SharedFiles | None:
    """Keeps the files that have enough live bytes, and takes their names from the others."""
    candidates, is_equal = equal
    if not is_equal.any():
        files.drop(files.numbers)
        return None
    sizes = {number: int(files.entries["file_bytes"][number]) for number in files.numbers}
    kept = [
        number
        for number, nbytes in sizes.items()
        if candidates.bytes_of(number, is_equal) * _LIVE_ONE_OF >= nbytes
    ]
    small = [number for number in kept if sizes[number] < _SMALL_BYTES]
    if len(small) > _MOST_SMALL_FILES:
        kept = [number for number in kept if sizes[number] >= _SMALL_BYTES]
    files.drop([number for number in sizes if number not in kept])
    found = candidates.kept(is_equal)
    is_equal_chunk = np.zeros(len(chunks), bool)
    is_equal_chunk[found.chunks] = True
    of_chunks, offsets = np.full(len(chunks), -1, np.int64), np.zeros(len(chunks), np.int64)
    for place, number in enumerate(kept):
        own = found.files == number
        of_chunks[found.chunks[own]] = place
        offsets[found.chunks[own]] = found.offsets[own]
    return SharedFiles([files.shared(number) for number in kept], of_chunks, offsets, is_equal_chunk)


# ---- the comparison ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Pieces:
    """What candidates have of the blocks of files, sorted by block and place.

    Attributes:
        blocks: The block of each piece, counted over all earlier files.
        candidates: The candidate.
        begins: Where in the candidate it begins.
        lengths: Its bytes.
        in_blocks: Where in the block it begins.
    """

    blocks: Integers
    candidates: Integers
    begins: Integers
    lengths: Integers
    in_blocks: Integers

    @classmethod
    def of(cls, candidates: _Candidates, first_blocks: Integers) -> _Pieces:
        firsts, lasts = candidates.offsets // _BLOCK, (candidates.ends - 1) // _BLOCK
        counts = lasts - firsts + 1
        which = np.repeat(np.arange(len(candidates)), counts)
        local = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts) + firsts[which]
        begins = np.maximum(local * _BLOCK, candidates.offsets[which])
        ends = np.minimum((local + 1) * _BLOCK, candidates.ends[which])
        blocks = first_blocks[candidates.files[which]] + local
        return cls(blocks, which, begins - candidates.offsets[which], ends - begins, begins - local * _BLOCK)


class _Comparison:
    """Finds which candidates are equal to what is stored.

    Args:
        candidates: They.
        files: The earlier files that they are stored in.
        chunks: What is saved.
        sources: All arrays.
        place: Options, and who hears of jobs.
    """

    def __init__(
        self,
        candidates: _Candidates,
        files: _Files,
        chunks: Chunks,
        sources: Sequence[ArraySource],
        place: Place,
    ) -> None:
        self._candidates = candidates
        self._files = files
        self._chunks, self._sources = chunks, sources
        self._place = place
        self._first_blocks = files.entries["first_block"].astype(np.int64)
        self._pieces = _Pieces.of(candidates, self._first_blocks)
        self._may_be_equal = np.ones(len(candidates), bool)

    def run(self) -> tuple[_Candidates, NDArray[np.bool_]]:
        """The candidates, and which of them are equal. Of files that cannot be shared any more, candidates
        that differ nowhere as far as is known count as equal: they are written anyway."""
        undecided = self._compare_in_memory()
        for number in self._files.numbers:
            live = self._candidates.bytes_of(number, self._may_be_equal)
            if live * _LIVE_ONE_OF < int(self._files.entries["file_bytes"][number]):
                self._files.drop([number])
        for batch in self._batches(undecided):
            self._compare_with_stored(batch)
        return self._candidates, self._may_be_equal

    def _compare_in_memory(self) -> Integers:
        """Compares all blocks that candidates fill; returns the pieces of which that has decided nothing."""
        pieces = self._pieces
        if not len(pieces.blocks):
            return np.zeros(0, np.int64)
        firsts = np.flatnonzero(np.diff(pieces.blocks, prepend=-1))
        counts = np.diff(firsts, append=len(pieces.blocks))
        blocks = pieces.blocks[firsts]
        is_filled = np.add.reduceat(pieces.lengths, firsts) == self._block_lengths(blocks)
        is_alone = is_filled & (counts == 1)
        # One block of each candidate that fills one goes first: of those that differ it is the only one.
        ranks = np.ones(len(blocks), np.int64)
        alone = np.flatnonzero(is_alone)
        owners = pieces.candidates[firsts[alone]]
        ranks[alone[np.diff(owners, prepend=-1) != 0]] = 0
        order = np.flatnonzero(is_filled)
        order = order[np.argsort(ranks[order], kind="stable")]
        members = np.repeat(firsts[order], counts[order]) + _counting(counts[order])
        rows = np.stack([pieces.candidates[members], pieces.begins[members], pieces.lengths[members]], axis=1)
        is_equal = np.zeros(len(blocks), bool)
        is_equal[order] = self._equal(
            self._words(np.arange(len(self._candidates))), rows, counts[order], self._expected(blocks[order])
        )
        self._may_be_equal[pieces.candidates[firsts[is_alone & ~is_equal]]] = False
        is_undecided = np.repeat(~is_equal & ~is_alone, counts)
        is_undecided &= self._may_be_equal[pieces.candidates]
        return self._worth_reading(np.flatnonzero(is_undecided), pieces.candidates[~is_undecided])

    def _worth_reading(self, undecided: Integers, decided: Integers) -> Integers:
        """Those of the undecided pieces whose blocks are to be read.

        A block is read for an array of which another block is equal. An array of which nothing is known lies
        in few blocks, with others that differ: to read them costs as much as to write the array. So that is
        done for a few blocks only, and what is not decided counts as different.

        Args:
            undecided: They.
            decided: Of the other pieces their candidates, some of which are known to differ.
        """
        pieces = self._pieces
        is_known = np.zeros(len(self._candidates), bool)
        is_known[decided] = True
        blocks, wanted = pieces.blocks[undecided], is_known[pieces.candidates[undecided]]
        others = distinct(blocks[~np.isin(blocks, blocks[wanted])])
        is_read = np.isin(blocks, blocks[wanted]) | np.isin(blocks, others[:_BLOCKS_ON_SUSPICION])
        self._may_be_equal[pieces.candidates[undecided[~is_read]]] = False
        return undecided[is_read]

    def _batches(self, undecided: Integers) -> Iterator[Integers]:
        """The undecided pieces of files that may be shared, some blocks at a time. Those of candidates that
        have been found to differ meanwhile are left out."""
        pieces = self._pieces
        blocks = distinct(pieces.blocks[undecided])
        # The engine writes nothing yet, so its share of the bound on memory is free.
        bound = self._place.options.engine.staging_bytes
        count = _BLOCKS_AT_A_TIME if bound is None else max(1, min(_BLOCKS_AT_A_TIME, bound // _BLOCK))
        for begin in range(0, len(blocks), count):
            own = undecided[np.isin(pieces.blocks[undecided], blocks[begin : begin + count])]
            shared = np.isin(self._candidates.files[pieces.candidates[own]], self._files.numbers)
            own = own[shared & self._may_be_equal[pieces.candidates[own]]]
            if len(own):
                yield own

    def _compare_with_stored(self, members: Integers) -> None:
        """Compares pieces one by one, with what else the file has in their blocks."""
        pieces = self._pieces
        blocks = distinct(pieces.blocks[members])
        slab = _native.allocate(len(blocks) * _BLOCK)
        for number in self._read(blocks, slab):
            self._files.drop([number])
        shared = np.isin(self._candidates.files[pieces.candidates[members]], self._files.numbers)
        members = members[shared]
        if not len(members):
            return
        owners, own = np.unique(pieces.candidates[members], return_inverse=True)
        stored = _plans.byte_segment(0, slab.nbytes, slab.address)
        words = np.concatenate([self._words(owners), np.array(stored, np.int64)])
        begins = np.searchsorted(blocks, pieces.blocks[members]) * _BLOCK
        starts, lengths = pieces.in_blocks[members], pieces.lengths[members]
        after = starts + lengths
        rests = self._block_lengths(pieces.blocks[members]) - after
        old = np.full(len(members), len(owners), np.int64)
        rows = np.stack(
            [old, begins, starts, own, pieces.begins[members], lengths, old, begins + after, rests], axis=1
        )
        counts, expected = np.full(len(members), 3, np.int64), self._expected(pieces.blocks[members])
        is_equal = self._equal(words, rows, counts, expected, slab)
        self._may_be_equal[pieces.candidates[members[~is_equal]]] = False

    def _read(self, blocks: Integers, slab: _native.Slab) -> list[int]:
        """Reads and verifies blocks of earlier files. Returns the files of which that fails."""
        files = np.searchsorted(self._first_blocks, blocks, side="right") - 1
        addresses = slab.address + np.arange(len(blocks)) * _BLOCK
        try:
            self._read_of(files, blocks, addresses, slab)
            return []
        except Cancelled:
            raise
        except WaystationError:
            pass  # of one of them
        failed = []
        for number in distinct(files).tolist():
            own = files == number
            try:
                self._read_of(files[own], blocks[own], addresses[own], slab)
            except Cancelled:
                raise
            except WaystationError as error:
                _log.warning("the arrays of a file are written again, for it cannot be shared: %s", error)
                failed.append(number)
        return failed

    def _read_of(self, files: Integers, blocks: Integers, addresses: Integers, slab: _native.Slab) -> None:
        used, which = np.unique(files, return_inverse=True)
        begins = (blocks - self._first_blocks[files]) * _BLOCK
        words = _plans.byte_reads(which, begins, self._block_lengths(blocks), addresses)
        found = [self._files.read_file(number) for number in used.tolist()]
        job = read_job.start(found, words, slab, self._place.options, root=self._files.read_by)
        self._finish(job)

    def _equal(
        self,
        words: Integers,
        rows: Integers,
        counts: Integers,
        expected: NDArray[np.uint64],
        stored: _native.Slab | None = None,
    ) -> NDArray[np.bool_]:
        """Whether each block has the checksum that is expected."""
        if not len(counts):
            return np.zeros(0, bool)
        job = _native.start_comparison(
            words,
            np.ascontiguousarray(rows, np.int64),
            counts.astype(np.int64),
            expected,
            (self._chunks, stored),
            threads=self._place.options.engine.threads,
        )
        return np.frombuffer(self._finish(job)["equal"], np.uint8).astype(bool)

    def _finish(self, job: _native.Job) -> Mapping[str, bytes]:
        self._place.on_job(job)
        try:
            while not job.wait(engine_job.HEARTBEAT_S):
                self._place.heartbeat()
            return job.result()
        except BaseException:
            read_job.stop([job])
            raise

    def _words(self, candidates: Integers) -> Integers:
        """The engine's records of some candidates, whose offsets say nothing."""
        numbers = self._candidates.chunks[candidates]
        others = self._chunks.others
        if not others:
            zeros = np.zeros(len(numbers), np.int64)
            lengths, addresses = self._chunks.lengths[numbers], self._chunks.addresses[numbers]
            return _plans.byte_segments_at(zeros, lengths, addresses)
        words: list[int] = []
        for number in numbers.tolist():
            other = others.get(number)
            if other is None:
                nbytes, address = int(self._chunks.lengths[number]), int(self._chunks.addresses[number])
                words += _plans.byte_segment(0, nbytes, address)
            else:
                words += segment_words(0, other, self._sources[other.array].storage_item_bytes)
        return np.array(words, np.int64)

    def _expected(self, blocks: Integers) -> NDArray[np.uint64]:
        return np.ascontiguousarray(self._files.opened.tables.checksums[blocks], np.uint64)

    def _block_lengths(self, blocks: Integers) -> Integers:
        """The bytes of blocks, the last of a file may be shorter."""
        files = np.searchsorted(self._first_blocks, blocks, side="right") - 1
        sizes = self._files.entries["file_bytes"].astype(np.int64)[files]
        lengths: Integers = np.minimum(_BLOCK, sizes - (blocks - self._first_blocks[files]) * _BLOCK)
        return lengths


def _counting(counts: Integers) -> Integers:
    """0, 1, … for each count."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
