"""What each process of a group gets of a model: tensors, blocks, joined blocks; beside fastsafetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.published import group_scenarios
from tests.published.group_scenarios import bytes_of
from tests.support.programs import running

from waystation import errors
from waystation.frameworks.torch_groups import even_blocks
from waystation.safetensors import Divided, Joined, Only, load_in_group

NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bfloat16, torch.bool]


def large(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor whose bytes are all different enough."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.tensor(shape).prod()) * dtype.itemsize
    most = 2 if dtype == torch.bool else 256
    return torch.randint(0, most, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


STATE = {
    "0.q": large(torch.float16, 1024, 1536, seed=1),
    "0.k": large(torch.float16, 256, 1536, seed=2),
    "0.v": large(torch.float16, 256, 1536, seed=3),
    "0.q_bias": large(torch.float32, 1024, seed=4),
    "0.k_bias": large(torch.float32, 256, seed=5),
    "0.o": large(torch.float16, 1536, 1024, seed=6),
    "1.expert": large(torch.float16, 300, 77, seed=7),
    "1.odd": large(torch.float32, 1013, 515, seed=8),
    "1.norm": large(torch.float32, 1536, seed=9),
    "1.scale": torch.tensor(0.5),
    "1.none": torch.zeros(0, 3),
    "2.packed": large(torch.uint8, 1024, 1030, seed=10).view(torch.float4_e2m1fn_x2),
} | {f"2.{dtype}": large(dtype, 1030, 1031, seed=11) for dtype in NARROW}

QKV = {"qkv": Joined(["0.q", "0.k", "0.v"]), "bias": Joined(["0.q_bias", "0.k_bias"])}
ROWS = {name: Divided(0) for name in ("0.q", "0.k", "0.v", "0.q_bias", "0.k_bias")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("placement") / "model"
    directory.mkdir()
    for number in range(3):
        own = {name: tensor for name, tensor in STATE.items() if name.startswith(f"{number}.")}
        save_file(own, directory / f"{number}.safetensors")
    return directory


def values(tmp_path: Path, count: int, scenario: Any, *arguments: Any) -> list[Any]:
    with running(scenario, *arguments, count=count, framework="torch", directory=tmp_path) as programs:
        return programs.values()


def block(tensor: torch.Tensor, axis: int, rank: int, count: int) -> torch.Tensor:
    own = even_blocks(tensor.shape[axis], count)[rank]
    plain = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return plain.narrow(axis, own.start, len(own)).contiguous().view(tensor.dtype)


def joined(tensors: list[torch.Tensor], axis: int = 0) -> torch.Tensor:
    return torch.cat(tensors, dim=axis)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_each_gets_is_what_fastsafetensors_gives(tmp_path: Path, model: Path, count: int) -> None:
    """Of dtypes that fastsafetensors sends over gloo, and of blocks that are all of one size."""
    plain = tmp_path / "plain"
    plain.mkdir()
    for number in range(2):
        (plain / f"{number}.safetensors").symlink_to(model / f"{number}.safetensors")
    joins = QKV | {"wide": Joined(["0.o"], 1)}
    placement: dict[str, Any] = ROWS | {"0.o": Divided(1), "1.norm": Divided(0)}
    placement["1.expert"] = Only(count - 1)
    pairs = values(tmp_path, count, group_scenarios.beside_fastsafetensors, plain, joins, placement)
    for rank, pair in enumerate(pairs):
        assert isinstance(pair, tuple), pair
        expected, found = pair
        assert found.keys() == expected.keys(), rank
        for name, tensor in expected.items():
            assert found[name] == tensor, (rank, name)


@pytest.mark.share(15)
@pytest.mark.parametrize(("count", "send"), [(1, None), (2, True), (2, None), (3, True), (3, False)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_blocks_of_every_dtype(tmp_path: Path, model: Path, count: int, axis: int, send: bool | None) -> None:
    names = [name for name in STATE if name.startswith("2.") and (name != "2.packed" or axis == 0)]
    options = {"select": names, "placement": dict.fromkeys(names, Divided(axis)), "send": send}
    for rank, found in enumerate(values(tmp_path, count, group_scenarios.load, model, options)):
        assert {name for name, _ in found} == set(names)
        for name, tensor in found:
            assert tensor == bytes_of(block(STATE[name], axis, rank, count)), (rank, name)


@pytest.mark.parametrize("send", [True, False])
def test_fewer_blocks_than_processes(tmp_path: Path, model: Path, send: bool) -> None:
    """Of keys and values with two heads, two processes each get the same one."""
    placement = {"0.q": Divided(0), "0.k": Divided(0, blocks=2), "0.v": Divided(0, blocks=2)}
    options = {"select": [*placement], "placement": placement, "join": {"qkv": QKV["qkv"]}, "send": send}
    for rank, found in enumerate(values(tmp_path, 4, group_scenarios.load, model, options)):
        parts = [
            block(STATE["0.q"], 0, rank, 4),
            block(STATE["0.k"], 0, rank // 2, 2),
            block(STATE["0.v"], 0, rank // 2, 2),
        ]
        assert found == [("qkv", bytes_of(joined(parts)))]


@pytest.mark.parametrize(("count", "send"), [(1, None), (2, True), (2, False)])
def test_joins_across_files_dtypes_and_axes(tmp_path: Path, count: int, send: bool | None) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    first, second = torch.randn(700, 501), torch.randn(700, 300)
    save_file({"a": first, "x": torch.ones(3)}, directory / "0.safetensors")
    save_file(
        {"b": second, "small": torch.ones(2, 3), "less": torch.zeros(2, 3)}, directory / "1.safetensors"
    )
    options: dict[str, Any] = {
        "join": {"ab": Joined(["b", "a"], -1), "both": Joined(["small", "less"], 1)},
        "placement": {"a": Divided(0), "b": Divided(0)},
        "dtype": "bfloat16",
        "rename": {"x": "y"},
        "send": send,
    }
    for rank, found in enumerate(values(tmp_path, count, group_scenarios.load, directory, options)):
        whole = block(joined([second, first], 1), 0, rank, count).bfloat16()
        both = joined([torch.ones(2, 3), torch.zeros(2, 3)], 1).bfloat16()
        assert found[0][0] == "ab"
        assert dict(found) == {
            "ab": bytes_of(whole),
            "y": bytes_of(torch.ones(3).bfloat16()),
            "both": bytes_of(both),
        }


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"placement": {"0.q": Divided(2)}}, errors.InvalidInput, "there is no axis 2"),
        ({"placement": lambda name, shape: Divided(len(shape))}, errors.InvalidInput, "there is no axis"),
        ({"placement": {"absent": Divided(0)}}, errors.TensorNotFound, "placement names 'absent'"),
        ({"placement": {"0.q": Only(1)}}, errors.InvalidInput, "no process 1 in a group of 1"),
        ({"placement": {"0.q": Divided(0, blocks=2)}}, errors.InvalidInput, "2 blocks"),
        ({"placement": {"0.q": 0}}, TypeError, "Divided, Only or None"),
        ({"join": {"j": Joined(["0.q", "absent"])}}, errors.TensorNotFound, "'absent'"),
        ({"join": {"j": Joined(["0.q", "1.odd"])}}, errors.InvalidInput, "joins float32"),
        ({"join": {"j": Joined(["0.q", "0.o"])}}, errors.InvalidInput, r"\(1536, 1024\)"),
        ({"join": {"j": Joined(["0.q"], 2)}}, errors.InvalidInput, "no axis 2"),
        ({"join": {"j": Joined([])}}, errors.InvalidInput, "no tensor"),
        ({"join": {"j": Joined(["0.q"]), "i": Joined(["0.q"])}}, errors.InvalidInput, "joined twice"),
        ({"join": {"1.odd": Joined(["0.q"])}}, errors.InvalidInput, "two arrays get the name '1.odd'"),
        (
            {"join": {"j": Joined(["0.k", "0.v"])}, "placement": {"0.k": Divided(1)}},
            errors.InvalidInput,
            "the same processes",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(
    model: Path, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        load_in_group(model, group=None, **options)


def test_packed_elements_are_divided_at_bytes(tmp_path: Path, model: Path) -> None:
    """2060 elements of 4 bits in each row: 1030 of them are whole bytes, a third of them not."""
    options = {"select": ["2.packed"], "placement": {"2.packed": Divided(1)}}
    for rank, found in enumerate(values(tmp_path, 2, group_scenarios.load, model, options)):
        assert found == [("2.packed", bytes_of(block(STATE["2.packed"], 1, rank, 2)))]
    for error in values(tmp_path, 3, group_scenarios.load, model, options):
        assert error.type == "InvalidInput"
        assert "two to a byte" in error.message
