"""JAX arrays in GPU memory: saved, loaded, and donated right after an asynchronous save has returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waystation
from waystation.frameworks import dtypes, registry

BIG = 6 << 20
WIDE = ("int64", "uint64", "float64", "complex128")


def plain(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def names_on(gpu: Any) -> list[str]:
    """The dtypes that JAX and this device have."""
    import jax

    found = []
    for name, entry in dtypes.TABLE.items():
        if entry.host is None or name in WIDE:
            continue
        try:
            found += [name] if jax.device_put(np.zeros(2, entry.host), gpu).dtype == entry.host else []
        except Exception:
            continue  # a dtype that this JAX or device lacks
    return found


def state_of(gpu: Any) -> dict[str, Any]:
    import jax

    random = np.random.default_rng(3)
    state: dict[str, Any] = {}
    for name in names_on(gpu):
        host = random.integers(0, 2, (3, 5, 16)).astype(dtypes.TABLE[name].host)
        state[name] = jax.device_put(host, gpu)
    grid = jax.device_put(random.standard_normal((2048, BIG // 2048), np.float32), gpu)
    state |= {
        "grid": grid,
        "transposed": grid.T,
        "scalar": grid[3, 4],
        "empty": grid[:0],
        "computed": grid * 3,
    }
    state["keys"] = jax.device_put(jax.random.split(jax.random.key(1), 5), gpu)
    return state


def same(loaded: dict[str, Any], state: dict[str, Any]) -> None:
    import jax

    assert loaded.keys() == state.keys()
    for name, array in state.items():
        found = loaded[name]
        assert (found.shape, found.dtype, found.devices()) == (array.shape, array.dtype, array.devices()), (
            name
        )
        if name == "keys":
            assert plain(jax.random.key_data(found)) == plain(jax.random.key_data(array))
        else:
            assert plain(found) == plain(array), name


def test_large_arrays_are_named_in_device_memory(gpu: Any) -> None:
    import jax

    array = jax.device_put(np.arange(BIG, dtype=np.float32), gpu)
    (source,) = registry.codec_by_name("jax").sources([array])
    (block,) = source.blocks
    assert block.device == gpu.local_hardware_id
    assert block.address == array.unsafe_buffer_pointer()
    assert source.mutable


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_dtype_round_trips(gpu: Any, tmp_path: Path, asynchronous: bool) -> None:
    state = state_of(gpu)
    assert {"float32", "bfloat16", "int4", "bool", "complex64"} <= state.keys()
    if asynchronous:
        waystation.save_async(tmp_path / "checkpoint", state).result()
    else:
        waystation.save(tmp_path / "checkpoint", state)
    same(waystation.load(tmp_path / "checkpoint"), state)
    same(waystation.load(tmp_path / "checkpoint", state), state)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_chunks_of_columns_round_trip(
    gpu: Any, tmp_path: Path, asynchronous: bool, dtype: str | None
) -> None:
    import jax

    state = {"a": jax.device_put(np.arange(BIG, dtype=np.float32).reshape(6, 1 << 10, -1) % 251, gpu)}
    context = waystation.Context()
    context.array.saving.storage_options.chunk_bytes = 1 << 18
    context.array.saving.storage_options.chunk_axes = (2,)
    context.array.saving.storage_options.dtype = dtype
    with context:
        if asynchronous:
            waystation.save_async(tmp_path / "checkpoint", state).result()
        else:
            waystation.save(tmp_path / "checkpoint", state)
    same(waystation.load(tmp_path / "checkpoint", state), state)


def test_wide_dtypes_round_trip(gpu: Any, tmp_path: Path) -> None:
    import jax

    with jax.enable_x64(True):
        state = {name: jax.device_put(np.arange(1000, dtype=name) * 3, gpu) for name in WIDE}
        waystation.save_async(tmp_path / "checkpoint", state).result()
        same(waystation.load(tmp_path / "checkpoint"), state)


@pytest.mark.parametrize("snapshot_bytes", [None, 0, 30 << 20], ids=["all copied", "drained", "some of each"])
@pytest.mark.parametrize("caller_keeps", [False, True])
@pytest.mark.parametrize("limit", [None, 5 << 20, 100 << 20], ids=["no bound", "5 MiB", "100 MiB"])
def test_arrays_may_be_donated_at_once(
    gpu: Any, tmp_path: Path, snapshot_bytes: int | None, caller_keeps: bool, limit: int | None
) -> None:
    import jax

    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    context = waystation.Context()
    context.memory.snapshot_bytes = snapshot_bytes
    context.memory.write_concurrent_bytes = limit
    context.memory.caller_keeps = caller_keeps  # promises nothing about JAX arrays
    for attempt in range(2):  # the second finds pinned memory
        state = {f"x{i}": jax.device_put(np.full(BIG, i, np.float32), gpu) for i in range(6)}
        path = tmp_path / f"checkpoint-{attempt}"
        with context:
            response = waystation.save_async(path, state)
        overwritten = [step(array) for array in state.values()]
        jax.block_until_ready(overwritten)
        assert all(array.is_deleted() for array in state.values())
        response.result()
        loaded = waystation.load(path)
        for number, array in enumerate(loaded.values()):
            np.testing.assert_array_equal(np.asarray(array), np.full(BIG, number, np.float32))


def test_computations_under_way_are_awaited(gpu: Any, tmp_path: Path) -> None:
    import jax

    matrix = jax.device_put(np.ones((4096, 4096), np.float32), gpu)
    double = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, y: y + 1, x))
    waystation.save_async(tmp_path / "checkpoint", [double(matrix)]).result()
    np.testing.assert_array_equal(np.asarray(waystation.load(tmp_path / "checkpoint")[0]), 101)


@pytest.mark.parametrize("kind", ["pinned_host", "device"])
def test_memory_kinds_round_trip(gpu: Any, tmp_path: Path, kind: str) -> None:
    import jax

    if kind not in {memory.kind for memory in gpu.addressable_memories()}:
        pytest.skip(f"this device has no {kind} memory")
    sharding = jax.sharding.SingleDeviceSharding(gpu, memory_kind=kind)
    array = jax.device_put(np.arange(BIG, dtype=np.int32), sharding)
    waystation.save_async(tmp_path / "checkpoint", [array]).result()
    (loaded,) = waystation.load(tmp_path / "checkpoint", [array])
    assert loaded.sharding.memory_kind == kind
    assert plain(loaded) == plain(array)


def test_arrays_sharded_over_all_gpus(gpu: Any, tmp_path: Path) -> None:
    import jax

    gpus = jax.devices("gpu")
    mesh = jax.sharding.Mesh(np.array(gpus), ("x",))
    host = np.random.default_rng(2).standard_normal((1024, 16 * len(gpus)), np.float32)
    specs = [jax.sharding.PartitionSpec(*axes) for axes in ((), ("x",), (None, "x"))]
    state = [jax.device_put(host, jax.sharding.NamedSharding(mesh, spec)) for spec in specs]
    for number, save in enumerate((waystation.save, waystation.save_async)):
        response = save(tmp_path / f"{number}", state)
        if response is not None:
            response.result()
        for loaded, array in zip(waystation.load(tmp_path / f"{number}"), state, strict=True):
            assert loaded.sharding == array.sharding
            assert plain(loaded) == host.tobytes()


def test_what_a_gpu_saved_loads_elsewhere(gpu: Any, tmp_path: Path) -> None:
    import jax

    array = jax.device_put(np.arange(77_777, dtype=np.float32), gpu)
    waystation.save(tmp_path / "checkpoint", {"x": array})
    wanted = {"x": np.empty(77_777, np.float32)}
    host = waystation.load(tmp_path / "checkpoint", wanted)["x"]
    assert isinstance(host, np.ndarray)
    assert host.tobytes() == plain(array)
