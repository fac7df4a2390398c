"""Shardings over eight devices: each gets its part, and no more is read than all need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from tests.published import models
from tests.support.long import amount

import waystation
from waystation import errors
from waystation.safetensors import load

MIB = 1 << 20


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("x", "y"))


@contextmanager
def statistics() -> Iterator[list[waystation.LoadStatistics]]:
    seen: list[waystation.LoadStatistics] = []
    context = waystation.Context()
    context.array.loading.on_statistics = seen.append
    with context:
        yield seen


SPECS = st.sampled_from([(), ("x",), (None, "y"), ("y", "x"), (("x", "y"),), (None, ("y", "x"))])


@given(spec=SPECS, mmap=st.booleans())
@settings(max_examples=amount(30))
def test_every_device_has_its_part(
    tmp_path_factory: pytest.TempPathFactory, spec: tuple[str | None, ...], mmap: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "sharded.safetensors"
    values = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    if not path.exists():
        models.write_file(path, {"w": values, "h": values.astype(np.float16)})
    sharding = NamedSharding(mesh(), PartitionSpec(*spec))
    loaded = load(path, framework="jax", sharding=sharding, mmap=mmap)
    for name, dtype in (("w", np.float32), ("h", np.float16)):
        assert loaded[name].sharding == sharding
        expected = values.astype(dtype)
        for shard in loaded[name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes()


def test_a_function_chooses(tmp_path: Path) -> None:
    path = models.write_file(
        tmp_path / "model.safetensors", {"w": np.ones((8, 4), np.float32), "b": np.ones(3)}
    )
    sharding = NamedSharding(mesh(), PartitionSpec("x"))
    asked: list[tuple[str, object]] = []

    def choose(name: str, abstract: jax.ShapeDtypeStruct) -> jax.sharding.Sharding | None:
        asked.append((name, abstract))
        return sharding if len(abstract.shape) == 2 else None

    loaded = load(
        path, framework="jax", sharding_fn=choose, dtype="bfloat16", rename={"w": "weight", "b": "bias"}
    )
    assert sorted(asked) == [
        ("bias", jax.ShapeDtypeStruct((3,), jnp.bfloat16)),
        ("weight", jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)),
    ]
    assert loaded["weight"].sharding == sharding
    assert loaded["weight"].dtype == loaded["bias"].dtype == jnp.bfloat16
    assert isinstance(loaded["bias"].sharding, SingleDeviceSharding)


@pytest.mark.parametrize("spec", [("x", "y", None), (None, "x"), (None, None, None, "x")])
def test_shardings_that_do_not_fit_name_the_tensor(tmp_path: Path, spec: tuple[str | None, ...]) -> None:
    path = models.write_file(tmp_path / "model.safetensors", {"w": np.ones((8, 3), np.float32)})
    with pytest.raises(errors.InvalidInput) as caught:
        load(path, framework="jax", sharding=NamedSharding(mesh(), PartitionSpec(*spec)))
    assert caught.value.context["tensor"] == "w"


def test_shards_alias_what_was_read_and_replicas_share_it(tmp_path: Path) -> None:
    path = models.write_file(tmp_path / "model.safetensors", {"w": np.ones((64, 64), np.float32)})
    sharding = NamedSharding(mesh(), PartitionSpec("x"))
    loaded = load(path, framework="jax", sharding=sharding)["w"]
    addresses = [shard.data.unsafe_buffer_pointer() for shard in loaded.addressable_shards]
    assert len(set(addresses)) == 4, "two devices hold each part"
    assert all(address % 256 == 0 for address in addresses)


@pytest.mark.parametrize(("spec", "most"), [(("x",), 1.01), ((None, "y"), 1.01), ((), 1.01)])
def test_no_byte_is_read_twice(tmp_path: Path, spec: tuple[str | None, ...], most: float) -> None:
    path = models.write_file(tmp_path / "model.safetensors", {"w": np.ones((1024, 1024), np.float32)})
    with statistics() as seen:
        load(path, framework="jax", sharding=NamedSharding(mesh(), PartitionSpec(*spec)))
    assert seen[0].bytes_needed == 4 * MIB
    assert seen[0].bytes_read <= most * 4 * MIB


def test_a_part_of_the_devices_reads_a_part_of_the_file(tmp_path: Path) -> None:
    """What devices of other processes hold is not read: here, rows that a slice leaves out."""
    path = models.write_file(tmp_path / "model.safetensors", {"w": np.ones((1024, 1024), np.float32)})
    with statistics() as seen, waystation.safetensors.open(path) as tensors:
        part = tensors.slice("w")[256:512]
        assert part.shape == (256, 1024)
        assert not seen
    before = read_bytes()
    tensors = waystation.safetensors.open(path)
    opened = read_bytes() - before
    tensors.slice("w")[:, 512:]
    columns = read_bytes() - before - opened
    tensors.slice("w")[256:512]
    rows = read_bytes() - before - opened - columns
    assert opened <= 128 << 10
    assert rows <= 1.05 * MIB
    assert columns <= 4.05 * MIB, "rows of 2 KiB are read with what is between them"


def read_bytes() -> int:
    """What this process has asked the system to read."""
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])
