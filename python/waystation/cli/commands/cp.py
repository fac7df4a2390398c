"""`waystation cp` and `waystation mirror`: copy one checkpoint, or a directory of them, to another place."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import typer

from waystation import storage
from waystation._errors import InvalidInput
from waystation.checkpoint.copy import CopyStatistics, copy
from waystation.cli import formatting
from waystation.cli.commands.ls import checkpoints_in, directories_beside, named
from waystation.cli.output import OnProgress, Output
from waystation.training.mirror import MirrorStatistics, mirror

DIFFERS = 1


def run(
    output: Output, source: str, destination: str, *, overwrite: bool, bytes_per_second: str | None
) -> None:
    """Copies, and says what was copied."""
    with output.progress(f"copying {os.path.basename(source)}") as on_progress:
        done = copy(
            source,
            destination,
            overwrite=overwrite,
            bytes_per_second=_rate(bytes_per_second),
            on_progress=on_progress,
        )
    if output.as_json:
        output.document({"source": source, **_document(done)})
    else:
        output.line(f"{done.path}: {_told(done)}")


def run_mirror(
    output: Output,
    source: str,
    destination: str,
    *,
    overwrite: bool,
    delete: bool,
    bytes_per_second: str | None,
) -> None:
    """Copies what is lacking, says what was done, and exits with 1 if something differs or is damaged."""
    with contextlib.ExitStack() as bar:

        def on_checkpoint(name: str) -> OnProgress:
            bar.close()
            return bar.enter_context(output.progress(f"copying {name}"))

        done = mirror(
            source,
            destination,
            overwrite=overwrite,
            delete=delete,
            bytes_per_second=_rate(bytes_per_second),
            on_checkpoint=on_checkpoint,
        )
    if not (done.copied or done.equal or done.differing or done.damaged or done.unsupported):
        _check_is_no_directory_of_runs(source)
    if output.as_json:
        output.document(_mirror_document(source, done))
    else:
        _show_mirror(output, done)
    if done.differing or done.damaged:
        raise typer.Exit(DIFFERS)


def _check_is_no_directory_of_runs(source: str) -> None:
    """Refuses a source that holds no checkpoints but directories of them: a mirror copies those of one."""
    parent = storage.resolved(storage.located(source))
    runs = [
        each.path
        for each in directories_beside(parent, checkpoints_in(parent).others)
        if each.holds_checkpoints
    ]
    if runs:
        raise InvalidInput(
            f"there are no checkpoints in '{parent}' itself, and nothing was copied; directories there that "
            f"hold some: {named(runs)}. Mirror each of them",
            path=parent,
        )


def _mirror_document(source: str, done: MirrorStatistics) -> dict[str, Any]:
    return {
        "source": source,
        "path": done.path,
        "copied": [{"name": name, **_document(each)} for name, each in done.copied.items()],
        "equal": done.equal,
        "differing": done.differing,
        "damaged": done.damaged,
        "unsupported": done.unsupported,
        "deleted": done.deleted,
    }


def _show_mirror(output: Output, done: MirrorStatistics) -> None:
    for name, each in done.copied.items():
        output.line(f"{name}: {_told(each)}")
    for name in done.deleted:
        output.line(f"{name}: removed, as the source does not have it")
    for name in done.unsupported:
        output.line(
            f"{name}: not copied: it is one process's part of a save to local storage", style="yellow"
        )
    for name in done.differing:
        output.line(f"{name}: left alone: another one is there; --overwrite replaces it", style="bold red")
    for name, problem in done.damaged.items():
        output.line(f"{name}: not copied: {problem}", style="bold red")
    copied, equal = len(done.copied), len(done.equal)
    output.line(
        f"{done.path}: {formatting.count(copied, 'checkpoint')} copied, {equal} there already"
        + (f", {len(done.deleted)} removed" if done.deleted else "")
    )


def _rate(text: str | None) -> int | None:
    return None if text is None else formatting.parse_size(text.removesuffix("/s"))


def _document(done: CopyStatistics) -> dict[str, Any]:
    return {
        "path": done.path,
        "files": done.files,
        "bytes": done.nbytes,
        "bytes_found": done.found_bytes,
        "elapsed_s": done.elapsed_s,
    }


def _told(done: CopyStatistics) -> str:
    text = (
        f"{formatting.size(done.nbytes)} in {formatting.count(done.files, 'file')} copied and verified in "
        f"{done.elapsed_s:.1f} s"
    )
    if done.found_bytes:
        text += f"; {formatting.size(done.found_bytes)} of them were there from a copy that did not end"
    return text
