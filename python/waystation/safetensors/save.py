"""`save`: arrays as safetensors files that any tool reads, in one file or several with an index.

The bytes go straight from the arrays' memory to disk, in one job of the engine. Everything that can be
refused is refused before a byte is written; `destination.py` says how the files come to stand under their
names.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from waystation import _native, storage
from waystation._arguments import require_boolean, require_type
from waystation._collection import paused_collection
from waystation._errors import InvalidInput, Unsupported, UnsupportedLeaf, WaystationError
from waystation._options import checks
from waystation._options.in_effect import current_options
from waystation.frameworks import registry
from waystation.frameworks.base import ArraySource, Codec, Contiguous
from waystation.layouts.native import engine_job
from waystation.layouts.native.chunks import Chunk
from waystation.layouts.native.write_plan import chunk_words
from waystation.safetensors.description import PACKED
from waystation.safetensors.destination import Destination, PlannedFile
from waystation.safetensors.index import is_text
from waystation.safetensors.sources import PathLike
from waystation.transfers.statistics import SaveStatistics, failures_published, tell
from waystation.tree import flatten, format_key_path, label

FILE_BYTES = 5_000_000_000  # as tools of Hugging Face divide models

_HEADER_ALIGN_BYTES = 4096
# Loaders of Hugging Face want to be told a framework, and take 'pt' for 'any'.
_METADATA = {"format": "pt"}


@dataclass(slots=True)
class _Entry:
    """An array as it is written.

    Attributes:
        label: Its name.
        source: What is said of it. Arrays that are alike and lie in one piece have one, without blocks.
        nbytes: Of its elements.
        address: Where these are if they lie in one piece in host memory; -1 if the blocks of `source` say it.
        owner: What keeps its memory.
    """

    label: str
    source: ArraySource
    nbytes: int
    address: int
    owner: object

    @property
    def item_bytes(self) -> int:
        return self.source.storage_item_bytes

    def tensor(self) -> tuple[str, str, tuple[int, ...]]:
        """Name, dtype and shape in the header."""
        source = self.source
        if source.dtype == PACKED:
            return self.label, "F4", (*source.shape[:-1], 2 * source.shape[-1])
        return self.label, source.storage_dtype, source.shape


def save(
    state: Any,
    path: PathLike,
    *,
    metadata: Mapping[str, str] | None = None,
    max_file_bytes: int = FILE_BYTES,
    overwrite: bool = False,
) -> list[str]:
    """Saves arrays as safetensors files, durably; in a program of several processes, one calls it.

    Args:
        state: Arrays by name, or a tree of them, whose names then are their paths with dots.
        path: A directory, which then holds `model.safetensors`, or several files and their index; or a name
            ending in `.safetensors`.
        metadata: Text for people. The key `format`, which tools of Hugging Face look for, is added.
        max_file_bytes: Most bytes of arrays in one file (a larger array has its own).
        overwrite: Replace earlier files of this name. A reader finds the old ones, the new ones, or no
            model, and never a mixture. Where another process saves there too, one goes after the other.

    Returns:
        The paths of the files, that of the index last.

    Raises:
        InvalidInput: Two arrays have one name, or something else is wrong with the call.
        UnsupportedLeaf: Something is no array. None within a tree is no leaf, and is left out.
        Unsupported: The format has no dtype for an array.
        Conflict: There are files of that name, or another process has been replacing what is there for too
            long.
    """
    begun_s = time.monotonic()
    target = storage.absolute(path)
    with failures_published("save", target, begun_s):
        problem = checks.positive(max_file_bytes)
        if problem is not None:
            raise InvalidInput(f"max_file_bytes is {max_file_bytes!r}; give {problem}")
        require_boolean("overwrite", overwrite)
        require_type("metadata", metadata, (Mapping, type(None)), "a mapping of strings, or None")
        text = {**_METADATA, **(metadata or {})}
        entries = _entries(state)
        destination = Destination(target, "safetensors", overwrite=overwrite)
        files = destination.plan(entries, max_file_bytes)
        headers = [
            _native.build_safetensors_header(
                [entry.tensor() for entry in file.arrays], text, _HEADER_ALIGN_BYTES
            )
            for file in files
        ]
        with destination.staged() as stage:
            nbytes, sync_s = _write(stage, files, headers)
            synced_s = time.monotonic() - begun_s
            paths = destination.publish(stage, files)
    duration_s = time.monotonic() - begun_s
    statistics = SaveStatistics(target, nbytes, duration_s, synced_s - sync_s, synced_s, duration_s)
    tell([statistics], current_options().array.saving.on_statistics, "array.saving.on_statistics")
    return paths


@paused_collection()
def _entries(state: Any) -> list[_Entry]:
    """What is written; refuses what cannot be."""
    _require_no_none(state)
    leaves, structure = flatten(state)
    paths = structure.key_paths()
    names = _names(paths)
    found: list[_Entry | None] = [None] * len(leaves)
    by_codec: dict[Codec, list[int]] = {}
    for number, codec in enumerate(map(registry.codec_for, leaves)):
        if codec is None:
            raise UnsupportedLeaf(
                f"{format_key_path(paths[number])} is a {type(leaves[number]).__name__}, and these files "
                "hold arrays only; leave it out, or save a checkpoint",
                tensor=names[number],
            )
        by_codec.setdefault(codec, []).append(number)
    for codec, numbers in by_codec.items():
        rest = _add_contiguous(
            found, names, numbers, codec.contiguous([leaves[number] for number in numbers])
        )
        try:
            sources = codec.sources([leaves[number] for number in rest])
        except WaystationError as error:
            index = error.context.pop("index", None)
            raise error.where(tensor=None if index is None else names[rest[index]])
        for number, source in zip(rest, sources, strict=True):
            nbytes = _nbytes(names[number], source, sum(math.prod(block.shape) for block in source.blocks))
            found[number] = _Entry(names[number], source, nbytes, -1, source)
    return [entry for entry in found if entry is not None]


def _add_contiguous(
    found: list[_Entry | None], names: Sequence[str], numbers: Sequence[int], columns: Contiguous | None
) -> Sequence[int]:
    """Adds the arrays of one codec that lie in one piece; returns the numbers of the others."""
    if columns is None:
        return numbers
    rest: list[int] = []
    sizes: dict[int, int] = {}  # by kind, of which there are few
    rows = zip(numbers, columns.which.tolist(), columns.addresses.tolist(), columns.owners, strict=True)
    for number, kind, address, owner in rows:
        source = columns.kinds[kind] if kind >= 0 else None
        if source is None:
            rest.append(number)
            continue
        nbytes = sizes.get(kind)
        if nbytes is None:
            nbytes = sizes[kind] = _nbytes(names[number], source, math.prod(source.storage_shape))
        found[number] = _Entry(names[number], source, nbytes, address, owner)
    return rest


def _require_no_none(state: Any) -> None:
    """Refuses None in the place of an array that is given by its name. In a tree it stands for no array, as
    in what `equinox.filter` makes."""
    if state is None:
        raise UnsupportedLeaf("what is saved is None, and these files hold arrays only; give a dict of them")
    if isinstance(state, dict):
        is_flat = not any(isinstance(value, dict | list | tuple) for value in state.values())
        for name, value in state.items() if is_flat else ():
            if value is None:
                raise UnsupportedLeaf(
                    f"[{name!r}] is None, and these files hold arrays only; leave it out, or save a "
                    "checkpoint",
                    tensor=str(name),
                )


def _names(paths: Sequence[Any]) -> list[str]:
    names = list(map(label, paths))
    every = "".join(names)
    if all(paths) and len(set(names)) == len(names) and is_text(every) and "\0" not in every:
        return names
    taken: dict[str, int] = {}
    for number, (path, name) in enumerate(zip(paths, names, strict=True)):
        if not path:
            raise InvalidInput("what is saved has no names; give a dict of arrays first, then the path")
        if not is_text(name) or "\0" in name:
            raise InvalidInput(f"{name!r:.200} holds characters that no file can have in a name", tensor=name)
        other = taken.setdefault(name, number)
        if other != number:
            raise InvalidInput(
                f"{format_key_path(paths[other])} and {format_key_path(path)} would both be {name!r}; rename "
                "one of them",
                tensor=name,
            )
    return names


def _nbytes(name: str, source: ArraySource, held_items: int) -> int:
    """The bytes of an array of which this process holds so many elements; refuses what no file can hold."""
    if source.dtype != PACKED and source.storage_shape != source.shape:
        raise Unsupported(
            f"safetensors has no dtype for {source.dtype}; cast the array, or save a checkpoint", tensor=name
        )
    if source.dtype == PACKED and not source.shape:
        raise Unsupported("packed elements need an axis to be counted along", tensor=name)
    items = math.prod(source.storage_shape)
    if held_items != items:
        raise InvalidInput(
            "this process holds only a part of an array; gather it first, or save a checkpoint, which all "
            "processes write together",
            tensor=name,
        )
    return items * source.storage_item_bytes


def _write(stage: str, files: Sequence[PlannedFile[_Entry]], headers: Sequence[bytes]) -> tuple[int, float]:
    """Writes the files, durably; returns how many bytes they have, and how long the syncs took at the end."""
    planned = []
    for file, header in zip(files, headers, strict=True):
        lengths = np.array([entry.nbytes for entry in file.arrays], np.int64)
        addresses = np.array([entry.address for entry in file.arrays], np.int64)
        ends = len(header) + np.cumsum(lengths)
        others = {place: _chunk(file.arrays[place]) for place in np.flatnonzero(addresses < 0).tolist()}
        item_bytes = {place: file.arrays[place].item_bytes for place in others}
        words = chunk_words(ends - lengths, lengths, addresses, others, item_bytes)
        end = int(ends[-1]) if len(ends) else len(header)
        planned.append((os.path.join(stage, file.name), header, end, words))
    owners = [entry.owner for file in files for entry in file.arrays]
    options = current_options()
    nbytes = sum(file[2] for file in planned)
    engine_job.calibrate_once(stage, options, nbytes)
    jobs: list[_native.Job] = []
    engine_job.run(planned, owners, options, (), jobs.append, lambda: None, lambda: None, sync=True)
    return nbytes, jobs[0].result()["sync_s"]


def _chunk(entry: _Entry) -> Chunk:
    """The whole array, as the blocks of it lie in memory."""
    return Chunk(0, None, entry.source.storage_shape, entry.nbytes, entry.source.blocks)
