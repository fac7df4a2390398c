"""Programs of several processes that load a checkpoint while others overwrite or delete it.

All processes get one and the same version, and none waits for another.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.distributed import replaced_scenarios
from tests.support import overwriting
from tests.support.programs import running

import waystation
from waystation.checkpoint.replaced import MOST_ATTEMPTS

_BOUND_S = 120


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
    command = [sys.executable, "-m", "tests.support.overwriting", str(path)]
    writers = [
        subprocess.Popen([*command, str(number), way, layout], stdin=subprocess.PIPE) for number in (1, 2)
    ]
    try:
        with running(replaced_scenarios.load, count=3, framework=framework, directory=tmp_path) as programs:
            saves = 0
            for _ in range(replaced_scenarios.LOADS * len(replaced_scenarios.ways(framework))):
                programs.report(0)
                saves += len(writers)
                if saves >= MOST_ATTEMPTS:
                    continue  # else one load could meet another version in each of its attempts
                for writer in writers:
                    assert writer.stdin is not None
                    writer.stdin.write(b"\n")
                    writer.stdin.flush()
            values = programs.values()
        for writer in writers:
            writer.communicate(timeout=_BOUND_S)
        assert [writer.returncode for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(_BOUND_S)
    assert isinstance(values[0], list), values
    assert values[1:] == values[:1] * 2
    if way == "overwrite":
        assert None not in {number for _, number in values[0]}
