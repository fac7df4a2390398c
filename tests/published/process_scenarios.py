"""What the processes of a JAX program do in the tests of published models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tests.support.programs import Place

import waystation
from waystation.safetensors import load


def load_sharded(place: Place, model: Path, devices: int) -> tuple[int, int, list[tuple[Any, bytes]]]:
    """Loads a model of which every process needs a part; returns what was read, as counted by the load and
    by the system, and the parts."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    place.connect()
    mesh = jax.make_mesh((devices * place.count,), ("x",))
    seen: list[waystation.LoadStatistics] = []
    context = waystation.Context()
    context.array.loading.on_statistics = seen.append
    before = _read_bytes()
    with context:
        loaded = load(model, framework="jax", sharding=NamedSharding(mesh, PartitionSpec("x")))
    read = _read_bytes() - before
    parts = []
    for name, array in loaded.items():
        for shard in array.addressable_shards:
            bounds = [part.indices(extent) for part, extent in zip(shard.index, array.shape, strict=True)]
            parts.append(((name, bounds), np.asarray(shard.data).tobytes()))
    place.disconnect()
    return seen[0].bytes_read, read, parts


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])
