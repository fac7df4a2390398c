"""Every framework saves what every other loads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.frameworks.store import bits, load, save

from waystation.errors import InvalidInput, Unsupported
from waystation.frameworks import AbstractNumpy, dtypes, registry

SHARED = [
    entry
    for entry in dtypes.TABLE.values()
    if isinstance(getattr(torch, entry.name, None), torch.dtype)
    and not entry.name.startswith(("int1", "int2", "int4", "uint2", "uint4", "complex32", "bcomplex32"))
    and entry.name not in ("uint1", "float4_e2m1fn_x2")
]
SHARED += [dtypes.TABLE["int16"], dtypes.TABLE["int32"]]
FRAMEWORKS = ["numpy", "jax", "torch"]


def make(framework: str, host: np.ndarray[Any, Any], entry: dtypes.LogicalDtype) -> Any:
    if framework == "numpy":
        return host
    if framework == "jax":
        mesh = Mesh(np.array(jax.devices()), ("x",))
        return jax.device_put(host, NamedSharding(mesh, P("x")))
    flat = torch.frombuffer(bytearray(bits(host)), dtype=torch.uint8)
    return flat.view(getattr(torch, entry.name)).reshape(host.shape)


def abstract(framework: str, shape: tuple[int, ...], entry: dtypes.LogicalDtype) -> Any:
    if framework == "numpy":
        return AbstractNumpy(shape, entry.host)
    if framework == "jax":
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
        return jax.ShapeDtypeStruct(shape, entry.host, sharding=NamedSharding(mesh, P("y")))
    return torch.empty(shape, dtype=getattr(torch, entry.name), device="meta")


def data(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        return bits(leaf.reshape(-1).view(torch.uint8).numpy())
    return bits(leaf)


@pytest.mark.parametrize("saver", FRAMEWORKS)
@pytest.mark.parametrize("loader", FRAMEWORKS)
@pytest.mark.parametrize("entry", SHARED, ids=lambda entry: entry.name)
def test_every_pair_keeps_every_bit(
    saver: str, loader: str, entry: dtypes.LogicalDtype, pattern: Any
) -> None:
    host = pattern((8, 3), entry.host)
    with jax.enable_x64(True):
        loaded = load(save(make(saver, host, entry)), abstract(loader, (8, 3), entry))
    found = registry.codec_for(loaded)
    assert found is not None
    assert found.name == loader
    assert entry.name == str(loaded.dtype).removeprefix("torch.")
    assert data(loaded) == bits(host)


@pytest.mark.parametrize("saver", FRAMEWORKS)
@pytest.mark.parametrize("loader", FRAMEWORKS)
def test_every_pair_casts(saver: str, loader: str) -> None:
    entry, wanted = dtypes.TABLE["float32"], dtypes.TABLE["bfloat16"]
    host = np.linspace(-3, 3, 24, dtype=np.float32).reshape(8, 3)
    loaded = load(save(make(saver, host, entry)), abstract(loader, (8, 3), wanted))
    assert data(loaded) == bits(host.astype(wanted.host))


def test_jax_integers_of_four_bits_become_numpy_but_not_torch() -> None:
    saved = save(jnp.arange(-8, 8).astype(jnp.int4))
    assert load(saved, AbstractNumpy((16,), "int4")).astype(int).tolist() == list(range(-8, 8))
    assert load(saved, torch.empty(16, dtype=torch.int8)).tolist() == list(range(-8, 8))
    with pytest.raises(Unsupported):
        load(saved, torch.empty(16, dtype=torch.int4, device="meta"))


def test_packed_torch_values_become_bytes_in_numpy() -> None:
    packed = torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert load(save(packed), AbstractNumpy((4,), "uint8")).tolist() == [0, 1, 2, 3]
    assert load(save(packed), registry.ANY_NUMPY).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("loader", ["jax", "torch"])
def test_complex_values_do_not_lose_their_imaginary_part(loader: str) -> None:
    entry = dtypes.TABLE["float32"]
    with pytest.raises(InvalidInput, match="imaginary"):
        load(save(np.ones((8, 3), np.complex64)), abstract(loader, (8, 3), entry))


@pytest.mark.parametrize("loader", FRAMEWORKS)
def test_every_loader_refuses_another_shape(loader: str) -> None:
    with pytest.raises(InvalidInput, match="was saved"):
        load(save(np.ones((8, 4), np.float32)), abstract(loader, (8, 3), dtypes.TABLE["float32"]))


def test_unknown_frameworks_are_named() -> None:
    with pytest.raises(InvalidInput, match="no framework 'mxnet'"):
        registry.codec_by_name("mxnet")


def test_a_framework_that_is_not_installed_gives_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save(jnp.arange(4))
    keys = save(jax.random.key(3))
    monkeypatch.setattr(registry, "_installed", lambda name: False)
    monkeypatch.setattr(registry, "_by_name", {})
    assert load(saved).tolist() == [0, 1, 2, 3]
    assert load(keys).tolist() == [0, 3]
    with pytest.raises(Unsupported, match=r"pip install 'jax>=0\.6'"):
        registry.codec_by_name("jax")
