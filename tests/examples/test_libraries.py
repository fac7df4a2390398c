"""The examples for libraries on JAX: a resumed run gives the losses of one that was not stopped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LIBRARIES = ["flax_nnx", "flax_linen", "equinox_module", "grain_iterator", "keras_jax"]


def losses(name: str, path: Path, steps: int) -> dict[int, float]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), str(path), "--steps", str(steps)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {
        int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.M)
    }


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_resumed_run_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    whole = losses(name, tmp_path / "whole", 6)
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    assert len(set(whole.values())) == 6
    before = losses(name, tmp_path / "resumed", 3)
    after = losses(name, tmp_path / "resumed", 6)
    assert list(after) == [4, 5, 6]
    assert before | after == whole
