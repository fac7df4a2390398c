"""`compare`: how two checkpoints differ, in structure and in values.

Structures are matched as a load matches them: by the names of leaves, whatever process, framework or
sharding saved them. Containers of another kind and leaves of another kind, shape or dtype are differences
of structure. Values are read piece by piece, in bounded memory. Without tolerances they have to have the
same bits, except that arrays of two dtypes are compared as numbers; with tolerances NaN equals NaN and
numbers may differ as `math.isclose` allows. Files of handlers are compared by what vouches for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from waystation._errors import InvalidInput
from waystation._options import Options
from waystation._options.in_effect import current_options
from waystation.checkpoint.differing_values import Tally, Tolerance, ValueDifference, same_scalar
from waystation.checkpoint.opening import open_held
from waystation.checkpoint.paths import PathLike, locate
from waystation.checkpoint.replaced import Held, read_what_is_there
from waystation.checkpoint.stored import Stored
from waystation.frameworks import dtypes
from waystation.frameworks.base import StoredArray
from waystation.layouts.native import handler_files
from waystation.layouts.native.records import Digest
from waystation.layouts.opened import ArrayLeaf, Leaf, Opened, StoredTree
from waystation.transfers.pieces import Part, buffer_item_bytes, group_parts, read_ahead, read_parts
from waystation.tree import Mismatch, Structure, format_key_path, label, match

Kind = Literal["only-in-first", "only-in-second", "container", "leaf", "shape", "dtype", "value"]
OnProgress = Callable[[int, int], None]

_SHOWN_CHARACTERS = 60
_NUMBERS = frozenset({"bool", "integer", "float", "complex"})


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which the checkpoints differ.

    Attributes:
        checkpointable: In which of them.
        key_path: Of the leaf or container; empty for the checkpointable itself.
        kind: In what respect.
        first: What the first checkpoint has there; None if nothing.
        second: What the second one has.
        values: How values differ, where that is what differs or dtypes do.
    """

    checkpointable: str
    key_path: str
    kind: Kind
    first: str | None = None
    second: str | None = None
    values: ValueDifference | None = None


@dataclass(slots=True)
class Comparison:
    """What `compare` found.

    Attributes:
        first: Path of the first checkpoint.
        second: Path of the second.
        differences: In the order of the leaves; empty if there are none.
        leaves: Leaves that both have.
        bytes_compared: Bytes of array elements that were compared, of one checkpoint.
    """

    first: str
    second: str
    differences: list[Difference] = field(default_factory=list)
    leaves: int = 0
    bytes_compared: int = 0


def compare(
    first: PathLike,
    second: PathLike,
    *,
    absolute_tolerance: float = 0.0,
    relative_tolerance: float = 0.0,
    structure_only: bool = False,
    on_progress: OnProgress = lambda _done, _total: None,
) -> Comparison:
    """Compares two checkpoints.

    Args:
        first: A checkpoint.
        second: Another.
        absolute_tolerance: The most by which numbers may differ.
        relative_tolerance: The most by which they may differ, as a part of the larger one's magnitude.
            One tolerance that allows a difference is enough.
        structure_only: Read no array.
        on_progress: Called with `(bytes compared, bytes to compare)` as it goes.

    Raises:
        NotFound, InvalidInput: One of them is no checkpoint.
        Corrupt: One of them is damaged.
    """
    if not (absolute_tolerance >= 0 and relative_tolerance >= 0):
        raise InvalidInput("tolerances are numbers from 0 on")
    paths = locate(first), locate(second)
    options = current_options()

    def compare_held(one: Held, two: Held) -> Comparison:
        tolerance = None if structure_only else Tolerance(absolute_tolerance, relative_tolerance)
        return _compare((one, two), tolerance, options, on_progress)

    return read_what_is_there(
        paths[0],
        options,
        lambda one: read_what_is_there(paths[1], options, lambda two: compare_held(one, two)),
    )


def _compare(
    held: tuple[Held, Held], tolerance: Tolerance | None, options: Options, on_progress: OnProgress
) -> Comparison:
    """Compares two checkpoints that are held open; without a tolerance their structure only."""
    found = Comparison(held[0].target, held[1].target)
    names = _compare_names([open_held(either, [], options).names for either in held], found)
    opened = [open_held(either, names, options) for either in held]
    pairs: list[_Pair] = []
    for name in names:
        one, two = (either.stored[name] for either in opened)
        if one.state is not None and two.state is not None:
            pairs.append(_Pair(name, one.state, two.state, options))
        else:
            _compare_files(name, one, two, found, structure_only=tolerance is None)
    for pair in pairs:
        pair.match_leaves()
        found.leaves += len(pair.matched)
    if tolerance is not None:
        _compare_values(pairs, tolerance, found, on_progress)
    for pair in pairs:
        found.differences += pair.ordered_differences()
    if not all(pair.first.notices_absence and pair.second.notices_absence for pair in pairs):
        for checkpoint in held:
            checkpoint.require_current()
    return found


def _compare_names(names: Sequence[tuple[str, ...]], found: Comparison) -> list[str]:
    first, second = map(set, names)
    for name in sorted(first - second):
        found.differences.append(Difference(name, "", "only-in-first", "a checkpointable", None))
    for name in sorted(second - first):
        found.differences.append(Difference(name, "", "only-in-second", None, "a checkpointable"))
    return sorted(first & second)


def _compare_files(name: str, one: Stored, two: Stored, found: Comparison, *, structure_only: bool) -> None:
    """Compares files of handlers by what the checkpoints vouch for, or by what is in them."""
    if one.state is not None or two.state is not None or one.handler != two.handler:
        found.differences.append(Difference(name, "", "leaf", _saver_text(one), _saver_text(two)))
        if one.state is not None or two.state is not None:
            return
    ours, theirs = _digests(one), _digests(two)
    for path in sorted(ours.keys() | theirs.keys()):
        if path not in theirs:
            found.differences.append(Difference(name, path, "only-in-first", "a file", None))
        elif path not in ours:
            found.differences.append(Difference(name, path, "only-in-second", None, "a file"))
        elif ours[path] != theirs[path] and not structure_only:
            texts = _content_text(ours[path]), _content_text(theirs[path])
            found.differences.append(Difference(name, path, "value", *texts))


def _digests(stored: Stored) -> dict[str, Digest]:
    return stored.files or handler_files.digests(stored.directory, stored.root)


def _content_text(file: Digest) -> str:
    return f"{file.nbytes} bytes with checksum {file.crc64:016x}"


def _saver_text(stored: Stored) -> str:
    return f"files of {stored.handler}" if stored.state is None else "a state"


class _Pair:
    """One state of both checkpoints.

    Attributes:
        matched: `(leaf of the first, leaf of the second)` by number.
        of_structure: Differences of structure outside of matched leaves.
        of_leaves: The difference of a matched leaf, by its number in the first.
    """

    def __init__(self, name: str, first: Opened, second: Opened, options: Options) -> None:
        self.name = name
        self.first = first
        self.second = second
        self.matched: list[tuple[int, int]] = []
        self.of_structure: list[Difference] = []
        self.of_leaves: dict[int, Difference] = {}
        self._key_paths = first.tree.structure.key_paths()
        self._numbers = _numbers_of(first, options), _numbers_of(second, options)

    def match_leaves(self) -> None:
        # Of containers a layout may say less than the other; only what both say can differ.
        ours = self.second.tree.comparable(self.first.tree.structure)
        theirs = self.first.tree.comparable(self.second.tree.structure)
        outcome = match(ours, theirs)
        if isinstance(outcome, Mismatch):
            for path in outcome.unexpected_paths():
                self._add(format_key_path(path), "only-in-first")
            for path in outcome.missing_paths():
                self._add(format_key_path(path), "only-in-second")
        numbers = outcome.leaves if isinstance(outcome, Mismatch) else outcome
        self.matched = sorted((have, number) for number, have in enumerate(numbers) if have >= 0)
        if ours != theirs:
            for shown, one, two in _other_containers(ours, theirs):
                self._add(shown, "container", one, two)
        for leaf, other in self.matched:
            self._compare_kinds(leaf, other)

    def _add(self, path: str, kind: Kind, first: str | None = None, second: str | None = None) -> None:
        self.of_structure.append(Difference(self.name, path, kind, first, second))

    def _compare_kinds(self, leaf: int, other: int) -> None:
        one, two = self.stored(leaf, other)
        for kind, property_of in _PROPERTIES:
            have, want = property_of(one), property_of(two)
            if have != want:
                self.set(leaf, kind, have, want)
                return

    def stored(self, leaf: int, other: int) -> tuple[StoredArray | Leaf, StoredArray | Leaf]:
        """What both checkpoints say of a matched leaf: an array's description or a scalar's value."""
        one, two = self._numbers
        return _stored(self.first.tree, leaf, one), _stored(self.second.tree, other, two)

    def set(
        self,
        leaf: int,
        kind: Kind,
        first: str | None,
        second: str | None,
        values: ValueDifference | None = None,
    ) -> None:
        """Notes the difference of a matched leaf."""
        path = format_key_path(self._key_paths[leaf])
        self.of_leaves[leaf] = Difference(self.name, path, kind, first, second, values)

    def ordered_differences(self) -> list[Difference]:
        return self.of_structure + [self.of_leaves[leaf] for leaf in sorted(self.of_leaves)]


def _stored(tree: StoredTree, number: int, numbers: dict[int, Leaf]) -> StoredArray | Leaf:
    leaf = tree.leaves[number]
    return numbers.get(leaf.array, tree.arrays[leaf.array]) if type(leaf) is ArrayLeaf else leaf


def _numbers_of(opened: Opened, options: Options) -> dict[int, Leaf]:
    """The numbers of Python that a layout stores as arrays, by the numbers of these."""
    arrays = [number for number, array in enumerate(opened.tree.arrays) if array.framework == "python"]
    parts = [Part(index, ((), ())) for index in range(len(arrays))]
    values = read_parts(opened, arrays, parts, options) if parts else []
    return {number: value.item() for number, value in zip(arrays, values, strict=True)}


def _kind_of(stored: StoredArray | Leaf) -> str:
    if not isinstance(stored, StoredArray):
        return f"a Python {type(stored).__name__}"
    long_scalar = stored.framework in ("str", "bytes")
    return f"a Python {stored.framework}" if long_scalar else "an array"


def _shape_of(stored: StoredArray | Leaf) -> str:
    return str(tuple(stored.shape)) if isinstance(stored, StoredArray) else "()"


def _dtype_of(stored: StoredArray | Leaf) -> str:
    return stored.dtype if isinstance(stored, StoredArray) else type(stored).__name__


# A leaf is compared in these, in order; after the first that differs the others mean little.
_PROPERTIES: tuple[tuple[Kind, Callable[[StoredArray | Leaf], str]], ...] = (
    ("leaf", _kind_of),
    ("shape", _shape_of),
    ("dtype", _dtype_of),
)


def _other_containers(ours: Structure, theirs: Structure) -> Iterator[tuple[str, str, str]]:
    """Containers of the same name that are of another kind: path and both kinds."""
    known = dict(_containers(theirs))
    for name, (path, kind) in _containers(ours):
        if name in known and known[name][1] != kind:
            yield path, kind, known[name][1]


def _containers(structure: Structure) -> Iterator[tuple[tuple[str, ...], tuple[str, str]]]:
    positions = [at for at, node in enumerate(structure.nodes) if node.kind not in ("leaf", "none")]
    for at, path in zip(positions, structure.paths_of(positions), strict=True):
        node = structure.nodes[at]
        yield tuple(label((key,)) for key in path), (format_key_path(path), node.tag or node.kind)


# ---- values ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ArrayPair:
    leaf: int
    stored: tuple[StoredArray, StoredArray]
    arrays: tuple[int, int]
    item_bytes: int


def _compare_values(
    pairs: list[_Pair], tolerance: Tolerance, found: Comparison, on_progress: OnProgress
) -> None:
    compared: list[tuple[_Pair, list[_ArrayPair]]] = [
        (pair, list(_comparable_arrays(pair, tolerance))) for pair in pairs
    ]
    total = sum(
        entry.item_bytes * math.prod(entry.stored[0].shape) for _, entries in compared for entry in entries
    )
    options = current_options()
    for pair, entries in compared:
        _compare_arrays(
            pair, entries, tolerance, options, found, lambda: on_progress(found.bytes_compared, total)
        )


def _comparable_arrays(pair: _Pair, tolerance: Tolerance) -> Iterator[_ArrayPair]:
    """The matched arrays whose values can be compared; scalars are compared on the way."""
    for leaf, other in pair.matched:
        one, two = pair.stored(leaf, other)
        if isinstance(one, StoredArray) and isinstance(two, StoredArray):
            earlier = pair.of_leaves.get(leaf)
            if earlier is None or (earlier.kind == "dtype" and _both_numbers(one, two)):
                arrays = _array(pair.first.tree, leaf), _array(pair.second.tree, other)
                size = max(
                    buffer_item_bytes(pair.first, arrays[0]), buffer_item_bytes(pair.second, arrays[1])
                )
                yield _ArrayPair(leaf, (one, two), arrays, size)
        elif leaf not in pair.of_leaves and not same_scalar(one, two, tolerance):
            pair.set(leaf, "value", _short(one), _short(two))


def _array(tree: StoredTree, number: int) -> int:
    leaf = tree.leaves[number]
    assert type(leaf) is ArrayLeaf, "only leaves that are arrays come here"
    return leaf.array


def _both_numbers(one: StoredArray, two: StoredArray) -> bool:
    return all(dtypes.of_stored(stored).category in _NUMBERS for stored in (one, two))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def _compare_arrays(
    pair: _Pair,
    entries: list[_ArrayPair],
    tolerance: Tolerance,
    options: Options,
    found: Comparison,
    on_group: Callable[[], None],
) -> None:
    sides = (
        (pair.first, [entry.arrays[0] for entry in entries]),
        (pair.second, [entry.arrays[1] for entry in entries]),
    )
    tallies: dict[int, Tally] = {}
    groups = group_parts(
        [entry.stored[0].shape for entry in entries], [entry.item_bytes for entry in entries]
    )
    read = read_ahead(groups, lambda parts: [read_parts(*side, parts, options) for side in sides])
    for parts, (ours, theirs) in read:
        for part, one, two in zip(parts, ours, theirs, strict=True):
            entry = entries[part.index]
            tally = tallies.get(part.index)
            if tally is None:
                categories = [dtypes.of_stored(stored).category for stored in entry.stored]
                numeric = set(categories) <= _NUMBERS
                tally = tallies[part.index] = Tally(entry.stored[0].shape, tolerance, numeric=numeric)
            tally.add(part.box, one, two)
            found.bytes_compared += math.prod(part.box[1]) * entry.item_bytes
        on_group()
    for index, tally in tallies.items():
        _note(pair, entries[index], tally.difference())


def _note(pair: _Pair, entry: _ArrayPair, values: ValueDifference | None) -> None:
    earlier = pair.of_leaves.get(entry.leaf)
    if earlier is not None:
        pair.set(entry.leaf, "dtype", earlier.first, earlier.second, values)
    elif values is not None:
        pair.set(entry.leaf, "value", None, None, values)
