"""Options of checkpointers and managers, which become options of a `waystation.Context`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

from waystation import coordination
from waystation._errors import InvalidInput, Unsupported
from waystation._options import AtomicityMode
from waystation.checkpoint.context import Context, copy_of_current

__all__ = [
    "AsyncOptions",
    "AtomicityMode",
    "AtomicityOptions",
    "FileOptions",
    "MemoryLimitOptions",
    "MultiprocessingOptions",
    "PyTreeMetadataOptions",
]

Layout = Literal["orbax", "native"]


@dataclasses.dataclass
class AsyncOptions:
    """Saves in the background.

    Attributes:
        timeout_secs: How long a process waits for another one, at most.
        barrier_sync_fn: Refused: the library has its own way for processes to wait for each other.
        post_finalization_callback: Called once a checkpoint is committed.
        create_directories_asynchronously: Has no effect: directories are made in the background.
    """

    timeout_secs: int = 1200
    barrier_sync_fn: Callable[..., Any] | None = None
    post_finalization_callback: Callable[[], None] | None = None
    create_directories_asynchronously: bool = True


@dataclasses.dataclass
class MultiprocessingOptions:
    """The processes of a program.

    Attributes:
        primary_host: The process that decides; None if each process has a storage of its own.
        active_processes: Those that take part; None for all.
        barrier_sync_key_prefix: Divides calls of some processes from calls of others.
    """

    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """Files.

    Attributes:
        path_permission_mode: The permissions of directories of checkpoints.
        skip_sync_file_validations: Has no effect.
    """

    path_permission_mode: int | None = None
    skip_sync_file_validations: bool = False


@dataclasses.dataclass(frozen=True)
class AtomicityOptions:
    """How a checkpoint becomes visible.

    Attributes:
        mode: Always a rename on file systems, and one object that commits in object stores.
        allow_legacy_atomic_rename: Has no effect.
    """

    mode: AtomicityMode = AtomicityMode.AUTO
    allow_legacy_atomic_rename: bool = False


@dataclasses.dataclass(frozen=True)
class MemoryLimitOptions:
    """Memory.

    Attributes:
        max_transfer_concurrent_gb: How much of a state is copied at a time, in GB.
    """

    max_transfer_concurrent_gb: int | None = None


@dataclasses.dataclass(frozen=True)
class PyTreeMetadataOptions:
    """What is said of the containers of a tree.

    Attributes:
        support_rich_types: Whether tuples and named tuples come back as such.
    """

    support_rich_types: bool = False


@dataclasses.dataclass(frozen=True)
class TreeOptions:
    """How trees are stored, by the handler of a tree.

    Attributes:
        use_ocdbt: In a database; else in files.
        use_zarr3: In zarr of version 3; else 2.
        use_compression: Compressed.
        support_rich_types: With tuples and named tuples.
        target_file_bytes: How large a data file may become; None for Orbax's default.
        write_concurrent_bytes: How much is written at a time; None for no bound.
        read_concurrent_bytes: How much is read at a time.
        transfer_concurrent_bytes: How much is copied from devices at a time.
    """

    use_ocdbt: bool = True
    use_zarr3: bool = False
    use_compression: bool = True
    support_rich_types: bool = False
    target_file_bytes: int | None = None
    write_concurrent_bytes: int | None = None
    read_concurrent_bytes: int | None = None
    transfer_concurrent_bytes: int | None = None

    def apply(self, context: Context) -> None:
        """Sets the options of a context."""
        saving, memory = context.array.saving, context.memory
        saving.use_ocdbt = None if layout() == "native" else self.use_ocdbt
        saving.use_zarr3 = self.use_zarr3
        saving.use_compression = self.use_compression
        if self.target_file_bytes is not None:
            saving.ocdbt_target_data_file_size = self.target_file_bytes
        kept = context.pytree.saving.pytree_metadata_options
        context.pytree.saving.pytree_metadata_options = type(kept)(support_rich_types=self.support_rich_types)
        for name in ("write_concurrent_bytes", "read_concurrent_bytes", "transfer_concurrent_bytes"):
            nbytes = getattr(self, name)
            if nbytes is not None:
                setattr(memory, name, nbytes)


def apply_async(options: AsyncOptions | None, context: Context) -> None:
    """Sets the options of a context."""
    if options is None:
        return
    if options.barrier_sync_fn is not None:
        raise Unsupported(
            "barrier_sync_fn must be None: processes wait for each other by what JAX or torch connects them"
        )
    context.asynchronous.timeout_secs = options.timeout_secs
    context.asynchronous.post_finalization_callback = options.post_finalization_callback


def apply_multiprocessing(options: MultiprocessingOptions | None, context: Context) -> None:
    """Sets the options of a context."""
    if options is None:
        return
    # A program of one process has one storage, whatever it is called.
    is_alone = options.primary_host is None and coordination.current().process_count == 1
    context.multiprocessing.primary_host = 0 if is_alone else options.primary_host
    context.multiprocessing.active_processes = options.active_processes
    context.multiprocessing.barrier_sync_key_prefix = options.barrier_sync_key_prefix


def apply_files(
    files: FileOptions | None, atomicity: AtomicityOptions | None, temporary_path_class: Any, context: Context
) -> None:
    """Sets the options of a context."""
    if temporary_path_class is not None:
        raise Unsupported(
            "temporary_path_class must be None: an attempt is a directory that a rename commits, see "
            "docs/orbax.md"
        )
    if files is not None:
        context.file.path_permission_mode = files.path_permission_mode
        context.file.skip_sync_file_validations = files.skip_sync_file_validations
    if atomicity is not None:
        context.atomicity.mode = AtomicityMode(getattr(atomicity.mode, "value", atomicity.mode))
        context.atomicity.allow_legacy_atomic_rename = atomicity.allow_legacy_atomic_rename


# ---- the layout --------------------------------------------------------------------------------

_chosen: dict[str, Layout] = {"layout": "orbax"}


def layout() -> Layout:
    """In which layout this interface saves."""
    return _chosen["layout"]


def set_layout(layout: Layout) -> None:
    """Says in which layout this interface saves from now on.

    Args:
        layout: `orbax`, which Orbax reads, or `native`, Waystation's own. Loads find out what is there.

    Raises:
        InvalidInput: It is neither.
    """
    if layout not in ("orbax", "native"):
        raise InvalidInput(f"the layout must be 'orbax' or 'native', not {layout!r:.60}")
    _chosen["layout"] = layout


@contextlib.contextmanager
def context_with(*changes: Callable[[Context], None]) -> Iterator[Context]:
    """Options in effect within the block: those of now, changed."""
    context = copy_of_current()
    for change in changes:
        change(context)
    with context:
        yield context
