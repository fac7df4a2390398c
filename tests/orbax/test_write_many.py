"""Many small arrays in Orbax's layouts: made durable at once, with few files open, or one by one."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.orbax import oracle, writing
from tests.support import disks, failing_calls

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS: dict[str, dict[str, Any]] = {
    "files": {"use_ocdbt": False},
    "files-plain": {"use_ocdbt": False, "use_compression": False},
    "files-zarr2": {"use_ocdbt": False, "use_zarr3": False},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)

PROGRAM = """
import json, sys
import numpy as np, waystation
from tests.support import failing_calls
path, call, code, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
failing_calls.fail(call, code)
context = waystation.Context()
context.array.saving.use_ocdbt = False
try:
    with context:
        waystation.save(path, [np.full(100 + n, n) for n in range(count)], overwrite=True)
except waystation.errors.Unavailable as error:
    print(json.dumps({"errno": error.errno, "path": error.context["path"]}))
else:
    print(json.dumps(None))
"""


@contextmanager
def few_open_files(count: int) -> Iterator[None]:
    """No more files than so many may be open, besides those that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@layouts
def test_few_files_are_open_at_a_time(layout: dict[str, Any], tmp_path: Path) -> None:
    state = {f"group{n % 7}": {f"array{n}": np.full(100 + n, n)} for n in range(1000)}
    with few_open_files(200):
        writing.save(tmp_path / "ours", state, **layout)
    oracle.assert_same(oracle.load(tmp_path / "ours"), state)


def save_with_failing(call: str, code: int, path: Path, array_count: int) -> Any:
    """Saves arrays in a process in which a system call fails; returns what the error tells, if any."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), call, str(code), str(array_count)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_filters = pytest.mark.skipif(
    not failing_calls.SUPPORTED, reason="the filter of system calls is for x86-64 and AArch64 Linux"
)


@needs_filters
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
@pytest.mark.share(2)
def test_what_cannot_be_synced_as_a_whole_is_synced_one_by_one(code: int) -> None:
    with disks.in_memory() as directory:
        assert save_with_failing("syncfs", code, directory / "ours", 100) is None
        assert [array[0] for array in oracle.load(directory / "ours")] == list(range(100))


@needs_filters
@pytest.mark.parametrize(("call", "array_count"), [("syncfs", 100), ("fsync", 5)])
@pytest.mark.share(2)
def test_a_disk_that_fails_is_told_of(call: str, array_count: int) -> None:
    with disks.in_memory() as directory:
        path = directory / "ours"
        writing.save(path, {"old": np.arange(3)}, use_ocdbt=False)
        told = save_with_failing(call, errno.EIO, path, array_count)
        assert told["errno"] == errno.EIO
        assert told["path"].startswith(str(directory))
        assert os.listdir(directory) == ["ours"], "nothing is left"
        oracle.assert_same(oracle.load(path), {"old": np.arange(3)})
