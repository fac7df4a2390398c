"""Chunks of a chosen size, casts on the way to the disk, and what the tables say of both."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.layouts.plans import expand

import waystation
from waystation.errors import InvalidInput
from waystation.layouts.native import merge, tables
from waystation.layouts.native.chunks import Writer, cut
from waystation.layouts.native.read import OpenCheckpointable, open_checkpoint, open_checkpointable
from waystation.layouts.native.write_plan import plan


def opened(path: Path) -> OpenCheckpointable:
    return open_checkpointable(str(path), open_checkpoint(str(path)), "state")


def chunk_shape(path: Path, label: str) -> tuple[int, ...]:
    found = opened(path)
    return found.tables.chunk_shape(found.tree.labels.index(label))


def on_devices(shape: tuple[int, ...], dtype: str, *spec: str | None) -> jax.Array:
    """An array over a mesh of all eight devices."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    return jax.device_put(values, NamedSharding(mesh, P(*spec)))


def save(path: Path, state: Any, **options: Any) -> None:
    context = waystation.Context()
    for name, value in options.items():
        setattr(context.array.saving.storage_options, name, value)
    with context:
        waystation.save(path, state)


# Shards as on the sixteen devices of Orbax's guide to performance, on eight: half the array.
@pytest.mark.parametrize(
    ("shape", "spec", "axes", "expected"),
    [
        ((64,), ("x",), None, (4,)),
        ((16, 64), ("x",), None, (1, 4)),
        ((32, 16), ("x",), (1,), (4, 1)),
    ],
)
def test_chunks_are_as_small_as_asked(
    tmp_path: Path, shape: tuple[int, ...], spec: tuple[str], axes: Any, expected: tuple[int, ...]
) -> None:
    array = on_devices(shape, "float32", *spec)
    save(tmp_path / "chunked", {"a": array}, chunk_bytes=16, chunk_axes=axes)
    assert chunk_shape(tmp_path / "chunked", "a") == expected
    assert np.array_equal(waystation.load(tmp_path / "chunked")["a"], array)
    save(tmp_path / "whole", {"a": array})
    assert chunk_shape(tmp_path / "whole", "a") == shape


def test_axes_without_a_size_mean_32_mib(tmp_path: Path) -> None:
    state = {"a": np.zeros((4, 40 << 20), np.uint8), "b": np.zeros((4, 8 << 20), np.uint8)}
    save(tmp_path / "x", state, chunk_axes=(1,))
    assert chunk_shape(tmp_path / "x", "a") == (4, 8 << 20)
    assert chunk_shape(tmp_path / "x", "b") == (4, 8 << 20)


def test_options_of_single_arrays(tmp_path: Path) -> None:
    state = {"a": np.zeros((8, 8), np.float32), "b": {"c": np.zeros((8, 8), np.float32)}}
    context = waystation.Context()
    context.array.saving.storage_options_for = lambda path, array: (
        waystation.StorageOptions(chunk_bytes=array.shape[0] * 4, dtype="float16") if path == "b.c" else None
    )
    with context:
        waystation.save(tmp_path / "x", state)
    assert chunk_shape(tmp_path / "x", "a") == (8, 8)
    assert chunk_shape(tmp_path / "x", "b.c") == (4, 4)
    assert waystation.load(tmp_path / "x")["b"]["c"].dtype == np.float16


def test_options_of_single_arrays_complete_those_of_all(tmp_path: Path) -> None:
    state = {"a": np.zeros((8, 8), np.float32), "b": np.zeros((8, 8), np.float32)}
    context = waystation.Context()
    context.array.saving.storage_options.dtype = "float16"
    context.array.saving.storage_options.chunk_bytes = 64
    axes = {"a": (0,), "b": (1,)}
    context.array.saving.storage_options_for = lambda path, _: waystation.StorageOptions(
        chunk_axes=axes[path]
    )
    with context:
        waystation.save(tmp_path / "x", state)
    assert (chunk_shape(tmp_path / "x", "a"), chunk_shape(tmp_path / "x", "b")) == ((4, 8), (8, 4))
    assert waystation.load(tmp_path / "x")["a"].dtype == np.float16


def test_what_a_function_returns_is_checked(tmp_path: Path) -> None:
    context = waystation.Context()
    context.array.saving.storage_options_for = lambda path, array: {"dtype": "float16"}  # type: ignore[arg-type,return-value]
    with context, pytest.raises(InvalidInput, match="must return StorageOptions") as caught:
        waystation.save(tmp_path / "x", {"a": np.zeros(3)})
    assert caught.value.context["array"] == "a"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_cast_of_all_arrays_keeps_their_category(tmp_path: Path, asynchronous: bool) -> None:
    values = np.linspace(-3, 3, 60, dtype=np.float32).reshape(6, 10)
    state = {
        "jax": on_devices((8, 4), "float32", "x"),
        "numpy": values.T,
        "integer": np.arange(5),
        "key": jax.random.key(3),
        "scalar": 1.5,
        "empty": np.zeros((0, 2), np.float32),
    }
    context = waystation.Context()
    context.array.saving.storage_options.dtype = "bfloat16"
    with context:
        if asynchronous:
            response = waystation.save_async(tmp_path / "x", state)
            values[:] = 0
            response.result()
            values[:] = np.linspace(-3, 3, 60, dtype=np.float32).reshape(6, 10)
        else:
            waystation.save(tmp_path / "x", state)
    loaded = waystation.load(tmp_path / "x")
    assert loaded["jax"].dtype == jnp.bfloat16
    assert loaded["numpy"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(loaded["numpy"], values.T.astype(ml_dtypes.bfloat16))
    assert np.array_equal(loaded["jax"].astype(np.float32), state["jax"])
    assert loaded["integer"].dtype == np.int64
    assert loaded["key"] == state["key"]
    assert loaded["scalar"] == 1.5
    assert loaded["empty"].dtype == ml_dtypes.bfloat16


def test_cast_that_was_asked_by_name_has_to_be_possible(tmp_path: Path) -> None:
    context = waystation.Context()
    context.array.saving.storage_options_for = lambda path, array: waystation.StorageOptions(dtype="int8")
    with context, pytest.raises(InvalidInput, match=r"the value 128 .* int8"):
        waystation.save(tmp_path / "x", {"a": np.arange(1000)})
    with context, pytest.raises(InvalidInput, match="PRNG keys"):
        waystation.save(tmp_path / "x", {"a": jax.random.key(1)})
    assert list(tmp_path.iterdir()) == []


# ---- merging -----------------------------------------------------------------------------------


def parts_of(spread: Any, values: np.ndarray, count: int, **saving: Any) -> tuple[list[merge.Part], Any]:
    """What each process of a program would say that it has written of one array."""
    from waystation._options import ArraySavingOptions
    from waystation.frameworks import registry

    parts, options = [], ArraySavingOptions(**saving)
    for process in range(count):
        (source,) = registry.codec_by_name("numpy").sources([values])
        source.spread = spread
        chunks = cut([source], ["a"], options, Writer(process, count, 0))
        planned = plan(chunks, [source], ["a"], 1 << 30, process)
        sums = [b"\0" * 8 * -(-file.file_bytes // tables.BLOCK_BYTES) for file in planned.files]
        parts.append(merge.Part.decode(merge.Part.of(planned, chunks, sums).encode()))
    return parts, source


@given(data=st.data())
def test_shares_of_any_spread_cover_the_array_once(data: st.DataObject) -> None:
    from waystation.grid import Spread

    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    count = data.draw(st.integers(1, 5))
    cuts = [sorted({0, extent, *data.draw(st.lists(st.integers(0, extent), max_size=2))}) for extent in shape]
    boxes = [((), ())]
    for bounds in cuts:
        spans = list(itertools.pairwise(bounds))
        boxes = [((*offset, low), (*extents, high - low)) for offset, extents in boxes for low, high in spans]
    processes = st.sets(st.integers(0, count - 1), min_size=1)
    holders = tuple(tuple(sorted(data.draw(processes))) for _ in boxes)
    parts, source = parts_of(
        Spread(shape, tuple(boxes), holders),
        np.zeros(shape, np.int16),
        count,
        min_slice_bytes_for_replica_parallel=data.draw(st.integers(1, 40)),
        max_replicas_for_replica_parallel=data.draw(st.none() | st.integers(1, 4)),
    )
    merged = merge.merge(parts, [source], ["a"])
    # Encoding checks every rule of the format: chunks in order, boxes that cover the array exactly once.
    merged.checksums = np.zeros(int(sum(len(part.checksums) for part in parts)), "<u8")
    encoded = merged.encode_files(), merged.encode_chunks(), merged.encode_checksums()
    tables.decode(*encoded, ("files", "chunks", "checksums"))
    assert int(expand(merged, 0)["length"].sum()) == 2 * np.prod(shape)


@pytest.mark.parametrize(
    ("holders", "told"),
    [
        (((0,), ()), r"\[2:4\] .* is written by no process"),
        (((0,), (0, 1)), None),
    ],
)
def test_holes_are_found(holders: Any, told: str | None) -> None:
    from waystation.grid import Spread

    spread = Spread((4,), (((0,), (2,)), ((2,), (2,))), holders)
    parts, source = parts_of(spread, np.zeros(4), 2)
    if told is None:
        merge.merge(parts, [source], ["a"])
        return
    with pytest.raises(InvalidInput, match=told):
        merge.merge(parts, [source], ["a"])


def test_processes_that_disagree_overlap() -> None:
    from waystation.grid import Spread

    halves = Spread((4,), (((0,), (2,)), ((2,), (2,))), ((0,), (1,)))
    parts, source = parts_of(halves, np.zeros(4), 2)
    whole, _ = parts_of(Spread((4,), (((0,), (4,)),), ((0,),)), np.zeros(4), 2)
    with pytest.raises(InvalidInput, match=r"written more than once, by processes \[0, 1\]"):
        merge.merge([whole[0], parts[1]], [source], ["a"])


def test_parts_of_other_lengths_are_refused() -> None:
    with pytest.raises(waystation.errors.Corrupt, match="not what a process wrote"):
        merge.Part.decode(b"\0" * 47)
