"""`waystation export`: arrays as safetensors or npz."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from waystation import storage
from waystation.checkpoint.export import export
from waystation.cli import formatting
from waystation.cli.output import Output
from waystation.errors import Corrupt, InvalidInput, Unsupported
from waystation.frameworks import dtypes
from waystation.safetensors.destination import Format

_SHOWN = 5

# Names that end so promise a file that export does not write; it would make a directory of that name.
_OTHER_FORMATS = frozenset(
    (
        *(".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle", ".npy", ".msgpack", ".gguf", ".ggml", ".onnx"),
        *(".h5", ".hdf5", ".keras", ".tflite", ".pb", ".orbax", ".zarr", ".arrow", ".parquet", ".mat"),
        *(".json", ".csv", ".zip", ".tar", ".gz", ".tgz"),
    )
)


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments as they were typed."""

    path: str
    output: Path
    file_format: str | None
    max_shard_bytes: str
    checkpointable: str | None
    select: str | None
    casts: list[str]
    allow_lossy_casts: bool
    overwrite: bool


def run(output: Output, request: Request) -> None:
    """Exports, and prints the files."""
    file_format = _format(request.file_format)
    _require_name(request.output)
    with output.progress("exporting") as on_progress:
        done = export(
            request.path,
            request.output,
            file_format=file_format,
            max_shard_bytes=formatting.parse_size(request.max_shard_bytes),
            checkpointable_name=request.checkpointable or "AUTO",
            select=request.select,
            casts=_casts(request.casts),
            allow_lossy_casts=request.allow_lossy_casts,
            overwrite=request.overwrite,
            on_progress=on_progress,
        )
    if output.as_json:
        document = {
            "files": done.files,
            "arrays": done.arrays,
            "bytes": done.nbytes,
            "left_out": done.left_out,
        }
        output.document(document)
        return
    for path in done.files:
        output.line(path)
    output.line(f"{formatting.count(done.arrays, 'array')}, {formatting.size(done.nbytes)}")
    if done.left_out:
        shown = ", ".join(done.left_out[:_SHOWN]) + (" and others" if len(done.left_out) > _SHOWN else "")
        values = formatting.count(len(done.left_out), "value that is no array", "values that are no arrays")
        output.note(f"note: left out {values}: {formatting.plain(shown)}", style="yellow")


def _format(name: str | None) -> Format | None:
    if name not in (None, "safetensors", "npz"):
        raise InvalidInput(f"there is no format '{name}'; give safetensors or npz")
    return cast("Format | None", name)


def _require_name(output: Path) -> None:
    if output.suffix.lower() in _OTHER_FORMATS and not storage.is_directory(output):
        raise InvalidInput(
            f"'{output}' ends in {output.suffix}, which export does not write; name a directory for "
            "model.safetensors, or a file that ends in .safetensors or .npz"
        )


def _casts(texts: list[str]) -> dict[str, str]:
    casts: dict[str, str] = {}
    for text in texts:
        stored, equals, wanted = text.rpartition("=")
        if not (equals and stored and wanted):
            raise InvalidInput(f"--cast {text}: write it like --cast float32=bfloat16")
        _require_dtype(text, wanted)
        if casts.setdefault(stored, wanted) != wanted:
            raise InvalidInput(f"--cast {text}: {stored} is cast to {casts[stored]} already")
    return casts


def _require_dtype(text: str, wanted: str) -> None:
    try:
        dtypes.of_name(wanted)
    except (Corrupt, Unsupported):  # as if a checkpoint had said so; here a person has typed it
        close = difflib.get_close_matches(wanted, dtypes.TABLE) or ["float32", "bfloat16", "int8"]
        raise InvalidInput(
            f"--cast {text}: '{wanted}' is no dtype; write a name of NumPy or ml_dtypes, such as "
            f"{', '.join(close)}"
        ) from None
