"""`waystation sum`, and `waystation verify` of published models: checksums of safetensors files."""

from __future__ import annotations

import os

import typer

from waystation import safetensors, storage
from waystation.checkpoint.paths import is_checkpoint
from waystation.cli import formatting
from waystation.cli.output import Output
from waystation.errors import NotDirectory
from waystation.safetensors.checksums import FILE_NAME, read_checksums, verify_model

FOUND_DAMAGE = 1


def is_model(path: str) -> bool:
    """Whether a path is that of a published model, and not of a checkpoint."""
    place = storage.located(path)
    found = storage.status(place)
    if found is None:
        return _is_summed(*os.path.split(place))
    if found.kind != "directory" or is_checkpoint(place):
        return found.kind == "file"
    names = storage.list_names(place)
    endings = (".safetensors", ".index.json", FILE_NAME)
    return "snapshots" in names or any(name.endswith(endings) for name in names)


def _is_summed(directory: str, name: str) -> bool:
    """Whether there are checksums of a file."""
    try:
        return name in read_checksums(directory)
    except NotDirectory:
        return False


def run_sum(output: Output, path: str) -> None:
    """Sums the files of a model and tells what was written."""
    with output.progress(f"summing {os.path.basename(path)}") as on_progress:
        written = safetensors.write_checksums(path, on_progress=on_progress)
    files, nbytes = _extent(path)
    if output.as_json:
        output.document({"files": files, "bytes_read": nbytes, "written": written})
        return
    for file in written:
        output.line(f"{file}: {formatting.size(nbytes)} in {formatting.count(files, 'file')} summed")


def run_verify(output: Output, path: str) -> None:
    """Verifies, prints what was found, and exits with 1 if a file is damaged."""
    with output.progress(f"verifying {os.path.basename(path)}") as on_progress:
        damaged, files, nbytes = verify_model(path, on_progress=on_progress)
    if output.as_json:
        damages = [
            {"path": damage.path, "problem": damage.problem, "tensors": list(damage.tensors)}
            for damage in damaged
        ]
        found = {"path": path, "intact": not damaged, "files": files, "bytes_read": nbytes}
        output.document({"models": [{**found, "damages": damages}]})
    else:
        _show(output, path, damaged, f"{formatting.size(nbytes)} in {formatting.count(files, 'file')}")
    if damaged:
        raise typer.Exit(FOUND_DAMAGE)


def _show(output: Output, path: str, damaged: list[safetensors.DamagedFile], read: str) -> None:
    if not damaged:
        output.line(f"{path}: intact ({read} verified)")
        return
    output.line(f"{path}: {formatting.count(len(damaged), 'damaged file')} ({read} read)", style="bold red")
    for damage in damaged:
        shown = ", ".join(damage.tensors[:5])
        more = f" and {len(damage.tensors) - 5} more" if len(damage.tensors) > 5 else ""
        output.line(f"  {os.path.basename(damage.path)}: {damage.problem}")
        if shown:
            output.line(f"    in {shown}{more}")


def _extent(path: str) -> tuple[int, int]:
    """How many files a model has, and bytes."""
    with safetensors.open(path) as opened:
        return len(opened.files), sum(
            found.nbytes for file in opened.files if (found := storage.status(file))
        )
