"""What processes of JAX and of torch do with the same arrays: each loads what the last has saved and saves it
for the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tests.distributed import jax_scenarios, torch_scenarios
from tests.support.programs import Place

import waystation

TABLE = np.arange(48 * 60, dtype=np.float32).reshape(48, 60)
VALUES: dict[str, np.ndarray[Any, Any]] = {
    "table": TABLE,
    "half": TABLE.astype(ml_dtypes.bfloat16),
    "row": np.arange(35, dtype=np.int32),
    "all": TABLE[:3] > 40,
}


def in_jax(place: Place, devices: int, loaded_from: Path | None, saved_to: Path) -> bool:
    """Loads, if there is something yet, and saves, with arrays over all devices."""
    jax_scenarios.join(place, devices)
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))
    specs = {"table": P("y", "x"), "half": P(("x", "y")), "row": P(), "all": P(None, "y")}
    places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    made = {
        name: jax.make_array_from_callback(values.shape, places[name], values.__getitem__)
        for name, values in VALUES.items()
    }
    if loaded_from is not None:
        abstract = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for name, array in made.items()
        }
        loaded = waystation.load(loaded_from, abstract)
        for name, array in made.items():
            assert loaded[name].sharding == array.sharding
            for shard, other in zip(loaded[name].addressable_shards, array.addressable_shards, strict=True):
                assert np.asarray(shard.data).tobytes() == np.asarray(other.data).tobytes(), name
        made = loaded
    waystation.save(saved_to, made)
    return True


def in_torch(place: Place, loaded_from: Path | None, saved_to: Path) -> bool:
    """The same with DTensors: sharded unevenly, strided, and replicated."""
    torch_scenarios.connect(place)
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (place.count,))
    placements: dict[str, Any] = {"table": Shard(1), "half": Shard(0), "row": Shard(0), "all": Replicate()}
    made = {}
    for name, values in VALUES.items():
        bits = values.view(np.int16) if name == "half" else values
        tensor = torch.from_numpy(bits.copy())
        tensor = tensor.view(torch.bfloat16) if name == "half" else tensor
        made[name] = distribute_tensor(tensor, mesh, [placements[name]])
    if loaded_from is not None:
        loaded = waystation.load(loaded_from, {name: tensor.clone() for name, tensor in made.items()})
        for name, tensor in made.items():
            assert loaded[name].placements == tensor.placements
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name].to_local(), tensor.to_local()), name
        made = loaded
    waystation.save(saved_to, made)
    place.disconnect()
    return True
