"""The extension is what its stub and the error tree say it is."""

import os
import subprocess
import sys
from pathlib import Path

from waystation import _errors, _native

ROOT = Path(__file__).parents[2]


def test_the_stub_describes_the_extension() -> None:
    command = [
        sys.executable,
        "-m",
        "mypy.stubtest",
        "waystation._native",
        "--mypy-config-file",
        "pyproject.toml",
    ]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "python")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_both_languages_have_the_same_error_kinds() -> None:
    assert set(_native.ERROR_KINDS) == set(_errors.KINDS)
    assert len(_native.ERROR_KINDS) == len(_errors.KINDS)
