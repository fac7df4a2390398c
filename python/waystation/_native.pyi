"""The Rust engine. Internal: addresses are trusted, so only `waystation` itself may call it.

Every function that may block releases the GIL. Errors are the classes of `waystation.errors`. `words` are
records of the kind that is named, as `_plans` makes them.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, final

from typing_extensions import Buffer

_Version: TypeAlias = tuple[int, int, str | None, str | None]

BLOCK_BYTES: int  # file bytes under one checksum
TABLE_KINDS: tuple[str, ...]
ERROR_KINDS: tuple[str, ...]

# ---- format ------------------------------------------------------------------------------------

def crc32c(data: Buffer, /) -> int: ...
def crc64(data: Buffer, /) -> int: ...
def seal_json(body: bytes, /) -> bytes:
    """Frames a JSON value with its checksum: `{"crc64":"<16 hex>","record":<body>}\\n`."""

def open_sealed_json(data: Buffer, path: str, /) -> bytes:
    """Verifies the frame and returns the body. Raises Corrupt, naming `path`."""

def encode_table(kind: Literal["files", "chunks", "checksums"], sections: Sequence[Buffer], /) -> bytes:
    """Pages and checksums the sections of one table file. Entries are fixed-width, little-endian."""

def decode_table(kind: str, data: Buffer, path: str, /) -> list[bytes]:
    """Verifies every page and the table's own rules; returns the raw entries of each section."""

def parse_safetensors_header(
    data: Buffer, file_bytes: int, path: str, /
) -> tuple[dict[str, str] | None, list[tuple[str, str, tuple[int, ...], int, int]], int]:
    """Strictly parses the first bytes of a file of `file_bytes`.

    `data` begins at byte 0 and holds at least the whole header. Returns the metadata, the tensors as
    `(name, dtype, shape, begin, end)` in file order with absolute file offsets, and the offset at
    which data begins.
    """

def parse_safetensors_index(data: Buffer, path: str, /) -> dict[str, str]:
    """Strictly parses an index: the file of each tensor, a plain name. What else it says is stepped over."""

def parse_checksums(data: Buffer, path: str, /) -> dict[str, tuple[int, bytes]]:
    """Strictly parses a sealed file of checksums: of each file the length, and a little-endian u64 per block.
    Takes no more memory than a small multiple of the file's. Unsupported if it is of another version."""

def build_safetensors_header(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: dict[str, str] | None, align_bytes: int, /
) -> bytes:
    """Header of tensors laid out one after another in the given order, padded with spaces."""

# ---- memory ------------------------------------------------------------------------------------

@final
class Slab:
    """Host memory from the arena: page-aligned, writable through the buffer protocol, returned to
    the pool when the last view of it is gone. Its bytes are unspecified at first."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def allocate(nbytes: int, /) -> Slab: ...

@final
class PartReader:
    """One version of a file, of which small parts are read on the caller's thread. It has a descriptor of its
    own; `identity` is the device, the inode, the length and when the content changed last (ns)."""

    def __new__(cls, path: str, descriptor: int, identity: tuple[int, int, int, int], /) -> PartReader: ...
    def read(self, offset: int, nbytes: int, memory: Buffer, /) -> int | None:
        """Reads a part into memory that has 63 bytes more than it, to an address that is a multiple of 64.
        Returns where in the memory that is; None where the file is not that version any more."""

def dlpack_capsules(
    slabs: Sequence[Slab | None],
    offsets: Sequence[int],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[tuple[int, int]],
    /,
) -> list[Any]:
    """Arrays over parts of slabs, C-contiguous, as DLPack capsules ("dltensor") on the CPU: each keeps its
    slab's memory, from whoever takes it until that one is done. `dtypes`: DLPack's type code and bits. An
    array without elements may have no slab."""

@final
class Views:
    """Keeps the memory of arrays alive."""

def view_arrays(arrays: list[Any], alike: list[Any], /, *, hold: bool) -> tuple[bytes, bytes, Views | None]:
    """Of each array its kind and where it begins (int64 each), by the buffer protocol. Arrays of one shape
    are of one kind if their entries of `alike` are one object; kinds are counted as they first come. The kind
    is -1 where `alike` has None, or there is no C-contiguous buffer. `hold`: the views keep the memory."""

def distinct_objects(objects: list[Any], /) -> tuple[list[Any], bytearray]:
    """The distinct objects, by identity and in order, and for each object its place among them (int64)."""

def arena_statistics() -> dict[str, int]:
    """`{"live_bytes", "idle_bytes", "reused_bytes", "mapped_bytes", "limit_bytes"}`."""

def trim_arena() -> int:
    """Gives idle memory back to the system; returns the bytes freed."""

def prepare_memory(address: int, nbytes: int, /) -> None:
    """Touches memory that is about to be filled, in pages of the size that is cheaper now. Memory that is
    not the arena's, or was touched before, is left alone."""

def copy_batch(words: Buffer, owners: object, /, *, threads: int | None = None) -> None:
    """Copies host memory to host memory in parallel: `HOST_COPY`."""

# ---- devices -----------------------------------------------------------------------------------

def devices() -> list[dict[str, Any]]:
    """The CUDA devices of this process: `ordinal`, `name`, `total_bytes`, `pci_bus_id`,
    `compute_capability` (major, minor). Empty without a driver. Starts the driver (without making a
    context), so that children forked later cannot use CUDA."""

def gpu_direct_problem() -> str | None:
    """Why files cannot be read straight to memory of devices (GPUDirect Storage) here; None if they can be.
    Starts the driver, as `devices` does, and opens cuFile."""

def copy_from_devices(words: Buffer, slabs: Sequence[Slab], owners: object, /) -> None:
    """Copies device memory into slabs, as fast as the bus carries it: `ARRAY_COPY`.

    Rows follow one another in `slabs`. What writes to the sources must have been waited for. The slabs are
    pinned, and stay so in the arena. Unsupported without a CUDA driver. Ctrl-C is noticed; nothing writes to
    the slabs afterwards.
    """

# ---- files -------------------------------------------------------------------------------------

@final
class Directory:
    """An open directory, which stays the same whatever happens to its path. Functions that take it as `root`
    open the files at the paths that they are given beneath it: these begin with its own path. Unless
    `follow_links_out`, symbolic links that lead out of it are Unsupported (where the system has no `openat2`,
    all symbolic links beneath it)."""

    def __new__(cls, path: str, /, *, follow_links_out: bool = False) -> Directory: ...
    @property
    def path(self) -> str: ...
    def is_current(self) -> bool:
        """Whether its path still leads to it."""

    def open(self, path: str, /, *, flags: int = 0) -> int:
        """Opens what is at a path beneath it for reading; the caller closes the descriptor."""

    def fileno(self) -> int:
        """Its descriptor, which stays its own."""

@final
class StoreWaits:
    """Waits for stores, of threads that work for the one that has made this. Those of threads that such a
    thread has work for it are among them."""

    def __new__(cls) -> StoreWaits: ...
    def join(self) -> None:
        """Has the waits of this thread be among these, from now on."""

    def end(self) -> None:
        """Ends them, and those that are to come: they raise Cancelled."""

@final
class ObjectStore:
    """Everything beneath one bucket; asks nobody before it is used. The engine takes it as `root`, and then
    whole locations as paths. A version is its length, time of change (ns), ETag and generation. NotFound has
    the context `bucket` where there is no bucket."""

    def __new__(
        cls,
        location: str,
        /,
        *,
        options: Sequence[tuple[str, str]],
        deadline_s: float,
        allow_unconditional: bool,
        query: str | None = None,
        cache_directory: str | None = None,
        cache_bytes: int = 0,
    ) -> ObjectStore: ...
    def status(self, path: str, /) -> tuple[bool, _Version] | None:
        """Whether only objects beneath it are there, and the version of the object that is."""

    def get(self, wanted: Sequence[tuple[str, int]], /) -> list[tuple[bytes, _Version]]:
        """Whole objects by path and limit, several at a time. Corrupt if one is longer than its limit."""

    def get_beginning(self, path: str, nbytes: int, /) -> tuple[bytes, _Version]:
        """The first bytes of an object, fewer where it has fewer, by one request."""

    def get_range(self, path: str, begin: int, end: int, version: _Version, /) -> bytes:
        """Raises Conflict if the object is not this version any more."""

    def put(
        self, path: str, content: bytes, /, *, new: bool = False, unchanged: _Version | None = None
    ) -> _Version:
        """Puts a whole object; Conflict if it is to be new, or unchanged, and is not."""

    def put_all(self, contents: Sequence[tuple[str, Buffer]], /) -> None:
        """Puts whole objects, several at a time."""

    def copy(self, source: str, target: str, /) -> None:
        """Has the store copy an object."""

    def list(self, directory: str, /) -> tuple[list[tuple[str, _Version]], list[str]]:
        """The names of the objects directly beneath, with their versions, and of what stands for
        directories."""

    def bytes_beneath(self, directory: str, /) -> int:
        """The bytes of all objects beneath."""

    def remove(self, path: str, /, *, unchanged: _Version | None = None) -> None:
        """Conflict if it is to be unchanged and is not; Unsupported where the store cannot tell."""

    def removes_versions(self, directory: str, /) -> bool:
        """Whether the store removes an object on condition that it is unchanged; tried once, with an object
        beneath a directory."""

    def remove_all(self, directory: str, /) -> int:
        """Removes what is beneath; returns how many objects that were."""

@final
class Job:
    """A batch of reads or writes in the background. Dropping it cancels it and waits."""

    def wait(self, timeout_s: float | None = None, /) -> bool:
        """True when finished. Ctrl-C is noticed and raised while waiting."""

    def wait_gathered(self, position: int, timeout_s: float | None = None, /) -> bool:
        """True when every source byte before plan position `position` (bytes of segments, in plan
        order over all files) has been copied out, or the job has finished. Of a job with ranges that
        go `first`, only their bytes count."""

    def wait_arrived(self, records: int, timeout_s: float | None = None, /) -> bool:
        """True when the first `records` records of a read that announces are in place (on a device: copied
        to it), or the job has finished, well or not."""

    def arrived(self) -> int:
        """How many of the first records of a read that announces are in place, without a gap."""

    def done(self) -> bool: ...
    def progress(self) -> tuple[int, int]: ...
    def cancel(self) -> None: ...
    def result(self) -> dict[str, Any]:
        """Waits, then returns statistics, or raises the first error.

        Of a write: `{"checksums": [bytes, …] one u64 per block and file, "mode": str,
        "bytes_written": int, "gather_s": float, "write_s": float, "sync_s": float}`.
        Of a read: `{"bytes_read": int, "bytes_needed": int, "modes": [str, …] one per file,
        "first_touch_s": float, "gpu_direct_bytes": int, "gpu_direct_reason": str | None,
        "cached_bytes": int, "cache_problem": str | None, "repeated_requests": int}`.
        """

def start_write(
    files: Sequence[tuple[str, bytes, int, Buffer]],
    owners: object,
    /,
    *,
    sync: bool = True,
    group: SyncGroup | None = None,
    mode: str | None = None,
    block_bytes: int | None = None,
    depth: int | None = None,
    threads: int | None = None,
    staging_bytes: int | None = None,
    first: Sequence[tuple[int, int]] | None = None,
    throttle: str | None = None,
    root: ObjectStore | None = None,
) -> Job:
    """Creates and writes data files. Each is `(path, header, file_bytes, words)`.

    `header` fills the first bytes; `words` are segments that cover the rest without hole or overlap, in file
    order. The blocks of a segment partition its array (C order in the file); those of devices are
    C-contiguous. Existing paths are a Conflict. `owners` is kept until no thread reads sources.
    A failed or cancelled job removes the files that it created. With `sync` they are durable when the job
    ends; with a `group`, which holds them until then, when that is synced. `staging_bytes` bounds the job's
    own memory (at least one block of checksums). `first` are ranges of plan positions (see
    `Job.wait_gathered`) that are copied out before the rest. `throttle` names the file of one.
    """

def start_copy(
    files: Sequence[tuple[str, bytes, Buffer, int, Buffer | None, int | None]],
    sources: Sequence[tuple[str, int, Buffer | None, str | None]],
    /,
    *,
    source: Directory | ObjectStore | None = None,
    root: ObjectStore | None = None,
    sync: bool = True,
    group: SyncGroup | None = None,
    mode: str | None = None,
    read_mode: str | None = None,
    block_bytes: int | None = None,
    depth: int | None = None,
    threads: int | None = None,
    readers: int,
    staging_bytes: int | None = None,
    throttle: str | None = None,
) -> Job:
    """Makes new files of those of another storage, or of a directory held open. Each is
    `(path, header, words, file_bytes, block_checksums, crc64)`.

    `header` fills the first bytes; `words` are rows of three int64 for what follows, in order: the number of
    a source, an offset in it, and how many bytes. A file that is copied whole is one row and no header. Each
    of `sources` is `(path, file_bytes, block_checksums, version)`, and is verified where it is read, if it
    has checksums.

    Every block is compared with its checksum before it is written, every file with its own, where it has one,
    before it is whole. Damage is Corrupt, and fails the job, which then removes the files that it created.
    `readers` pieces are read at a time. `throttle` bounds what is read; `staging_bytes` bounds the memory for
    what has been read, and that for what is written. The rest is as for `start_write`.
    """

def compress_zstd(
    words: Buffer, owners: object, /, *, level: int, checksum: bool, threads: int | None = None
) -> tuple[Slab, list[tuple[int, int]]]:
    """Compresses arrays of host memory in parallel, each to one zstd frame with its size. With `checksum`,
    the CRC-32C of the frame follows it, little-endian, and counts as a part of it.

    `words` are segments, whose file offsets say nothing. Returns memory and `(offset, nbytes)` of each frame
    in it. Ctrl-C is noticed afterwards.
    """

def chunk_checksums(words: Buffer, owners: object, /, *, threads: int | None = None) -> list[int]:
    """The CRC-32C of arrays of host memory, given as segments. Ctrl-C is noticed afterwards."""

def start_comparison(
    words: Buffer,
    pieces: Buffer,
    counts: Buffer,
    expected: Buffer,
    owners: object,
    /,
    *,
    threads: int | None = None,
) -> Job:
    """Compares blocks of files with memory, by their checksums, and reads no file.

    `words` are segments, the arrays. `pieces` are rows of three int64: the number of an array, where in it
    the piece begins, its bytes. A block is the next `counts` of them, at most 256 KiB, whose crc64 should be
    `expected`. Blocks are taken in order; those of which every array is known to differ, by a block that has
    one piece, count as different. `owners` is kept until no thread reads sources. The job counts no bytes;
    its result is `{"equal": bytes}`, one of 0 or 1 for each block.
    """

def start_read(
    files: Sequence[tuple[str, int, Buffer | None]],
    words: Buffer,
    owners: object,
    /,
    *,
    mode: str | None = None,
    block_bytes: int | None = None,
    depth: int | None = None,
    threads: int | None = None,
    throttle: str | None = None,
    device_memory: Sequence[tuple[int, int, int]] | None = None,
    staging_bytes: int | None = None,
    announce: bool = False,
    gpu_direct: bool = False,
    among: tuple[int, int] | None = None,
    root: Directory | ObjectStore | None = None,
    may_be_longer: bool = False,
    versions: Sequence[str | None] | None = None,
) -> Job:
    """Reads boxes of stored chunks to chosen addresses. Each file is
    `(path, file_bytes, block_checksums)`; with checksums every block that is touched is verified
    whole, without them only the needed bytes are read.

    `device_memory` are ranges of CUDA devices' memory as `(ordinal, address, nbytes)`. Destinations in one of
    them are copied to, from pinned memory of at most `staging_bytes`, while more is read; whatever used that
    memory before must have been waited for. Unsupported without a CUDA driver. With `announce`, the job tells
    record by record what is in place (`Job.wait_arrived`). With `gpu_direct`, files without checksums are
    read straight to them where cuFile can do that; the statistics say how much was, and why the rest was not.

    A file that has not `file_bytes` is Corrupt; with `may_be_longer`, one that has fewer.

    `among` is the number of this process and the count of those that read the same through the page cache:
    each begins with another part.

    `versions` are the ETags that files must have, where their storage has such; another one is Conflict.
    """

def decode_chunks(words: Buffer, owners: object, /, *, threads: int | None = None) -> None:
    """Verifies and decompresses chunks in memory in parallel, and puts boxes of them in place.

    The records of one chunk follow each other. A chunk is one zstd frame or the bytes themselves; where
    it has a checksum, its last four bytes are the CRC-32C of the others. One that does not match, or has
    another length, is Corrupt; the error says which `chunk`, counted from the first. Ctrl-C is noticed
    afterwards.
    """

def decompress_zstd_frame(frame: Buffer, /, *, limit_bytes: int) -> bytes:
    """The content of one zstd frame; more than the limit is Corrupt."""

def create_throttle(
    path: str, /, *, bytes_per_s: int | None = None, requests_per_s: int | None = None
) -> None:
    """Makes a file that holds a limit: all jobs of all processes of this machine that name it together get
    no more (None is no limit). A read or write of up to `block_bytes` is one request. For benchmarks."""

def throttle_usage(path: str, /) -> dict[str, int]:
    """What they have asked for so far: `{"bytes", "requests"}`."""

def write_small_files(
    files: Sequence[tuple[str, Buffer]], /, *, sync: bool = True, group: SyncGroup | None = None
) -> None:
    """Creates each file and writes it, all in parallel; durable as there. Conflict if one exists."""

def read_small_files(
    paths: Sequence[str], /, *, limit_bytes: int | Sequence[int], root: Directory | None = None
) -> list[bytes]:
    """Reads whole files in parallel; one that is larger than the limit, of all or its own, is Corrupt before
    memory is taken for it."""

def table_counts(
    path: str, kind: str, file_bytes: int, /, *, root: Directory | ObjectStore | None = None
) -> list[int]:
    """The number of entries of each section of a table of `file_bytes`; reads its header page."""

def read_table_entries(
    path: str,
    kind: str,
    file_bytes: int,
    ranges: Sequence[tuple[int, int, int]],
    /,
    *,
    root: Directory | ObjectStore | None = None,
) -> list[bytes]:
    """Reads `(section, begin, end)` ranges of raw entries, in parallel, and verifies every page that it
    reads, the header page too. A reserved field in use is Unsupported; what must be true between entries
    is not checked."""

def sync_paths(paths: Sequence[str], /) -> None:
    """Makes files and directories (their entries) durable, all in parallel."""

def created_ns(path: str, /) -> int | None:
    """When what is at a path was created, in nanoseconds since 1970; None if its file system does not tell.
    A rename keeps it, no copy has that of its original, and no program can set it."""

@final
class SyncGroup:
    """Files that are made durable together, through the descriptors that wrote them, so that no failure of
    write-back is missed; all at once where that is faster. It is made before the first of them, with a
    directory on their file system. It holds few descriptors: what would be too many is closed before."""

    def __new__(cls, directory: str, /) -> SyncGroup: ...
    def add(self, paths: Sequence[str], /) -> None:
        """Adds directories (their entries), and files that were written by others."""

    def sync(self) -> None:
        """Makes durable what was added since the last time, and closes it."""

    def close(self) -> None:
        """Closes what was not synced; it has to come before the files are removed where open files stay."""

def rename_new(source: str, target: str, /) -> None:
    """Atomic rename that fails with Conflict if `target` exists, Unsupported where the file system
    cannot."""

def rename_exchange(first: str, second: str, /) -> None:
    """Atomically swaps two existing names; Unsupported where the file system cannot."""

def probe(directory: str, /) -> dict[str, Any]:
    """What the machine and the file system under `directory` offer: io_uring, O_DIRECT and its
    alignments, huge pages, RWF_NOWAIT, renames, cores, memory, file system type. Tried, not asked."""

def calibrate(directory: str, /, *, probe_bytes: int, force: bool = False) -> dict[str, Any]:
    """Measures the ways to write and read under `directory` and remembers the best per file system."""

def calibration(directory: str, /) -> dict[str, Any] | None:
    """What is remembered for the file system of `directory`."""

# ---- memory tier -------------------------------------------------------------------------------

def place_shard(
    entries: Sequence[tuple[str, str, Sequence[int], Sequence[int], Sequence[int], int]], /
) -> tuple[bytes, list[int], int]:
    """Lays out the boxes of arrays that make up a shard in a slot, in the given order.

    Each is `(path, dtype, array_shape, offset, shape, nbytes)`; no two have path and box in common. What is
    no array is an entry of one axis, as long as it has bytes. Returns the table of contents, where in the
    data each box begins, and how long the data are.
    """

def place_hosts(domains: Sequence[str], copies: int, /) -> list[list[int]]:
    """The groups of hosts, given by their failure domains, that keep so many copies of their shards."""

@final
class AgentClient:
    """This process, as the agent of its host knows it.

    Connections are made as they are needed and again when the agent was replaced; a call waits `timeout_s`
    for an agent to be there, and is Unavailable if none is; one that is there has a second at least to
    answer, and more to verify what it seals. Calls of several threads do not wait for each other. What was
    begun with one agent is finished with the next. Not to be used in a forked child.
    """

    def __new__(cls, directory: str, /, *, run: str | None = None, timeout_s: float = 30.0) -> AgentClient:
        """Greets the agent of the store in `directory`. Conflict if that is of another run (32 hex digits)
        than `run`, Unsupported if it speaks another version of the protocol."""

    def status(self) -> dict[str, Any]:
        """`{"agent_version": str, "process": int, "process_count": int, "directory": str, "run": str,
        "topology": str, "store": str, "epoch": int, "slot_bytes": int, "slot_count": int,
        "versions_per_shard": int, "adoption": {"is_new": bool, "free": int, "whole": int, "in_writing": int,
        "abandoned": int, "quarantined": int, "gone": int, "damaged": [str, …] why, one per slot},
        "host": str, "agent_count": int}`: the store, how its agent found it, and how many processes that
        agent watches; which of several hosts this is, and how many agents there are ("" and 1 if it is
        alone). Ids are 32 hex digits."""

    def metrics(self) -> str:
        """Its numbers, as text in Prometheus' exposition format."""

    def inventory(self) -> list[dict[str, Any]]:
        """Every slot: `{"slot": int, "state": "free" | "writing" | "sealed" | "committed" | "quarantined",
        "sequence": int}`; of one that is not free also `{"shard": str, "epoch": int, "step": int,
        "contents_bytes": int, "data_bytes": int, "process": int}`, the process that wrote it; of one that is
        sealed or committed also `{"digest": int}`. Equal digests of a shard are equal bytes."""

    def start_save(
        self,
        epoch: int,
        step: int,
        shard: str,
        contents: bytes,
        words: Buffer,
        owners: object,
        /,
        *,
        data_bytes: int,
        threads: int | None = None,
    ) -> Job:
        """Copies a version of a shard into a slot and has the agent verify and seal it.

        `contents` and `data_bytes` are of `place_shard`; `words` are segments, as `start_write` takes
        them, of host memory only, with offsets in the data; between segments are zeros. `owners` is kept
        until no thread reads sources. `Job.wait_gathered(data_bytes)` returns once everything was copied. Its
        result is `{"slot": int, "digest": int, "grant_s": float, "fill_s": float, "seal_s": float}`. Errors
        are the job's: Fenced if the epoch is over, Conflict if the version is there already or is not newer
        than what is committed, Unavailable if no slot can be had now or no agent is there. A job that fails
        or is cancelled gives its slot back.
        """

    def hold(self, epoch: int, step: int, shard: str, /) -> HeldShard:
        """Keeps a version that is sealed or committed from being overwritten. NotFound if it is not here,
        Corrupt if its tables are damaged."""

    def bring(self, epoch: int, step: int, shard: str, /) -> HeldShard:
        """As `hold`, but what is not here is fetched from another host into a free slot, within `timeout_s`.
        NotFound if no host has it, Unavailable if no slot is free or it does not arrive in time, Unsupported
        if the agent is alone. May be repeated."""

    def standing(self) -> dict[str, Any]:
        """`{"epoch": int, "program": int, "is_training": bool, "is_open": bool, "base": None | {"epoch": int,
        "step": int, "shard_count": int, "sequence": str}, "commits": [(epoch, step), …], "doubted": [(epoch,
        step), …], "lost": None | (epoch, step), "holders": [[str, …] host names, per shard, …], "hosts":
        {str: bool is heard, …}}`: what the agents of several hosts have agreed upon, as far as this one
        knows. `is_training`: the orders of the epoch are here, and the shards of the base that this host
        owns; `is_open`: versions of the epoch are taken; `doubted`: programs began with it in vain too often;
        `lost`: the newest commit, if it cannot be restored. Unsupported if the agent is alone."""

    def begin(self, program: int, sequence: str, owners: list[str], /) -> dict[str, Any]:
        """Has the agents of several hosts recover for a program that begins; returns the standing of now.
        `program`: its token, greater than those of earlier programs; `sequence`: 16 hex digits; `owners`: the
        name of the host of each of its processes. Fenced if a newer program is known, Unsupported if the
        agent is alone. May be repeated, by any process."""

    def commit(self, epoch: int, step: int, /) -> list[int]:
        """Commits the sealed slots of a version that is whole everywhere; returns all that are committed,
        none if none is there. Older versions may be overwritten from then on."""

    def give_up(self, epoch: int, step: int, /) -> list[int]:
        """Frees the sealed slots of a version that will not be committed; returns them."""

    def retire_before(self, epoch: int, step: int, /) -> list[int]:
        """Frees what is sealed or committed of all versions before this one, which the caller vouches to be
        committed and whole; returns the slots. Unavailable if one is being read."""

    def quarantine(self, epoch: int, step: int, /) -> list[int]:
        """Keeps the slots of a version from use, as they are; returns them."""

    def discard_quarantined(self, slot: int, /) -> None:
        """Frees a slot that is quarantined."""

    def verify(self) -> None:
        """Has the agent verify all slots, and let go of what is damaged. One of several hosts goes on
        meanwhile, and brings that again from the others; one that is alone answers when it has done so."""

    def raise_epoch(self, epoch: int, /) -> int:
        """Refuses writers of lower epochs from now on and takes their unfinished slots from them. Never goes
        back; returns the epoch that holds."""

@final
class HeldShard:
    """A version of a shard in its slot, which is not overwritten while this exists and is not released."""

    @property
    def file(self) -> tuple[str, int, bytes]:
        """A file for `start_read`, with the checksums that it verifies. The job's owners must hold this."""

    @property
    def entries(
        self,
    ) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]]:
        """The boxes of arrays in it: `(path, dtype, array_shape, offset, shape, file_offset, nbytes)`."""

    def release(self) -> None:
        """Lets the slot go; what is read of it from now on may be anything."""

# ---- peers -------------------------------------------------------------------------------------

@final
class PeerKeys:
    """What one side of a connection proves itself by, and whom it believes."""

    @staticmethod
    def of_launches(secret: bytes, /) -> PeerKeys:
        """Both sides have the secret."""

    @staticmethod
    def of_issuer(secret: bytes, /) -> PeerKeys:
        """The side that listens, which alone has the secret, and lets in who has a key that it has issued."""

    @staticmethod
    def of_issued(key: bytes, issuer: bytes, /) -> PeerKeys:
        """The side that connects with such a key, and knows the issuer by its public key."""

    def connect(
        self,
        purpose: str,
        client: str,
        server: str,
        run: bytes,
        ends: tuple[str, str],
        limit_bytes: int,
        /,
    ) -> PeerChannel:
        """The side that connects.

        Purposes are `host`, `program` and `launch`; `ends` are the addresses of both ends of the socket.
        """

    def accept(self, server: str, run: bytes, ends: tuple[str, str], limit_bytes: int, /) -> PeerChannel:
        """The side that listens, for one connection."""

@final
class PeerChannel:
    """One side of a connection, without its socket: the proofs, then messages.

    Between two loopback addresses messages are not encrypted once both sides have proved themselves.
    """

    @property
    def is_open(self) -> bool:
        """Whether both sides have proved themselves, and the one that connects was let in."""

    @property
    def asked(self) -> tuple[str, str] | None:
        """The purpose and the name of a client that has proved itself and waits to be let in."""

    def admit(self, is_expected: bool, /) -> None:
        """Lets it in, or tells it that it is not expected; `take` has what is to be sent."""

    def take(self) -> bytes:
        """What is to be sent next of the proofs, of the answer to them, or of why there is no connection."""

    def feed(self, received: bytes, /) -> list[bytes]:
        """Takes what has come; returns the messages that are whole.

        Raises InvalidInput if the other side has not proved itself, Corrupt if this is not what it has sent
        or is longer than any message may be. The channel is over then; `take` has what tells the other side.
        """

    def seal(self, message: bytes, /) -> bytes:
        """What is to be sent for a message; one thread at a time, which sends it before it seals the next."""

def issue_peer_key(secret: bytes, purpose: str, name: str, /) -> tuple[bytes, bytes]:
    """The private key of one purpose and one name, and the public key of the issuer."""

def derive_peer_secret(secret: bytes, purpose: str, /) -> bytes:
    """A secret for one purpose, which tells nothing of the one that it is made from."""

# ---- transport ---------------------------------------------------------------------------------

@final
class BlockTransport:
    """One host's end of the transport of the runtime: what it offers, and its connections to others.

    Memory is handed over by address and number, and is to be kept until `released` has told the number; that
    of a block that is offered must not change, that of a fetch must not be used."""

    def __new__(cls, name: str, secret: bytes, listen_at: str, reads_memory: bool, /) -> BlockTransport:
        """Listens at `IP:PORT`; port 0 has the system choose one."""

    @property
    def address(self) -> str:
        """`NAME@IP:PORT`."""

    def held(self) -> tuple[int, int]:
        """Bytes and blocks that are offered and not fetched yet."""

    def offer(self, words: Buffer, /) -> None:
        """Offers blocks: `OFFER`.

        Raises Conflict if a key is offered already; then none is.
        """

    def fetch(self, address: str, words: Buffer, number: int, deadline_s: float, /) -> BlockFetch:
        """Asks for blocks: `FETCH`."""

    def released(self) -> list[int] | None:
        """Waits for numbers whose memory is not needed any more; None once closed, and all have been told."""

    def end(self, kind: str, message: str, run: int, epoch: int | None, /) -> None:
        """Has all of a run, or of one epoch of it, fail with an error, and lets go of what it offers."""

    def lose(self, kind: str, message: str, address: str, /) -> None:
        """Has all fetches from a host fail with an error."""

    def wait_below(self, limit_bytes: int, deadline_s: float, /) -> None:
        """Waits until less is held. Raises Unavailable."""

    def close(self) -> None: ...

@final
class BlockFetch:
    """Blocks that are on their way. To forget it is to give it up."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None, /) -> bool:
        """Waits; False if they are not there yet. Raises what has failed."""

    def release(self) -> None:
        """Says that nobody waits any more."""
