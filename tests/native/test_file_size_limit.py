"""A limit on the size of files (RLIMIT_FSIZE, as batch systems set it): a typed error and no traces."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import waystation

LIMIT_BYTES = 2 << 20

PROGRAM = """
import resource, sys
import numpy as np, waystation
path, mode, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
context = waystation.Context()
context.engine.write_mode = mode if mode != "chosen" else None
with context:
    for save in (waystation.save, lambda *given, **named: waystation.save_async(*given, **named).result()):
        try:
            save(path, {"x": np.ones(2 * limit, np.uint8)}, overwrite=True)
        except waystation.errors.Unavailable as error:
            print(error.errno, error.context["path"].rpartition("/")[2])
    waystation.save(path, {"x": np.full(1000, 2)}, overwrite=True)
"""


@pytest.mark.parametrize("mode", ["chosen", "buffered", "direct-threads", "direct-ring"])
@pytest.mark.share(2)
def test_a_file_beyond_the_limit(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "runs" / "checkpoint"
    waystation.save(path, {"x": np.full(1000, 1)})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), mode, str(LIMIT_BYTES)],
        env={**os.environ, "WAYSTATION_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    if "Unsupported" in done.stderr and mode != "chosen":
        pytest.skip(f"this file system or system has no mode '{mode}'")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{errno.EFBIG} p00000-000.safetensors\n" * 2
    assert os.listdir(path.parent) == ["checkpoint"]
    np.testing.assert_array_equal(waystation.load(path)["x"], np.full(1000, 2))
