"""What the processes of a JAX program do in the tests of published models."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.support.programs import Place, raised

import waystation
from waystation.safetensors import load, load_async


def connect(place: Place, devices: int = 1) -> None:
    """Connects the processes, each of which has so many devices, and has all learn of all."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    place.connect()
    jax.devices()


def load_sharded(
    place: Place, model: Path, devices: int, spec: tuple[str | None, ...] = ("x",), **options: Any
) -> tuple[int, int, list[tuple[Any, bytes]]]:
    """Loads a model of which every process needs a part; returns what was read, as counted by the load and
    by the system, and the parts."""
    connect(place, devices)
    mesh = jax.make_mesh((devices * place.count,), ("x",))
    seen: list[waystation.LoadStatistics] = []
    context = waystation.Context()
    context.array.loading.on_statistics = seen.append
    before = _read_bytes()
    with context:
        loaded = load(model, framework="jax", sharding=NamedSharding(mesh, PartitionSpec(*spec)), **options)
    read = _read_bytes() - before
    parts = []
    for name, array in loaded.items():
        for shard in array.addressable_shards:
            bounds = [part.indices(extent) for part, extent in zip(shard.index, array.shape, strict=True)]
            parts.append(((name, bounds), np.asarray(shard.data).tobytes()))
    place.disconnect()
    return seen[0].bytes_read, read, parts


def told_of_columns(place: Place, model: Path, devices: int) -> tuple[waystation.LoadStatistics, int]:
    """Loads columns of a model; returns the statistics, and the bytes that this process holds."""
    connect(place, devices)
    mesh = jax.make_mesh((devices * place.count,), ("x",))
    seen: list[waystation.LoadStatistics] = []
    context = waystation.Context()
    context.array.loading.on_statistics = seen.append
    with context:
        loaded = load(model, framework="jax", sharding=NamedSharding(mesh, PartitionSpec(None, "x")))
    held = sum(shard.data.nbytes for array in loaded.values() for shard in array.addressable_shards)
    place.disconnect()
    return seen[0], held


def interrupted_before_it_reads(place: Place, model: Path) -> tuple[Any, Any]:
    """What each process sees when one is interrupted once all have agreed, and when all load again."""
    connect(place)
    shared = NamedSharding(jax.make_mesh((place.count,), ("x",)), PartitionSpec("x"))

    def interrupt(*arguments: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    def use() -> int:
        return len(load(model, framework="jax", sharding=shared))

    with pytest.MonkeyPatch.context() as patch:
        if place.index == 1:
            patch.setattr(sys.modules["waystation.safetensors.load"], "Filling", interrupt)
        try:
            first: Any = use()
        except KeyboardInterrupt:
            first = "interrupted"
        except Exception as error:
            told = raised(error)
            first = told.type, told.context.get("process")
    again = use()
    place.disconnect()
    return first, again


def load_copies(place: Place, models: list[Path], way: str, options: dict[str, Any]) -> Any:
    """Loads a model of which every process has a copy of its own; returns the error, or how many arrays
    came."""
    connect(place)
    mesh = jax.make_mesh((place.count,), ("x",))
    shared = NamedSharding(mesh, PartitionSpec("x"))
    placing: dict[str, Any] = (
        {"sharding": shared} if way == "sharding" else {"sharding_fn": lambda *_: shared}
    )
    context = waystation.Context()
    context.multiprocessing.deadline_s = 60.0
    try:
        with context:
            if way == "async":
                loaded = load_async(models[place.index], framework="jax", **placing, **options).result()
            else:
                loaded = load(models[place.index], framework="jax", **placing, **options)
        return len(loaded)
    except Exception as error:
        return raised(error)
    finally:
        place.disconnect()


def load_in_another_order(place: Place, model: Path) -> Any:
    """Each process has its own devices first in the mesh; returns the error."""
    connect(place, 2)
    own = sorted(jax.devices(), key=lambda device: device.process_index != place.index)
    mesh = jax.sharding.Mesh(np.array(own), ("x",))
    try:
        return len(load(model, framework="jax", sharding=NamedSharding(mesh, PartitionSpec("x"))))
    except Exception as error:
        return raised(error)
    finally:
        place.disconnect()


def load_alone(place: Place, model: Path) -> int:
    """One process alone loads to its own devices, by a sharding and by a function; the others do not."""
    connect(place)
    count = 0
    if place.index == 1:
        own = NamedSharding(jax.sharding.Mesh(np.array(jax.local_devices()), ("x",)), PartitionSpec("x"))
        count += len(load(model, framework="jax", sharding=own))
        count += len(load(model, framework="jax", sharding_fn=lambda *_: own, together=False))
    place.disconnect()
    return count


def load_late(place: Place, model: Path) -> Any:
    """One process does not come; what the other one sees."""
    connect(place)
    found: Any = None
    if place.index == 0:
        sharding = NamedSharding(jax.make_mesh((place.count,), ("x",)), PartitionSpec("x"))
        context = waystation.Context()
        context.multiprocessing.deadline_s = 0.2
        try:
            with context:
                load(model, framework="jax", sharding=sharding)
        except Exception as error:
            found = raised(error)
        place.report("done")
    else:
        place.receive()
    place.disconnect()
    return found


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])
