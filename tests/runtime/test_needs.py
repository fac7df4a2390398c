"""The runtime without a package that it needs: the error says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("missing", "code"),
    [
        ("ray", "runtime.connect()"),
        ("jax", "runtime.local()"),
        ("jax", "runtime.pmap"),
        ("jax", "from waystation.runtime import program"),
    ],
)
@pytest.mark.share(4)
def test_what_to_install_is_said(tmp_path: Path, missing: str, code: str) -> None:
    # An import of what is None in sys.modules fails as that of a module which is not installed.
    program = f"import sys; sys.modules['{missing}'] = None\nfrom waystation import runtime\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("waystation.errors.Unsupported: the runtime needs Ray and JAX 0.12 or later")
    assert last.endswith(": pip install 'flatbuffers>=24.3' 'jax>=0.12' 'ray>=2.60'")
