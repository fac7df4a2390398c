"""`waystation safetensors spread`: a published model over several disks."""

from __future__ import annotations

import os
from dataclasses import dataclass

from waystation.cli import formatting
from waystation.cli.output import Output
from waystation.safetensors.spread import SpreadModel, spread_model

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments as they were typed."""

    path: str
    to: list[str]
    max_shard_bytes: str
    overwrite: bool
    relative_links: bool


def run(output: Output, request: Request) -> None:
    """Spreads, and tells what is where."""

    def warn(text: str) -> None:
        output.note(f"warning: {formatting.plain(text)}", style="yellow")

    with output.progress(f"spreading {os.path.basename(request.path)}") as on_progress:
        done = spread_model(
            request.path,
            request.to,
            max_file_bytes=formatting.parse_size(request.max_shard_bytes),
            overwrite=request.overwrite,
            relative_links=request.relative_links,
            on_progress=on_progress,
            on_warning=warn,
        )
    if output.as_json:
        output.document(_document(done))
        return
    for folder, (nbytes, files) in _by_folder(done).items():
        output.line(f"{folder}: {formatting.size(nbytes)} in {formatting.count(files, 'file')}")
    output.line(f"load {done.path}")
    if done.left_out:
        more = " and others" if len(done.left_out) > _SHOWN else ""
        shown = formatting.plain(", ".join(done.left_out[:_SHOWN]) + more)
        count = formatting.count(len(done.left_out), "file")
        output.note(f"note: {count} beside the model stayed there: {shown}", style="yellow")


def _by_folder(done: SpreadModel) -> dict[str, tuple[int, int]]:
    """Bytes and number of the files of each folder."""
    found: dict[str, tuple[int, int]] = {}
    for file in done.files:
        nbytes, files = found.get(file.folder, (0, 0))
        found[file.folder] = nbytes + file.nbytes, files + 1
    return found


def _document(done: SpreadModel) -> dict[str, object]:
    return {
        "path": done.path,
        "bytes": done.nbytes,
        "files": [
            {"path": file.path, "folder": file.folder, "bytes": file.nbytes, "tensors": file.tensors}
            for file in done.files
        ],
        "carried": done.carried,
        "left_out": done.left_out,
        "on_one_disk": [list(pair) for pair in done.on_one_disk],
    }
