"""One state of what several processes have each: pipeline stages, data loaders, random generators.

A save takes the same tree in all processes. Programs of torch give it different ones: each process has the
keys of its stage, its loader, its generators. Here these trees are joined as `torch.distributed.checkpoint`
joins them: by key, and of what is no array the first process that has it counts. An array that some processes
lack is in their trees too, as one that others hold.

Failure sequence: what fails in one process, all raise (`Session.round`). Invariants: where all have the same
keys, one round of eight bytes shows it, and nothing else is done; each entry of the dict is described once,
by the first process that has it, however many have the same; no data are sent or copied; each box of an array
has a holder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from waystation._errors import StructureMismatch
from waystation._options import in_effect
from waystation.checkpoint import prepare
from waystation.checkpoint.prepare import Described
from waystation.checkpoint.sessions import open_session
from waystation.coordination import Session, collective
from waystation.frameworks import dtypes, torch_shardings
from waystation.frameworks.base import ArraySource, StoredArray
from waystation.frameworks.carried import DescribedArray
from waystation.frameworks.torch_shards import spread_of
from waystation.grid import Shape, Spread, whole
from waystation.layouts.native import tree_file
from waystation.layouts.opened import ArrayLeaf, Leaf, StoredTree
from waystation.tree import KeyPath, Structure, flatten, format_key_path, unflatten, union

_DIGEST_BYTES = 8


def have_same_keys(state: dict[Any, Any], session: Session) -> bool:
    """Whether all processes of a session have the same containers and keys; all of them ask."""
    if session.process_count == 1:
        return True
    same = session.round(
        lambda: _digest(flatten(state)[1]), lambda parts: b"yes" if len(set(parts)) == 1 else b"no"
    )
    return same == b"yes"


def joined_by_all(state: dict[Any, Any], what: str) -> dict[Any, Any]:
    """What the processes that take part have together; see `joined`. `what` names it for errors."""
    with contextlib.closing(open_session(f"keys of '{what}'", in_effect.current_options())) as session:
        return joined(state, session)


def joined(state: dict[Any, Any], session: Session) -> dict[Any, Any]:
    """What the processes of a session have together, as a state that all of them can save.

    Args:
        state: What this process has.
        session: Of the processes; all of them call this.

    Returns:
        The same dict if all have the same keys, else another, with what other processes hold as arrays
        without data.

    Raises:
        StructureMismatch: Two processes have different arrays in one place, or nobody holds a part of one;
            names
            the place.
        WaystationError: As `save` raises it for the leaves of a state.
    """
    if have_same_keys(state, session):
        return state
    own, known = collective.attempt(
        session, lambda: _described(state), lambda entries: json.dumps(list(entries)).encode(), _members
    )
    members: dict[str, list[int]] = json.loads(known)
    mine = [name for name, processes in members.items() if processes[0] == session.process_index]
    sent = session.round(lambda: _packed({name: own[name] for name in mine}), _unpacked)
    texts: dict[str, str] = json.loads(zlib.decompress(sent))
    trees = _Trees(session)
    for name, processes in members.items():
        trees.add(tree_file.decode(texts[name].encode(), "what another process has"), processes)
    return trees.state(state, own)


def _digest(structure: Structure) -> bytes:
    return hashlib.sha256(json.dumps(structure.to_json()).encode()).digest()[:_DIGEST_BYTES]


def _described(state: dict[Any, Any]) -> dict[str, Described]:
    """Each entry of a dict described as a dict of its own, by the digest of its keys."""
    entries = {}
    for key, value in state.items():
        entry = prepare.describe({key: value})
        entry.expand()
        entries[_digest(entry.structure).hex()] = entry
    return entries


def _members(parts: Sequence[bytes]) -> bytes:
    """Which processes have which entries, in the order in which the processes have them."""
    members: dict[str, list[int]] = {}
    for process, part in enumerate(parts):
        for name in json.loads(part):
            members.setdefault(name, []).append(process)
    return json.dumps(members).encode()


def _packed(entries: dict[str, Described]) -> bytes:
    trees = {
        name: tree_file.encode(
            StoredTree(entry.structure, entry.leaves, entry.sources, entry.labels)
        ).decode()
        for name, entry in entries.items()
    }
    return zlib.compress(json.dumps(trees).encode())


def _unpacked(parts: Sequence[bytes]) -> bytes:
    """All entries in one message."""
    trees: dict[str, str] = {}
    for part in parts:
        trees |= json.loads(zlib.decompress(part))
    return zlib.compress(json.dumps(trees).encode())


@dataclass(slots=True)
class _Known:
    """A leaf that some processes have.

    Attributes:
        leaf: The value that counts, if it is no array.
        array: What is known of it, if it is one.
        processes: Who has it, by their numbers in the program.
    """

    leaf: Leaf
    array: StoredArray | None
    processes: set[int]

    @property
    def shown(self) -> str:
        """What it is, for people."""
        if self.array is None:
            return f"a {type(self.leaf).__name__}"
        return f"an array of {self.array.dtype} with shape {self.array.shape}"


@dataclass(slots=True)
class _Trees:
    """The entries of all processes, which become one tree."""

    session: Session
    structure: Structure = field(default_factory=lambda: flatten({})[1])
    known: dict[KeyPath, _Known] = field(default_factory=dict)
    _spreads: dict[tuple[Shape, int, tuple[int, ...]], Spread] = field(default_factory=dict)

    def add(self, tree: StoredTree, members: Sequence[int]) -> None:
        """Adds the tree of an entry that processes have."""
        self.structure, _ = union(self.structure, tree.structure, keep_first=True)
        processes = {self.session.processes[member] for member in members}
        for path, leaf in zip(tree.structure.key_paths(), tree.leaves, strict=True):
            array = tree.arrays[leaf.array] if isinstance(leaf, ArrayLeaf) else None
            found = _Known(leaf, array, processes)
            first = self.known.setdefault(path, found)
            if first is found:
                continue
            if _kind(first.array) != _kind(array):
                place = format_key_path(path)
                raise StructureMismatch(
                    f"process {min(first.processes)} saves {first.shown} at {place}, and process "
                    f"{min(processes)} {found.shown}; give them different keys",
                    array=place,
                )
            first.processes = first.processes | processes

    def state(self, state: dict[Any, Any], entries: dict[str, Described]) -> dict[Any, Any]:
        """The tree of all, with what this process has of it."""
        values, structure = flatten(state)
        own = dict(zip(structure.key_paths(), values, strict=True))
        sources = dict(_sources(entries))
        leaves = [
            self._leaf(path, self.known[path], own.get(path), sources.get(path))
            for path in self.structure.key_paths()
        ]
        made: dict[Any, Any] = unflatten(self.structure, leaves)
        return made

    def _leaf(self, path: KeyPath, known: _Known, own: Any, source: ArraySource | None) -> Any:
        if known.array is None:
            return own if type(own) is type(known.leaf) else known.leaf
        if len(known.processes) == self.session.process_count:
            return own
        if source is None:
            source = _elsewhere(known.array)
        return DescribedArray(replace(source, spread=self._spread(path, known.array, known.processes)))

    def _spread(self, path: KeyPath, array: StoredArray, processes: set[int]) -> Spread:
        """Who holds what of an array; those of one shape, sharding and processes share it."""
        holders = tuple(sorted(processes))
        is_shared = torch_shardings.is_dtensor(array.sharding)
        key = array.shape, id(array.sharding) if is_shared else 0, holders
        found = self._spreads.get(key)
        if found is None:
            found = Spread(array.shape, (whole(array.shape),), (holders,))
            if is_shared:
                found = _spread_of_dtensor(path, array, processes)
            self._spreads[key] = found
        return found


def _spread_of_dtensor(path: KeyPath, array: StoredArray, processes: set[int]) -> Spread:
    """Who holds what of a DTensor; its mesh may have copies in processes that lack it."""
    assert array.sharding is not None, "that of a DTensor is known"
    mesh, splits = torch_shardings.parse(array.sharding, array.shape)
    spread = spread_of(array.shape, mesh.copies(), (None, *splits))
    holders = tuple(tuple(one for one in own if one in processes) for own in spread.holders)
    if () in holders:
        place, box = format_key_path(path), holders.index(())
        offset, shape = spread.boxes[box]
        raise StructureMismatch(
            f"the box of shape {shape} at {offset} of the DTensor at {place} is held by process "
            f"{spread.holders[box][0]}, which saves nothing at {place}; have it save that DTensor, too",
            array=place,
        )
    return replace(spread, holders=holders)


def _kind(array: StoredArray | None) -> tuple[Any, ...] | None:
    """What has to be the same in all processes that have an array."""
    return None if array is None else (array.shape, array.dtype, array.framework)


def _sources(entries: dict[str, Described]) -> Iterator[tuple[KeyPath, ArraySource]]:
    """The arrays that this process has, by their key paths."""
    for entry in entries.values():
        paths = entry.structure.key_paths()
        for number, source in zip(entry.array_leaf_numbers, entry.sources, strict=True):
            yield paths[number], source


def _elsewhere(array: StoredArray) -> ArraySource:
    """An array that others hold."""
    return ArraySource(
        array.shape,
        array.dtype,
        array.framework,
        array.storage_dtype,
        array.storage_shape,
        array.sharding,
        array.extra,
        storage_item_bytes=dtypes.of_stored(array).storage_item_bytes,
        blocks=[],
        mutable=False,
    )
