"""What the cells of Orbax's guide to performance show, on the same sixteen devices and shapes: chunks within
shards, resharding, replicas. The guide's limits of memory are tested where memory is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.distributed.guide_cells import cells
from tests.support.programs import Raised, running


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the cells showed; a program of their own has sixteen devices."""
    directory: Path = tmp_path_factory.mktemp("guide")
    with running(cells, count=1, framework="jax", directory=directory) as programs:
        (value,) = programs.values()
    assert not isinstance(value, Raised), value
    return dict(value)


@pytest.mark.parametrize(
    ("cell", "chunk", "shard"),
    [
        # Without a size a process writes all that its devices hold as one chunk: rows are read from anywhere.
        ("as it comes", (128,), (8,)),
        ("16 bytes", (4,), (8,)),
        ("rows", (1, 4), (2, 64)),
        ("square", (2, 2), (4, 16)),
        ("axis 1", (4, 1), (4, 16)),
    ],
)
def test_chunks(seen: dict[str, Any], cell: str, chunk: tuple[int, ...], shard: tuple[int, ...]) -> None:
    assert seen[cell] == (chunk, shard)


def test_replicas_come_back(seen: dict[str, Any]) -> None:
    assert seen["replicas"]
