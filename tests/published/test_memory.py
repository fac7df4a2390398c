"""`memory_limit`: the peak of host memory beyond the arrays, measured in processes of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.published import load_peak, models
from tests.support.peaks import in_own_process

MIB = 1 << 20
# What an interpreter and its libraries allocate beside: lists, headers, threads' stacks.
SLACK_BYTES = 2 * MIB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 arrays of 1 MiB and one of 16 MiB in two files."""
    arrays = {f"w{number}": np.full((512, 512), number, np.float32) for number in range(60)}
    arrays["large"] = np.ones((1 << 11, 1 << 11), np.float32)
    return models.write_set(tmp_path_factory.mktemp("memory") / "model", arrays, 2).parent


def measured(model: Path, kind: str, framework: str, dtype: str | None, limit: int) -> tuple[int, int]:
    arguments = model, kind, framework, dtype, limit
    found: tuple[int, int] = in_own_process(
        load_peak.held_and_extra_bytes, *arguments, directory=model.parent
    )
    return found


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.share(2)
def test_a_load_takes_no_more_than_its_limit(model: Path, framework: str, dtype: str | None) -> None:
    held, extra = measured(model, "load", framework, dtype, 8 * MIB)
    assert held == 76 * MIB // (1 if dtype is None else 2)
    assert extra < 8 * MIB + SLACK_BYTES


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_stream_takes_no_more_than_its_limit_and_one_array(model: Path, framework: str) -> None:
    held, extra = measured(model, "stream", framework, None, 8 * MIB)
    assert held == 16 * MIB
    assert extra < 8 * MIB + SLACK_BYTES


def test_memory_of_dropped_arrays_is_kept_until_it_is_released(model: Path) -> None:
    kept, released, left = in_own_process(load_peak.kept_and_released_bytes, model, directory=model.parent)
    assert kept >= 76 * MIB
    assert released >= 76 * MIB
    assert left < 8 * MIB
