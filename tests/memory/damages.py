"""Damage to the files of slots: any part of them, of one slot or of all that a host has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

PAGE_BYTES = 4096
CONTENTS_OFFSET = 3 * PAGE_BYTES
BLOCK_BYTES = 256 << 10


def flip(path: Path, *offsets: int) -> None:
    """Flips a bit of each of these bytes."""
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))


def _replaced(path: Path) -> None:
    """Puts a file of zeros in the place of a slot's, under its name."""
    aside = path.with_name(f"{path.name}.aside")
    with aside.open("wb") as file:
        file.truncate(path.stat().st_size)
    aside.chmod(0o600)
    aside.rename(path)


def _checksums_offset(path: Path) -> int:
    """Where the checksums of the blocks begin, as the newest header says."""
    content = path.read_bytes()[: 2 * PAGE_BYTES]
    pages = content[:PAGE_BYTES], content[PAGE_BYTES:]
    newest = max(pages, key=lambda page: int.from_bytes(page[16:24], "little"))
    end = CONTENTS_OFFSET + int.from_bytes(newest[88:96], "little")
    return -(-end // PAGE_BYTES) * PAGE_BYTES


def _data_offset(path: Path) -> int:
    return -(-(_checksums_offset(path) + 8) // BLOCK_BYTES) * BLOCK_BYTES


DAMAGES: dict[str, Callable[[Path], None]] = {
    "first header": lambda path: flip(path, 100),
    "second header": lambda path: flip(path, PAGE_BYTES + 100),
    "both headers": lambda path: flip(path, 100, PAGE_BYTES + 100),
    "contents": lambda path: flip(path, CONTENTS_OFFSET + 40),
    "checksums": lambda path: flip(path, _checksums_offset(path)),
    "data": lambda path: flip(path, _data_offset(path) + 100),
    "cut within the data": lambda path: os.truncate(path, _data_offset(path) + 100),
    "cut within the header": lambda path: os.truncate(path, 100),
    "cut to nothing": lambda path: os.truncate(path, 0),
    "gone": Path.unlink,
    "replaced": _replaced,
}


def slots(store: Path) -> Iterator[Path]:
    """The files of all slots of a store."""
    yield from sorted(path for path in store.iterdir() if path.name.startswith("slot-"))
