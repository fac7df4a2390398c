"""A load of a published model, decided: which arrays, where they go, how much memory that may take.

Invariants: everything that can be refused is refused here, before a byte of data is read; settings of the
calling thread (the default device, 64-bit mode, the options in effect) are taken here, so that what follows
may run in another thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from waystation import storage
from waystation._arguments import require_boolean, require_function
from waystation._collection import paused_collection
from waystation._errors import InvalidInput, Unsupported, WaystationError
from waystation._options import Options
from waystation._options.checks import positive_or_none
from waystation._options.in_effect import current_options
from waystation.frameworks import casts
from waystation.frameworks.base import Codec, StoredArray, Target
from waystation.safetensors import nesting
from waystation.safetensors.choices import DType, Rename, Select, dtype_chooser, renamed, selected
from waystation.safetensors.handle import Tensors
from waystation.safetensors.headers import Header
from waystation.safetensors.jax_collective import read_contiguously
from waystation.safetensors.making import Wanted, as_cast, codec_of, held_by, incoming_of
from waystation.safetensors.mapped import Mappings
from waystation.safetensors.open_files import OpenFiles
from waystation.safetensors.same_model import mark_of
from waystation.safetensors.sources import Files, find
from waystation.transfers.buffers import Incoming
from waystation.transfers.statistics import failures_published

MEMORY_BYTES = 256 << 20  # beyond the arrays, unless the caller says otherwise

_MAP_ALIGN_BYTES = {"jax": 64}  # what JAX aliases; the others do with the alignment of an element


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Where arrays go. At most one of these is given.

    Attributes:
        device: One device for all.
        sharding: One sharding for all.
        sharding_fn: A function that chooses one for each, from its name and what stands for it.
    """

    device: Any
    sharding: Any
    sharding_fn: Callable[[str, Any], Any] | None

    def __post_init__(self) -> None:
        if self.sharding_fn is not None:
            require_function("sharding_fn", self.sharding_fn)
        given = [name for name in ("device", "sharding", "sharding_fn") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidInput(f"{given[0]} and {given[1]} both say where arrays go; give one of them")

    def places(
        self, codec: Codec, names: Sequence[str], stored: Sequence[StoredArray], dtypes: Sequence[str]
    ) -> list[Any]:
        """The place of every array."""
        if codec.name == "torch" and self.sharding is not None:
            raise InvalidInput("sharding is for JAX arrays, and torch ones are asked for; give device")
        if self.sharding_fn is None:
            return [codec.place_of(self.device if self.sharding is None else self.sharding)] * len(names)
        if codec.name != "jax":
            raise InvalidInput(f"sharding_fn is for JAX arrays, and {codec.name} ones are asked for")
        places = []
        for name, array, dtype in zip(names, stored, dtypes, strict=True):
            chosen = self.sharding_fn(name, codec.abstract(as_cast(array, dtype)))
            try:
                places.append(codec.place_of(chosen))
            except WaystationError as error:
                raise error.where(tensor=name)
        return places


@dataclass(frozen=True, slots=True)
class Request:
    """What was decided.

    Attributes:
        opened: The files.
        codec: What makes the arrays.
        wanted: The arrays, in the order of the files, or as they alternate.
        incoming: The same with where they go.
        options: How to read, with a bound on memory.
        mappings: What is mapped instead of being read, if anything is.
        separator: What separates the parts of names in a nested result; None for a flat one.
        resharded: Where arrays go in the end that are read with another sharding, by their leaves.
        begun_s: When the load was called, by the monotonic clock.
    """

    opened: OpenFiles
    codec: Codec
    wanted: Wanted
    incoming: list[Incoming]
    options: Options
    mappings: Mappings | None
    separator: str | None
    resharded: dict[int, Target]
    begun_s: float

    def shared(self) -> list[int]:
        """The leaves of those arrays that several processes hold, which these have to decide alike."""
        able = self.codec.resharding
        if able is None:
            return []
        are_shared: dict[int, bool] = {}
        for place in self.wanted.places:
            if id(place) not in are_shared:
                are_shared[id(place)] = place is not None and len(able.processes_of(place)) > 1
        return [leaf for leaf, place in enumerate(self.wanted.places) if are_shared[id(place)]]

    def described(self) -> bytes:
        """What was decided about these, and what tells the files that they are in."""
        digest = hashlib.sha256()
        own, able = self.wanted, self.codec.resharding
        headers: dict[str, Header] = {}
        described: dict[tuple[int, tuple[int, ...]], str] = {}  # the places live as long as this request
        for leaf in self.shared():
            assert able is not None
            stored = own.stored[leaf]
            place = id(own.places[leaf]), stored.shape
            if place not in described:
                text = able.described(own.places[leaf], stored.shape)
                # A text has all devices, of which there may be thousands, and goes with every leaf.
                described[place] = hashlib.sha256(text.encode()).hexdigest()
            what = (own.names[leaf], stored.shape, stored.dtype, own.dtypes[leaf], described[place])
            digest.update(repr((*what, leaf in self.resharded)).encode())
            header, _, _ = self.opened.extent(own.numbers[leaf])
            headers[header.path] = header
        return json.dumps([digest.hexdigest(), mark_of(list(headers.values()))]).encode()


@paused_collection()
def decide(
    files: Files | Tensors,
    framework: str,
    placing: Placing,
    *,
    dtype: DType,
    select: Select | None,
    rename: Rename | None,
    options: Options,
    mmap: bool,
    nested: bool | str,
    may_reshard: bool,
    alternate: bool,
    begun_s: float,
) -> Request:
    """Opens the files and decides everything about a load of them.

    With `alternate` arrays of files on several disks do not come in the order of the files, but so that the
    first of them, however many, are on all disks: what is read in groups then keeps all of them busy.
    """
    require_boolean("mmap", mmap)
    separator = nesting.separator_of(nested)
    codec = codec_of(framework)
    choose = dtype_chooser(dtype)
    opened = files.opened if isinstance(files, Tensors) else OpenFiles(find(files))
    names = selected(opened.labels, select)
    if alternate and opened.is_on_several_devices and len(names) > 1:
        order = opened.alternating(list(map(opened.numbers.__getitem__, names)))
        names = list(map(names.__getitem__, order))
    new_names = renamed(names, rename)
    if separator is not None:
        nesting.check_names(new_names, separator)
    numbers = list(map(opened.numbers.__getitem__, names))
    stored = held_by(opened.arrays(numbers), codec.name)
    dtypes = list(map(choose, names, [array.dtype for array in stored]))
    places = placing.places(codec, new_names, stored, dtypes)
    wanted = Wanted(numbers, new_names, stored, dtypes, places)
    if mmap and not opened.is_local:
        path = opened.headers[0].path
        raise Unsupported(
            f"only files of this system can be mapped, not '{path}'; load without mmap", path=path
        )
    is_mapped = mmap and not options.array.loading.verify
    mappings = Mappings(opened, _MAP_ALIGN_BYTES.get(codec.name)) if is_mapped else None
    incoming = incoming_of(opened, codec, wanted, casts.rule_of_loads(options))
    resharded: dict[int, Target] = {}
    if may_reshard and mappings is None:
        resharded = read_contiguously(opened, codec, incoming, options.array.loading.verify)
    return Request(opened, codec, wanted, incoming, options, mappings, separator, resharded, begun_s)


def failures_of(files: Files | Tensors) -> contextlib.AbstractContextManager[None]:
    """Publishes what the block, which begins a load of files, raises."""
    return failures_published("load", _called(files), time.monotonic())


def _called(files: Files | Tensors) -> str:
    """What a load of files is called before they are open: the path, or the directory of several."""
    if isinstance(files, Tensors):
        return files.path
    given = files if isinstance(files, list | tuple) else [files]
    try:
        first = storage.located(given[0])
    except (WaystationError, IndexError):
        return "(no location)"  # and not what was given, in which there may be credentials
    return first if len(given) == 1 else os.path.dirname(first)


def options_of(memory_limit: int | None, verify: bool | None, gpu_direct: bool | None = None) -> Options:
    """The options in effect, with a bound on memory in any case.

    Raises:
        InvalidInput: `memory_limit` is no number of bytes.
    """
    if wrong := positive_or_none(memory_limit):
        raise InvalidInput(f"memory_limit must be {wrong}, in bytes, not {memory_limit!r:.60}")
    chosen = current_options().thawed()
    if memory_limit is not None or chosen.memory.read_concurrent_bytes is None:
        chosen.memory.read_concurrent_bytes = MEMORY_BYTES if memory_limit is None else memory_limit
    if verify is not None:
        chosen.array.loading.verify = verify
    if gpu_direct is not None:
        chosen.engine.gpu_direct = gpu_direct
    return chosen.frozen()
