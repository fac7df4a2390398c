"""From a state to something that can be written: every leaf looked at, every refusal made.

After this nothing about the state can fail a save any more; only the disk can.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from waystation import _native
from waystation._collection import paused_collection
from waystation._distinct import Shared, distinct_objects
from waystation._errors import InvalidInput, StructureMismatch, UnsupportedLeaf, WaystationError
from waystation._options import ArraySavingOptions, Options, StorageOptions
from waystation.checkpoint import cast
from waystation.coordination import Session
from waystation.coordination.round_errors import named
from waystation.frameworks import dtypes, registry
from waystation.frameworks.base import ArraySource, Contiguous
from waystation.grid import Spread
from waystation.layouts.native import write_plan
from waystation.layouts.native.chunks import ALONE, Chunk, Writer, are_whole, block_of, cut, whole_chunks
from waystation.layouts.native.records import Digest, dump_json, load_json
from waystation.layouts.native.write import Prepared
from waystation.layouts.native.write_plan import SharedFiles
from waystation.layouts.opened import ArrayLeaf, Leaf, StoredTree
from waystation.tree import Structure, flatten, format_key_path

SCALARS = (bool, int, float, complex, str, bytes)

# Longer strings and bytes are stored as data, not in the tree file, which is read whole.
INLINE_LIMIT_BYTES = 64 << 10

# The size of data files, unless the options say it: a store completes one while others are uploaded.
_FILE_BYTES = 2 << 30
_STORED_FILE_BYTES = 256 << 20

# In the place of a codec's name, for those.
LONG_SCALARS = "long scalars"

_OTHERS_SHOWN = 5

_SHOWN_DIFFERENCES = 5


@dataclass(slots=True)
class Described:
    """A state taken apart.

    Attributes:
        structure: Its structure.
        leaves: Its leaves, as the tree file has them.
        labels: Of its arrays.
        array_leaf_numbers: The number of the leaf of each.
        sources: Its arrays. Those that lie in host memory in one piece share one for each kind, which has no
            blocks.
        addresses: Where these begin.
        owners: What keeps their memory alive; None for the others.
    """

    structure: Structure
    leaves: list[Leaf]
    labels: list[str]
    array_leaf_numbers: list[int]
    sources: list[ArraySource]
    addresses: NDArray[np.int64]
    owners: list[object]

    def expand(self) -> None:
        """Gives every array a description of its own, with its blocks."""
        for number, owner in enumerate(self.owners):
            if owner is not None:
                source = self.sources[number]
                block = block_of(source, int(self.addresses[number]), owner)
                self.sources[number] = replace(source, blocks=[block])
        self.owners = [None] * len(self.owners)


@paused_collection()
def describe(state: Any) -> Described:
    """Takes a state apart, without copying arrays.

    Raises:
        UnsupportedLeaf: A leaf is of a type that cannot be saved; names its key path and type.
        InvalidInput: A leaf cannot be read (deleted, not addressable, …).
    """
    values, structure = flatten(state)
    codecs = _codecs(values, structure)
    numbers = [number for number, name in enumerate(codecs) if name is not None]
    arrays = map(ArrayLeaf, range(len(numbers)))
    leaves: list[Leaf] = [
        value if name is None else next(arrays) for value, name in zip(values, codecs, strict=True)
    ]
    paths = structure.labels()
    labels = paths if len(paths) == len(numbers) else list(map(paths.__getitem__, numbers))
    described = Described(
        structure,
        leaves,
        labels,
        numbers,
        [_ABSENT] * len(numbers),
        np.zeros(len(numbers), np.int64),
        [None] * len(numbers),
    )
    for name in dict.fromkeys(codecs):
        if name is not None:
            own = [number for number in numbers if codecs[number] == name]
            _describe_arrays(described, name, own, [values[number] for number in own])
    return described


def _codecs(values: Sequence[Any], structure: Structure) -> list[str | None]:
    """The name of the codec of each leaf; None where the tree file holds the value."""
    types = list(map(type, values))  # which are few, and have one codec each
    of_type: dict[type, str | None] = {}
    for kind in dict.fromkeys(types):
        first = types.index(kind)
        codec = None if kind in SCALARS else registry.codec_for(values[first])
        if codec is None and kind not in SCALARS:
            _raise_unsupported(values, structure, first)
        of_type[kind] = None if codec is None else codec.name
    found = list(map(of_type.__getitem__, types))
    if str in of_type or bytes in of_type:
        for number, value in enumerate(values):
            if types[number] in (str, bytes) and len(value) > INLINE_LIMIT_BYTES:
                found[number] = LONG_SCALARS
    return found


def limit_to(described: Described, processes: Sequence[int], *, are_all: bool) -> None:
    """Makes arrays those of the processes that save them.

    Args:
        described: The state.
        processes: The indices of these processes in the program, ascending.
        are_all: Whether the program has no others.

    Raises:
        InvalidInput: They have different arrays, or not all of one; names its key path.
    """
    limited: dict[int, Spread] = {}  # arrays of one spread keep having one
    kinds, which = distinct_objects(described.sources)
    firsts = dict(zip(reversed(which.tolist()), reversed(described.labels), strict=True))
    for number, source in enumerate(kinds):
        label = firsts[number]
        if source.only_here and len(processes) > 1:
            raise InvalidInput(
                f"array {label} of shape {source.shape} is spread over devices of this process alone, so "
                "every process has another one; make a global array of them "
                "(jax.make_array_from_process_local_data), or save them under a key for each process",
                array=label,
            )
        if are_all or source.spread is None or not all(source.shape):
            continue
        own = limited.get(id(source.spread))
        if own is None:
            own = limited[id(source.spread)] = source.spread.among(processes)
        if () in own.holders:
            _raise_not_held(source, own.holders.index(()), label, processes)
        source.spread = own


def _raise_not_held(source: ArraySource, box: int, label: str, processes: Sequence[int]) -> None:
    assert source.spread is not None, "only arrays that are spread can lack holders"
    offset, shape = source.spread.boxes[box]
    raise InvalidInput(
        f"the box of shape {shape} at {offset} of array {label} is held by "
        f"{named(source.spread.holders[box])} alone, and not by {named(processes)}, which save; add one of "
        "them to multiprocessing.active_processes, or leave the array out",
        array=label,
    )


def can_save(state: Any) -> bool:
    """Whether the types of all leaves can be saved; looks at no array."""
    of_type: dict[type, bool] = {}
    for value in flatten(state)[0]:
        kind = type(value)
        if kind not in of_type:
            of_type[kind] = kind in SCALARS or registry.codec_for(value) is not None
        if not of_type[kind]:
            return False
    return True


def with_scoped_options(
    options: Options, states: Mapping[str, Any], described: Mapping[str, Described]
) -> Options:
    """The options, with what the caller's function says of the leaves of states.

    Raises:
        InvalidInput: It returned something else than options, or `storage_options_for` is set as well.
    """
    creator = options.array.saving.scoped_storage_options_creator
    if creator is None:
        return options
    if options.array.saving.storage_options_for is not None:
        raise InvalidInput("set either scoped_storage_options_creator or storage_options_for, not both")
    chosen: dict[int, StorageOptions | None] = {}
    of_state = getattr(creator, "of_state", None)  # one that tells states apart, whose key paths may be equal
    for name, state in states.items():
        ask = creator if of_state is None else of_state(name)
        values, structure = flatten(state)
        paths, entry = structure.key_paths(), described[name]
        entry.expand()
        for number, source in zip(entry.array_leaf_numbers, entry.sources, strict=True):
            answer: object = ask(registry.keys_of_program(paths[number]), values[number])
            if answer is not None and not isinstance(answer, StorageOptions):
                raise InvalidInput(
                    f"scoped_storage_options_creator must return StorageOptions or None, not {answer!r}",
                    array=format_key_path(paths[number]),
                )
            chosen[id(source)] = answer  # the sources outlive the options
    bound = options.thawed()
    bound.array.saving.scoped_storage_options_creator = None
    # Orbax's layouts store numbers as arrays, too, which nobody was asked about.
    bound.array.saving.storage_options_for = lambda _, source: chosen.get(id(source))
    return bound.frozen()


@dataclass(slots=True)
class Taken:
    """What this process writes of a state, and what is said of all of it."""

    structure: Structure
    leaves: list[Leaf]
    sources: Sequence[ArraySource]
    labels: list[str]
    chunks: Sequence[Chunk]
    cast: dict[int, str]


@paused_collection()
def take(described: Described, options: Options, writer: Writer = ALONE) -> Taken:
    """Decides which chunks of its arrays this process writes.

    Afterwards only the chunks keep memory alive: what others write may be changed or freed at once.
    """
    labels = write_plan.unique_labels(described.labels)
    saving = options.array.saving
    wanted = cast.wanted_dtypes(described.sources, described.labels, saving)
    chunks: Sequence[Chunk]
    if are_whole(saving, writer) and not wanted:
        sources = Shared(described.sources)
        chunks = whole_chunks(sources, described.addresses, described.owners)
    else:
        if wanted:
            described.expand()
        sources = Shared(described.sources)
        sizes = {number: dtypes.of_name(name).host.itemsize for number, name in wanted.items()}
        addresses, owners = described.addresses, described.owners
        chunks = cut(sources, described.labels, saving, writer, sizes, addresses, owners)
    described.owners = []
    for source in distinct_objects(sources)[0]:
        source.blocks = []
    if wanted:
        chunks = list(chunks)  # whose lengths change
        cast.apply(chunks, sources, described.labels, wanted, cast.rule_of(saving))
    return Taken(described.structure, described.leaves, sources, labels, chunks, wanted)


@paused_collection()
def plan(
    name: str,
    taken: Taken,
    options: Options,
    process: int = 0,
    shared: SharedFiles | None = None,
    *,
    is_in_store: bool = False,
) -> Prepared:
    """Plans the files of a state; the addresses of its chunks must be final."""
    target = options.file.file_bytes_target
    if target is None:
        target = _STORED_FILE_BYTES if is_in_store else _FILE_BYTES
    planned = write_plan.plan(taken.chunks, taken.sources, taken.labels, target, process, shared)
    tree = StoredTree(taken.structure, taken.leaves, taken.sources, taken.labels)
    return Prepared(name, tree, taken.sources, taken.chunks, planned)


def _lines_of(described: Described) -> list[str]:
    """What has to be the same in every process that saves a state, for people to read: one line for each
    leaf, then the containers. Values of scalars may differ: the primary's count."""
    spreads: dict[int, str] = {}
    lines = []
    sources = iter(described.sources)
    for path, leaf in zip(described.structure.labels(), described.leaves, strict=True):
        if type(leaf) is not ArrayLeaf:
            lines.append(f"{path}: {type(leaf).__name__}")
            continue
        source = next(sources)
        text = f"{path}: {source.framework} {source.dtype}{list(source.shape)}"
        if source.spread is not None:
            key = id(source.spread)
            if key not in spreads:
                spreads[key] = f"{_native.crc64(repr(source.spread).encode()):016x}"
            text += f" spread {spreads[key]}"
        lines.append(text)
    return [*lines, f"containers: {dump_json(described.structure.to_json()).decode()}"]


def _raise_unsupported(values: Sequence[Any], structure: Structure, first: int) -> NoReturn:
    """Names the first leaf that cannot be saved, and others like it."""
    paths = structure.key_paths()
    path, value = format_key_path(paths[first]), values[first]
    others = [
        f"{format_key_path(paths[number])} ({_type_name(value)})"
        for number, value in enumerate(values[first + 1 :], first + 1)
        if type(value) not in SCALARS and registry.codec_for(value) is None
    ]
    beyond = len(others) - _OTHERS_SHOWN
    shown = ", ".join(others[:_OTHERS_SHOWN]) + (f" and {beyond} more" if beyond > 0 else "")
    likewise = f", nor can {shown}" if others else ""
    raise UnsupportedLeaf(
        f"leaf {path} is a {_type_name(value)}, which cannot be saved{likewise}; {_instead(value)}",
        array=path,
    )


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _instead(value: Any) -> str:
    """What to save instead of an object of a framework, or of anything else that is no leaf."""
    nnx, equinox = (sys.modules.get(name) for name in ("flax.nnx", "equinox"))
    if nnx is not None and isinstance(value, nnx.Module | nnx.Optimizer):
        return "save the state of 'graphdef, state = nnx.split(module)'"
    if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
        return "save what its method state_dict() returns"
    advice = "save arrays, numbers, strings, bytes, or containers of them (register_node tells how to take a "
    advice += "class apart)"
    if equinox is not None and callable(value):
        advice += "; of an Equinox module save eqx.filter(model, eqx.is_array)"
    return advice


# In the place of arrays that are still to be described.
_ABSENT = ArraySource((), "", "", "", (), storage_item_bytes=0, blocks=[], mutable=False)


def _describe_arrays(described: Described, name: str, numbers: Sequence[int], values: Sequence[Any]) -> None:
    """Describes the arrays of one codec, given by the numbers of their leaves."""
    places = np.searchsorted(described.array_leaf_numbers, numbers)
    rest = list(range(len(values)))
    try:
        codec = None if name == LONG_SCALARS else registry.codec_by_name(name)
        found = None if codec is None else codec.contiguous(values)
        if found is not None:
            rest = _add_contiguous(described, places, found)
            numbers = [numbers[place] for place in rest]
            values = [values[place] for place in rest]
        others = _long_scalars(values) if codec is None else codec.sources(values)
    except WaystationError as error:
        _name_leaf(error, numbers, described.structure)
        raise
    for place, source in zip(places[rest].tolist(), others, strict=True):
        described.sources[place] = source


def _add_contiguous(described: Described, places: NDArray[np.int64], found: Contiguous) -> list[int]:
    """Adds arrays, by their places; returns which of them are to be described by themselves."""
    is_found = found.which >= 0
    described.addresses[places[is_found]] = found.addresses[is_found]
    kinds, sources, owners = found.kinds, described.sources, described.owners
    for place, kind, owner in zip(places.tolist(), found.which.tolist(), found.owners, strict=True):
        source = kinds[kind] if kind >= 0 else None
        if source is not None:
            sources[place], owners[place] = source, owner
    rest: list[int] = np.flatnonzero(~is_found).tolist()
    return rest


def _name_leaf(error: WaystationError, numbers: Sequence[int], structure: Structure) -> None:
    """Replaces a codec's index into its batch by the key path."""
    index = error.context.pop("index", None)
    if isinstance(index, int) and 0 <= index < len(numbers):
        error.where(array=format_key_path(structure.key_paths()[numbers[index]]))


def _long_scalars(values: Sequence[str | bytes]) -> list[ArraySource]:
    """Long strings and bytes as arrays of bytes."""
    encoded = [_encode(value) for value in values]
    arrays = [np.frombuffer(data, np.uint8) for data in encoded]
    sources = registry.codec_by_name("numpy").sources(arrays)
    for source, value in zip(sources, values, strict=True):
        source.framework = type(value).__name__
        source.mutable = False
    return sources


def _encode(value: str | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return value.encode("utf-8", "surrogatepass")
    except UnicodeError as error:
        raise InvalidInput(f"a string cannot be encoded: {error}") from error


# ---- fingerprints: what has to be the same in every process that saves -------------------------
#
# Processes compare digests; only if these differ are the lines themselves sent, and an error shows where.
# What may differ between processes (values, and which devices hold what) is in no line.


def fingerprint_of_save(
    states: Mapping[str, Described], handlers: Mapping[str, str], saving: ArraySavingOptions
) -> list[str]:
    """The lines of a save: of its states, who handles what is none, and who writes which arrays."""
    lines = [f"checkpointable '{name}': handled by {handler}" for name, handler in handlers.items()]
    if len(states) == 1 and not handlers:
        (name,) = states
        return [f"checkpointable '{name}'", *_lines_of(states[name]), *_of_sharing(saving)]
    for name, described in states.items():
        lines += [f"checkpointable '{name}', {line}" for line in _lines_of(described)]
    return [*lines, *_of_sharing(saving)]


def _of_sharing(saving: ArraySavingOptions) -> list[str]:
    """By which options each process decides what it writes of what several hold."""
    return [
        f"option array.saving.use_replica_parallel: {saving.use_replica_parallel is not False}",
        "option array.saving.min_slice_bytes_for_replica_parallel: "
        f"{saving.min_slice_bytes_for_replica_parallel or 'the default'}",
        f"option array.saving.max_replicas_for_replica_parallel: {saving.max_replicas_for_replica_parallel}",
    ]


def fingerprint_of_casts(name: str, labels: Sequence[str], cast: Mapping[int, str]) -> list[str]:
    """The lines about arrays of a state that are stored in other dtypes, given by number."""
    return [f"checkpointable '{name}', {labels[number]}: stored as {dtype}" for number, dtype in cast.items()]


def agree(session: Session, work: Callable[[], list[str]]) -> None:
    """Has every process do its work, and makes sure that what it returns is the same in all.

    Raises:
        StructureMismatch: It is not; shows where the first process that differs from the first one does so.
    """
    lines: list[str] = []

    def digest() -> bytes:
        lines.extend(work())
        return str(Digest.of("\n".join(lines).encode())).encode()

    def decide(parts: Sequence[bytes]) -> bytes:
        return b"" if len(set(parts)) == 1 else b"differ"

    if session.round(digest, decide):
        session.round(lambda: dump_json(lines), lambda parts: _explain_difference(parts, session.processes))


def _explain_difference(parts: Sequence[bytes], processes: Sequence[int]) -> bytes:
    """Raises the error, of the lines of these processes of the program."""
    saves: list[list[str]] = [load_json(part, "the state of another process") for part in parts]
    differing = next(number for number, lines in enumerate(saves) if lines != saves[0])
    shown = []
    for number, other in ((0, differing), (differing, 0)):
        present = set(saves[other])
        own = [line for line in saves[number] if line not in present]
        more = f"\n    and {len(own) - _SHOWN_DIFFERENCES} more" if len(own) > _SHOWN_DIFFERENCES else ""
        lines = "".join(f"\n    {line}" for line in own[:_SHOWN_DIFFERENCES]) or "\n    (nothing else)"
        shown.append(f"\n  only process {processes[number]}:{lines}{more}")
    raise StructureMismatch(
        "the processes of the program save different states; every process must give the same tree, "
        f"with the same shapes, dtypes and shardings, and the same options:{''.join(shown)}"
    )
