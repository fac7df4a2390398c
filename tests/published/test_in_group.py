"""Loads by the processes of a torch program together: what each gets, and who reads how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.published import group_scenarios
from tests.published.group_scenarios import bytes_of
from tests.support.programs import Raised, running

from waystation.frameworks.torch_groups import even_blocks
from waystation.safetensors import load_in_group

MIB = 1 << 20
STATE = {
    "a": torch.arange(120.0).reshape(10, 12),
    "b": torch.arange(35, dtype=torch.int16).reshape(5, 7),
    "narrow": torch.arange(9.0).to(torch.float8_e4m3fn),
    "none": torch.zeros(0, 3),
    "packed": torch.arange(12, dtype=torch.uint8).reshape(4, 3).view(torch.float4_e2m1fn_x2),
    "scalar": torch.tensor(True),
    "vector": torch.arange(17, dtype=torch.int64),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for number in range(3):
        save_file(
            {f"{number}.{name}": tensor for name, tensor in STATE.items()},
            directory / f"{number}.safetensors",
        )
    return directory


def values(tmp_path: Path, count: int, scenario: Any, *arguments: Any) -> list[Any]:
    with running(scenario, *arguments, count=count, framework="torch", directory=tmp_path) as programs:
        return programs.values()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_get_all(tmp_path: Path, model: Path, count: int) -> None:
    expected = {f"{number}.{name}": bytes_of(tensor) for number in range(3) for name, tensor in STATE.items()}
    for found in values(tmp_path, count, group_scenarios.load, model, {}):
        assert dict(found) == expected


@pytest.mark.parametrize("count", [1, 3])
def test_blocks_go_to_each(tmp_path: Path, model: Path, count: int) -> None:
    axes = {"0.a": 0, "1.a": 1, "2.b": -1, "0.packed": 0, "1.vector": 0, "2.narrow": 0, "0.none": 0}
    found = values(tmp_path, count, group_scenarios.load, model, {"axis": axes})
    for rank, own in enumerate(found):
        for name, tensor in dict(own).items():
            whole = STATE[name.partition(".")[2]]
            axis = axes.get(name)
            if axis is not None:
                block = even_blocks(whole.shape[axis], count)[rank]
                whole = whole.narrow(axis, block.start, len(block))
            assert tensor == bytes_of(whole), (rank, name)


def test_choices_are_those_of_load(tmp_path: Path, model: Path) -> None:
    options = {"select": r"\.[ab]$", "rename": {"0.a": "first"}, "dtype": "bfloat16"}
    expected = [
        ("first" if name == "0.a" else name, bytes_of(tensor))
        for number in range(3)
        for name, tensor in ((f"{number}.a", STATE["a"].bfloat16()), (f"{number}.b", STATE["b"]))
    ]
    for found in values(tmp_path, 2, group_scenarios.load, model, options):
        assert found == expected


def test_a_process_alone_needs_no_group(model: Path) -> None:
    found = load_in_group(model, group=None, axis={"0.a": 0})
    assert bytes_of(found["0.a"]) == bytes_of(STATE["a"])
    assert list(found) == [name for number in range(3) for name in found if name.startswith(f"{number}.")]


@pytest.mark.parametrize("files", [1, 5])
def test_every_byte_is_read_by_one_process(tmp_path: Path, files: int) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for number in range(files):
        state = {f"{number}.{part}": torch.randn(MIB // 4) for part in range(40 // files)}
        save_file(state, directory / f"{number}.safetensors")
    total = sum(path.stat().st_size for path in directory.iterdir())
    counted = values(tmp_path, 4, group_scenarios.read, directory)
    assert [held for _, held in counted] == [40 * MIB] * 4
    assert 40 * MIB <= sum(nbytes for nbytes, _ in counted) <= 1.05 * total
    for nbytes, _ in counted:
        assert abs(nbytes - total / 4) < 3 * MIB


def test_memory_is_bounded_and_all_arrive(tmp_path: Path, model: Path) -> None:
    options = {"memory_limit": 8 * MIB}
    found = values(tmp_path, 2, group_scenarios.load, model, options)
    assert found[0] == found[1] == values(tmp_path, 2, group_scenarios.load, model, {})[0]


def test_different_models_are_refused_in_all(tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(3)}, other)
    errors = values(tmp_path, 2, group_scenarios.different, [model, other])
    assert [error.type for error in errors] == ["InvalidInput"] * 2


def test_what_one_cannot_read_fails_in_all(tmp_path: Path, model: Path) -> None:
    errors = values(tmp_path, 3, group_scenarios.broken, model, "2.safetensors")
    assert all(isinstance(error, Raised) for error in errors), errors
    assert sorted(error.type for error in errors) == ["Conflict", "Unavailable", "Unavailable"]


def test_an_axis_that_is_not_there_is_refused(model: Path) -> None:
    for axis in ({"0.a": 2}, lambda name, shape: len(shape)):
        with pytest.raises(ValueError, match="axis"):
            load_in_group(model, group=None, axis=axis)


def test_what_is_no_group_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="process group"):
        load_in_group(model, group="world")
