"""`export`: arrays of a checkpoint as plain safetensors files or as npz, for programs without Waystation.

What can be refused is refused before a byte is written: an array that the format has no dtype for, a cast
that is impossible, files that are there already. Arrays are then read and written piece by piece, in
bounded memory; `safetensors/destination.py` says how the files come to stand under their names.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from waystation._errors import InvalidInput, Unsupported, WaystationError
from waystation._options.in_effect import current_options
from waystation.checkpoint.export_files import ExportedArray, open_writer
from waystation.checkpoint.opening import open_held, require_state
from waystation.checkpoint.paths import PathLike, locate
from waystation.checkpoint.replaced import Held, read_what_is_there
from waystation.checkpoint.stored import AUTO
from waystation.frameworks import casts as conversions
from waystation.frameworks import dtypes
from waystation.frameworks.base import CastRule
from waystation.layouts.opened import ArrayLeaf, Opened
from waystation.safetensors.destination import Destination, Format, PlannedFile
from waystation.transfers.pieces import buffer_item_bytes, group_parts, read_ahead, read_parts

SHARD_BYTES = 5_000_000_000

_LONG_SCALARS = ("str", "bytes")


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export` wrote.

    Attributes:
        files: Paths of the files, the index last if there is one.
        arrays: Arrays in them.
        nbytes: Bytes of these.
        left_out: Labels of selected leaves that are no arrays, and so in no file.
    """

    files: tuple[str, ...]
    arrays: int
    nbytes: int
    left_out: tuple[str, ...]


def export(
    path: PathLike,
    output: PathLike,
    *,
    file_format: Format | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    checkpointable_name: str = AUTO,
    select: str | None = None,
    casts: Mapping[str, str] | None = None,
    allow_lossy_casts: bool = False,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Exported:
    """Writes arrays of a checkpoint to files of another format, under their dotted names.

    Args:
        path: The checkpoint.
        output: For safetensors a directory, which then holds `model.safetensors`, or several files and
            `model.safetensors.index.json`; or a name ending in `.safetensors`. For npz the file.
        file_format: By default what the name of `output` ends in, else safetensors.
        max_shard_bytes: The most bytes of arrays in one safetensors file (a larger array has its own).
        checkpointable_name: Which checkpointable; by default `state`, or the first state by name.
        select: A regular expression; only leaves are exported whose dotted name it is found in.
        casts: Dtypes to convert, from one to another: `{"float32": "bfloat16"}`. That of PRNG keys may be
            cast to `uint32`, which gives their words.
        allow_lossy_casts: Convert values that the new dtype does not hold, as the option
            `array.loading.allow_lossy_casts` says, instead of raising `LossyCast`.
        overwrite: Replace an earlier export of this name.
        on_progress: Called with `(bytes written, bytes to write)` as it goes.

    Raises:
        NotFound: There is no checkpoint, or no such checkpointable.
        InvalidInput: There is nothing to export, or a cast is impossible.
        LossyCast: A cast would lose more than rounding does.
        Unsupported: The format has no dtype for an array; the error names it.
        Conflict: A file is there already.
        Corrupt: The checkpoint is damaged; what was at `output` stays.
    """
    if max_shard_bytes < 1:
        raise InvalidInput(f"max_shard_bytes is {max_shard_bytes}; give at least 1")
    source, options = locate(path), current_options()
    rule = CastRule(allow_lossy_casts, "allow_lossy_casts (--allow-lossy-casts on the command line)")

    def export_held(held: Held) -> Exported:
        (stored,) = open_held(held, [checkpointable_name], options).stored.values()
        opened = require_state(stored, source)
        destination = Destination(os.fspath(output), file_format, overwrite=overwrite)
        arrays, left_out = _select(opened, select)
        planned = _plan(opened, arrays, destination.format, dict(casts or {}), rule)
        files = destination.plan(planned, max_shard_bytes)
        total = sum(entry.nbytes for entry in planned)
        progress = _Progress(total, on_progress)
        with destination.staged() as stage:
            for file in files:
                _write_file(opened, file, os.path.join(stage, file.name), destination.format, rule, progress)
            if not opened.notices_absence:
                held.require_current()
            paths = destination.publish(stage, files)
        return Exported(tuple(paths), len(planned), total, tuple(left_out))

    return read_what_is_there(source, options, export_held)


class _Progress:
    """Adds up what has been written."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None]) -> None:
        self._done = 0
        self._total = total
        self._on_progress = on_progress

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._on_progress(self._done, self._total)


# ---- what is written ---------------------------------------------------------------------------


def _select(opened: Opened, select: str | None) -> tuple[list[int], list[str]]:
    """The arrays to export, and the labels of selected leaves that are none."""
    try:
        pattern = re.compile(select or "")
    except re.error as error:
        raise InvalidInput(f"{select!r} is not a regular expression: {error}") from error
    tree = opened.tree
    arrays, others = [], []
    for leaf, label in zip(tree.leaves, tree.structure.labels(), strict=True):
        if type(leaf) is not ArrayLeaf or tree.arrays[leaf.array].framework in _LONG_SCALARS:
            if pattern.search(label):
                others.append(label)
        elif pattern.search(tree.labels[leaf.array]):
            arrays.append(leaf.array)
    if not arrays:
        raise InvalidInput(f"nothing to export: {_why_nothing(tree.labels, select)}")
    return arrays, others


def _why_nothing(labels: Sequence[str], select: str | None) -> str:
    if not labels:
        return "the checkpointable holds no arrays"
    return f"{select!r} is found in the name of no array; the first names are {', '.join(labels[:3])}"


def _plan(
    opened: Opened, arrays: Sequence[int], file_format: Format, casts: dict[str, str], rule: CastRule
) -> list[ExportedArray]:
    """How each array is written; refuses what the format cannot hold."""
    present = {opened.tree.arrays[array].dtype for array in arrays}
    unused = sorted(casts.keys() - present)
    if unused:
        raise InvalidInput(
            f"no array that is exported is of {unused[0]}; they are of {', '.join(sorted(present))}"
        )
    planned = []
    for array in arrays:
        stored = opened.tree.arrays[array]
        try:
            logical = _cast(dtypes.of_stored(stored), casts.get(stored.dtype), rule)
            _require_held(file_format, logical)
        except WaystationError as error:
            raise error.where(array=opened.tree.labels[array])
        shape = (*stored.shape, *dtypes.of_stored(stored).host_trailing)
        planned.append(ExportedArray(array, opened.tree.labels[array], shape, logical.host, logical.storage))
    return planned


def _cast(stored: dtypes.LogicalDtype, wanted: str | None, rule: CastRule) -> dtypes.LogicalDtype:
    if wanted is None:
        return stored
    if stored.category != "key" or wanted != "uint32":
        conversions.check(stored.name, wanted, rule)
    return dtypes.of_name(wanted)


def _require_held(file_format: Format, logical: dtypes.LogicalDtype) -> None:
    """Raises Unsupported if the format has no dtype for these elements."""
    if file_format == "safetensors":
        held = not logical.trailing
    else:
        # A file says 'void' of what NumPy knows only while ml_dtypes is imported.
        held = logical.category not in ("key", "packed") and logical.host.isbuiltin != 2
    if held:
        return
    other = _offer(logical)
    cast = f"cast it (--cast '{logical.name}={other}'), or " if other else ""
    raise Unsupported(f"{file_format} has no dtype for {logical.name}: {cast}leave it out (--select)")


def _offer(logical: dtypes.LogicalDtype) -> str | None:
    """A dtype that a lacking one could be cast to."""
    if logical.host.isbuiltin != 2 and logical.name.startswith("numpy:") and logical.category != "other":
        return (
            "float64" if logical.category == "float" and logical.host.itemsize > 8 else _native_name(logical)
        )
    unsigned = logical.name.startswith("uint")
    offers = {"float": "float32", "complex": "complex64", "key": "uint32", "packed": "uint8"}
    return (
        ("uint8" if unsigned else "int8") if logical.category == "integer" else offers.get(logical.category)
    )


def _native_name(logical: dtypes.LogicalDtype) -> str:
    return logical.host.newbyteorder("=").name


# ---- writing -----------------------------------------------------------------------------------


def _write_file(
    opened: Opened,
    file: PlannedFile[ExportedArray],
    path: str,
    file_format: Format,
    rule: CastRule,
    progress: _Progress,
) -> None:
    arrays = [entry.array for entry in file.arrays]
    shapes = [tuple(opened.tree.arrays[array].shape) for array in arrays]
    sizes = [
        max(buffer_item_bytes(opened, entry.array), entry.nbytes // max(1, math.prod(shape)))
        for entry, shape in zip(file.arrays, shapes, strict=True)
    ]
    options = current_options()
    groups = group_parts(shapes, sizes)
    with open_writer(path, file_format, file.arrays) as writer:
        for parts, found in read_ahead(groups, lambda group: read_parts(opened, arrays, group, options)):
            written = 0
            for part, values in zip(parts, found, strict=True):
                try:
                    converted = _converted(values, file.arrays[part.index].dtype, rule)
                except WaystationError as error:
                    raise error.where(array=file.arrays[part.index].label)
                writer.write(file.arrays[part.index], converted)
                written += converted.nbytes
            progress.add(written)
        for entry in file.arrays:
            if entry.nbytes == 0:
                writer.write(entry, np.empty(entry.shape, entry.dtype))


def _converted(values: np.ndarray[Any, Any], dtype: np.dtype[Any], rule: CastRule) -> np.ndarray[Any, Any]:
    if values.dtype == dtype:
        return values
    converted = np.empty(values.shape, dtype)
    conversions.copy(converted, values, rule)
    return converted
