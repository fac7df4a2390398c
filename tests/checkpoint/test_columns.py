"""Many small arrays, cast, loaded in place or cut: the bits and errors of one by one, in few steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import waystation
from waystation.errors import InvalidInput, LossyCast
from waystation.frameworks import casts
from waystation.frameworks.numpy_arrays import AbstractNumpy
from waystation.frameworks.registry import codec_by_name
from waystation.layouts.native import read_job
from waystation.layouts.native.chunks import StorageOptions, cut

SHAPES: list[tuple[int, ...]] = [(3,), (), (1,), (0, 4), (64,), (5, 7, 2), (256,)]
MANY = 2000


def state_of(dtypes: list[Any], count: int = 200) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays of every dtype and shape, those of a kind spread among the others."""
    random = np.random.default_rng(1)
    return {
        f"{number:05}": np.asarray(
            random.integers(0, 2, SHAPES[number % len(SHAPES)]) * random.integers(0, 100)
        ).astype(dtypes[number % len(dtypes)])
        for number in range(count)
    }


def bits(array: Any) -> tuple[Any, ...]:
    """What is there to compare of an array."""
    if isinstance(array, torch.Tensor):
        data = array.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return array.dtype, tuple(array.shape), data
    host = np.asarray(array)
    return host.dtype, host.shape, host.tobytes()


def one_by_one(*, may_lose: bool = False) -> waystation.Context:
    """Loads that do not use columns, since their memory has a bound."""
    context = waystation.Context()
    context.array.loading.allow_lossy_casts = may_lose
    context.memory.read_concurrent_bytes = 64 << 20
    return context


def abstract_of(framework: str) -> Callable[[tuple[int, ...], Any], Any]:
    """What asks for an array of a framework."""
    if framework == "numpy":
        return AbstractNumpy
    if framework == "jax":
        return jax.ShapeDtypeStruct
    return lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, np.dtype(dtype).name), device="meta")


class Counted:
    """Counts the calls of a function, which does what it always did."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.count, self._function = 0, getattr(owner, name)
        patch.setattr(owner, name, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.count += 1
        return self._function(*arguments, **named)


# ---- casts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16", "int8", "bool", "complex64"])
def test_casts_of_many_are_those_of_each(tmp_path: Path, framework: str, wanted: str) -> None:
    dtypes = ["float32", "int32", "bool", "uint8", "float16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
    saved = state_of(dtypes)
    waystation.save(tmp_path / "at", saved)
    abstract = abstract_of(framework)
    asked = {name: abstract(array.shape, np.dtype(wanted)) for name, array in saved.items()}
    context = waystation.Context()
    context.array.loading.allow_lossy_casts = True
    with context:
        loaded = waystation.load(tmp_path / "at", asked)
    with one_by_one(may_lose=True):
        expected = waystation.load(tmp_path / "at", asked)
    assert {name: bits(array) for name, array in loaded.items()} == {
        name: bits(array) for name, array in expected.items()
    }
    assert [type(leaf) for leaf in loaded.values()] == [type(leaf) for leaf in expected.values()]


def test_many_casts_are_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {f"{number}": np.full((9, number % 3), number, np.float32) for number in range(MANY)}
    waystation.save(tmp_path / "at", saved)
    asked = {name: AbstractNumpy(array.shape, np.float64) for name, array in saved.items()}
    copies, jobs = Counted(monkeypatch, casts, "copy"), Counted(monkeypatch, read_job, "start")
    loaded = waystation.load(tmp_path / "at", asked)
    assert copies.count == 2  # of each shape that has elements
    assert jobs.count == 1
    assert all(np.array_equal(loaded[name], array) for name, array in saved.items())


def test_casts_go_group_by_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {f"{number}": np.full(1 << 20, number, np.uint8) for number in range(70)}
    saved["large"] = np.full(33 << 20, 1, np.uint8)  # more than a group holds
    waystation.save(tmp_path / "at", saved)
    asked = {name: AbstractNumpy(array.shape, np.uint16) for name, array in saved.items()}
    jobs = Counted(monkeypatch, read_job, "start")
    loaded = waystation.load(tmp_path / "at", asked)
    assert jobs.count == 3 + 2
    assert all(np.array_equal(loaded[name], array) for name, array in saved.items())


def test_a_cast_that_is_refused_names_the_first_array(tmp_path: Path) -> None:
    saved = {f"{number:03}": np.full((2, 1 + number % 2), 1.0, np.float32) for number in range(100)}
    saved["041"][1, 1], saved["040"][1, 0] = 1e30, 1e20
    waystation.save(tmp_path / "at", saved)
    asked = {name: AbstractNumpy(array.shape, np.float16) for name, array in saved.items()}
    with pytest.raises(LossyCast) as refused:
        waystation.load(tmp_path / "at", asked)
    with one_by_one(), pytest.raises(LossyCast) as expected:
        waystation.load(tmp_path / "at", asked)
    assert refused.value.context["array"] == "040"
    assert str(refused.value) == str(expected.value)


# ---- in place ----------------------------------------------------------------------------------


def in_place() -> waystation.Context:
    context = waystation.Context()
    context.array.loading.in_place = True
    return context


@pytest.mark.parametrize("wanted", ["float32", "float64"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_many_arrays_are_loaded_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str, wanted: str
) -> None:
    saved = state_of(["float32"], MANY)
    waystation.save(tmp_path / "at", saved)
    own: dict[str, Any] = {name: np.full(array.shape, 7, wanted) for name, array in saved.items()}
    own["00004"] = np.full((128,), 7, wanted)[::2]
    own["00005"] = np.full((2, 7, 5), 7, wanted).T
    if framework == "torch":
        own = {name: torch.from_numpy(array) for name, array in own.items()}
    versions = [tensor._version for tensor in own.values()] if framework == "torch" else []
    jobs = Counted(monkeypatch, read_job, "start")
    with in_place():
        loaded = waystation.load(tmp_path / "at", own)
    assert jobs.count <= 2
    for name, array in own.items():
        assert loaded[name] is array
        assert np.array_equal(np.asarray(array), saved[name])
    for version, (name, tensor) in zip(versions, own.items(), strict=False):
        assert tensor._version == version + (saved[name].size > 0)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_arrays_that_share_memory_are_loaded_into(tmp_path: Path, framework: str) -> None:
    saved = {f"{number}": np.full(4, number, np.int32) for number in range(6)}
    saved["1"] = saved["0"]
    waystation.save(tmp_path / "at", saved)
    memory = np.zeros(20, np.int32)
    own: dict[str, Any] = {f"{number}": memory[4 * number - 4 :][:4] for number in range(2, 6)}
    own |= {"0": memory[:4], "1": memory[:4]}
    own["2"], own["3"], own["4"] = memory[4:8], memory[8:12], memory[12:16]
    own["5"] = memory[16:20]
    if framework == "torch":
        own = {name: torch.from_numpy(array) for name, array in own.items()}
    with in_place():
        loaded = waystation.load(tmp_path / "at", own)
    assert all(loaded[name] is array for name, array in own.items())
    assert memory.tolist() == [0] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4


def test_an_array_that_is_read_only_is_refused_by_its_name(tmp_path: Path) -> None:
    saved = {f"{number}": np.arange(4.0) for number in range(5)}
    waystation.save(tmp_path / "at", saved)
    own = {name: np.zeros(4) for name in saved}
    own["3"].flags.writeable = False
    with in_place(), pytest.raises(InvalidInput, match="read-only") as refused:
        waystation.load(tmp_path / "at", own)
    assert refused.value.context["array"] == "['3']"


# ---- chunks ------------------------------------------------------------------------------------


@pytest.mark.share(3)
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("chunk_bytes", [16, 100, 1 << 20])
def test_chunks_of_many_are_those_of_each(tmp_path: Path, framework: str, chunk_bytes: int) -> None:
    make = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}[framework]
    state = {name: make(array) for name, array in state_of(["float32", "int32", "uint8"]).items()}
    state["strided"] = make(np.arange(60.0, dtype=np.float32).reshape(6, 10)).T
    for name, chosen in (("all", None), ("each", lambda *_: StorageOptions(chunk_bytes=chunk_bytes))):
        context = waystation.Context()
        context.array.saving.storage_options.chunk_bytes = chunk_bytes
        context.array.saving.storage_options_for = chosen
        with context:
            waystation.save(tmp_path / name, state)
            waystation.save_async(tmp_path / f"{name} async", state).result()
    names = ["all", "each", "all async", "each async"]
    first, *others = [
        {path.name: path.read_bytes() for path in sorted((tmp_path / name / "state").glob("*.safetensors"))}
        for name in names
    ]
    assert all(other == first for other in others)
    for name in names:
        loaded = waystation.load(tmp_path / name)
        assert {key: bits(leaf) for key, leaf in loaded.items()} == {
            key: bits(leaf) for key, leaf in state.items()
        }


def test_arrays_that_are_not_cut_stay_in_columns() -> None:
    arrays = [np.full(4 + 4 * (number % 10 == 0), number, np.float32) for number in range(50)]
    codec = codec_by_name("numpy")
    found = codec.contiguous(arrays)
    assert found is not None
    sources = [found.kinds[kind] for kind in found.which]
    saving = waystation.Context().array.saving
    saving.storage_options.chunk_bytes = 16
    labels = [str(number) for number in range(50)]
    chunks = cut(sources, labels, saving, addresses=found.addresses, owners=found.owners)
    assert len(chunks) == 55
    assert sorted({chunks.others[place].array for place in chunks.others}) == [0, 10, 20, 30, 40]
    assert len(chunks.others) == 10
