"""Options of a program that its hosts heed, where they save and load for it.

Hosts are told those that differ from their defaults and are plain data. What says of single arrays how they
are stored is asked here, where the program's functions are. Options that are of the program's own processes
say nothing to hosts, and stay here; those that hosts cannot heed are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeAlias

from waystation._errors import InvalidInput, Unsupported
from waystation._options import Options, StorageOptions
from waystation.checkpoint import Context
from waystation.frameworks.registry import keys_of_program
from waystation.tree import KeyPath

PARTIAL_LOAD = "pytree.loading.partial_load"
LAYOUT = "array.saving.use_ocdbt"
_STORAGE_FOR = "array.saving.storage_options_for"
_SCOPED_STORAGE = "array.saving.scoped_storage_options_creator"
_WRITE_LIMIT = "memory.write_concurrent_bytes"
_STORE = "storage.settings"

# Of the processes of the program, and of values that it keeps by itself.
_OF_THE_PROGRAM = frozenset(
    {
        "multiprocessing.primary_host",
        "multiprocessing.active_processes",
        "multiprocessing.barrier_sync_key_prefix",
        "asynchronous.post_finalization_callback",  # which is called here
        "file.path_class",
        "memory.caller_keeps",  # what hosts are given is copied in any case
        "memory.is_prioritized_key_fn",
        "checkpointables.registry",
        "deletion.gcs_deletion_options.todelete_full_path",
        "pathways.checkpointing_impl",
        "storage.cache_directory",  # a directory of this machine
        "storage.cache_bytes",
    }
)
# These come down to one number, or to what single arrays are told.
_SAID_OTHERWISE = frozenset(
    {
        _WRITE_LIMIT,
        "memory.transfer_concurrent_bytes",
        "memory.regulator_options",
        "memory.expected_surge_bytes",
        _STORAGE_FOR,
        _SCOPED_STORAGE,
    }
)
_REFUSED = {
    "array.loading.in_place": "arrays of hosts are made anew; leave it off",
    "array.loading.restore_on_host": "leave it off, and load without arrays of hosts",
    "array.loading.sharding_for": "arrays lie as those of the abstract state do",
    "array.loading.on_statistics": "hosts keep statistics of their own; leave it out",
    "array.saving.on_statistics": "hosts keep statistics of their own; leave it out",
    "memory.serialization_status_callback": "hosts write the arrays; leave it out",
    "pytree.loading.keep_missing": "give ... in the places of what the checkpoint lacks",
    "pytree.loading.select": "give ... in the places of leaves that are not to be loaded",
}

StorageOf: TypeAlias = Callable[[KeyPath, str, Any, Any], StorageOptions | None]
_Storage: TypeAlias = tuple[str | None, int | None, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class HostOptions:
    """What hosts are told of options.

    Attributes:
        values: Names, as `array.loading.verify`, and values of those that differ from their defaults.
        storage: Of single arrays, by the numbers of their leaves: dtype, bytes of a chunk, axes that are cut.
        store: Settings by which object stores are reached. They may be credentials, so nothing shows them.
    """

    values: tuple[tuple[str, Any], ...] = ()
    storage: tuple[tuple[int, _Storage], ...] = ()
    store: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def has(self, name: str) -> bool:
        """Whether an option differs from its default."""
        return any(name == each for each, _ in self.values)

    def context(self, paths: Sequence[KeyPath] = ()) -> Context:
        """A context with these options.

        Args:
            paths: The key paths of all leaves of what is to be saved. An array may be there several times,
                and be stored in several ways.
        """
        context = Context()
        for name, value in self.values:
            *groups, last = name.split(".")
            setattr(reduce(getattr, groups, context), last, value)
        context.storage.settings = dict(self.store)
        if self.storage and paths:
            found = {keys_of_program(paths[number]): _options_of(own) for number, own in self.storage}
            context.array.saving.scoped_storage_options_creator = lambda key, value: found.get(key)
        return context


def _options_of(stored: _Storage) -> StorageOptions:
    dtype, chunk_bytes, chunk_axes = stored
    return StorageOptions(dtype=dtype, chunk_bytes=chunk_bytes, chunk_axes=chunk_axes)


DEFAULT_OPTIONS = HostOptions()


@dataclass(frozen=True, slots=True)
class SaveManner:
    """How a state is saved.

    Attributes:
        overwrite: Whether it may take the place of another checkpoint.
        custom_metadata: A JSON value to keep with it.
        options: What hosts are told of options.
    """

    overwrite: bool = False
    custom_metadata: Any = None
    options: HostOptions = DEFAULT_OPTIONS


def options_for_hosts(options: Options, storage: Mapping[int, StorageOptions] | None = None) -> HostOptions:
    """What hosts are told of options.

    Args:
        options: Those in effect.
        storage: How single arrays are to be stored, by the numbers of their leaves; see `storage_of`.

    Raises:
        Unsupported: Hosts cannot heed one of them; names it.
    """
    defaults = dict(Options().walk())
    chosen: dict[str, Any] = {}
    for name, value in options.walk():
        if name in _OF_THE_PROGRAM or name in _SAID_OTHERWISE or name == _STORE or value == defaults[name]:
            continue
        if name in _REFUSED:
            raise Unsupported(f"hosts cannot heed the option {name}: {_REFUSED[name]}")
        chosen[name] = value
    limit_bytes = options.memory.write_limit_bytes()
    if limit_bytes is not None:
        chosen[_WRITE_LIMIT] = limit_bytes
    single = {leaf: (own.dtype, own.chunk_bytes, own.chunk_axes) for leaf, own in (storage or {}).items()}
    store = tuple(options.storage.settings.items())
    return HostOptions(tuple(chosen.items()), tuple(single.items()), store)  # type: ignore[arg-type]


def storage_of(options: Options) -> StorageOf | None:
    """What says how single arrays are stored: called with the key path of an array, the same as text, its
    description (`shape`, `dtype`) and itself. None if options do not.

    Raises:
        InvalidInput: Both of two options are set, or one has not returned options.
    """
    by_name = options.array.saving.storage_options_for
    by_path = options.array.saving.scoped_storage_options_creator
    if by_name is not None and by_path is not None:
        raise InvalidInput("set either scoped_storage_options_creator or storage_options_for, not both")
    if by_name is None and by_path is None:
        return None

    def ask(path: KeyPath, label: str, described: Any, leaf: Any) -> StorageOptions | None:
        answer: Any = by_name(label, described) if by_name else by_path(keys_of_program(path), leaf)  # type: ignore[misc]
        if answer is not None and not isinstance(answer, StorageOptions):
            name = "storage_options_for" if by_name else "scoped_storage_options_creator"
            raise InvalidInput(f"{name} must return StorageOptions or None, not {answer!r}")
        return answer

    return ask
