"""File systems for tests: such that fill up soon, and one on which nothing that others do is in the way."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from waystation import _native


@contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """A file system in memory, with options such as `size=8m,nr_inodes=100`; or a skipped test."""
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"needs the right to mount a file system: {done.stderr.strip()}")
    try:
        yield place
    finally:
        if subprocess.run(["umount", place], capture_output=True, check=False).returncode != 0:
            # Somebody held it at that moment, such as a process that looks at every mount of this machine.
            held = _open_beneath(place)
            subprocess.run(["umount", "--lazy", place], check=True)
            assert not held, f"still open: {held}"


def _open_beneath(place: Path) -> list[str]:
    """What any process has open, mapped, or as its working directory, in a file system."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        links = [*process.glob("fd/*"), *process.glob("map_files/*"), process / "cwd"]
        for link in links:
            with suppress(OSError):
                if str(target := link.readlink()).startswith(str(place)):
                    found.append(f"{link} -> {target}")
    return found


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    """Within the block nothing may be written to a directory, not even by those whom permissions do not
    stop; or a skipped test."""
    for options in (["--bind", place], ["-o", "remount,ro,bind"]):
        done = subprocess.run(["mount", *options, place], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"needs the right to mount a file system: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@contextmanager
def in_memory() -> Iterator[Path]:
    """A directory in memory, where many files are always synced at once; skips a test where there is none."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or _native.probe(str(shared))["filesystem"]["kind"] != "tmpfs":
        pytest.skip("needs a file system in memory at /dev/shm")
    with tempfile.TemporaryDirectory(dir=shared) as directory:
        yield Path(directory)
