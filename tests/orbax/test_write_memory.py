"""Saves in Orbax's layouts keep to `memory.write_concurrent_bytes`, those that compress too.

Measured in processes of their own, with arrays that no compressor makes smaller: their frames take most.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.test_write_limits import MIB, SLACK_BYTES, extra_bytes
from tests.orbax import oracle, writing

import waystation

LAYOUTS: dict[str, dict[str, Any]] = {
    "files": {"use_ocdbt": False},
    "files-plain": {"use_ocdbt": False, "use_compression": False},
    "ocdbt": {"use_ocdbt": True},
    "ocdbt-plain": {"use_ocdbt": True, "use_compression": False},
}
CASES = [
    ("files", "random-one", "save"),
    ("files", "random", "save_async"),
    ("files-plain", "random-one", "save_async"),
    ("ocdbt", "random-strided", "save"),
    ("ocdbt", "random-one", "save_async"),
    ("ocdbt-plain", "random", "save_async"),
]


@pytest.mark.share(8)
@pytest.mark.parametrize(("layout", "kind", "mode"), CASES, ids=["-".join(case) for case in CASES])
def test_memory_is_within_the_bound(layout: str, kind: str, mode: str, tmp_path: Path) -> None:
    bound = 5 * MIB
    assert extra_bytes(tmp_path / "saved", kind, mode, bound, **LAYOUTS[layout]) < bound + SLACK_BYTES


def test_without_a_bound_compressing_takes_more(tmp_path: Path) -> None:
    assert extra_bytes(tmp_path / "saved", "random-one", "save", None, use_ocdbt=True) > 32 * MIB


@pytest.mark.share(3)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("bound", [1, 3 * MIB, 40 * MIB, 1 << 40])
def test_what_is_saved_is_the_same_whatever_the_bound(
    bound: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    state = {
        "large": random.integers(0, 1 << 16, (3, 1 << 20), np.uint16),
        "strided": random.random((512, 640)).T,
        "small": [np.full(5, number) for number in range(20)],
    }
    context = writing.layout_of(layout)
    context.memory.write_concurrent_bytes = bound
    with context:
        waystation.save(tmp_path / "ours", state)
    oracle.assert_same(oracle.load(tmp_path / "ours"), state)
