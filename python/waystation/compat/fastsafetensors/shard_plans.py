"""Which tensor goes into which file of a set, and what each file says of itself.

Each file says in its metadata which it is of how many, and of which set. Invariant: everything that can be
refused is refused here, before a file is made.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from waystation import _native
from waystation._errors import Corrupt, InvalidInput
from waystation.compat.fastsafetensors.common import SafeTensorsMetadata
from waystation.compat.fastsafetensors.st_types import DTYPE_SIZES, DType
from waystation.compat.fastsafetensors.tensors import check_framework, wrapped

KEY_SHARD_INDEX = "fst.shard.index"
KEY_SHARD_COUNT = "fst.shard.count"
KEY_SHARD_SET = "fst.shard.set"

_RESERVED = frozenset({KEY_SHARD_INDEX, KEY_SHARD_COUNT, KEY_SHARD_SET})


class ShardSetError(Corrupt):
    """Files are not all of one set, in order."""


@dataclass
class WriteEntry:
    """A tensor that is to be written.

    Attributes:
        name: Of the tensor.
        dtype: As the file has it.
        shape: As the file has it.
        nbytes: Of its data.
        source: What fills it; for `tensor_fill` a tensor.
    """

    name: str
    dtype: DType
    shape: list[int]
    nbytes: int
    source: Any = None


@dataclass
class ShardPlan:
    """A file that is to be written.

    Attributes:
        path: The file.
        entries: What is in it, in order.
        header: Its first bytes.
        offsets: Where the data of each entry begin and end.
        total_bytes: Its length.
    """

    path: str
    entries: list[WriteEntry]
    header: bytes
    offsets: dict[str, tuple[int, int]] = field(default_factory=dict)
    total_bytes: int = 0


ShardMetadataFn: TypeAlias = Callable[[Sequence[WriteEntry]], Mapping[str, str]]


def validate_shard_set(metas: Sequence[SafeTensorsMetadata]) -> None:
    """Checks that files are all those of one set, in order.

    Raises:
        ShardSetError: They are not.
    """
    if not metas:
        raise ShardSetError("there are no files")
    sets = set()
    for number, meta in enumerate(metas):
        said = meta.metadata if isinstance(meta.metadata, dict) else {}
        place = said.get(KEY_SHARD_INDEX), said.get(KEY_SHARD_COUNT)
        if place != (str(number), str(len(metas))):
            raise ShardSetError(
                f"the file is {place[0]} of {place[1]}, and {number} of {len(metas)} belongs here",
                path=meta.src,
            )
        sets.add(said.get(KEY_SHARD_SET))
    if None in sets or len(sets) > 1:
        raise ShardSetError(f"the files are of {len(sets)} sets; give those that were written together")


def plain_entry(name: str, tensor: Any, *, framework: str = "pytorch") -> WriteEntry:
    """The entry of a tensor."""
    check_framework(framework)
    held = wrapped(tensor)
    return WriteEntry(name, held.dtype, held.get_shape(), held.get_nbytes(), tensor)


def shard_paths(base: str, num_shards: int) -> list[str]:
    """The names of the files of a set: `model-00001-of-00016.safetensors`, ….

    Raises:
        ValueError: There are none.
    """
    if num_shards < 1:
        raise InvalidInput(f"num_shards is {num_shards}; give at least 1")
    return [f"{base}-{number:05}-of-{num_shards:05}.safetensors" for number in range(1, num_shards + 1)]


def plan_shards(
    entries: Sequence[WriteEntry],
    paths: Sequence[str],
    *,
    metadata: Mapping[str, str] | None = None,
    shard0_metadata: Mapping[str, str] | None = None,
    shard_metadata: ShardMetadataFn | None = None,
    header_align: int = 8,
) -> list[ShardPlan]:
    """Deals entries out to files: the largest first, each to the file that has the least so far.

    Args:
        entries: The tensors.
        paths: The files.
        metadata: Text for people, for every file.
        shard0_metadata: The same, for the first.
        shard_metadata: Says more of each file, from its entries.
        header_align: The header is padded to a multiple of so many bytes.

    Raises:
        ValueError: Names or paths occur twice, or an entry is not what it says.
    """
    if not paths or len({os.path.abspath(path) for path in paths}) != len(paths):
        raise InvalidInput("give one path at least, and none twice")
    if header_align < 8 or header_align % 8:
        raise InvalidInput(f"header_align must be a multiple of 8, not {header_align}")
    for entry in entries:
        _check(entry)
    if len({entry.name for entry in entries}) != len(entries):
        raise InvalidInput("two tensors have one name")
    _check_text({**(metadata or {}), **(shard0_metadata or {})})
    dealt: list[list[WriteEntry]] = [[] for _ in paths]
    held = [0] * len(paths)
    for entry in sorted(entries, key=lambda entry: -entry.nbytes):
        least = held.index(min(held))
        dealt[least].append(entry)
        held[least] += entry.nbytes
    set_id = uuid.uuid4().hex
    plans = []
    for number, (path, own) in enumerate(zip(paths, dealt, strict=True)):
        text = {**(metadata or {}), **((shard0_metadata or {}) if number == 0 else {})}
        text |= {KEY_SHARD_INDEX: str(number), KEY_SHARD_COUNT: str(len(paths)), KEY_SHARD_SET: set_id}
        if shard_metadata is not None:
            more = dict(shard_metadata(tuple(own)))
            _check_text(more)
            if _RESERVED & more.keys():
                raise InvalidInput(f"shard_metadata sets {sorted(_RESERVED & more.keys())}, which are taken")
            text |= more
        plans.append(_plan(path, own, text, header_align))
    return plans


def _plan(path: str, entries: list[WriteEntry], text: dict[str, str], align_bytes: int) -> ShardPlan:
    tensors = [(entry.name, entry.dtype.value, entry.shape) for entry in entries]
    header = _native.build_safetensors_header(tensors, text, 8)
    length = -(-(len(header) - 8) // align_bytes) * align_bytes
    header = length.to_bytes(8, "little") + header[8:].ljust(length)
    plan = ShardPlan(path, entries, header)
    position = len(header)
    for entry in entries:
        plan.offsets[entry.name] = position, position + entry.nbytes
        position += entry.nbytes
    plan.total_bytes = position
    return plan


def _check(entry: WriteEntry) -> None:
    size = DTYPE_SIZES.get(entry.dtype)
    if size is None:
        raise InvalidInput(f"{entry.dtype.value} is no dtype that a file can have", tensor=entry.name)
    if any(extent < 0 for extent in entry.shape):
        raise InvalidInput(f"{entry.shape} is no shape", tensor=entry.name)
    if entry.dtype is DType.F4 and (not entry.shape or entry.shape[-1] % 2):
        raise InvalidInput("F4 wants a last axis with an even number of elements", tensor=entry.name)
    if math.prod(entry.shape) * size != entry.nbytes:
        raise InvalidInput(
            f"{entry.dtype.value} {tuple(entry.shape)} has {math.prod(entry.shape) * size:g} bytes, and "
            f"{entry.nbytes} are given",
            tensor=entry.name,
        )


def _check_text(text: Mapping[Any, Any]) -> None:
    for key, value in text.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidInput(f"metadata must map text to text, not {value!r:.60} by {key!r:.60}")
