"""Several checkpointables, parts of one state, become one: their trees joined, their data files linked.

No array is read or written. The data files get further names (hard links, or copies where a file system has
none), so what they were linked from stays whole until it is removed. Each part counts as processes of its
own, which come after those of the parts before: so files stay sorted, and runs of chunks stay runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from waystation import _native, grid, storage
from waystation._errors import Conflict
from waystation.layouts.native import names, tables, tree_file
from waystation.layouts.native.read import OpenCheckpointable
from waystation.layouts.native.records import CheckpointableRecord, Digest, dump_json, load_json, read_vouched
from waystation.layouts.opened import ArrayLeaf, Leaf, StoredTree
from waystation.tree import Structure, union


@dataclass(frozen=True, slots=True)
class _Joined:
    """What all parts hold together.

    Attributes:
        tree: The tree of all.
        origins: Of each array of it, the part and the number there.
    """

    tree: StoredTree
    origins: list[tuple[int, int]]


def assemble(
    directory: str,
    parts: Sequence[OpenCheckpointable],
    owners: Sequence[int] | None,
    group: _native.SyncGroup,
) -> Digest:
    """Makes one checkpointable of several.

    Args:
        directory: Its own, which is empty.
        parts: What it is made of.
        owners: The number of the part that each leaf is taken from, where all parts have the whole structure,
            with whatever in the places of leaves that are not their own. With None each part has only what
            is its own, and the structures are united.
        group: Gets what is not durable yet.

    Returns:
        The digest of its record.

    Raises:
        Conflict: Two parts have something at the same place, or `owners` is given and they are not of one
            structure.
    """
    joined = _join(parts, owners)
    process_counts = [part.record.process_count for part in parts]
    first_processes = np.cumsum([0, *process_counts]).tolist()
    files = _link_files(directory, parts, first_processes)
    made = _join_tables(parts, joined.origins, files)
    contents = {
        names.TREE: tree_file.encode(joined.tree),
        names.FILE_TABLE: made.encode_files(),
        names.CHUNK_TABLE: made.encode_chunks(),
        names.CHECKSUM_TABLE: made.encode_checksums(),
    }
    index = _join_indices(parts, first_processes)
    if index is not None and len(set(joined.tree.labels)) == len(joined.tree.labels):
        contents[names.INDEX] = index
    digests = {name: Digest.of(data) for name, data in contents.items()}
    contents[names.CHECKPOINTABLE_RECORD] = CheckpointableRecord(sum(process_counts), digests).encode()
    written = [(os.path.join(directory, name), data) for name, data in contents.items()]
    _native.write_small_files(written, group=group)
    group.add([directory])
    return Digest.of(contents[names.CHECKPOINTABLE_RECORD])


def join_structures(structures: Sequence[Structure]) -> tuple[Structure, list[tuple[int, int]]]:
    """The union of structures, and of each of its leaves the structure and the number there.

    Raises:
        Conflict: Two have something at the same place.
    """
    joined = structures[0]
    origins = [(0, number) for number in range(joined.leaf_count)]
    for which, structure in enumerate(structures[1:], start=1):
        origins += [(which, number) for number in range(structure.leaf_count)]
        joined, order = union(joined, structure)
        origins = [origins[number] for number in order]
    return joined, origins


def _join(parts: Sequence[OpenCheckpointable], owners: Sequence[int] | None) -> _Joined:
    structures = [part.tree.structure for part in parts]
    if owners is None:
        structure, origins = join_structures(structures)
    else:
        structure, origins = structures[0], list(zip(owners, range(len(owners)), strict=True))
        if structure.leaf_count != len(owners) or any(each != structure for each in structures):
            raise Conflict(f"the parts that '{parts[0].directory}' is the first of are not of one state")
    leaves: list[Leaf] = []
    arrays, labels, array_origins = [], [], []
    for which, number in origins:
        tree = parts[which].tree
        leaf = tree.leaves[number]
        if isinstance(leaf, ArrayLeaf):
            arrays.append(tree.arrays[leaf.array])
            labels.append(tree.labels[leaf.array])
            array_origins.append((which, leaf.array))
            leaf = ArrayLeaf(len(arrays) - 1)
        leaves.append(leaf)
    return _Joined(StoredTree(structure, leaves, arrays, labels), array_origins)


# ---- data files --------------------------------------------------------------------------------


def _link_files(
    directory: str, parts: Sequence[OpenCheckpointable], first_processes: Sequence[int]
) -> tables.Table:
    """Gives the data files of all parts their names, durably; returns their entries."""
    entries, place = [], storage.of(directory)
    for part, first in zip(parts, first_processes, strict=False):
        own = np.array(part.tables.files[:])
        own["process"] += first
        own["location"] = 0
        entries.append(own)
        rows = zip(own["process"].tolist(), own["sequence"].tolist(), strict=True)
        for source, row in zip(part.paths(), rows, strict=True):
            place.copy(source, os.path.join(directory, names.data_file(*row)))
    files: tables.Table = np.concatenate(entries)
    files["first_block"] = tables.first_blocks(files["file_bytes"])
    return files


def _join_indices(parts: Sequence[OpenCheckpointable], first_processes: Sequence[int]) -> bytes | None:
    """The index of all parts, if each has one, or no array."""
    total, weights = 0, {}
    for part, first in zip(parts, first_processes, strict=False):
        if not part.tree.arrays:
            continue
        if names.INDEX not in part.record.tables:
            return None
        path = os.path.join(part.directory, names.INDEX)
        (data,) = read_vouched({path: part.record.tables[names.INDEX]})
        content = load_json(data, path)
        total += content["metadata"]["total_size"]
        renamed = {
            names.data_file(process, sequence): names.data_file(process + first, sequence)
            for process, sequence in part.tables.files[:][["process", "sequence"]].tolist()
        }
        weights.update({label: renamed[file] for label, file in content["weight_map"].items()})
    return dump_json({"metadata": {"total_size": total}, "weight_map": weights}) if weights else None


# ---- tables ------------------------------------------------------------------------------------


def _join_tables(
    parts: Sequence[OpenCheckpointable], origins: Sequence[tuple[int, int]], files: tables.Table
) -> tables.Tables:
    file_counts = [len(part.tables.files) for part in parts]
    first_files = np.cumsum([0, *file_counts])
    entries = np.zeros(len(origins), tables.ARRAY_ENTRY)
    chunks, dims = [np.zeros(0, tables.CHUNK_ENTRY)], [np.zeros(0, tables.WORD)]
    for number, (which, array) in enumerate(origins):
        own = parts[which].tables
        entries[number] = own.arrays[array]
        own_chunks, own_dims = _of_array(own, array, int(first_files[which]))
        chunks.append(own_chunks)
        dims.append(own_dims)
    counts, dim_counts = entries["chunk_count"].astype(np.int64), entries["dim_count"].astype(np.int64)
    entries["first_chunk"] = np.cumsum(counts) - counts
    entries["first_dim"] = np.cumsum(dim_counts) - dim_counts
    checksums = np.concatenate([np.asarray(part.tables.checksums[:]) for part in parts])
    return tables.Tables(files, entries, np.concatenate(chunks), np.concatenate(dims), checksums)


def _of_array(own: tables.Tables, array: int, first_file: int) -> tuple[tables.Table, tables.Table]:
    """The chunk entries and the dims of an array, whose files are counted from another one."""
    entry = own.arrays[array]
    first, count = int(entry["first_chunk"]), int(entry["chunk_count"])
    chunks = np.array(own.chunks[first : first + count])
    chunks["file"] += first_file
    first, count = int(entry["first_dim"]), int(entry["dim_count"])
    dims = np.array(own.dims[first : first + count])
    if entry["kind"] == tables.RUNS:
        words = dims[2 * int(entry["ndim"]) :]
        runs = words[len(words) - grid.RUN_WORDS * int(words[0]) :].reshape(-1, grid.RUN_WORDS)
        runs[:, 1] += np.uint64(first_file)
    return chunks, dims
