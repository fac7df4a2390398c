"""Iterators of Grain beside a state: they save and load themselves, by files of each process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp


def data(kind: str) -> Any:
    numbers = grain.MapDataset.range(200).seed(7).shuffle()
    if kind == "batches":
        return iter(numbers.batch(4).to_iter_dataset())
    if kind == "mapped":
        return iter(numbers.map(lambda number: {"x": np.full(3, number)}).to_iter_dataset())
    if kind == "prefetched":
        return iter(numbers.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))
    loader = grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 200, 1),
        sampler=grain.samplers.IndexSampler(num_records=200, shuffle=True, seed=7, num_epochs=1),
        worker_count=0,
    )
    return iter(loader)


KINDS = ["batches", "mapped", "prefetched", "loader"]


def same(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    for name in one if isinstance(one, dict) else [None]:
        np.testing.assert_array_equal(one if name is None else one[name], two if name is None else two[name])


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_iterator_goes_on(tmp_path: Path, kind: str, in_background: bool) -> None:
    iterator = data(kind)
    for _ in range(5):
        next(iterator)
    path = tmp_path / "checkpoint"
    checkpointables = {"state": {"w": jnp.ones(4)}, "iter": iterator}
    if in_background:
        response = ocp.save_checkpointables_async(path, checkpointables)
        expected = [next(iterator) for _ in range(3)]  # what is saved is what it was when the call returned
        response.result()
    else:
        ocp.save_checkpointables(path, checkpointables)
        expected = [next(iterator) for _ in range(3)]
    assert [file.name for file in (path / "iter").glob("process_*")] == ["process_0-of-1.json"]
    fresh = data(kind)
    loaded = ocp.load_checkpointables(path, {"state": None, "iter": fresh})
    assert loaded["state"]["w"].tolist() == [1, 1, 1, 1]
    for wanted in expected:
        same(next(fresh), wanted)


def test_steps_of_a_run(tmp_path: Path) -> None:
    iterator = data("batches")
    expected = []
    with ocp.training.Checkpointer(tmp_path) as run:
        for step in range(3):
            next(iterator)
            run.save_checkpointables(step, {"state": {"w": jnp.full(2, step)}, "iter": iterator})
            expected.append(iterator.get_state())
    with ocp.training.Checkpointer(tmp_path) as run:
        for step in (2, 0, 1):
            fresh = data("batches")
            run.load_checkpointables(step, {"iter": fresh})
            assert fresh.get_state() == expected[step]


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    ocp.save_checkpointables(tmp_path / "c", {"iter": data("batches")})
    (tmp_path / "c" / "iter" / "process_0-of-1.json").unlink()
    # Orbax asks the iterator, and says that no handler can load it; ours says that the checkpoint is damaged.
    with pytest.raises((KeyError, ValueError)):
        ocp.load_checkpointables(tmp_path / "c", {"iter": data("batches")})
