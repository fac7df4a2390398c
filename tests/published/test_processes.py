"""Programs of several processes: each reads its part, and all together little more than the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.published import models, process_scenarios
from tests.support.programs import running


@pytest.mark.parametrize(("count", "devices"), [(4, 1), (2, 2)])
def test_every_process_reads_its_part(tmp_path: Path, count: int, devices: int) -> None:
    arrays = {
        f"layer.{number}": np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, -1) + number
        for number in range(4)
    }
    index = models.write_set(tmp_path / "model", arrays, 2)
    file_bytes = sum(path.stat().st_size for path in index.parent.glob("*.safetensors"))
    with running(
        process_scenarios.load_sharded,
        index.parent,
        devices,
        count=count,
        framework="jax",
        directory=tmp_path,
    ) as programs:
        values = programs.values()
    assert sum(counted for counted, _, _ in values) <= 1.05 * file_bytes
    # Beside it the headers, and what the processes read to load code on their way.
    assert sum(system for _, system, _ in values) <= 1.05 * file_bytes + count * (4 << 20)
    rows: dict[str, set[tuple[int, int]]] = {name: set() for name in arrays}
    for _, _, parts in values:
        for (name, ((begin, end, _), (_, columns, _))), data in parts:
            assert columns == 1 << 10
            assert data == arrays[name][begin:end].tobytes()
            rows[name].add((begin, end))
    step = (1 << 10) // (count * devices)
    assert all(found == {(at, at + step) for at in range(0, 1 << 10, step)} for found in rows.values())
