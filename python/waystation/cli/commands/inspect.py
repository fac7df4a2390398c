"""`waystation inspect`: the tree of a checkpoint, from its metadata alone; imports no framework."""

from __future__ import annotations

import json
from typing import Any

from waystation._options.in_effect import current_options
from waystation.checkpoint.paths import layout_in, locate, require_checkpoint
from waystation.checkpoint.replaced import Held, read_what_is_there
from waystation.cli import formatting, state_tree
from waystation.cli.commands import inspect_orbax
from waystation.cli.output import Output
from waystation.layouts.native import names
from waystation.layouts.native.handler_files import HandlerFiles
from waystation.layouts.native.read import OpenCheckpointable, open_any, open_checkpoint
from waystation.layouts.native.records import CheckpointRecord

Opened = OpenCheckpointable | HandlerFiles


def run(output: Output, path: str, checkpointable: str | None, depth: int | None) -> None:
    """Prints what a checkpoint holds."""
    target, found = _read(path, checkpointable)
    if found is None:
        inspect_orbax.run(output, target, checkpointable, depth)
        return
    record, opened = found
    if output.as_json:
        output.document(_document(target, record, opened))
    else:
        _show_checkpoint(output, target, record, opened)
        for name, entry in opened.items():
            if isinstance(entry, HandlerFiles):
                files = {path: digest.nbytes for path, digest in entry.record.files.items()}
                state_tree.show_files(output, name, entry.record.handler, files)
            else:
                state_tree.show(output, f"{name}: {_totals(entry)}", entry.tree, depth)


def see(path: str) -> state_tree.Seen:
    """Opens a checkpoint, to be shown part by part, with what `run` prints of it for programs.

    Raises:
        NotFound, InvalidInput: There is none.
        Corrupt: Its metadata are damaged.
    """
    target, found = _read(path, None)
    if found is None:
        return inspect_orbax.see(target)
    record, opened = found
    return state_tree.Seen(
        _head(target, record),
        {
            name: _checkpointable_document(entry)
            if isinstance(entry, HandlerFiles)
            else state_tree.SeenState(entry, _held(entry), entry.tables.chunk_count)
            for name, entry in opened.items()
        },
    )


def _read(
    path: str, checkpointable: str | None
) -> tuple[str, tuple[CheckpointRecord, dict[str, Opened]] | None]:
    """Where a checkpoint is, and what is in it; None if it is in one of Orbax's layouts."""
    target = locate(path)
    require_checkpoint(target)

    def read(held: Held) -> tuple[CheckpointRecord, dict[str, Opened]] | None:
        if layout_in(held.root) == "orbax":
            return None
        record = open_checkpoint(target, held.root)
        chosen = record.present(target, held.root) if checkpointable is None else [checkpointable]
        return record, {name: open_any(target, record, name, held.root) for name in chosen}

    return target, read_what_is_there(target, current_options(), read)


# ---- for programs ------------------------------------------------------------------------------


def _document(target: str, record: CheckpointRecord, opened: dict[str, Opened]) -> dict[str, Any]:
    documents = {name: _checkpointable_document(entry) for name, entry in opened.items()}
    return {**_head(target, record), "checkpointables": documents}


def _head(target: str, record: CheckpointRecord) -> dict[str, Any]:
    return {
        "path": target,
        "layout": "native",
        "format_version": names.FORMAT_VERSION,
        "generation": record.generation,
        "committed_at": formatting.moment(record.created_ns),
        "custom_metadata": record.custom_metadata,
        "local": None if record.local is None else record.local.to_json(),
    }


def _checkpointable_document(opened: Opened) -> dict[str, Any]:
    if isinstance(opened, HandlerFiles):
        files = opened.record.files
        return {
            "handler": opened.record.handler,
            "processes": opened.record.process_count,
            "files": len(files),
            "file_bytes": sum(digest.nbytes for digest in files.values()),
            "paths": sorted(files),
        }
    return {**_held(opened), **state_tree.document(opened.tree, opened.tables.chunk_count)}


def _held(opened: OpenCheckpointable) -> dict[str, Any]:
    return {
        "processes": opened.record.process_count,
        "files": len(opened.tables.files),
        "file_bytes": int(opened.tables.files["file_bytes"].sum()),
    }


# ---- for people --------------------------------------------------------------------------------


def _show_checkpoint(
    output: Output, target: str, record: CheckpointRecord, opened: dict[str, Opened]
) -> None:
    facts = {
        "committed": formatting.shown_moment(record.created_ns),
        "generation": str(record.generation),
        "format": f"native, version {names.FORMAT_VERSION}",
    }
    if record.local is not None:
        facts["local storage"] = formatting.part(record.local)
    if record.custom_metadata is not None:
        facts["custom metadata"] = json.dumps(record.custom_metadata)
    absent = sorted(record.checkpointables.keys() - opened.keys())
    if absent:
        facts["not shown"] = ", ".join(absent)
    state_tree.show_facts(output, target, facts)


def _totals(opened: OpenCheckpointable) -> str:
    held = "in " + formatting.count(len(opened.tables.files), "file")
    if opened.record.process_count > 1:
        held += f" of {opened.record.process_count} processes"
    return f"{state_tree.totals(opened.tree)} {held}"
