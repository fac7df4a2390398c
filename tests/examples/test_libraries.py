"""The examples for libraries on JAX: a resumed run gives the losses of one that was not stopped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.scripts import output_of

EXAMPLES = Path(__file__).parents[2] / "examples"
LIBRARIES = ["flax_nnx", "flax_linen", "equinox_module", "grain_iterator", "keras_jax"]


def losses(name: str, path: Path, steps: int) -> dict[int, float]:
    output = output_of(EXAMPLES / f"{name}.py", path, "--steps", steps, directory=path.parent)
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", output, re.M)}


@pytest.mark.share(6)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_resumed_run_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    whole = losses(name, tmp_path / "whole", 6)
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    assert len(set(whole.values())) == 6
    before = losses(name, tmp_path / "resumed", 3)
    after = losses(name, tmp_path / "resumed", 6)
    assert list(after) == [4, 5, 6]
    assert before | after == whole
