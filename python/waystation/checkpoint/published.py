"""Published models as checkpoints: safetensors files that are loaded as a state, as Orbax loads them.

The state is a flat dict of tensors by their names. Each process reads the headers itself: what identifies a
file differs between the hosts of a network file system. Invariants: all processes of a load read files of
the same lengths and times, or the load fails; an abstract state may ask for any of the tensors, and for
nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from waystation import storage
from waystation._errors import Conflict, InvalidInput, InvalidLayoutError, Unsupported
from waystation._options import CheckpointLayout, Options, PyTreeLoadingOptions
from waystation._options.in_effect import current_options
from waystation.checkpoint import remote_state, wanted
from waystation.checkpoint.handlers.choice import STATE, STATE_HANDLER
from waystation.checkpoint.paths import require_checkpoint
from waystation.checkpoint.sessions import process_count
from waystation.checkpoint.stored import AUTO, OpenCheckpoint, Stored
from waystation.frameworks import registry
from waystation.frameworks.described import is_described
from waystation.layouts.opened import StoredTree
from waystation.safetensors.headers import Header, read_headers
from waystation.safetensors.open_files import OpenFiles
from waystation.safetensors.save import save as save_files
from waystation.safetensors.sources import files_of_checkpoint, find_in_checkpoint
from waystation.tree import flatten, unflatten

_ADVICE = "load it with load, as one state; waystation.safetensors reads parts of it, too"


class SafetensorsReader:
    """Reads safetensors files as a checkpoint."""

    def recognises(self, target: str) -> bool:
        """Whether a safetensors file is there, or a directory of such files."""
        return bool(files_of_checkpoint(target))

    def read(self, target: str, wanted: Sequence[str] | None) -> bytes:
        """Says which files there are, once their headers have been checked."""
        asked = wanted[0] if wanted else STATE
        headers = find_in_checkpoint(target)
        files = [[header.path, *_version(header)] for header in headers]
        return json.dumps({"name": STATE if asked == AUTO else asked, "files": files}).encode()

    def decode(self, target: str, data: bytes) -> OpenCheckpoint:
        """Opens these files in this process."""
        head = json.loads(data)
        headers = read_headers([path for path, *_ in head["files"]])
        for header, (_, *version) in zip(headers, head["files"], strict=True):
            if _version(header) != version:
                raise Conflict(
                    "the file changed while the processes of the program opened it; load again",
                    path=header.path,
                )
        metadata: dict[str, str] = {}
        for header in headers:
            metadata |= header.metadata or {}
        opened = OpenFiles(headers)
        stored = {head["name"]: Stored(head["name"], STATE_HANDLER, opened.directory, opened)}
        modified_ns = max(header.identity.modified_ns for header in headers)
        return OpenCheckpoint(target, tuple(stored), stored, metadata, None, modified_ns, is_model=True)


def _version(header: Header) -> list[int | str | None]:
    """What of a file's identity is the same on all hosts that see it."""
    return [header.identity.nbytes, header.identity.modified_ns, header.identity.tag]


def decide(
    target: str,
    tree: StoredTree,
    abstract_state: Any,
    loading: PyTreeLoadingOptions,
    *,
    process_count: int,
) -> wanted.Decided:
    """What a load of a published model is to produce.

    Args:
        target: The model.
        tree: What is in it.
        abstract_state: A flat dict of abstract arrays by names; None for all tensors, as NumPy arrays.
        loading: Options of trees.
        process_count: How many processes load it together.

    Raises:
        InvalidInput: Several processes load all of it, or the abstract state is no flat dict.
        StructureMismatch: A tensor is not there, or has another shape.
    """
    if abstract_state is None:
        if process_count > 1:
            raise InvalidInput(
                f"{process_count} processes load '{target}' without an abstract state, so each would read "
                "all of it; give a dict of jax.ShapeDtypeStruct with shardings",
                path=target,
            )
        return wanted.as_saved(tree, loading)
    leaves, structure = flatten(abstract_state, is_described)
    is_flat = isinstance(abstract_state, dict) and all(len(path) == 1 for path in structure.key_paths())
    if not is_flat or structure.leaf_count != len(abstract_state):
        raise InvalidInput(
            f"the abstract state of '{target}' is not a flat dict: it maps the names of tensors to abstract "
            "arrays, for example {'layers.0.weight': jax.ShapeDtypeStruct(…)}",
            path=target,
        )
    everywhere = unflatten(structure, [registry.over_all_devices(leaf) for leaf in leaves])
    # Whatever part of a model is asked for: a published one may hold tensors that a program has no use for.
    own = loading.thawed()
    own.partial_load = True
    return wanted.as_asked(tree, everywhere, own.frozen())


def abstract_model(stored: Stored) -> dict[str, Any]:
    """The abstract arrays of a published model by name: those of JAX where the program uses JAX."""
    assert stored.state is not None
    tree = stored.state.tree
    codec = registry.codec_of_program()
    return dict(zip(tree.labels, map(codec.abstract, tree.arrays), strict=True))


def require_checkpointables(opened: OpenCheckpoint) -> None:
    """Refuses a published model where checkpointables are loaded by name: it has none."""
    if opened.is_model:
        raise Unsupported(
            f"'{opened.target}' is a published model, which has no checkpointables; {_ADVICE}",
            path=opened.target,
        )


def refuse_other_than_model(target: str) -> NoReturn:
    """Raises what tells best why there is no published model at a path.

    Raises:
        CheckpointNotFound: There is nothing.
        InvalidLayoutError: There is something else.
    """
    if not storage.is_there(target):
        require_checkpoint(target)
    raise InvalidLayoutError(
        f"checkpoint_layout is SAFETENSORS, and '{target}' is neither a .safetensors file nor a directory "
        "that holds one; set AUTO to load checkpoints as well",
        path=target,
    )


def is_saved_as_model(options: Options) -> bool:
    """Whether the options say that a state is saved as a published model."""
    return options.checkpoint_layout is CheckpointLayout.SAFETENSORS


def save_model(
    target: str,
    state: Any,
    *,
    checkpointable_name: str,
    overwrite: bool,
    custom_metadata: Any,
    shares: bool,
) -> None:
    """Saves a flat dict of arrays, or a tree of them, as a published model, durably.

    Args:
        target: A directory, or the name of a file that ends in `.safetensors`.
        state: The arrays.
        checkpointable_name: The name of the state, which a model has no place for.
        overwrite: Replace a model that is there.
        custom_metadata: A dict of strings, or None.
        shares: Whether the caller wants to share data files with an earlier checkpoint.

    Raises:
        Unsupported: It was given another name, an earlier checkpoint, or arrays of the runtime; or the
            program has several processes.
        UnsupportedLeaf: A leaf is no array.
        InvalidInput: The metadata are no strings.
        Conflict: There is a model at `target`, or something else.
    """
    problem = None
    if checkpointable_name != STATE:
        problem = f"has no checkpointables, so leave out checkpointable_name = '{checkpointable_name}'"
    elif shares:
        problem = "shares no files; save without unchanged_from"
    elif remote_state.backend_of(state) is not None:
        problem = "holds no arrays of hosts; save them as a checkpoint, and export that"
    elif process_count(current_options()) > 1:
        problem = (
            "is saved by programs of one process only; save a checkpoint, and make a model of it with "
            "`waystation export`"
        )
    if problem is not None:
        raise Unsupported(f"a model (checkpoint_layout = SAFETENSORS) {problem}: '{target}'", path=target)
    is_text = isinstance(custom_metadata, dict) and all(
        isinstance(part, str) for item in custom_metadata.items() for part in item
    )
    if custom_metadata is not None and not is_text:
        raise InvalidInput(
            "the custom_metadata of a model (checkpoint_layout = SAFETENSORS) must be a dict of strings, not "
            f"{custom_metadata!r:.60}",
            path=target,
        )
    save_files(state, target, metadata=custom_metadata, overwrite=overwrite)


def require_layout_for_saves(options: Options) -> None:
    """Refuses a save of anything but one state where the options say that files are those of models."""
    if is_saved_as_model(options):
        raise Unsupported(
            "with checkpoint_layout = SAFETENSORS only save and save_async save, and only one state: a model "
            "has no checkpointables, parts or steps; save with ORBAX or AUTO (the data files of native "
            "checkpoints are safetensors files)"
        )
