"""The extension under fork, Ctrl-C and waiting threads, while a job is in the middle of its work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.native.held_jobs import PROGRAMS
from tests.support import held_memory

HANG_S = 120


@pytest.mark.share(6)
@pytest.mark.skipif(not held_memory.is_granted(), reason="the system does not grant userfaultfd")
@pytest.mark.parametrize("program", PROGRAMS)
def test_held_job(program: str, tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    # Python warns of any fork beside threads; that it is safe here is what is tested.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.native.held_jobs", program]
    environment = {**os.environ, "WAYSTATION_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [*command, str(directory)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
