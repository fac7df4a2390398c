"""Saves in parts: nothing is there before the end, all is there after it, and a death loses no part."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.torch import load_file
from tests.checkpoint import partial_scenarios
from tests.support.programs import Raised, running

import waystation
from waystation import errors, partial
from waystation.checkpoint import partial_saving
from waystation.layouts.native import names
from waystation.transfers.handle import Progress


def parts() -> list[dict[str, Any]]:
    return [
        {"layers": {"0": {"w": jnp.arange(12.0).reshape(3, 4)}}, "step": 7, "none": None},
        {"layers": {"1": {"w": jnp.ones((3, 4), jnp.bfloat16)}}, "tensor": torch.arange(5)},
        {"layers": {"0": {"b": np.arange(4)}}, "text": "x" * 100_000, "moments": [np.float32(2), (1.5,)]},
        {"empty": {}, "nothing": np.zeros((0, 3))},
    ]


def whole() -> dict[str, Any]:
    first, second, third, fourth = parts()
    layers = {"0": {**first["layers"]["0"], **third["layers"]["0"]}, **second["layers"]}
    return {**first, **second, **third, **fourth, "layers": layers}


def assert_same(found: Any, expected: Any) -> None:
    """Compares trees leaf by leaf."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif hasattr(expected, "dtype"):
        assert found.dtype == expected.dtype
        assert np.array_equal(np.asarray(found), np.asarray(expected))
    else:
        assert found == expected


def test_parts_become_one_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "checkpoint"
    for number, part in enumerate(parts()):
        partial.save(path, part, custom_metadata={"last": number, f"part {number}": True})
        assert not waystation.is_checkpoint(path)
        assert not path.exists()
    partial.finalize(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["checkpoint"]
    assert_same(waystation.load(path), whole())
    found = waystation.metadata(path)
    assert found.custom_metadata == {"last": 3} | {f"part {number}": True for number in range(4)}
    assert not waystation.verify(path).damages
    assert_same(waystation.load(path, found), whole())


def test_other_tools_find_all_arrays_of_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for part in parts():
        partial.save(path, part)
    partial.finalize(path)
    weights = json.loads((path / "state" / names.INDEX).read_bytes())["weight_map"]
    stored = {label: load_file(path / "state" / file)[label] for label, file in weights.items()}
    assert np.array_equal(stored["layers.0.b"], np.arange(4))
    assert stored["layers.1.w"].dtype == torch.bfloat16
    assert len(stored) == 7


def test_shards_and_runs_of_chunks_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    mesh = jax.make_mesh((4,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    context = waystation.Context()
    context.array.saving.storage_options.chunk_bytes = 1 << 10
    state = {
        f"part {number}": {
            "first": jax.device_put(jnp.arange(64.0 * 512).reshape(512, 64) + number, sharding),
            "second": np.arange(1000 + number),
        }
        for number in range(3)
    }
    with context:
        for name, part in state.items():
            partial.save(path, {name: part})
    partial.finalize(path)
    loaded = waystation.load(path)
    assert_same(loaded, state)
    assert loaded["part 2"]["first"].sharding == sharding
    assert not waystation.verify(path).damages


def test_what_is_there_cannot_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    partial.save(path, {"a": {"b": np.arange(3)}, "step": 1})
    for again in ({"step": 2}, {"a": {"b": {"c": 1}}}, {"a": [1]}, {"a": {"b": np.arange(3)}}):
        with pytest.raises(errors.Conflict, match=r"both have \['"):
            partial.save(path, again)
    partial.save(path, {"a": {"c": 2}})
    partial.finalize(path)
    assert_same(waystation.load(path), {"a": {"b": np.arange(3), "c": 2}, "step": 1})


def test_a_part_in_the_background(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    array = np.arange(1000)
    first = partial.save_async(path, {"a": array})
    array[:] = 0
    second = partial.save_async(path, {"b": np.ones(3)})
    assert first.done(), "parts come one after another"
    with pytest.raises(errors.Conflict, match=r"\['a'\]"):
        partial.save_async(path, {"a": 1})
    partial.finalize(path)
    second.result()
    assert_same(waystation.load(path), {"a": np.arange(1000), "b": np.ones(3)})


def test_there_is_a_time_for_everything(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with pytest.raises(FileNotFoundError, match=r"partial\.save"):
        partial.finalize(path)
    waystation.save(path, {"a": 1})
    for call in (lambda: partial.save(path, {"b": 2}), lambda: partial.save_async(path, {"b": 2})):
        with pytest.raises(FileExistsError, match="exists already"):
            call()
    waystation.delete(path)
    partial.save(path, {"b": 2})
    waystation.save(path, {"a": 1})
    with pytest.raises(FileExistsError):
        partial.finalize(path)
    waystation.delete(path)
    partial.finalize(names.partial(str(path)))
    assert waystation.load(path) == {"b": 2}
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("wrong", [["a list"], "text"])
def test_metadata_of_a_part_is_an_object(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(errors.InvalidInput, match="custom_metadata"):
        partial.save(tmp_path / "checkpoint", {"a": 1}, custom_metadata=wrong)
    assert list(tmp_path.iterdir()) == []


def test_other_layouts_and_local_storage_are_refused(tmp_path: Path) -> None:
    context = waystation.Context()
    context.array.saving.use_ocdbt = True
    with context, pytest.raises(errors.Unsupported, match="use_ocdbt"):
        partial.save(tmp_path / "checkpoint", {"a": 1})
    context = waystation.Context()
    context.multiprocessing.primary_host = None
    with context, pytest.raises(errors.Unsupported, match="local storage"):
        partial.save(tmp_path / "checkpoint", {"a": 1})


def test_several_processes_save_parts_together(tmp_path: Path) -> None:
    with running(partial_scenarios.save_parts, count=2, framework="jax", directory=tmp_path) as programs:
        values = programs.values()
    assert not [value for value in values if isinstance(value, Raised)], values
    assert values[0] == values[1] == {"before": False, "conflict": "Conflict", "same": True}
    loaded = waystation.load(tmp_path / "checkpoint", {"a": np.zeros(16, np.float32), "b": ..., "step": 0})
    assert np.array_equal(loaded["a"], np.arange(16.0))
    assert not waystation.verify(tmp_path / "checkpoint").damages


@pytest.mark.parametrize("point", ["part", "linking", "publishing", "removing"])
def test_a_death_at_any_point_loses_no_part(tmp_path: Path, point: str) -> None:
    path = tmp_path / "checkpoint"
    with running(partial_scenarios.die_at, point, count=1, framework="jax", directory=tmp_path) as programs:
        programs.report(0)
        (ended,) = programs.end()
    assert ended.exit_code == -signal.SIGKILL, ended.output
    if point == "removing":
        assert_same(waystation.load(path), partial_scenarios.whole())
        with pytest.raises(FileExistsError):
            partial.finalize(path)
    else:
        assert not path.exists()
        if point == "part":
            partial.save(path, partial_scenarios.PARTS[2])
        partial.finalize(path)
    assert_same(waystation.load(path), partial_scenarios.whole())
    assert not waystation.verify(path).damages
    left = {entry.name for entry in tmp_path.iterdir() if not entry.name.endswith(".log")}
    assert left == {"checkpoint"}


def test_a_part_that_is_saved_beside_finalize_is_refused_or_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "whole"
    failures: list[errors.Conflict] = []
    partial.save(path, {"a": 1})

    def save_another() -> None:
        try:
            partial.save(path, {"b": 2})
        except errors.Conflict as error:
            failures.append(error)

    beside = threading.Thread(target=save_another)
    write_whole = partial_saving.write_whole

    def write_slowly(*arguments: Any, **options: Any) -> None:
        beside.start()
        beside.join(1)  # it comes no further than to its commit
        write_whole(*arguments, **options)

    monkeypatch.setattr(partial_saving, "write_whole", write_slowly)
    partial.finalize(path)
    beside.join()
    assert waystation.load(path) == {"a": 1}
    (failure,) = failures
    assert "finalized" in failure.message


def test_a_part_that_comes_after_finalize_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    partial.save(path, {"a": 1})
    with partial_saving._open(path) as saving:
        saving.begin({"state": {"b": 2}}, None, is_state=True)
        saving.prepare({"state": {"b": 2}})
        partial.finalize(path)
        with pytest.raises(errors.Conflict, match="was finalized"):
            saving.finish(Progress())
    assert waystation.load(path) == {"a": 1}
