"""The extension is what its stub and the error tree say it is."""

import subprocess
import sys
from pathlib import Path

from waystation import _errors, _native

ROOT = Path(__file__).parents[2]


# The stub needs nothing of the package around it, whose imports lead to all of JAX and torch.
SETTINGS = f"""
[mypy]
mypy_path = {ROOT / "python"}
strict = True
[mypy-waystation.*]
follow_imports = skip
[mypy-waystation._native]
follow_imports = normal
"""


def test_the_stub_describes_the_extension(tmp_path: Path) -> None:
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy.stubtest", "waystation._native"]
    command += ["--mypy-config-file", str(settings)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_both_languages_have_the_same_error_kinds() -> None:
    assert set(_native.ERROR_KINDS) == set(_errors.KINDS)
    assert len(_native.ERROR_KINDS) == len(_errors.KINDS)
