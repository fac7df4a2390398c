"""States saved by some processes on some devices, loaded by others: bit by bit, whatever the shardings.

The processes are real and joined by `jax.distributed`; each makes and checks its own part.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.distributed.running import JaxJob

SEEDS = range(6)
TOPOLOGIES = [(1, 8), (2, 2), (2, 4), (4, 2)]


def plan(action: str, seeds: object) -> list[tuple[str, int]]:
    return [(action, seed) for seed in seeds]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """Checkpoints of random states, saved on every topology, and loaded there as they were saved."""
    found = {}
    for processes, devices in TOPOLOGIES:
        directory = tmp_path_factory.mktemp(f"saved-by-{processes}x{devices}")
        steps = [*plan("save", SEEDS), *plan("load-as-saved", SEEDS), *plan("load", SEEDS)]
        JaxJob(processes, devices).run(directory, json.dumps(steps))
        found[processes, devices] = directory
    return found


@pytest.mark.parametrize("loading", TOPOLOGIES, ids=lambda pair: f"by-{pair[0]}x{pair[1]}")
def test_load_on_another_topology(saved: dict[tuple[int, int], Path], loading: tuple[int, int]) -> None:
    for saving, directory in saved.items():
        if saving != loading:
            JaxJob(*loading).run(directory, json.dumps(plan("load", SEEDS)))


@pytest.mark.parametrize(("chunk_bytes", "most"), [(1 << 20, 1.05), (0, 2.1)])
def test_a_process_reads_what_it_needs(tmp_path: Path, chunk_bytes: int, most: float) -> None:
    """Rows to columns over two processes: chunks of columns are read as needed; without them the blocks that
    are verified hold the other process's half as well, which is all that is read in vain."""
    JaxJob(2, 2).run(tmp_path, json.dumps([("reshard", chunk_bytes)]))
    for process in range(2):
        told = json.loads((tmp_path / f"{chunk_bytes}-{process}.json").read_text())
        assert told["needed"] == 4096 * 4096 * 4 // 2
        assert told["read"] <= most * told["needed"], told
