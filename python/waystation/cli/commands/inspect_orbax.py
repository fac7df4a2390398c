"""`waystation inspect` of a checkpoint in one of Orbax's layouts."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

from waystation import storage
from waystation._options.in_effect import current_options
from waystation.checkpoint.opening import open_held
from waystation.checkpoint.replaced import Held, read_what_is_there
from waystation.checkpoint.stored import OpenCheckpoint, Stored
from waystation.cli import formatting, state_tree
from waystation.cli.output import Output
from waystation.layouts.opened import Opened

Files = dict[str, int]  # lengths in bytes, by paths from the directory of the checkpointable


def run(output: Output, target: str, checkpointable: str | None, depth: int | None) -> None:
    """Prints what a checkpoint holds."""
    opened, files = _read(target, None if checkpointable is None else [checkpointable])
    if output.as_json:
        output.document(_document(opened, files))
        return
    facts = {"format": "Orbax"}
    if opened.committed_ns is not None:
        facts = {"committed": formatting.shown_moment(opened.committed_ns), **facts}
    if opened.custom_metadata:
        facts["custom metadata"] = json.dumps(opened.custom_metadata)
    absent = sorted(set(opened.names) - opened.stored.keys())
    if absent:
        facts["not shown"] = formatting.plain(", ".join(absent))
    state_tree.show_facts(output, target, facts)
    for name, stored in opened.stored.items():
        if stored.state is None:
            state_tree.show_files(output, name, stored.handler, files[name])
        else:
            title = f"{name}: {state_tree.totals(stored.state.tree)}"
            state_tree.show(output, title, stored.state.tree, depth)


def see(target: str) -> state_tree.Seen:
    """Opens a checkpoint, to be shown part by part, as `inspect.see` does."""
    opened, files = _read(target, None)
    return state_tree.Seen(
        _head(opened),
        {
            name: _checkpointable_document(stored, files[name])
            if stored.state is None
            else state_tree.SeenState(
                stored.state, _held(files[name]), functools.partial(_chunk_count, stored.state)
            )
            for name, stored in opened.stored.items()
        },
    )


def _read(target: str, wanted: list[str] | None) -> tuple[OpenCheckpoint, dict[str, Files]]:
    options = current_options()

    def read(held: Held) -> tuple[OpenCheckpoint, dict[str, Files]]:
        opened = open_held(held, wanted, options)
        return opened, {
            name: storage.files_below(stored.directory, held.root) for name, stored in opened.stored.items()
        }

    return read_what_is_there(target, options, read)


def _document(opened: OpenCheckpoint, files: dict[str, Files]) -> dict[str, Any]:
    documents = {
        name: _checkpointable_document(stored, files[name]) for name, stored in opened.stored.items()
    }
    return {**_head(opened), "checkpointables": documents}


def _head(opened: OpenCheckpoint) -> dict[str, Any]:
    committed = opened.committed_ns
    return {
        "path": opened.target,
        "layout": "orbax",
        "committed_at": None if committed is None else formatting.moment(committed),
        "custom_metadata": opened.custom_metadata,
    }


def _checkpointable_document(stored: Stored, files: Files) -> dict[str, Any]:
    state = stored.state
    if state is None:
        return {"handler": stored.handler, **_held(files), "paths": sorted(files)}
    chunk_count = functools.partial(_chunk_count, state)
    return {**_held(files), **state_tree.document(state.tree, chunk_count)}


def _held(files: Files) -> dict[str, Any]:
    return {"files": len(files), "file_bytes": sum(files.values())}


def _chunk_count(state: Opened, number: int) -> int:
    shape, chunk = state.tree.arrays[number].shape, state.storage_metadata(number).chunk_shape
    if chunk is None or 0 in shape:
        return 0
    return math.prod(-(-extent // part) for extent, part in zip(shape, chunk, strict=True))
