"""Loading without an abstract state on other devices, and what a load says of itself."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

import waystation
import waystation.safetensors
from waystation import errors
from waystation.checkpoint import LoadStatistics, fill, loading, opening
from waystation.frameworks import AbstractNumpy
from waystation.safetensors import request

ELSEWHERE = """
import sys
import jax, jax.numpy as jnp, numpy as np, waystation
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((16,), ("x",))
state = {
    "params": {"w": jax.device_put(jnp.arange(32.0), NamedSharding(mesh, P("x")))},
    "half": jnp.ones((2, 2), jnp.bfloat16),
    "key": jax.random.key(1),
    "host": np.arange(3),
    "step": 7,
}
waystation.save(sys.argv[1], state)
"""


@pytest.fixture(scope="module")
def from_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a program that had twice the devices that are here."""
    path = tmp_path_factory.mktemp("elsewhere") / "checkpoint"
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=16", "JAX_PLATFORMS": "cpu"}
    package = Path(waystation.__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", ELSEWHERE, path], env=environment | {"PYTHONPATH": str(package)}, check=True
    )
    return path


def options() -> waystation.Context:
    return waystation.Context()


def test_absent_devices_are_an_error_that_names_the_ways_out(from_elsewhere: Path) -> None:
    with pytest.raises(errors.InvalidInput) as caught:
        waystation.load(from_elsewhere)
    text = str(caught.value)
    assert caught.value.context["array"] == "['params']['w']"
    for way_out in ("ShapeDtypeStruct", "framework='numpy'", "restore_on_host", "array.loading.sharding_for"):
        assert way_out in text


def test_the_framework_numpy_loads_what_was_saved_on_absent_devices(from_elsewhere: Path) -> None:
    loaded = waystation.load(from_elsewhere, framework="numpy")
    assert {type(leaf) for leaf in jax.tree.leaves(loaded)} == {np.ndarray, int}
    again = waystation.load_async(from_elsewhere, framework="numpy").result()
    np.testing.assert_array_equal(again["params"]["w"], loaded["params"]["w"])
    with pytest.raises(errors.InvalidInput, match="framework must be 'numpy' or None, not 'torch'"):
        waystation.load(from_elsewhere, framework="torch")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidInput, match="both say what arrays become"):
        waystation.load(from_elsewhere, {"a": int}, framework="numpy")


def test_restore_on_host_gives_numpy_arrays(from_elsewhere: Path) -> None:
    context = options()
    context.array.loading.restore_on_host = True
    with context:
        loaded = waystation.load(from_elsewhere)
    assert {type(leaf) for leaf in jax.tree.leaves(loaded)} == {np.ndarray, int}
    np.testing.assert_array_equal(loaded["params"]["w"], np.arange(32, dtype=np.float32))
    assert loaded["half"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(loaded["key"], jax.random.key_data(jax.random.key(1)))
    np.testing.assert_array_equal(loaded["host"], np.arange(3))
    assert loaded["step"] == 7


def test_restore_on_host_takes_tensors_and_scalars_too(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"t": torch.arange(4), "s": np.float32(2), "text": "a" * 5000})
    context = options()
    context.array.loading.restore_on_host = True
    with context:
        loaded = waystation.load(tmp_path / "checkpoint")
    assert type(loaded["t"]) is np.ndarray
    assert type(loaded["s"]) is np.float32
    assert loaded["text"] == "a" * 5000


def test_an_abstract_state_goes_before_restore_on_host(from_elsewhere: Path) -> None:
    context = options()
    context.array.loading.restore_on_host = True
    abstract = jax.tree.map(lambda leaf: leaf, waystation.metadata(from_elsewhere).metadata)
    with context:
        assert isinstance(waystation.load(from_elsewhere, abstract)["params"]["w"], jax.Array)


def test_sharding_for_chooses_for_each_jax_array(from_elsewhere: Path) -> None:
    mesh = jax.make_mesh((8,), ("x",))
    seen: dict[str, Any] = {}

    def choose(key_path: str, description: Any) -> Any:
        seen[key_path] = description
        return NamedSharding(mesh, PartitionSpec("x")) if key_path == "params.w" else None

    context = options()
    context.array.loading.sharding_for = choose
    with context:
        loaded = waystation.load_async(from_elsewhere).result()
    assert loaded["params"]["w"].sharding == NamedSharding(mesh, PartitionSpec("x"))
    np.testing.assert_array_equal(loaded["params"]["w"], np.arange(32, dtype=np.float32))
    assert loaded["half"].devices() == {jax.devices()[0]}
    assert not loaded["half"].committed
    np.testing.assert_array_equal(jax.random.key_data(loaded["key"]), jax.random.key_data(jax.random.key(1)))
    assert type(loaded["host"]) is np.ndarray
    assert set(seen) == {"params.w", "half", "key"}
    assert (seen["params.w"].shape, seen["params.w"].dtype) == ((32,), jnp.float32)
    assert seen["params.w"].sharding is None


def test_sharding_for_sees_the_saved_sharding_where_it_fits(tmp_path: Path) -> None:
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    waystation.save(tmp_path / "checkpoint", {"x": jax.device_put(jnp.arange(8), sharding)})
    context = options()
    context.array.loading.sharding_for = lambda _, description: description.sharding
    with context:
        assert waystation.load(tmp_path / "checkpoint")["x"].sharding == sharding


@pytest.mark.parametrize("wrong", ["x", PartitionSpec("x"), 3])
def test_what_is_no_sharding_is_refused_by_name(from_elsewhere: Path, wrong: Any) -> None:
    context = options()
    context.array.loading.sharding_for = lambda key_path, _: wrong if key_path == "key" else None
    with context, pytest.raises(errors.InvalidInput, match="sharding_for") as caught:
        waystation.load(from_elsewhere)
    assert caught.value.context["array"] == "['key']"


def test_a_sharding_that_does_not_divide_the_array_is_refused_by_name(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": jnp.arange(9)})
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    context = options()
    context.array.loading.sharding_for = lambda *_: sharding
    with context, pytest.raises(errors.InvalidInput) as caught:
        waystation.load(tmp_path / "checkpoint")
    assert caught.value.context["array"] == "['x']"


@pytest.mark.parametrize("name", ["sharding_for", "on_statistics"])
def test_functions_are_checked_when_they_are_set(name: str) -> None:
    with pytest.raises(errors.InvalidInput, match="a function or None"):
        setattr(options().array.loading, name, "no function")
    with pytest.raises(errors.InvalidInput, match="True or False"):
        options().array.loading.restore_on_host = None  # type: ignore[assignment]


# ---- statistics --------------------------------------------------------------------------------


def load_counted(path: Path, abstract: Any = None, *, verify: bool | None = None) -> LoadStatistics:
    seen: list[LoadStatistics] = []
    context = options()
    context.array.loading.on_statistics = seen.append
    context.array.loading.verify = verify
    with context:
        waystation.load(path, abstract)
    (statistics,) = seen
    return statistics


class Clock:
    """A clock that only calls advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        self.now_s = 1000.0
        for module in modules:
            monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: self.now_s))

    def takes(self, seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **keywords: Any) -> Any:
            self.now_s += seconds
            return call(*arguments, **keywords)

        return slow


def test_the_duration_counts_from_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"x": np.zeros(3)}
    waystation.save(tmp_path / "checkpoint", state)
    waystation.safetensors.save(state, tmp_path / "model.safetensors")
    published_load = sys.modules["waystation.safetensors.load"]
    clock = Clock(monkeypatch, fill, loading, published_load)
    monkeypatch.setattr(opening, "read", clock.takes(7, opening.read))
    monkeypatch.setattr(request, "find", clock.takes(7, request.find))
    assert load_counted(tmp_path / "checkpoint").duration_s == 7

    seen: list[LoadStatistics] = []
    context = options()
    context.array.loading.on_statistics = seen.append
    with context:
        waystation.safetensors.load(tmp_path / "model.safetensors", framework="numpy")
    assert [statistics.duration_s for statistics in seen] == [7]


def test_statistics_count_what_was_needed_and_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    waystation.save(path, {"x": np.zeros(1 << 20, np.uint8), "y": np.zeros(3), "n": 5})
    statistics = load_counted(path)
    assert (statistics.path, statistics.checkpointable) == (str(path), "state")
    assert statistics.bytes_needed == (1 << 20) + 24
    assert statistics.bytes_read >= statistics.bytes_needed
    assert statistics.read_ratio == statistics.bytes_read / statistics.bytes_needed
    assert statistics.read_ratio < 1.05
    assert statistics.duration_s > 0
    cast = load_counted(
        path, {"x": AbstractNumpy((1 << 20,), np.float32), "y": AbstractNumpy((3,)), "n": int}
    )
    assert cast.bytes_needed == statistics.bytes_needed


def test_a_load_of_several_checkpointables_tells_of_each_with_the_path_that_the_save_told(
    tmp_path: Path,
) -> None:
    path = tmp_path / "checkpoint"
    saved: list[waystation.SaveStatistics] = []
    loaded: list[LoadStatistics] = []
    context = options()
    context.array.saving.on_statistics = saved.append
    context.array.loading.on_statistics = loaded.append
    with context:
        waystation.save_checkpointables(path, {"model": {"w": np.zeros(8)}, "ema": {"w": np.ones(8)}})
        waystation.load_checkpointables(path)
    assert sorted(each.checkpointable or "" for each in loaded) == ["ema", "model"]
    assert {each.path for each in [*saved, *loaded]} == {str(path)}


def test_statistics_of_a_part_count_only_the_part(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    waystation.save(path, {"x": np.zeros((1024, 1024), np.float32)})
    device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    whole = load_counted(path, {"x": jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=device)})
    assert whole.bytes_needed == 4 << 20
    sharded = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec())
    replicated = load_counted(path, {"x": jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=sharded)})
    assert replicated.bytes_needed == 4 << 20
    assert replicated.read_ratio < 1.07


def test_nothing_needed_is_a_ratio_of_one(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"n": 5})
    assert load_counted(tmp_path / "checkpoint").read_ratio == 1.0


def test_each_load_writes_one_line_to_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "checkpoint"
    waystation.save(path, {"x": np.zeros(100)})
    with caplog.at_level(logging.INFO, "waystation"):
        waystation.load(path)
    (line,) = [record.getMessage() for record in caplog.records if "loaded" in record.getMessage()]
    assert f"loaded '{path}' ('state'): 800 bytes needed" in line


def test_what_the_function_raises_the_load_raises(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": np.zeros(100)})

    def complain(statistics: LoadStatistics) -> None:
        raise RuntimeError(f"{statistics.bytes_needed} bytes")

    context = options()
    context.array.loading.on_statistics = complain
    with context, pytest.raises(RuntimeError, match="800 bytes"):
        waystation.load(tmp_path / "checkpoint")
