"""`memory.write_concurrent_bytes` and small snapshots: what is stored is the same, and the host memory for it
is bounded; the caller waits only for what could change.

The bound is measured in processes of their own (`save_peak.py`), in `make test-long` of more arrays.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from tests.checkpoint import save_peak
from tests.support.long import amount, only_long
from tests.support.peaks import in_own_process

import waystation
from waystation import _native, errors
from waystation._options import MemoryOptions, Options
from waystation.checkpoint import prepare, snapshot
from waystation.checkpoint.snapshot import WriteShares
from waystation.layouts.native import write_plan
from waystation.layouts.native.blocks import view_of

MIB = 1 << 20
# What an interpreter and its libraries allocate beside: lists, tables, threads' stacks.
SLACK_BYTES = 2 * MIB


def limited(limit_bytes: int | None, snapshot_bytes: int | None = None) -> waystation.Context:
    context = waystation.Context()
    context.memory.write_concurrent_bytes = limit_bytes
    context.memory.snapshot_bytes = snapshot_bytes
    return context


# ---- measured ----------------------------------------------------------------------------------


def extra_bytes(directory: Path, kind: str, mode: str, limit_bytes: int | None, **saving: Any) -> int:
    """The peak of resident memory during a save with options of `array.saving`, beyond the state."""
    directory.mkdir()
    arguments = directory, kind, mode, limit_bytes, saving
    found: int = in_own_process(save_peak.extra_bytes, *arguments, directory=directory.parent)
    return found


@pytest.mark.long
def test_saving_many_arrays_of_4_mb_under_5_mib(tmp_path: Path) -> None:
    assert extra_bytes(tmp_path / "bounded", "jax", "save", 5 * MIB) < 5 * MIB + SLACK_BYTES


@pytest.mark.long
@pytest.mark.parametrize("kind", ["jax", "numpy", "torch"])
@pytest.mark.share(3)
def test_saving_many_arrays_of_4_mb_in_the_background_under_5_mib(tmp_path: Path, kind: str) -> None:
    assert extra_bytes(tmp_path / "bounded", kind, "save_async", 5 * MIB) < 5 * MIB + SLACK_BYTES


@pytest.mark.parametrize("mode", ["save", "save_async"])
@pytest.mark.share(2)
def test_an_array_larger_than_the_bound_goes_in_pieces(tmp_path: Path, mode: str) -> None:
    assert extra_bytes(tmp_path / "bounded", "numpy-one", mode, 4 * MIB) < 4 * MIB + SLACK_BYTES


@pytest.mark.long
@only_long
def test_without_a_bound_it_takes_more(tmp_path: Path) -> None:
    assert extra_bytes(tmp_path / "saved", "numpy-one", "save", None) > 12 * MIB
    assert extra_bytes(tmp_path / "copied", "numpy-one", "save_async", None) > 128 * MIB


# ---- the same bytes, whatever the bound --------------------------------------------------------


@pytest.mark.share(6)
@pytest.mark.parametrize("limit", [1, MIB, 3 * MIB, 10 * MIB, 1 << 40])
def test_leaves_may_be_overwritten_whatever_the_bound(tmp_path: Path, limit: int) -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    sharding = NamedSharding(mesh, PartitionSpec("x", "y"))
    state: dict[str, Any] = {
        "large": np.arange(3 * MIB, dtype=np.float32).reshape(3, 1024, 1024),
        "tensor": torch.arange(2 * MIB).reshape(1, 2, MIB),
        "strided": np.arange(MIB).reshape(1024, 1024).T,
        "odd": np.arange(999_999, dtype=np.uint8),
        "row": np.ones((1, 1, 3 * MIB), np.uint8),
        "fixed": jax.device_put(jnp.arange(4 * MIB).reshape(2048, 2048), sharding),
        "small": [np.full(5, number) for number in range(50)],
        "scalar": np.float32(3),
        "empty": np.zeros((0, 5)),
    }
    mutable = [state["large"], state["tensor"], state["strided"], state["odd"], state["row"], *state["small"]]
    expected = jax.tree.map(lambda leaf: np.asarray(leaf).copy(), state)
    with limited(limit):
        response = waystation.save_async(tmp_path / "checkpoint", state)
    for leaf in mutable:
        leaf[...] = 0
    response.result()
    loaded = waystation.load(tmp_path / "checkpoint")
    found = jax.tree.map(np.asarray, loaded)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@settings(max_examples=amount(80))
@given(
    shapes=st.lists(
        st.lists(st.sampled_from([1, 1, 2, 3, 5, 8]), max_size=3).map(tuple), min_size=1, max_size=5
    ),
    columns=st.sampled_from([0, 1, 7, 1000, 40_000]),
    room=st.integers(0, 3 * MIB),
    is_bounded=st.booleans(),
    promised=st.booleans(),
)
def test_a_snapshot_copies_what_fits_and_names_the_rest(
    shapes: list[tuple[int, ...]], columns: int, room: int, is_bounded: bool, promised: bool
) -> None:
    values = [
        np.random.default_rng(number).random((*shape, columns), np.float32)
        for number, shape in enumerate(shapes)
    ]
    described = prepare.describe(values)
    taken = prepare.take(described, Options())
    total = sum(array.nbytes for array in values)
    shares = WriteShares(None, room, is_bounded=is_bounded)
    waited_for = snapshot.take(
        taken.chunks, taken.sources, MemoryOptions(caller_keeps=promised), shares, taken.cast
    )
    if promised:
        assert waited_for == []
        return
    kept = total - sum(end - begin for begin, end in waited_for)
    assert kept <= max(room, 0)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(waited_for))
    positions = [position for pair in waited_for for position in pair]
    assert positions == sorted(positions)
    assert all(0 <= position <= total for position in positions)
    if room >= total + 256 * len(values):
        assert waited_for == []
    # What is not waited for is a copy: the leaves may change now.
    expected = [array.copy() for array in values]
    untouched = np.zeros(total, bool)
    for begin, end in waited_for:
        untouched[begin:end] = True
    for array in values:
        array[...] = -1
    position = 0
    for number in write_plan.copy_order(taken.chunks):
        chunk = taken.chunks[number]
        stored = np.empty(chunk.shape, np.float32)
        for block in chunk.blocks:
            box = tuple(slice(b, b + e) for b, e in zip(block.offset, block.shape, strict=True))
            stored[box] = view_of(block, len(block.shape), np.dtype(np.float32))
        want = np.where(
            untouched[position : position + chunk.nbytes].reshape(-1, 4)[:, 0].reshape(chunk.shape),
            np.float32(-1),
            expected[chunk.array],
        )
        np.testing.assert_array_equal(stored, want)
        position += chunk.nbytes


def test_an_array_that_fits_in_part_is_copied_in_part(tmp_path: Path) -> None:
    values = np.zeros((8, MIB), np.uint8)
    described = prepare.describe([values])
    taken = prepare.take(described, Options())
    shares = WriteShares(None, 3 * MIB, is_bounded=False)
    assert snapshot.take(taken.chunks, taken.sources, MemoryOptions(), shares) == [(0, 5 * MIB)]


# ---- how long the caller waits -----------------------------------------------------------------


@pytest.fixture
def slow_store(tmp_path: Path) -> str:
    """The throttle of a store so slow that what a test does not wait for is not written meanwhile."""
    path = str(tmp_path / "throttle")
    _native.create_throttle(path, bytes_per_s=4 * MIB)
    return path


def test_the_call_does_not_wait_for_jax_arrays(tmp_path: Path, slow_store: str) -> None:
    # The arrays of JAX stand before the other in the file.
    state = {"fixed": [jnp.zeros(4 * MIB) for _ in range(4)], "host": np.zeros(999_999, np.uint8)}
    context = limited(2 * MIB, 0)
    context.engine.throttle_path = slow_store
    with context:
        response = waystation.save_async(tmp_path / "checkpoint", state)
    done, total = response.progress()
    assert done < total // 2
    response.cancel()
    with pytest.raises(errors.Cancelled):
        response.result()
    assert not (tmp_path / "checkpoint").exists()


def test_jax_arrays_may_be_donated_while_they_are_written(tmp_path: Path) -> None:
    throttle = str(tmp_path / "throttle")
    _native.create_throttle(throttle, bytes_per_s=32 * MIB)
    state = {"donated": jnp.arange(8 * MIB), "deleted": jnp.ones((64, 1024))}
    expected = {name: np.array(leaf, copy=True) for name, leaf in state.items()}
    context = limited(MIB)
    context.engine.throttle_path = throttle
    with context:
        response = waystation.save_async(tmp_path / "checkpoint", state)
    assert not response.done()
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    result = step(state["donated"])
    state["deleted"].delete()
    for _ in range(5):
        result = step(result)
    response.result()
    for name, leaf in waystation.load(tmp_path / "checkpoint").items():
        np.testing.assert_array_equal(np.asarray(leaf), expected[name], err_msg=name)


# ---- shares ------------------------------------------------------------------------------------


@given(
    limit=st.integers(1, 1 << 45),
    snapshot_bytes=st.none() | st.integers(0, 1 << 45),
    with_snapshot=st.booleans(),
)
def test_shares_are_within_the_bound(limit: int, snapshot_bytes: int | None, with_snapshot: bool) -> None:
    options = MemoryOptions(write_concurrent_bytes=limit, snapshot_bytes=snapshot_bytes)
    shares = WriteShares.of(options, with_snapshot=with_snapshot)
    assert shares.staging_bytes is not None
    assert shares.staging_bytes >= _native.BLOCK_BYTES
    assert shares.staging_bytes + shares.snapshot_bytes <= max(limit, snapshot.LEAST_BYTES)
    assert snapshot_bytes is None or shares.snapshot_bytes <= snapshot_bytes
    if not with_snapshot:
        assert shares.snapshot_bytes == 0


def test_the_option_is_checked_when_it_is_set() -> None:
    context = waystation.Context()
    for wrong in (0, -1, 1.5, "5 MiB", True):
        with pytest.raises(errors.InvalidInput, match="write_concurrent_bytes"):
            context.memory.write_concurrent_bytes = wrong  # type: ignore[assignment]
