"""`array.loading.in_place`: the caller's own tensors and arrays are loaded into, whatever they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint import load_peak
from tests.distributed import torch_scenarios
from tests.support.long import amount
from tests.support.peaks import in_own_process
from tests.support.programs import running

import waystation
from waystation import errors
from waystation.frameworks import torch_memory

MIB = 1 << 20


def in_place(limit_bytes: int | None = None, *, mmap: bool = False, pads: bool = False) -> waystation.Context:
    context = waystation.Context()
    context.array.loading.in_place = True
    context.array.loading.mmap = mmap
    context.array.loading.enable_padding_and_truncation = pads
    context.memory.read_concurrent_bytes = limit_bytes
    return context


@pytest.fixture(params=["whole", "bounded", "mapped"])
def context(request: pytest.FixtureRequest) -> Iterator[waystation.Context]:
    found = {
        "whole": in_place(),
        "bounded": in_place(2 * MIB),
        "mapped": in_place(mmap=True),
    }[request.param]
    with found:
        yield found


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits; of truth values, such."""
    generator = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape)) * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator)
    return data.to(torch.uint8).view(dtype).view(shape)


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("name", sorted(torch_memory._BY_NAME))
@pytest.mark.share(3)
def test_every_dtype_of_torch(tmp_path: Path, name: str) -> None:
    dtype = torch_memory.torch_dtype(name)
    saved = {str(shape): random_tensor(shape, dtype, 1) for shape in ((), (3,), (40, 50), (0, 3))}
    waystation.save(tmp_path / "at", saved)
    own = {name: random_tensor(tuple(tensor.shape), dtype, 2) for name, tensor in saved.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in own.items()}
    loaded = waystation.load(tmp_path / "at", own)
    for key, tensor in own.items():
        assert loaded[key] is tensor
        assert tensor.data_ptr() == addresses[key]
        assert bits(tensor) == bits(saved[key])


@pytest.mark.usefixtures("context")
def test_a_module_and_its_optimizer(tmp_path: Path) -> None:
    def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 30)).sum().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (other, other_optimizer) = trained(1), trained(2)
    waystation.save(tmp_path / "at", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    parameters = list(other.parameters())
    state = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
    loaded = waystation.load(tmp_path / "at", state)
    assert [own is kept for own, kept in zip(other.parameters(), parameters, strict=True)] == [True] * 4
    for own, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert own.requires_grad
        assert torch.equal(own, expected)
        for name, value in optimizer.state[expected].items():
            assert torch.equal(other_optimizer.state[own][name], value)
    # The number of batches is a tensor, and what are numbers come back beside.
    assert int(other[1].num_batches_tracked) == 1
    assert loaded["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]


def test_autograd_hears_of_it(tmp_path: Path) -> None:
    waystation.save(tmp_path / "at", {"w": torch.ones(5, requires_grad=True)})
    weights = torch.zeros(5, requires_grad=True)
    result = (weights * weights).sum()
    with in_place():
        waystation.load(tmp_path / "at", {"w": weights})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@settings(max_examples=amount(60))
@given(data=st.data())
def test_tensors_of_any_strides_overlaps_and_dtypes(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Whatever the tensors are views of: what belongs to them is loaded, and nothing beside it changes."""
    path = tmp_path_factory.mktemp("any") / "at"
    whole = torch.arange(4000, dtype=torch.float32)
    saved, own, expected = {}, {}, whole.clone()
    for number in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(("rows", "columns", "transposed", "steps")))
        start = 900 * number

        def view(of: torch.Tensor, kind: str = kind, start: int = start) -> torch.Tensor:
            square = of[start : start + 900].view(30, 30)
            found = {"rows": square[3:20], "columns": square[:, 4:9], "transposed": square.T}
            return found[kind] if kind in found else square[::2, ::3]

        stored = data.draw(st.sampled_from((torch.float32, torch.float64, torch.int16)))
        values = torch.randint(-999, 999, view(whole).shape).to(stored)
        saved[str(number)], own[str(number)] = values, view(whole)
        view(expected).copy_(values)
    waystation.save(path, saved)
    with in_place(data.draw(st.sampled_from((None, MIB)))):
        loaded = waystation.load(path, own)
    assert all(loaded[name] is tensor for name, tensor in own.items())
    assert torch.equal(whole, expected)


@pytest.mark.usefixtures("context")
def test_tensors_that_share_memory_are_each_loaded(tmp_path: Path) -> None:
    values = torch.arange(100.0)
    waystation.save(tmp_path / "at", {"embedding": values, "head": values, "tail": values[50:].clone()})
    own = torch.zeros(100)
    tied = {"embedding": own, "head": own, "tail": own[50:]}
    loaded = waystation.load(tmp_path / "at", tied)
    assert loaded["embedding"] is own
    assert loaded["head"] is own
    assert torch.equal(own, values)


@pytest.mark.parametrize("framework", ["torch", "numpy", "both"])
@pytest.mark.parametrize("stored", [np.float32, np.float64], ids=["plain", "cast"])
@pytest.mark.parametrize("limit_bytes", [None, MIB])
def test_arrays_that_overlap_in_a_part_of_each_are_refused(
    tmp_path: Path, framework: str, stored: Any, limit_bytes: int | None
) -> None:
    waystation.save(tmp_path / "at", {"a": np.arange(6, dtype=stored), "b": np.arange(6, dtype=stored)})
    whole = torch.full((10,), -1.0)
    first: Any = whole if framework == "torch" else whole.numpy()
    second: Any = whole.numpy() if framework == "numpy" else whole
    own = {"a": first[:6], "b": second[4:]}
    with (
        in_place(limit_bytes),
        pytest.raises(errors.InvalidInput, match="shares a part of its memory") as raised,
    ):
        waystation.load(tmp_path / "at", own)
    assert "['a']" in str(raised.value)
    assert raised.value.context["array"] == "['b']"
    assert whole.tolist() == [-1] * 10
    apart = {"a": first[:4], "b": second[4:]}
    waystation.save(tmp_path / "apart", {name: np.ones(len(array), stored) for name, array in apart.items()})
    with in_place(limit_bytes):
        waystation.load(tmp_path / "apart", apart)
    assert whole.tolist() == [1] * 10


@pytest.mark.usefixtures("context")
def test_numpy_arrays_and_what_cannot_change(tmp_path: Path) -> None:
    names = np.array(["a", "bcd"])
    state = {
        "c": np.arange(12.0).reshape(3, 4),
        "f": np.arange(12.0).reshape(3, 4),
        "names": names,
        "scalar": np.float32(3),
        "jax": jnp.arange(4),
        "step": 7,
        "meta": torch.ones(3),
    }
    waystation.save(tmp_path / "at", state)
    own = {
        "c": np.zeros((3, 4)),
        "f": np.zeros((3, 4), order="F"),
        "names": np.array(["xyz", "xyz"]),
        "scalar": np.float32(0),
        "jax": jnp.zeros(4, jnp.int32),
        "step": 0,
        "meta": torch.empty(3, device="meta"),
    }
    loaded = waystation.load(tmp_path / "at", own)
    for name in ("c", "f", "names"):
        assert loaded[name] is own[name]
        np.testing.assert_array_equal(own[name], state[name])
    assert (loaded["scalar"], loaded["step"], loaded["jax"].tolist()) == (3, 7, [0, 1, 2, 3])
    assert own["jax"].tolist() == [0] * 4
    assert torch.equal(loaded["meta"], torch.ones(3))


def test_zeros_beyond_what_is_stored(tmp_path: Path) -> None:
    waystation.save(tmp_path / "at", {"t": torch.ones(3, 4), "n": np.ones((3, 4))})
    own = {"t": torch.full((5, 2), 9.0), "n": np.full((5, 2), 9.0)}
    with in_place(pads=True):
        waystation.load(tmp_path / "at", own)
    for values in own.values():
        assert np.asarray(values).tolist() == [[1, 1]] * 3 + [[0, 0]] * 2


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (torch.zeros(1, 4).expand(3, 4), "several elements are the same memory"),
        (np.broadcast_to(np.zeros(4), (3, 4)), "read-only array"),
        (torch.zeros(3, 4).to_sparse(), "layout torch.sparse_coo"),
    ],
    ids=["expanded", "read-only", "sparse"],
)
def test_what_cannot_be_loaded_into_is_named_before_anything_changes(
    tmp_path: Path, leaf: Any, message: str
) -> None:
    waystation.save(tmp_path / "at", {"a": torch.ones(4), "b": {"c": torch.ones(3, 4)}})
    own = {"a": torch.zeros(4), "b": {"c": leaf}}
    with in_place(), pytest.raises(errors.InvalidInput, match=message) as raised:
        waystation.load(tmp_path / "at", own)
    assert raised.value.context["array"] == "['b']['c']"
    assert own["a"].tolist() == [0] * 4


def test_damage_is_raised_and_says_that_arrays_may_have_changed(tmp_path: Path) -> None:
    waystation.save(tmp_path / "at", {"w": torch.ones(1 << 20)})
    (file,) = (tmp_path / "at" / "state").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with in_place(), pytest.raises(errors.Corrupt) as raised:
        waystation.load(tmp_path / "at", {"w": torch.zeros(1 << 20)})
    assert any("in place" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_no_memory_for_a_second_copy(tmp_path: Path, framework: str) -> None:
    state = {str(number): np.full(8 * MIB, number, np.uint8) for number in range(8)}
    waystation.save(tmp_path / "at", state)
    arguments = (tmp_path / "at", framework)
    extra_bytes = in_own_process(load_peak.extra_bytes_in_place, *arguments, directory=tmp_path)
    assert extra_bytes < 12 * MIB  # of 64


def test_shards_of_distributed_tensors(tmp_path: Path) -> None:
    with running(
        torch_scenarios.load_in_place, tmp_path / "at", count=2, framework="torch", directory=tmp_path
    ) as programs:
        assert programs.values() == [True] * 2
