"""Published models in GPU memory as JAX arrays, brought there by the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import device_codec

from waystation import errors
from waystation.frameworks import dtypes, registry
from waystation.frameworks.base import StoredArray
from waystation.safetensors import load, stream, write_checksums

MIB = 1 << 20
STORED = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32",
    "F32": "float32", "C64": "complex64", "F4": "uint8",
}  # fmt: skip

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 2, nbytes, np.uint8).tobytes()


def has(gpu: Any, name: str) -> bool:
    import jax

    try:
        return bool(
            jax.device_put(np.zeros(2, dtypes.TABLE[name].host), gpu).dtype == dtypes.TABLE[name].host
        )
    except Exception:
        return False  # a dtype that this JAX or device lacks


def tensors_of(gpu: Any) -> Tensors:
    """Of each dtype a tensor that goes with others, and one that the engine brings itself."""
    found: Tensors = {"first": ("U8", (3,), noise(3))}
    for stored, name in STORED.items():
        if has(gpu, name):
            item_bits = 4 if stored == "F4" else dtypes.TABLE[name].host.itemsize * 8
            for rows in (3, 3 * MIB * 8 // item_bits // 14):
                count = rows * 14 * item_bits // 8
                found[f"{stored} {rows}"] = (stored, (rows, 14), noise(count, len(found)))
    return found


def goes_to_devices(gpu: Any, shape: tuple[int, ...], name: str) -> bool:
    codec: Any = registry.codec_by_name("jax")
    stored = StoredArray(shape, name, "numpy", "F32", shape, None, {})
    (target,) = codec.placed([stored], [name], [codec.place_of(gpu)])
    return bool(codec.devices.goes_to_devices(target, name))


def test_large_arrays_are_brought_by_the_engine(gpu: Any) -> None:
    assert goes_to_devices(gpu, (MIB,), "float32")
    assert not goes_to_devices(gpu, (16,), "float32")


@pytest.mark.parametrize("limit", [4 * MIB, 256 * MIB])
@pytest.mark.parametrize("how", ["load", "stream"])
def test_every_dtype_arrives(gpu: Any, tmp_path: Path, how: str, limit: int) -> None:
    tensors = tensors_of(gpu)
    path = device_codec.write_model(tmp_path / "model.safetensors", tensors)
    chosen: dict[str, Any] = {"framework": "jax", "device": gpu, "memory_limit": limit}
    found = load(path, **chosen) if how == "load" else dict(stream(path, **chosen))
    assert list(found) == list(tensors)
    for name, (stored, shape, data) in tensors.items():
        array = found[name]
        assert array.dtype == dtypes.TABLE[STORED[stored]].host
        assert array.shape == ((*shape[:-1], shape[-1] // 2) if stored == "F4" else shape)
        assert array.devices() == {gpu}
        assert np.asarray(array).tobytes() == data


def test_arrays_can_be_computed_with_and_donated(gpu: Any, tmp_path: Path) -> None:
    import jax

    tensors = {f"w{number}": ("F32", (MIB,), noise(4 * MIB, number)) for number in range(8)}
    path = device_codec.write_model(tmp_path / "model.safetensors", tensors)
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    for _ in range(3):
        found = load(path, framework="jax", device=gpu)
        for name, (_, _, data) in tensors.items():
            before = np.frombuffer(data, np.float32)
            np.testing.assert_array_equal(np.asarray(double(found[name])), before * 2)
            assert found[name].is_deleted()


def test_an_array_on_every_gpu_is_read_once(gpu: Any, tmp_path: Path) -> None:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    gpus = jax.devices("gpu")
    mesh = jax.sharding.Mesh(np.array(gpus), ("x",))
    host = np.random.default_rng(1).standard_normal((64 * len(gpus), 1 << 14), np.float32)
    path = device_codec.write_model(tmp_path / "m.safetensors", {"x": ("F32", host.shape, host.tobytes())})
    for spec in (PartitionSpec(), PartitionSpec("x"), PartitionSpec(None, "x")):
        array = load(path, framework="jax", sharding=NamedSharding(mesh, spec))["x"]
        assert array.sharding == NamedSharding(mesh, spec)
        np.testing.assert_array_equal(np.asarray(array), host)


def test_damage_is_an_error(gpu: Any, tmp_path: Path) -> None:
    path = device_codec.write_model(tmp_path / "m.safetensors", {"x": ("U8", (4 * MIB,), noise(4 * MIB))})
    write_checksums(path)
    data = bytearray(path.read_bytes())
    data[-9] ^= 8
    path.write_bytes(data)
    with pytest.raises(errors.Corrupt, match="checksum"):
        load(path, framework="jax", device=gpu, verify=True)
