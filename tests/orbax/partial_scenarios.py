"""What processes do that save a state together and load parts of it. Each function runs in every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tests.support.programs import Place

import waystation
from waystation import PLACEHOLDER, errors

VALUES = np.arange(96, dtype=np.float32).reshape(8, 12)
WRITERS = ("native", "files", "ocdbt", "genuine")


def in_jax(place: Place, devices: int, root: Path) -> dict[str, Any]:
    """Arrays over all devices, written in each layout; what each load of a part gave."""
    from tests.distributed.jax_scenarios import join

    join(place, devices)
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P
    from tests.orbax import oracle
    from tests.orbax.partial_states import WRITERS as WRITE
    from tests.orbax.partial_states import genuine_loading

    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))

    def sharded(values: np.ndarray[Any, Any], *spec: Any) -> jax.Array:
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)

    def shards_of(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: (
                [(str(shard.index), np.asarray(shard.data).tolist()) for shard in leaf.addressable_shards]
                if isinstance(leaf, jax.Array)
                else leaf
            ),
            tree,
        )

    state = {
        "layers": {name: {"w": sharded(VALUES + number, "x", "y")} for number, name in enumerate("abc")},
        "step": 7,
    }
    # Another sharding than the one that was saved.
    abstract = jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype, sharding=NamedSharding(mesh, P("y")))
    everything = {"layers": {name: {"w": abstract} for name in "abc"}, "step": 0}
    layers = everything["layers"]
    asked = {
        "a subset": ({"layers": {"b": layers["b"]}}, True),
        "a placeholder": ({**everything, "layers": {**layers, "b": {"w": PLACEHOLDER}}}, False),
        "a placeholder for nothing": ({**everything, "new": PLACEHOLDER}, False),
        "too little": ({"layers": layers}, False),
        "too much": ({**everything, "new": abstract}, False),
    }
    genuine_path = root / "genuine"
    for writer in WRITERS:
        WRITE[writer](root / writer, state)
    found: dict[str, Any] = {}
    for name, (wanted, partial_load) in asked.items():
        try:
            with genuine_loading(partial_load=partial_load):
                expected = shards_of(oracle.load(genuine_path, wanted))
        except ValueError:
            expected = "refused"
        for writer in WRITERS:
            loaded = _loaded(root / writer, wanted, partial_load=partial_load)
            found[f"{name}, {writer}"] = shards_of(loaded) == expected
    for writer in WRITERS:
        loaded = _loaded(root / writer, everything, select=r"\.b\.w$")
        selected = loaded["layers"].pop("b")["w"]
        values = [
            np.array_equal(shard.data, (VALUES + 1)[shard.index]) for shard in selected.addressable_shards
        ]
        rest = [layer["w"] for layer in loaded["layers"].values()]
        found[f"a selection, {writer}"] = all(values) and {id(leaf) for leaf in rest} == {id(PLACEHOLDER)}
    return found


def _loaded(path: Path, wanted: Any, *, partial_load: bool = False, select: Any = None) -> Any:
    """What a load gives; `refused` if the structures differ."""
    from tests.orbax.partial_states import loading

    with loading(partial_load=partial_load, select=select):
        try:
            return waystation.load(path, wanted)
        except errors.StructureMismatch:
            return "refused"


def in_torch(place: Place, root: Path) -> dict[str, Any]:
    """The same with tensors over all processes."""
    from tests.distributed import torch_scenarios
    from tests.orbax import writing

    torch_scenarios.connect(place)
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (place.count,))
    table = torch.from_numpy(VALUES.copy())

    def sharded(number: int, axis: int) -> DTensor:
        return distribute_tensor(table + number, mesh, [Shard(axis)])

    state = {"layers": [{"w": sharded(number, 0)} for number in range(3)], "step": 7}
    waystation.save(root / "native", state)
    writing.save(root / "files", state, use_ocdbt=False)
    found: dict[str, Any] = {}
    for writer in ("native", "files"):
        path = root / writer
        other = {"w": sharded(0, 1)}  # another placement than the one that was saved
        part = _loaded(path, {"layers": [other]}, partial_load=True)
        found[f"a subset, {writer}"] = torch.equal(
            part["layers"][0]["w"].to_local(), sharded(0, 1).to_local()
        )
        wanted = {
            "layers": [{"w": PLACEHOLDER}, other, {"w": PLACEHOLDER}],
            "step": PLACEHOLDER,
            "new": PLACEHOLDER,
        }
        part = _loaded(path, wanted)
        same = torch.equal(part["layers"][1]["w"].to_local(), sharded(1, 1).to_local())
        found[f"placeholders, {writer}"] = same and part["step"] is part["new"] is PLACEHOLDER
        found[f"too little, {writer}"] = _loaded(path, {"layers": [other]}) == "refused"
        found[f"too much, {writer}"] = _loaded(path, {"layers": [other] * 4, "step": 0}) == "refused"
        part = _loaded(path, None, select="step")
        found[f"a selection, {writer}"] = part["step"] == 7 and part["layers"][0]["w"] is PLACEHOLDER
    place.disconnect()
    return found
