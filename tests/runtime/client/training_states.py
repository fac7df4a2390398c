"""States as training has them, on one island and over two: hosts save what a program would save itself."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P

import waystation
import waystation.runtime as pw
from waystation.checkpoint.compare import compare
from waystation.errors import InvalidInput, StructureMismatch, UnsupportedLeaf
from waystation.tree import flatten, unflatten

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@dataclasses.dataclass
class Training:
    """What goes on from a checkpoint: a stage on each slice, and what the program itself keeps."""

    step: int
    stages: tuple[Any, ...]
    kept: Any


class Stage:
    """A model and the state of its optimizer, on a slice."""

    def __init__(self, client: pw.Client, on: pw.Slice, seed: float) -> None:
        def start(seed: Any) -> Any:
            rows = jnp.arange(64, dtype=jnp.float32).reshape(8, 8) + seed
            parameters = {"embed": rows, "layers": [rows.astype(jnp.bfloat16), {"w": 2 * rows}]}
            return parameters, OPTIMIZER.init(parameters)

        def step(state: Any) -> Any:
            parameters, optimizer_state = state
            updates, optimizer_state = OPTIMIZER.update(parameters, optimizer_state, parameters)
            return optax.apply_updates(parameters, updates), optimizer_state

        laid = jax.tree.map(lambda leaf: P("x") if leaf.ndim else P(), jax.eval_shape(start, 0.0))
        self._step = client.jit(step, on, in_shardings=(laid,), out_shardings=laid, donate_argnums=0)
        self.state = client.jit(start, on, out_shardings=laid)(np.float32(seed))
        self.step()

    def step(self) -> None:
        self.state = self._step(self.state)


def training_of(stages: list[Stage], step: int) -> Training:
    kept = {"name": "adamw", "rates": [1e-2, None, ()], 7: np.arange(5), "seed": np.uint32(3), "raw": b"\0"}
    kept["count"] = jnp.int32(7)
    kept["key"] = jax.random.key(3)
    kept["keys"] = jax.random.split(jax.random.key(4, impl="rbg"), 2)
    kept["dropout"] = torch.get_rng_state()
    kept["scales"] = [torch.ones(2, 3).T.bfloat16(), torch.nn.Parameter(torch.arange(3.0)), torch.tensor(2.0)]
    return Training(step, tuple(stage.state for stage in stages), kept)


def stored_wide() -> waystation.Context:
    """Arrays of bfloat16 are stored as float32, in small chunks."""

    def storage_for(label: str, described: Any) -> waystation.StorageOptions | None:
        if described.dtype != "bfloat16":
            return None
        return waystation.StorageOptions(dtype="float32", chunk_bytes=128)

    context = waystation.Context()
    context.array.saving.storage_options_for = storage_for
    return context


def read(state: Any) -> Any:
    """The same state as it is now, with NumPy arrays in the place of arrays of hosts."""
    leaves, structure = flatten(state)
    copies = [np.array(leaf) if isinstance(leaf, pw.Array | np.ndarray) else leaf for leaf in leaves]
    return unflatten(structure, copies)


def require_same(found: Any, expected: Any) -> None:
    leaves, structure = flatten(found)
    expected_leaves, expected_structure = flatten(expected)
    assert structure == expected_structure
    for leaf, other in zip(leaves, expected_leaves, strict=True):
        np.testing.assert_array_equal(numbers(leaf), numbers(other))


def numbers(leaf: Any) -> Any:
    """What NumPy can compare."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().double()
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def loaded_here(path: str) -> Any:
    context = waystation.Context()
    context.array.loading.restore_on_host = True
    with context:
        return waystation.load(path)


def check_training_states(client: pw.Client, directory: str) -> None:
    """Saves and loads, at once and in the background, on one island and over two; and what is refused."""
    for names in (("upper",), ("lower",), ("upper", "lower")):
        devices = client.make_virtual_device_set()
        stages = [
            Stage(client, devices.add_slice(devices=4, island=name), seed) for seed, name in enumerate(names)
        ]
        own = os.path.join(directory, "-".join(names))
        check_a_state(client, stages, own)
        check_tied_arrays(stages[0], own)
        if len(names) > 1:
            check_refusals(training_of(stages, 3), own)
        devices.release()


def check_a_state(client: pw.Client, stages: list[Stage], directory: str) -> None:
    paths = {name: os.path.join(directory, name) for name in ("here", "hosts", "later")}
    state = training_of(stages, 3)
    expected = read(state)
    with stored_wide():
        waystation.save(paths["here"], expected, custom_metadata={"run": [1]})
        waystation.save(paths["hosts"], state, custom_metadata={"run": [1]})
        saving = waystation.save_async(paths["later"], state, custom_metadata={"run": [1]})
    state.kept[7] += 1
    for stage in stages:
        stage.step()  # which donates what is saved
    assert saving.result() is None
    newer = training_of(stages, 4)
    for path in paths.values():
        assert not compare(paths["here"], path).differences
        assert waystation.metadata(path).custom_metadata == {"run": [1]}
        assert loaded_here(path).stages[0][0]["layers"][0].dtype == np.float32
        assert flatten(waystation.metadata(path).metadata)[1] == flatten(expected)[1]
        require_same(loaded_here(path), expected)
        for loaded in (waystation.load(path, newer), waystation.load_async(path, newer).result()):
            assert type(loaded) is Training
            assert isinstance(loaded.stages[0][0]["embed"], pw.Array)
            require_same(read(loaded), expected)
            assert [type(leaf) for leaf in loaded.kept["scales"]] == [torch.Tensor] * 3
            assert [leaf.requires_grad for leaf in loaded.kept["scales"]] == [False, True, False]
            assert loaded.kept["keys"].dtype == newer.kept["keys"].dtype
        assert not waystation.verify(path).damages
    for stage, loaded_state in zip(stages, loaded.stages, strict=True):
        before, stage.state = stage.state, loaded_state
        stage.step()  # from what was loaded it goes on as it went on then
        require_same(read(stage.state), read(before))
    assert sorted(os.listdir(directory)) == sorted(paths)


def check_tied_arrays(stage: Stage, directory: str) -> None:
    """One array in two places, each of which is stored in its own way."""
    weights = stage.state[0]["embed"]
    context = waystation.Context()
    context.array.saving.storage_options_for = lambda label, _: (
        waystation.StorageOptions(dtype="bfloat16") if label == "head" else None
    )
    path = os.path.join(directory, "tied")
    with context:
        waystation.save(path, {"embed": weights, "head": weights})
    found = loaded_here(path)
    assert (found["embed"].dtype, found["head"].dtype) == (np.float32, jnp.bfloat16)
    np.testing.assert_array_equal(found["embed"], weights)


def check_refusals(state: Training, directory: str) -> None:
    """What cannot be loaded or saved is said as `waystation` says it of states of this process."""
    path = os.path.join(directory, "hosts")
    part = Training(..., state.stages, ...)
    loaded = waystation.load(path, part)
    assert (loaded.step, loaded.kept) == (..., ...)
    require_same(read(loaded.stages), loaded_here(path).stages)
    context = waystation.Context()
    context.pytree.loading.partial_load = True
    with context:
        first = waystation.load(path, {"stages": [state.stages[0]], "kept": {7: np.zeros(5)}})
    require_same(read(first["stages"][0]), loaded_here(path).stages[0])
    other = dataclasses.replace(state, kept={**state.kept, "more": 3})
    with pytest.raises(StructureMismatch, match=r"\['more'\]: only in the abstract state"):
        waystation.load(path, other)
    fewer = waystation.load_async(path, {"stages": state.stages})
    with pytest.raises(StructureMismatch, match="step: only in the checkpoint"):
        fewer.result()
    with pytest.raises(InvalidInput, match="cannot be loaded as int"):
        waystation.load(path, dataclasses.replace(state, kept={**state.kept, "rates": [int, None, ()]}))
    with pytest.raises(InvalidInput, match="PRNG keys keep their implementation"):
        waystation.load(
            path, dataclasses.replace(state, kept={**state.kept, "key": jax.random.key(3, impl="rbg")})
        )
    with pytest.raises(UnsupportedLeaf, match=r"builtins\.object"):
        waystation.save(f"{path} too", dataclasses.replace(state, kept=object()))
