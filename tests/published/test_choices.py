"""Which tensors are loaded, and under which names: `select`, `rename`, `nested`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.published import models

import waystation
from waystation import _native, errors
from waystation.safetensors import load
from waystation.safetensors.nesting import nest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    models.write_set(tmp_path / "model", models.numbers(6), 3)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (None, [0, 3, 1, 4, 2, 5]),
        (r"layers\.[12]\.", [1, 2]),
        (lambda name: name.endswith("4.weight"), [4]),
        (["layers.5.weight", "layers.0.weight"], [0, 5]),
        ({"layers.3.weight"}, [3]),
        ([], []),
    ],
)
def test_select(model: Path, select: Any, expected: list[int]) -> None:
    found = load(model, framework="numpy", select=select)
    assert list(found) == [f"layers.{number}.weight" for number in expected]
    for name, array in found.items():
        assert array.tobytes() == models.numbers(6)[name].tobytes()


@pytest.mark.parametrize("select", ["[", "absent", 3, ["absent"], lambda name: False])
def test_selections_of_nothing(model: Path, select: Any) -> None:
    with pytest.raises((errors.InvalidInput, errors.TensorNotFound)):
        load(model, framework="numpy", select=select)


def test_only_selected_tensors_are_read(model: Path) -> None:
    seen: list[waystation.LoadStatistics] = []
    context = waystation.Context()
    context.array.loading.on_statistics = seen.append
    with context:
        load(model, framework="numpy", select=["layers.1.weight"])
    (statistics,) = seen
    assert statistics.bytes_needed == 8 * 16 * 4
    assert statistics.path == str(model)
    assert 512 <= statistics.bytes_read <= 4096 + 512


def test_statistics_of_mapped_arrays_count_what_was_needed(tmp_path: Path) -> None:
    """Of the two one is cast, and so read."""
    path = tmp_path / "model.safetensors"
    models.write_file(path, {"w": np.ones(1 << 20, np.uint8), "h": np.ones(1 << 16, np.float32)})
    seen: list[waystation.LoadStatistics] = []
    context = waystation.Context()
    context.array.loading.on_statistics = seen.append
    with context:
        load(path, framework="numpy", mmap=True, dtype="float64")
        load(path, framework="numpy", mmap=True, select=["w"])
        load(path, framework="numpy")
    assert [statistics.bytes_needed for statistics in seen] == [
        (1 << 20) + (1 << 18),
        1 << 20,
        (1 << 20) + (1 << 18),
    ]
    assert 1 << 18 <= seen[0].bytes_read < 1 << 20
    assert seen[1].bytes_read == 0


def test_only_new_memory_has_a_first_touch(tmp_path: Path) -> None:
    path = models.write_file(tmp_path / "model.safetensors", {"w": np.zeros(4 << 20, np.uint8)})
    _native.trim_arena()
    seen: list[waystation.LoadStatistics] = []
    context = waystation.Context()
    context.array.loading.on_statistics = seen.append
    with context:
        first = load(path, framework="numpy")
        del first
        load(path, framework="numpy")
    assert [statistics.first_touch_s > 0 for statistics in seen] == [True, False]


def test_rename(model: Path) -> None:
    by_function = load(model, framework="numpy", rename=lambda name: name.replace("layers", "blocks"))
    assert set(by_function) == {f"blocks.{number}.weight" for number in range(6)}
    by_mapping = load(model, framework="numpy", rename={"layers.2.weight": "last"})
    assert list(by_mapping)[4:] == ["last", "layers.5.weight"]
    assert by_mapping["last"].tobytes() == models.numbers(6)["layers.2.weight"].tobytes()


@pytest.mark.parametrize(
    ("rename", "error", "reason"),
    [
        (lambda name: "one", errors.InvalidInput, "two tensors the name 'one'"),
        ({"layers.0.weight": "layers.1.weight"}, errors.InvalidInput, "two tensors the name"),
        (lambda name: None, errors.InvalidInput, "has to make a string"),
        ({"absent": "x"}, errors.TensorNotFound, "'absent'"),
        (3, errors.InvalidInput, "a mapping or a function"),
    ],
)
def test_names_that_clash(model: Path, rename: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        load(model, framework="numpy", rename=rename)


def test_nested(model: Path) -> None:
    tree = load(model, framework="numpy", nested=True)
    assert tree["layers"]["3"]["weight"].tobytes() == models.numbers(6)["layers.3.weight"].tobytes()
    assert load(model, framework="numpy", nested="ers.").keys() == {"lay"}


@pytest.mark.parametrize("names", [["a", "a.b"], ["a.b", "a"], ["a.b.c", "a.b"], ["a.b", "a.b.c.d"]])
def test_names_that_make_no_tree(tmp_path: Path, names: list[str]) -> None:
    header = {name: models.entry("U8", [1], place, place + 1) for place, name in enumerate(names)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(models.raw_file(json.dumps(header), len(names)))
    assert load(path, framework="numpy").keys() == set(names)
    with pytest.raises(errors.InvalidInput, match="no tree"):
        load(path, framework="numpy", nested=True)
    for nested in ("", 3, None):
        with pytest.raises(errors.InvalidInput, match="nested must be"):
            load(path, framework="numpy", nested=nested)  # type: ignore[arg-type]


@given(names=st.sets(st.text("ab.", max_size=6), max_size=8))
def test_trees_hold_what_names_say(names: set[str]) -> None:
    parts = {name: name.split(".") for name in names}
    prefixes = {tuple(one[:length]) for one in parts.values() for length in range(1, len(one))}
    if prefixes & {tuple(one) for one in parts.values()}:
        with pytest.raises(errors.InvalidInput):
            nest(dict.fromkeys(names, 0), ".")
        return
    tree = nest({name: name for name in names}, ".")
    for name, keys in parts.items():
        found: Any = tree
        for key in keys:
            found = found[key]
        assert found == name
