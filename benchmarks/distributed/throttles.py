"""Slow stores, modelled by the engine's throttle: what several processes may move together.

A store is what all processes share: bytes and requests a second of all of them together. A link is what one
host can send, whatever the store takes: each process has one of its own. Only data files count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from waystation import _native

MIB = 1 << 20
STORE_BYTES_PER_S = 64 * MIB
STORE_REQUESTS_PER_S = 2000
LINK_BYTES_PER_S = 64 * MIB
BLOCK_BYTES = 1 * MIB
"""A request, so that every process asks for the store in equal portions."""


def store(
    directory: Path,
    bytes_per_s: int = STORE_BYTES_PER_S,
    requests_per_s: int | None = STORE_REQUESTS_PER_S,
) -> dict[str, Any]:
    """Makes a store for one program; the settings with which its processes use it."""
    path = _fresh(directory, "store")
    _native.create_throttle(path, bytes_per_s=bytes_per_s, requests_per_s=requests_per_s)
    return _settings(path)


def links(directory: Path, processes: int) -> dict[str, Any]:
    """Makes a link for each process of a program; the settings with which it uses its own."""
    for process in range(processes):
        _native.create_throttle(_fresh(directory, f"link-{process}"), bytes_per_s=LINK_BYTES_PER_S)
    return _settings(str(directory / "link-{process}"))


def describe() -> str:
    """The limits, for a table's title."""
    return (
        f"a store of {STORE_BYTES_PER_S // MIB} MiB/s and {STORE_REQUESTS_PER_S:,} requests/s, or links of "
        f"{LINK_BYTES_PER_S // MIB} MiB/s to each process"
    )


def _fresh(directory: Path, name: str) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.unlink(missing_ok=True)
    return str(path)


def _settings(path: str) -> dict[str, Any]:
    return {"engine.throttle_path": path, "engine.block_bytes": BLOCK_BYTES}
