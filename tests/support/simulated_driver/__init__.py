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
from pathlib import Path

SOURCE = Path(__file__).parent / "lib.rs"
NAMES = ("libcuda.so", "libcuda.so.1")
STATISTICS = ("pinned_bytes", "most_pinned_bytes", "copies", "unpinned_copies", "to_device_bytes")


@functools.cache
def build(directory: Path) -> Path:
    """A directory that holds the driver under the names that a real one has."""
    compiler = shutil.which("rustc")
    assert compiler, "rustc is needed to build the simulated driver, as cargo is to build Waystation"
    first = directory / NAMES[0]
    command = [compiler, "--crate-type", "cdylib", "--crate-name", "cuda", "--edition", "2024", "-O"]
    subprocess.run([*command, "-C", "prefer-dynamic=no", "-o", first, SOURCE], check=True)
    (directory / NAMES[1]).symlink_to(first.name)
    return directory


def environment(directory: Path, **settings: int) -> dict[str, str]:
    """The environment of a process that finds the driver, with settings such as `FAILING_COPY=3`."""
    found = os.environ.get("LD_LIBRARY_PATH")
    paths = os.pathsep.join([str(directory), *([found] if found else [])])
    own = {f"SIMULATED_CUDA_{name}": str(value) for name, value in settings.items()}
    return {**os.environ, "LD_LIBRARY_PATH": paths, **own}


def statistics() -> dict[str, int] | None:
    """What this process has done with the simulated driver; None if its driver is a real one."""
    try:
        ask = ctypes.CDLL(NAMES[1]).simulated_statistics
    except (OSError, AttributeError):
        return None
    values = (ctypes.c_uint64 * len(STATISTICS))()
    ask(values)
    return dict(zip(STATISTICS, values, strict=True))
