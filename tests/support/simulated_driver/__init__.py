"""A simulated CUDA driver, for machines without a GPU: built by `rustc`, used by child processes.

What runs against it is the whole way from Python to the driver's calls, and what is simulated is the driver
alone (see `lib.rs`). Frameworks that were built for CUDA do not work with it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).parent / "lib.rs"
CUFILE_SOURCE = Path(__file__).parent / "cufile.rs"
NAMES = ("libcuda.so", "libcuda.so.1")
CUFILE_NAME = "libcufile.so.0"
STATISTICS = ("pinned_bytes", "most_pinned_bytes", "copies", "unpinned_copies", "to_device_bytes")
CUFILE_STATISTICS = ("reads", "read_bytes", "files", "buffers")


@functools.cache
def build(directory: Path) -> Path:
    """A directory that holds the driver under the names that a real one has."""
    first = directory / NAMES[0]
    _compile(SOURCE, "cuda", first)
    (directory / NAMES[1]).symlink_to(first.name)
    return directory


def build_with_cufile(directory: Path) -> Path:
    """The same with a simulated cuFile beside the driver."""
    _compile(CUFILE_SOURCE, "cufile", build(directory) / CUFILE_NAME)
    return directory


def _compile(source: Path, name: str, target: Path) -> None:
    compiler = shutil.which("rustc")
    assert compiler, "rustc is needed to build the simulated driver, as cargo is to build Waystation"
    command = [compiler, "--crate-type", "cdylib", "--crate-name", name, "--edition", "2024", "-O"]
    subprocess.run([*command, "-C", "prefer-dynamic=no", "-o", target, source], check=True)


def environment(directory: Path, **settings: int | Path) -> dict[str, str]:
    """The environment of a process that finds the driver, with settings such as `FAILING_COPY=3`."""
    found = os.environ.get("LD_LIBRARY_PATH")
    paths = os.pathsep.join([str(directory), *([found] if found else [])])
    own = {f"SIMULATED_CUDA_{name}": str(value) for name, value in settings.items()}
    return {**os.environ, "LD_LIBRARY_PATH": paths, **own}


def statistics() -> dict[str, int] | None:
    """What this process has done with the simulated driver; None if its driver is a real one."""
    return _statistics(NAMES[1], "simulated_statistics", STATISTICS)


def cufile_statistics() -> dict[str, int] | None:
    """The same of the simulated cuFile."""
    return _statistics(CUFILE_NAME, "simulated_cufile_statistics", CUFILE_STATISTICS)


def _statistics(library: str, function: str, names: Sequence[str]) -> dict[str, int] | None:
    try:
        ask = getattr(ctypes.CDLL(library), function)
    except (OSError, AttributeError):
        return None
    values = (ctypes.c_uint64 * len(names))()
    ask(values)
    return dict(zip(names, values, strict=True))
