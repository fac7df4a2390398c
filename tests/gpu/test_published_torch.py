"""Published models and checkpoints in GPU memory as torch tensors, brought there by the engine."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import device_codec

import waystation
from waystation import _native, errors
from waystation.frameworks import registry
from waystation.frameworks.base import StoredArray
from waystation.safetensors import load, load_async, stream, write_checksums

MIB = 1 << 20
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64", "F64": "float64", "I64": "int64",
    "U64": "uint64",
}  # fmt: skip

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 2, nbytes, np.uint8).tobytes()


def bits(torch: Any, tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).reshape(-1).cpu().numpy().tobytes())


def every_dtype(torch: Any) -> Tensors:
    """A tensor of odd size of each dtype that this torch has."""
    found: Tensors = {"first": ("U8", (3,), noise(3))}
    for name, dtype in DTYPES.items():
        if hasattr(torch, dtype):
            item_bits = 4 if name == "F4" else getattr(torch, dtype).itemsize * 8
            found[name] = (name, (3, 5, 14), noise(3 * 5 * 14 * item_bits // 8, len(found)))
    return found


def large(count: int = 5, nbytes: int = 5 * MIB + 4) -> Tensors:
    return {f"w{number}": ("F32", (nbytes // 4,), noise(nbytes, number)) for number in range(count)}


@pytest.mark.parametrize("limit", [4 * MIB, 256 * MIB])
@pytest.mark.parametrize("how", ["load", "background", "stream"])
def test_every_dtype_arrives_at_aligned_addresses(cuda: Any, tmp_path: Path, how: str, limit: int) -> None:
    tensors = every_dtype(cuda) | large()
    path = device_codec.write_model(tmp_path / "model.safetensors", tensors)
    chosen: dict[str, Any] = {"framework": "torch", "device": "cuda", "memory_limit": limit}
    if how == "load":
        found = load(path, **chosen)
    else:
        found = load_async(path, **chosen).result() if how == "background" else dict(stream(path, **chosen))
    assert list(found) == list(tensors)
    for name, (stored, shape, data) in tensors.items():
        tensor = found[name]
        assert tensor.dtype == getattr(cuda, DTYPES[stored])
        assert tuple(tensor.shape) == ((*shape[:-1], shape[-1] // 2) if stored == "F4" else shape)
        assert tensor.device.type == "cuda"
        assert tensor.data_ptr() % 256 == 0
        assert bits(cuda, tensor) == data


def test_arrays_take_no_more_device_memory_than_they_have(cuda: Any, tmp_path: Path) -> None:
    tensors = large(20)
    path = device_codec.write_model(tmp_path / "model.safetensors", tensors)
    cuda.cuda.empty_cache()
    before = cuda.cuda.memory_allocated()
    found = load(path, framework="torch", device="cuda")
    held = cuda.cuda.memory_allocated() - before
    nbytes = sum(len(data) for _, _, data in tensors.values())
    assert held < nbytes * 1.02 + 2 * MIB
    survivor = found.popitem()[1]
    found.clear()
    assert cuda.cuda.memory_allocated() - before < survivor.nbytes + 2 * MIB


@pytest.mark.parametrize("stored", ["F32", "BF16", "F16", "F64"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_casts_are_those_of_the_host(cuda: Any, tmp_path: Path, stored: str, wanted: str) -> None:
    dtype = getattr(cuda, DTYPES[stored])
    values = cuda.randn(700_001, generator=cuda.Generator().manual_seed(3), dtype=cuda.float64).to(dtype)
    data = bits(cuda, values)
    path = device_codec.write_model(tmp_path / "m.safetensors", {"x": (stored, (700_001,), data)})
    on_device = load(path, framework="torch", device="cuda", dtype=wanted)["x"]
    on_host = load(path, framework="torch", dtype=wanted)["x"]
    assert on_device.dtype == getattr(cuda, wanted)
    assert bits(cuda, on_device) == bits(cuda, on_host)


def test_memory_that_kernels_still_read_is_not_written(cuda: Any, tmp_path: Path) -> None:
    nbytes = 64 * MIB
    path = device_codec.write_model(tmp_path / "m.safetensors", {"x": ("U8", (nbytes,), noise(nbytes))})
    load(path, framework="torch", device="cuda")  # libraries, pins
    for _ in range(5):
        matrix = cuda.full((4096, 4096), 1.0, device="cuda")
        total = matrix
        for _ in range(30):
            total = total @ matrix / 4096
        del matrix  # torch hands its memory out again while the products are still being computed
        found = load(path, framework="torch", device="cuda")["x"]
        assert bool((total == 1.0).all())
        assert bits(cuda, found) == noise(nbytes)


def test_what_is_wrong_with_files_is_an_error(cuda: Any, tmp_path: Path) -> None:
    path = device_codec.write_model(tmp_path / "model.safetensors", large(2))
    write_checksums(path)
    with waystation.safetensors.open(path) as tensors:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(errors.Conflict):
            load(tensors, framework="torch", device="cuda")
    device_codec.write_model(path, large(2))
    with path.open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(errors.Corrupt, match="checksum"):
        load(path, framework="torch", device="cuda", verify=True)


def test_a_load_can_be_cancelled(cuda: Any, tmp_path: Path) -> None:
    path = device_codec.write_model(tmp_path / "model.safetensors", large(100))
    response = load_async(path, framework="torch", device="cuda")
    response.cancel()
    with pytest.raises(errors.Cancelled):
        response.result()
    assert len(load(path, framework="torch", device="cuda")) == 100


def test_too_little_device_memory_is_an_error(cuda: Any, tmp_path: Path) -> None:
    total = cuda.cuda.get_device_properties(0).total_memory
    gc.collect()
    cuda.cuda.empty_cache()
    # What tensors of other tests keep of torch's memory may have room in it.
    room = cuda.cuda.memory_reserved() - cuda.cuda.memory_allocated()
    path = device_codec.write_model(tmp_path / "model.safetensors", large(20 + room // (5 * MIB)))
    cuda.cuda.set_per_process_memory_fraction((cuda.cuda.memory_reserved() + 40 * MIB) / total)
    try:
        with pytest.raises(errors.Unavailable, match="not enough memory"):
            load(path, framework="torch", device="cuda")
    finally:
        cuda.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("limit", [None, 8 * MIB])
def test_checkpoints_go_the_same_way(cuda: Any, tmp_path: Path, limit: int | None) -> None:
    state = {
        "small": cuda.arange(77, device="cuda"),
        "large": cuda.randn(1500, 1001, device="cuda"),
        "half": cuda.randn(300, 1000, device="cuda").half(),
    }
    waystation.save(tmp_path / "checkpoint", state)
    wanted = {name: cuda.empty_like(tensor) for name, tensor in state.items()}
    wanted["half"] = cuda.empty(300, 1000, device="cuda")  # wider than it was stored
    context = waystation.Context()
    context.memory.read_concurrent_bytes = limit
    before = _native.arena_statistics()["mapped_bytes"]
    with context:
        found = waystation.load(tmp_path / "checkpoint", wanted)
    for name, tensor in state.items():
        assert found[name].dtype == wanted[name].dtype
        assert cuda.equal(found[name], tensor.to(wanted[name].dtype))
        assert found[name].data_ptr() % 256 == 0
    if limit is not None:
        assert _native.arena_statistics()["mapped_bytes"] - before <= limit


def test_dtensors_go_the_same_way(cuda: Any, tmp_path: Path) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cuda", (1,))
        host = cuda.randn(700, 900)
        state = {"x": distribute_tensor(host.cuda(), mesh, [Shard(1)])}
        waystation.save(tmp_path / "checkpoint", state)
        codec: Any = registry.codec_by_name("torch")
        (target,) = codec.targets([state["x"]], [as_stored(state["x"])])
        assert codec.devices.goes_to_devices(target, "float32")
        found = waystation.load(tmp_path / "checkpoint", state)["x"]
        assert found.placements == state["x"].placements
        assert cuda.equal(found.to_local().cpu(), host)
    finally:
        distributed.destroy_process_group()


def as_stored(tensor: Any) -> StoredArray:
    shape = tuple(tensor.shape)
    return StoredArray(shape, "float32", "torch", "F32", shape, None, {})
