"""Opens a checkpointable and reads boxes of its arrays into memory.

Opening verifies every metadata file against the record; large tables are opened only, and their pages
verified one by one as they are needed. Reading turns boxes into the engine's plan: whole arrays by a
vectorised path, anything else chunk by chunk through the grid; all of it goes down in one call. A checksum
mismatch comes back naming the arrays that the damaged block holds.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from waystation import _native, _plans, storage
from waystation._collection import paused_collection
from waystation._distinct import distinct_objects
from waystation._errors import Corrupt, InvalidInput, NotFound, Unsupported, WaystationError
from waystation._options import Options
from waystation.frameworks import dtypes
from waystation.frameworks.storage import StorageMetadata
from waystation.grid import Box
from waystation.layouts.native import boxes, commit, memory, names, places, read_job, tables, tree_file
from waystation.layouts.native.handler_files import HandlerFiles
from waystation.layouts.native.read_job import ReadFile
from waystation.layouts.native.records import (
    PYTREE,
    CheckpointableRecord,
    CheckpointRecord,
    DataPlace,
    Digest,
    join_strings,
    read_vouched,
    split_strings,
)
from waystation.layouts.opened import (
    Allocate,
    Destinations,
    Mapped,
    Over,
    Place,
    ReadOver,
    ReadStatistics,
    Request,
    StoredTree,
)

_TABLES = (names.FILE_TABLE, names.CHUNK_TABLE, names.CHECKSUM_TABLE)
LOADED_FILES = (names.TREE, *_TABLES)

# Tables of up to so many bytes together are read whole: one process reads them, in few requests, verifies
# them against the record and hands them to the others. Larger ones belong to jobs of thousands of processes.
# There each process needs a small part, and handing all to all would send through one coordinator thousands
# of times what they read together if every process reads the pages that it needs from storage itself.
PAGED_FROM_BYTES = 16 << 20


@dataclass(slots=True)
class OpenCheckpointable:
    """A checkpointable whose metadata has been read and verified.

    Attributes:
        directory: Where its files are.
        record: Its record.
        tree: Its structure and leaves.
        tables: Where its chunks are.
        root: The directory beneath which its files are opened; without it, they are by their paths.
        may_be_longer: Whether a data file may have more bytes than the tables say.
    """

    directory: str
    record: CheckpointableRecord
    tree: StoredTree
    tables: tables.Tables
    root: storage.Root | None = None
    may_be_longer: bool = False

    @property
    def notices_absence(self) -> bool:
        """Whether a read fails where a file is missing: always."""
        return True

    @property
    def read_over(self) -> ReadOver | None:
        """How arrays are made before their memory is filled."""
        return self._read_over

    def _read_over(
        self,
        arrays: Sequence[int],
        options: Options,
        on_job: Callable[[_native.Job], None],
        statistics: ReadStatistics,
        over: Over,
        requests: Sequence[Request] = (),
        allocate: Allocate = memory.allocate,
    ) -> tuple[Sequence[object], list[list[np.ndarray[Any, Any]]]]:
        """See `ReadOver`."""
        stored, count = self.tree.arrays, len(arrays)
        with paused_collection():
            kinds, which = distinct_objects([stored[number] for number in arrays])
            forms = [dtypes.of_stored(kind) for kind in kinds]
            nbytes = [_nbytes(kind.shape, form) for kind, form in zip(kinds, forms, strict=True)]
            others = _forms(self, requests)
            sizes = np.array([*nbytes, *_sizes(requests, others)], np.int64)
            sizes = np.concatenate([sizes[which], sizes[len(kinds) :]])
            places, addresses = allocate(sizes.tolist())
            slabs, offsets = [slab for slab, _ in places], [offset for _, offset in places]
            words, used = boxes.words_of_arrays(
                self.tables,
                boxes.Arrays(np.asarray(arrays, np.int64), kinds, which, forms),
                addresses,
                sizes,
                stored,
                self.tree.labels,
                list(zip(requests, others, strict=True)),
            )
        destinations = Destinations(addresses, slabs)
        with _running(self, words, used, destinations, options, on_job, statistics), paused_collection():
            made = over(slabs[:count], offsets[:count])
        statistics.bytes_needed += int(sizes.sum())
        return made, _as_arrays(iter(places[count:]), requests, others)

    def paths(self, files: Sequence[int] | None = None) -> list[str]:
        """The data files, in table order, or those of these numbers.

        Raises:
            Corrupt: The record does not list the place of one.
        """
        rows = self.tables.files[:] if files is None else self.tables.files[np.asarray(files, np.int64)]
        pairs = zip(rows["process"].tolist(), rows["sequence"].tolist(), strict=True)
        directories = self._directories(rows["location"])
        return [
            os.path.join(directory, names.data_file(*pair))
            for directory, pair in zip(directories, pairs, strict=True)
        ]

    def place(self, file: int) -> DataPlace:
        """Where one of its data files is."""
        location = int(self.tables.files[file]["location"])
        if location:
            return self.record.places[location - 1]
        target, directory = os.path.split(self.directory)
        return DataPlace(os.path.basename(target), directory)

    def _directories(self, locations: np.ndarray[Any, Any]) -> Iterable[str]:
        if not locations.any():
            return itertools.repeat(self.directory, len(locations))
        places = self.record.places
        if int(locations.max()) > len(places):
            raise Corrupt(
                f"a data file is in place {int(locations.max())} of the {len(places)} that its record lists",
                path=os.path.join(self.directory, names.FILE_TABLE),
            )
        run = os.path.dirname(os.path.dirname(self.directory))
        known = [self.directory, *(os.path.join(run, each.checkpoint, each.directory) for each in places)]
        return [known[location] for location in locations.tolist()]

    def storage_metadata(self, number: int) -> StorageMetadata:
        """How one of its arrays is cut."""
        stored = self.tree.arrays[number]
        chunk_shape = None
        if int(self.tables.arrays[number]["kind"]) in (tables.REGULAR, tables.RUNS):
            chunk_shape = self.tables.chunk_shape(number)[: len(stored.shape)]  # others have several
        return StorageMetadata.of(stored.shape, chunk_shape, stored.sharding)

    def read_boxes(
        self,
        requests: Sequence[Request],
        options: Options,
        on_job: Callable[[_native.Job], None],
        statistics: ReadStatistics,
        allocate: Allocate = memory.allocate,
    ) -> list[list[np.ndarray[Any, Any]]]:
        """Reads every requested box into memory of its own, see the function of this name."""
        return read_boxes(self, requests, options, on_job, statistics, allocate)

    def read_to_devices(
        self,
        requests: Sequence[Request],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[_native.Job], None],
        statistics: ReadStatistics,
    ) -> None:
        """Reads every requested box to given memory, that of devices above all; whatever used that before
        must have been waited for."""
        self.fill(requests, destinations, options, on_job, statistics)

    def mapped(self) -> Mapped:
        """The mappings of a load."""
        return Mappings(self)

    def fill(
        self,
        requests: Sequence[Request],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[_native.Job], None],
        statistics: ReadStatistics,
        found: list[list[Box]] | None = None,
    ) -> None:
        """Reads every requested box to where it goes; with `found`, which is as for `boxes.read_words`, what
        is here of them, which is then the caller's to count."""
        forms = _forms(self, requests)
        sizes = _sizes(requests, forms)
        stored, labels = self.tree.arrays, self.tree.labels
        addresses = destinations.addresses.tolist()
        words, used = boxes.read_words(self.tables, requests, forms, addresses, sizes, stored, labels, found)
        with _running(self, words, used, destinations, options, on_job, statistics):
            pass
        if used:
            statistics.bytes_needed += sum(sizes) if found is None else 0


def open_checkpoint(target: str, root: storage.Root | None = None) -> CheckpointRecord:
    """Reads the record of a checkpoint (beneath `root`)."""
    return commit.read_record(target, root)


def open_checkpointable(
    target: str, record: CheckpointRecord, name: str, root: storage.Root | None = None
) -> OpenCheckpointable:
    """Reads and verifies the metadata of one checkpointable, all of it (beneath `root`).

    Raises:
        CheckpointableNotFound: The checkpoint has no such checkpointable.
        InvalidInput: It is no state.
        Corrupt: A file is missing, damaged or not the one that was committed.
    """
    directory, digest = record.entry(target, name)
    return decode_checkpointable(read_files(directory, digest, root, paged_from_bytes=None), root)


@dataclass(slots=True)
class MetadataFiles:
    """The metadata files of a checkpointable, as they were committed.

    Attributes:
        directory: Where they are.
        record: The content of its record.
        contents: Those of the files that a load needs, in the order of `LOADED_FILES`; of the tree alone
            where each process reads the pages of the tables that it needs.
    """

    directory: str
    record: bytes
    contents: list[bytes]

    def decode_record(self) -> CheckpointableRecord:
        """What the record says."""
        return CheckpointableRecord.decode(self.record, names.checkpointable_record(self.directory))

    def pack(self) -> bytes:
        """As one string of bytes, for other processes."""
        return join_strings([os.fsencode(self.directory), self.record, *self.contents])

    @classmethod
    def unpack(cls, data: bytes) -> MetadataFiles:
        """What `pack` made."""
        directory, record, *contents = split_strings(data)
        return cls(os.fsdecode(directory), record, contents)


def read_files(
    directory: str,
    digest: Digest,
    root: storage.Root | None = None,
    *,
    paged_from_bytes: int | None = PAGED_FROM_BYTES,
    record_only: bool = False,
) -> MetadataFiles:
    """Reads the metadata files of a checkpointable and verifies them against its record, and this against
    the digest that the checkpoint has of it.

    Args:
        directory: Where they are.
        digest: Of the record.
        root: The directory beneath which they are opened.
        paged_from_bytes: Tables that have more bytes together are not read here, but page by page.
        record_only: Read no more than the record; of files that a handler made there is no more.

    Raises:
        Corrupt: A file is missing, damaged or not the one that was committed.
    """
    record_path = names.checkpointable_record(directory)
    try:
        (data,) = _read_committed({record_path: digest}, root)
    except Corrupt:
        # On a disk without an exchange of names a directory of a handler had such a name, too.
        record_path = os.path.join(directory, names.HANDLED_RECORD)
        if not storage.is_in_store(directory) or not storage.is_file(record_path, root):
            raise
        (data,) = _read_committed({record_path: digest}, root)
    own = CheckpointableRecord.decode(data, record_path)
    if own.kind != PYTREE or record_only:
        return MetadataFiles(directory, data, [])
    absent = set(LOADED_FILES) - own.tables.keys()
    if absent:
        raise Corrupt(f"'{record_path}' does not vouch for {', '.join(sorted(absent))}", path=record_path)
    if paged_from_bytes is not None and sum(own.tables[name].nbytes for name in _TABLES) > paged_from_bytes:
        tree_path = os.path.join(directory, names.TREE)
        return MetadataFiles(directory, data, _read_committed({tree_path: own.tables[names.TREE]}, root))
    # Those that are needed first, then whatever else the record vouches for (the index for other tools).
    listed = [*LOADED_FILES, *sorted(own.tables.keys() - set(LOADED_FILES))]
    contents = _read_committed({os.path.join(directory, table): own.tables[table] for table in listed}, root)
    return MetadataFiles(directory, data, contents[: len(LOADED_FILES)])


def decode_checkpointable(files: MetadataFiles, root: storage.Root | None = None) -> OpenCheckpointable:
    """Makes sense of verified metadata files; the others will be opened beneath `root`.

    Raises:
        InvalidInput: They are not those of a state.
        Unsupported: They refer to files of other checkpoints, which only those in object stores do.
        Corrupt: They contradict each other or the format.
    """
    record = files.decode_record()
    if record.kind != PYTREE:
        raise InvalidInput(f"'{files.directory}' holds no state: {record.handler} has saved it")
    if record.places and not storage.is_in_store(files.directory):
        raise Unsupported(
            f"'{files.directory}' was copied out of an object store by a program that does not know that it "
            f"shares files with other checkpoints, such as '{record.places[0].checkpoint}'; copy it with "
            "'waystation cp', which copies those as well",
            path=files.directory,
        )
    paths = [os.path.join(files.directory, name) for name in LOADED_FILES]
    tree_content, *encoded = files.contents
    tree = tree_file.decode(tree_content, paths[0])
    if encoded:
        decoded = tables.decode(encoded[0], encoded[1], encoded[2], (paths[1], paths[2], paths[3]))
        _check_arrays(tree, decoded, paths[2])
    else:
        file_bytes, chunk_bytes, checksum_bytes = (record.tables[name].nbytes for name in _TABLES)
        decoded = tables.open_paged(
            (paths[1], paths[2], paths[3]), (file_bytes, chunk_bytes, checksum_bytes), root
        )
        _check_count(tree, decoded, paths[2])
    return OpenCheckpointable(files.directory, record, tree, decoded, root)


def _read_committed(digests: Mapping[str, Digest], root: storage.Root | None) -> list[bytes]:
    """Files that a committed record names: their absence is damage."""
    try:
        return read_vouched(digests, root)
    except NotFound as error:
        raise Corrupt(f"a committed file is missing: {error.message}", **error.context) from error


def _check_count(tree: StoredTree, decoded: tables.Tables, path: str) -> None:
    if len(tree.arrays) != len(decoded.arrays):
        raise Corrupt(
            f"{len(decoded.arrays)} arrays in the chunk table, {len(tree.arrays)} in the tree", path=path
        )


def _check_arrays(tree: StoredTree, decoded: tables.Tables, path: str) -> None:
    _check_count(tree, decoded, path)
    kinds, which = distinct_objects(tree.arrays)
    shapes = [kind.storage_shape for kind in kinds]
    firsts, ndims = decoded.arrays["first_dim"].astype(np.int64), decoded.arrays["ndim"]
    differs = boxes.differing_shapes(decoded.dims, firsts, ndims, shapes, which)
    if differs.any():
        raise Corrupt(
            "the chunk table and the tree differ in an array's shape",
            path=path,
            array=tree.labels[int(np.argmax(differs))],
        )


def read_boxes(
    opened: OpenCheckpointable,
    requests: Sequence[Request],
    options: Options,
    on_job: Callable[[_native.Job], None],
    statistics: ReadStatistics,
    allocate: Allocate = memory.allocate,
) -> list[list[np.ndarray[Any, Any]]]:
    """Reads every requested box into memory of its own, which `allocate` gives.

    Returns:
        For each request an array per box, C-contiguous, at least 256-byte aligned, of the stored
        dtype (dtypes without a NumPy equal keep their storage form, with the trailing axis).
    """
    forms = _forms(opened, requests)
    sizes = _sizes(requests, forms)
    places, addresses = allocate(sizes)
    destinations = Destinations(addresses, [place[0] for place in places])
    opened.fill(requests, destinations, options, on_job, statistics)
    return _as_arrays(iter(places), requests, forms)


def _as_arrays(
    places: Iterator[Place], requests: Sequence[Request], forms: Sequence[dtypes.LogicalDtype]
) -> list[list[np.ndarray[Any, Any]]]:
    """The boxes of requests at places, in their order."""
    return [
        [memory.as_array(next(places), box[1] + form.host_trailing, form.host) for box in request.boxes]
        for request, form in zip(requests, forms, strict=True)
    ]


def _forms(opened: OpenCheckpointable, requests: Sequence[Request]) -> list[dtypes.LogicalDtype]:
    stored = opened.tree.arrays
    return [dtypes.of_stored(stored[request.array]) for request in requests]


def _sizes(requests: Sequence[Request], forms: Sequence[dtypes.LogicalDtype]) -> list[int]:
    """The bytes of each box."""
    return [
        _nbytes(box[1], form) for request, form in zip(requests, forms, strict=True) for box in request.boxes
    ]


def _nbytes(shape: tuple[int, ...], form: dtypes.LogicalDtype) -> int:
    return math.prod(shape + form.host_trailing) * form.host.itemsize


@contextlib.contextmanager
def _running(
    opened: OpenCheckpointable,
    words: np.ndarray[Any, Any],
    used: Sequence[int],
    destinations: Destinations,
    options: Options,
    on_job: Callable[[_native.Job], None],
    statistics: ReadStatistics,
) -> Iterator[None]:
    """Runs one engine job over the files that the plan uses; `words` count only those files. It is done after
    the block, and uses no memory any more, even on an error."""
    if not used:
        yield
        return
    verify = options.array.loading.verify is not False
    files = files_to_read(opened, used, with_checksums=verify)
    owners: object = destinations.owner
    unread = [number for number, file in enumerate(used) if file not in statistics.headers]
    if verify and unread:
        headers, words = _with_headers(opened, used, unread, words)
        owners = (owners, headers)
    job = read_job.start(
        files,
        words,
        owners,
        options,
        destinations.regions,
        root=opened.root,
        may_be_longer=opened.may_be_longer,
    )
    on_job(job)
    try:
        yield
    except BaseException:
        read_job.stop([job])
        raise
    try:
        read_job.finish(job, statistics)
    except WaystationError as error:
        name_arrays(opened, error)
        raise
    if verify:
        statistics.headers.update(used)


def files_to_read(opened: OpenCheckpointable, used: Sequence[int], *, with_checksums: bool) -> list[ReadFile]:
    """What the engine has to know of the data files that a plan uses: path, length, checksums."""
    if with_checksums:
        opened.tables.prefetch_checksums(used)
    sizes = opened.tables.files[np.asarray(used, np.int64)]["file_bytes"].tolist()
    return [
        (path, size, opened.tables.file_checksums(file) if with_checksums else None)
        for path, size, file in zip(opened.paths(used), sizes, used, strict=True)
    ]


def _with_headers(
    opened: OpenCheckpointable, used: Sequence[int], unread: Sequence[int], words: np.ndarray[Any, Any]
) -> tuple[_native.Slab, np.ndarray[Any, Any]]:
    """Adds the headers of files (by their places in `used`) to what is read, so that their blocks are
    verified like the rest.

    No byte of them is used: the tables say where everything is. But a file whose header is damaged is
    no longer what other programs can open.
    """
    files = opened.tables.files[np.array([used[number] for number in unread], np.int64)]
    lengths = files["data_start"].astype(np.int64)
    slab = _native.allocate(int(lengths.sum()))
    headers = _plans.byte_reads(unread, 0, lengths, slab.address + np.cumsum(lengths) - lengths)
    return slab, np.concatenate([headers, words])


def name_arrays(opened: OpenCheckpointable, error: WaystationError) -> None:
    """Adds to an engine error which arrays the bytes that it speaks of belong to."""
    path, offset = error.context.get("path"), error.context.get("offset")
    if path not in opened.paths() or offset is None:
        return
    file = opened.paths().index(path)
    begin = int(offset)
    labels = arrays_at(opened, file, begin, begin + int(error.context.get("length", 1)))
    if labels:
        shown = ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else "")
        error.where(array=shown)


def arrays_at(opened: OpenCheckpointable, file: int, begin: int, end: int) -> list[str]:
    """Labels of the arrays that have bytes in a range of a data file."""
    return [opened.tree.labels[array] for array in places.arrays_at(opened.tables, file, begin, end)]


def open_any(
    target: str, record: CheckpointRecord, name: str, root: storage.Root | None = None
) -> OpenCheckpointable | HandlerFiles:
    """Reads and verifies the metadata of one checkpointable, beneath `root`; looks at no file of a handler.

    Raises:
        CheckpointableNotFound: The checkpoint has no such checkpointable.
        Corrupt: A metadata file is missing, damaged or not the one that was committed.
    """
    directory, digest = record.entry(target, name)
    files = read_files(directory, digest, root, paged_from_bytes=None)
    own = files.decode_record()
    if own.kind == PYTREE:
        return decode_checkpointable(files, root)
    return HandlerFiles(own.files_directory(directory), own, root)


def array_count(target: str, record: CheckpointRecord, name: str) -> int:
    """How many arrays a checkpointable has, by its tree alone: its tables are not read.

    Raises:
        CheckpointableNotFound: The checkpoint has no such checkpointable.
        Corrupt: Its record or tree is missing, damaged or not the one that was committed.
    """
    directory, digest = record.entry(target, name)
    files = read_files(directory, digest, paged_from_bytes=0)
    if files.decode_record().kind != PYTREE:
        return 0
    return len(tree_file.decode(files.contents[0], os.path.join(directory, names.TREE)).arrays)


# ---- arrays that alias a mapping of their data file instead of being read ----------------------
#
# Only arrays stored whole, in one chunk, at an address that frameworks can alias. The mapping is private: a
# write to an array copies its page and never reaches the file. The file must not change while arrays live,
# and shrinking it would end the program with SIGBUS; hence this is off by default.

_MAP_ALIGN_BYTES = 64


class Mappings:
    """The mappings of one load: one per data file, alive as long as an array aliases it."""

    def __init__(self, opened: OpenCheckpointable) -> None:
        self._opened = opened
        self._maps: dict[int, mmap.mmap] = {}
        # Plain lists: one conversion of a column instead of one for every access.
        decoded = opened.tables
        single = (decoded.arrays["kind"] == tables.REGULAR) & (decoded.arrays["chunk_count"] == 1)
        self._is_single: list[bool] = single.tolist()
        first = np.where(single, decoded.arrays["first_chunk"], 0)
        self._first_chunks: list[Any] = decoded.chunks[first].tolist() if single.any() else []

    def array(self, request: Request) -> np.ndarray[Any, Any] | None:
        """The requested array over its mapping, None where it has to be read."""
        if not self._is_single[request.array]:
            return None
        stored = self._opened.tree.arrays[request.array]
        if request.boxes != [((0,) * len(stored.shape), stored.shape)]:
            return None
        file, _, offset, length = self._first_chunks[request.array]
        form = dtypes.of_stored(stored)
        shape = stored.shape + form.host_trailing
        if offset % _MAP_ALIGN_BYTES or length != math.prod(shape) * form.host.itemsize:
            return None
        return np.ndarray(shape, form.host, self._map(file), offset)

    def _map(self, file: int) -> mmap.mmap:
        mapped = self._maps.get(file)
        if mapped is None:
            expected = int(self._opened.tables.files[file]["file_bytes"])
            (path,) = self._opened.paths([file])
            mapped = self._maps[file] = _map_file(path, expected, self._opened.root)
        return mapped


def _map_file(path: str, expected_bytes: int, root: storage.Root | None) -> mmap.mmap:
    try:
        with storage.opened(path, root) as file:
            present = file.status.nbytes
            if present != expected_bytes:
                raise Corrupt(f"the file has {present} bytes where {expected_bytes} were written", path=path)
            return storage.mapped(file, writable=True)
    except NotFound as error:
        raise Corrupt("a committed file is missing", path=path) from error
