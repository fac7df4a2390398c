"""Programs of several processes that load a checkpoint while others overwrite or delete it.

All processes get one and the same version, and none waits for another.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed import replaced_scenarios
from tests.support import overwriting
from tests.support.programs import running

import waystation
from waystation.checkpoint.paths import MOST_ATTEMPTS


@pytest.mark.share(8)
@pytest.mark.parametrize(
    ("framework", "way", "layout"),
    [
        ("torch", "overwrite", "native"),
        ("jax", "overwrite", "native"),
        ("torch", "delete", "native"),
        ("torch", "overwrite", "ocdbt"),
        ("jax", "overwrite", "zarr"),
    ],
)
def test_all_processes_load_one_version(tmp_path: Path, framework: str, way: str, layout: str) -> None:
    path = tmp_path / "same"
    with overwriting.context_of(layout):
        waystation.save(path, overwriting.state_of(0))
    with (
        overwriting.writing(path, way, layout) as writers,
        running(replaced_scenarios.load, count=3, framework=framework, directory=tmp_path) as programs,
    ):
        saves = 0
        for _ in range(replaced_scenarios.LOADS * len(replaced_scenarios.ways(framework))):
            programs.report(0)
            saves += overwriting.WRITERS
            if saves >= MOST_ATTEMPTS:
                continue  # else one load could meet another version in each of its attempts
            for writer in range(overwriting.WRITERS):
                writers.send(writer, True)
        values = programs.values()
        for writer in range(overwriting.WRITERS):
            writers.send(writer, False)
        assert writers.values() == [None] * overwriting.WRITERS
    assert isinstance(values[0], list), values
    assert values[1:] == values[:1] * 2
    if way == "overwrite":
        assert None not in {number for _, number in values[0]}
