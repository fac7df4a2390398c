"""What the figures were measured on: they mean nothing without it."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("waystation", "jax", "torch", "numpy", "tensorstore", "flax", "transformers", "ray")


def describe(directory: Path) -> dict[str, Any]:
    """The machine, the file system of `directory`, and versions."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _first_value("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "file_system": _file_system(directory),
        "page_cache_can_be_dropped": os.access("/proc/sys/vm/drop_caches", os.W_OK),
        "python": sys.version.split()[0],
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _first_value(path: str, key: str) -> str | None:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _file_system(directory: Path) -> str:
    """The type of the mount that a directory is on: the longest mount point that leads to it."""
    best, found = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        point = point.encode().decode("unicode_escape")
        if directory.resolve().is_relative_to(point) and len(point) >= len(best):
            best, found = point, kind
    return found
