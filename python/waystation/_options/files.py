"""Files and the engine that moves their bytes."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import Any, ClassVar

from waystation._options import checks
from waystation._options.base import OptionGroup

_PAST_MODES = 0o10000  # after the bits for user, group, others, and the three special ones


def _mode_bits(value: Any) -> str | None:
    fits = value is None or (checks.is_int(value) and 0 <= value < _PAST_MODES)
    return None if fits else "permission bits as an integer, such as 0o750, or None"


def _class(value: Any) -> str | None:
    return None if isinstance(value, type) else "a class of paths"


@dataclass(kw_only=True)
class FileOptions(OptionGroup):
    """How files are laid out and made durable.

    Attributes:
        file_bytes_target: Start a new data file at this size. An array is never split between files. None is
            2 GiB on a file system, and 256 MiB in an object store, which completes one file while others are
            uploaded.
        path_permission_mode: Permission bits of new directories; None uses the default of the process.
        path_class: The class of the paths that programs receive.
        follow_links_out: Whether loads follow symbolic links inside a checkpoint that lead out of it.
            Waystation writes no such links and refuses them by default, because a writer of such a link
            could make a load read any file that the program may read. Set it for checkpoints whose files a
            trusted tool has replaced by links into its store. The path of the checkpoint itself may be a
            link.
        skip_sync_file_validations: Accepted for compatibility with Orbax, and without effect: the check of
            the destination before an asynchronous save returns is one system call.
    """

    file_bytes_target: int | None = None
    path_permission_mode: int | None = None
    path_class: type[Any] = pathlib.Path
    follow_links_out: bool = False
    skip_sync_file_validations: bool = False
    _checks: ClassVar = {
        "file_bytes_target": checks.positive_or_none,
        "path_permission_mode": _mode_bits,
        "path_class": _class,
        "follow_links_out": checks.boolean,
        "skip_sync_file_validations": checks.boolean,
    }


def _mode(value: Any) -> str | None:
    modes = (None, "direct-ring", "direct-threads", "buffered")
    return None if value in modes else f"one of {modes}"


@dataclass(kw_only=True)
class EngineOptions(OptionGroup):
    """Overrides of the engine's calibration; None leaves the choice to the engine.

    Attributes:
        write_mode: `direct-ring`, `direct-threads` or `buffered`.
        read_mode: The same, for reading.
        block_bytes: Size of one request.
        depth: Number of requests in flight.
        threads: Number of worker threads.
        staging_bytes: Memory of a save for blocks on their way to the disk; at least one block of 256 KiB.
        throttle_path: The file of a throttle. All jobs of all processes of this machine that name it share
            its limit on bytes and requests per second. It emulates a slow store in benchmarks
            (`benchmarks/distributed`), and applies to data files only.
        gpu_direct: Whether to read files directly into the memory of NVIDIA GPUs (GPUDirect Storage) if
            cuFile supports it. Other reads pass through host memory.
    """

    write_mode: str | None = None
    read_mode: str | None = None
    block_bytes: int | None = None
    depth: int | None = None
    threads: int | None = None
    staging_bytes: int | None = None
    throttle_path: str | None = None
    gpu_direct: bool = False
    _checks: ClassVar = {
        "write_mode": _mode,
        "read_mode": _mode,
        "block_bytes": checks.positive_or_none,
        "depth": checks.positive_or_none,
        "threads": checks.positive_or_none,
        "staging_bytes": checks.positive_or_none,
        "throttle_path": checks.path_or_none,
        "gpu_direct": checks.boolean,
    }
