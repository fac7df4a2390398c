"""The functions for torch: the same files, tensors, modules and errors as those of the safetensors package,
which runs beside ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch as genuine
import torch
from tests.compat.comparing import outcome

import waystation.safetensors
from waystation import errors
from waystation.compat import safetensors as own
from waystation.compat import safetensors_torch

STATE = {
    "b": torch.arange(3.0),
    "a": torch.arange(2),
    "none": torch.zeros((0, 3), dtype=torch.uint8),
    "scalar": torch.tensor(True),
    "wide": torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 4),
    "half": torch.ones(2, 2, dtype=torch.bfloat16),
    "narrow": torch.arange(3.0).to(torch.float8_e4m3fn),
    "complex": torch.ones(2, dtype=torch.complex64),
}
PACKED = {"packed": torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2)}


def assert_same(ours: Any, expected: Any) -> None:
    """Equal tensors; or an error of ours that whoever catches that of the genuine package catches."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(ours, torch.Tensor), ours
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
        flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, expected)]
        assert torch.equal(*flat)
    elif isinstance(expected, safetensors.SafetensorError):
        assert isinstance(ours, own.SafetensorError), ours
    elif isinstance(expected, Exception):
        builtin = next(cls for cls in type(expected).__mro__ if cls.__module__ == "builtins")
        assert isinstance(ours, builtin), ours
    else:
        assert ours == expected


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = str(tmp_path / "model.safetensors")
    genuine.save_file(STATE, path, {"format": "pt"})
    return path


def test_files_go_both_ways(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    state = STATE | PACKED
    safetensors_torch.save_file(state, ours, {"format": "pt"})
    genuine.save_file(state, theirs, {"format": "pt"})
    assert ours.read_bytes() == theirs.read_bytes()
    assert safetensors_torch.save(state) == genuine.save(state)
    expected = genuine.load_file(ours)
    for backend in ("mmap", "pread"):
        loaded = safetensors_torch.load_file(theirs, backend=backend)
        assert list(loaded) == list(expected)
        for name, tensor in loaded.items():
            assert_same(tensor, expected[name])
    for name, tensor in safetensors_torch.load(theirs.read_bytes()).items():
        assert_same(tensor, expected[name])


def test_tensors_alias_the_file_only_if_it_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors_torch.save_file({"a": torch.zeros(4096)}, path)
    mapped, read = (safetensors_torch.load_file(path, backend=backend)["a"] for backend in ("mmap", "pread"))
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\xff\xff\x7f\x7f")
    assert mapped[-1] > 1e38
    assert read[-1] == 0
    mapped.fill_(7)  # is no change of the file
    assert safetensors_torch.load_file(path)["a"][0] == 0


@pytest.mark.parametrize("device", ["cpu", None, "oops", "meta", "cuda:0", 0, 7])
def test_devices_are_those_of_the_package(file: str, device: Any) -> None:
    if torch.cuda.is_available() and device in (0, "cuda:0"):
        pytest.skip("there is such a device")
    assert_same(
        outcome(lambda: own.safe_open(file, "pt", device=device).get_tensor("b")),
        outcome(lambda: safetensors.safe_open(file, "pt", device=device).get_tensor("b")),
    )


INDICES = [
    *(
        0,
        -1,
        5,
        slice(None),
        slice(0, 9),
        slice(1, None, 2),
        slice(3, 1),
        slice(-1, None),
        ...,
        (..., 0),
        None,
    ),
    *([0, 1], (slice(None), [0, 1]), (0, 0), (0, 0, 0, 0), slice(None, None, 0), (0, ..., 1), (), (1, -3)),
    torch.tensor([1, 0]),
]


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_slices_are_those_of_the_package(file: str, index: Any, backend: str) -> None:
    ours = own.safe_open(file, "pt", backend=backend).get_slice("wide")
    theirs = safetensors.safe_open(file, "pt").get_slice("wide")
    assert (ours.get_shape(), ours.get_dtype()) == (theirs.get_shape(), theirs.get_dtype())
    assert_same(outcome(lambda: ours[index]), outcome(lambda: theirs[index]))


SHARED = torch.zeros(4)
BAD_STATES: dict[str, Callable[[], Any]] = {
    "a list": lambda: [torch.zeros(1)],
    "a number": lambda: {"a": 1},
    "sparse": lambda: {"a": torch.eye(2).to_sparse()},
    "strides": lambda: {"a": torch.zeros(2, 3).T},
    "no data": lambda: {"a": torch.zeros(2, device="meta")},
    "no dtype for it": lambda: {"a": torch.zeros(2, dtype=torch.complex128)},
    "the same twice": lambda: {"a": SHARED, "b": SHARED},
    "a part of another": lambda: {"a": SHARED, "b": SHARED[1:3]},
    "no dict key": lambda: {1: torch.zeros(1)},
}


@pytest.mark.parametrize("state", BAD_STATES)
def test_what_the_package_refuses_is_refused(state: str) -> None:
    expected = outcome(lambda: genuine.save(BAD_STATES[state]()))
    assert isinstance(expected, Exception)
    ours = outcome(lambda: safetensors_torch.save(BAD_STATES[state]()))
    assert_same(ours, expected)
    assert isinstance(ours, errors.WaystationError)


GOOD_STATES: dict[str, Callable[[], Any]] = {
    "disjoint parts": lambda: {"a": SHARED[2:], "b": SHARED[:2]},
    "parameters": lambda: {"a": torch.nn.Parameter(torch.ones(2))},
    "nothing": dict,
    "nothing in common": lambda: {"a": torch.zeros(0), "b": torch.zeros(0)},
}


@pytest.mark.parametrize("state", GOOD_STATES)
def test_what_the_package_saves_is_saved(state: str) -> None:
    assert safetensors_torch.save(GOOD_STATES[state]()) == genuine.save(GOOD_STATES[state]())


# ---- modules -----------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """Two layers with one weight, and a view of it that one does not see."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.second = torch.nn.Linear(3, 3)
        self.first = torch.nn.Linear(3, 3, bias=False)
        self.first.weight = self.second.weight
        self.register_buffer("row", self.second.weight.detach()[1])


class Halves(torch.nn.Module):
    """Two buffers of which none has all of their memory, and which overlap."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(8)
        self.register_buffer("left", memory[:5])
        self.register_buffer("right", memory[3:])


def test_modules_go_both_ways(tmp_path: Path) -> None:
    module = Tied()
    safetensors_torch.save_model(module, tmp_path / "ours", {"row": "mine"})
    genuine.save_model(module, str(tmp_path / "theirs"), {"row": "mine"})
    opened = [safetensors.safe_open(tmp_path / name, "pt") for name in ("ours", "theirs")]
    assert opened[0].keys() == opened[1].keys()
    assert opened[0].metadata() == opened[1].metadata()
    for load, path in ((safetensors_torch.load_model, "theirs"), (genuine.load_model, "ours")):
        other = Tied(seed=1)
        missing, unexpected = load(other, tmp_path / path)
        assert (missing, unexpected) == (set(), [])
        for name, tensor in module.state_dict().items():
            assert_same(other.state_dict()[name], tensor)
        assert other.first.weight is other.second.weight


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "make",
    [lambda: torch.nn.Linear(3, 3), lambda: torch.nn.Linear(5, 5), Tied],
    ids=["other", "wide", "same"],
)
def test_modules_that_do_not_fit_are_those_of_the_package(
    tmp_path: Path, make: Callable[[], torch.nn.Module], strict: bool
) -> None:
    path = str(tmp_path / "model")
    genuine.save_file({"second.weight": torch.ones(3, 3), "weight": torch.ones(3, 3)}, path)
    assert_same(
        outcome(lambda: safetensors_torch.load_model(make(), path, strict=strict)),
        outcome(lambda: genuine.load_model(make(), path, strict=strict)),
    )


def test_modules_whose_memory_nobody_has_whole_are_refused(tmp_path: Path) -> None:
    for save in (safetensors_torch.save_model, genuine.save_model):
        with pytest.raises(RuntimeError):
            save(Halves(), str(tmp_path / "model"))


def test_strides_of_modules_are_straightened_or_refused(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 3)
    module.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
    safetensors_torch.save_model(module, tmp_path / "model")
    assert_same(genuine.load_file(tmp_path / "model")["weight"], module.weight.detach())
    for save in (safetensors_torch.save_model, genuine.save_model):
        with pytest.raises(ValueError, match="contiguous"):
            save(module, str(tmp_path / "model"), force_contiguous=False)


# ---- what is mapped ----------------------------------------------------------------------------


def test_a_file_is_mapped_once_and_holds_no_descriptor_of_its_own(tmp_path: Path) -> None:
    """However large its tensors are; those of the mapped file stay readable once it is replaced."""
    path = tmp_path / "model.safetensors"
    genuine.save_file({"small": torch.ones(3), "large": torch.ones(2 << 20)}, path)
    before = len(os.listdir("/proc/self/fd"))
    opened = [own.safe_open(path, "pt") for _ in range(20)]
    for file in opened:
        assert file.get_tensor("small").sum() == 3
    genuine.save_file({"small": torch.zeros(3), "large": torch.zeros(2 << 20)}, tmp_path / "other")
    (tmp_path / "other").replace(path)
    for file in opened:
        assert file.get_tensor("large").sum() == 2 << 20
    each = 0 if sys.version_info >= (3, 13) else 1
    assert len(os.listdir("/proc/self/fd")) == before + 20 * each


def test_what_is_to_be_verified_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    genuine.save_file({"w": torch.ones(3)}, path)
    waystation.safetensors.write_checksums(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    file = own.safe_open(path, "pt")
    for verify in (None, True, False):
        context = waystation.Context()
        context.array.loading.verify = verify
        with context:
            for read in (lambda: file.get_tensor("w"), lambda: file.get_slice("w")[:2]):
                if verify:
                    with pytest.raises(own.SafetensorError) as caught:
                        read()
                    assert isinstance(caught.value, errors.Corrupt)
                    assert caught.value.context["tensor"] == "w"
                else:
                    assert read()[0] == 1
