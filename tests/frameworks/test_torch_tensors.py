from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.frameworks.store import bits, keep, load, save
from torch._subclasses.fake_tensor import FakeTensorMode

from waystation.errors import InvalidInput, Unsupported, UnsupportedLeaf
from waystation.frameworks import dtypes, registry, torch_groups
from waystation.frameworks.base import StoredArray

TORCH_DTYPES = [
    entry
    for entry in dtypes.TABLE.values()
    if isinstance(getattr(torch, entry.name, None), torch.dtype)
    and entry.name not in ("int1", "int2", "int4", "uint1", "uint2", "uint4")
]


def codec() -> Any:
    return registry.codec_by_name("torch")


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, whatever its dtype."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return bits(flat.view(torch.uint8).numpy()) if flat.numel() else b""


@pytest.mark.parametrize("entry", TORCH_DTYPES, ids=lambda entry: entry.name)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 2)])
def test_every_dtype_round_trips(entry: dtypes.LogicalDtype, shape: tuple[int, ...], pattern: Any) -> None:
    dtype = getattr(torch, entry.name)
    host = pattern(shape, entry.host)
    flat = torch.tensor(list(bits(host)), dtype=torch.uint8)
    tensor = flat.view(dtype).reshape(shape)
    saved = save(tensor)
    assert saved.stored.dtype == entry.name
    for loaded in (load(saved), load(saved, tensor), load(saved, codec().abstract(saved.stored))):
        assert (loaded.dtype, loaded.shape, loaded.device.type) == (dtype, tensor.shape, "cpu")
        assert raw(loaded) == raw(tensor) == bits(host)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda base: base.T,
    "every second": lambda base: base[::2, 1::3],
    "expanded": lambda base: base[0].expand(5, -1),
    "conjugated": lambda base: base.conj(),
    "negated": torch._neg_view,
    "imaginary part of a conjugate": lambda base: base.conj().imag,
    "channels last": lambda base: base.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_any_kind_are_saved(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    base = torch.arange(24).reshape(4, 6) * (1 + 2j)
    tensor = view(base)
    loaded = load(save(tensor))
    assert not loaded.is_conj()
    assert torch.equal(loaded, tensor)


def test_strided_views_are_not_copied_and_resolved_ones_are_no_longer_shared() -> None:
    base = torch.arange(24).reshape(4, 6) * (1 + 0j)
    plain, resolved = codec().sources([base[1:, ::2], base.conj()])
    assert plain.mutable
    assert plain.blocks[0].address == base.data_ptr() + 6 * 8
    assert not resolved.mutable


def test_loaded_tensors_share_memory_with_the_buffers() -> None:
    batch = [save(torch.arange(6).to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2)]
    targets = codec().default_targets([one.stored for one in batch])
    boxes = [one.boxes(target) for one, target in zip(batch, targets, strict=True)]
    for tensor, (buffer,) in zip(codec().assemble(targets, boxes), boxes, strict=True):
        assert tensor.data_ptr() == buffer.ctypes.data
    boxes[0][0].flags.writeable = False
    with warnings.catch_warnings(action="error"):
        (copied,) = codec().assemble(targets[:1], boxes[:1])
    assert copied.data_ptr() != boxes[0][0].ctypes.data


def test_parameters_keep_requiring_gradients() -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    saved = save(parameter)
    for loaded in (load(saved), load(saved, parameter), load(saved, codec().abstract(saved.stored))):
        assert loaded.requires_grad
        assert loaded.is_leaf
        assert torch.equal(loaded, parameter)
    assert not load(saved, torch.empty(3, device="meta")).requires_grad
    assert not load(save(parameter * 2)).requires_grad


def test_a_gradient_of_integers_is_refused() -> None:
    saved = save(torch.arange(3))
    saved.stored.extra["requires_grad"] = True
    with pytest.raises(InvalidInput, match="cannot require a gradient"):
        load(saved)


def test_abstract_tensors_load_onto_the_cpu() -> None:
    with FakeTensorMode():
        fake = torch.empty(3, dtype=torch.bfloat16)
    for abstract in (fake, torch.empty(3, dtype=torch.bfloat16, device="meta")):
        loaded = load(save(torch.arange(3.0)), abstract)
        assert type(loaded) is torch.Tensor
        assert loaded.tolist() == [0, 1, 2]
        assert loaded.dtype == torch.bfloat16


def test_an_absent_device_is_refused_when_asked_for_and_replaced_when_saved() -> None:
    saved = save(torch.arange(3))
    if not torch.cuda.is_available():  # torch itself refuses such a tensor where it has a device
        with FakeTensorMode():
            wanted = torch.empty(3, dtype=torch.int64, device="cuda:77")
        with pytest.raises(InvalidInput, match="cuda:77"):
            load(saved, wanted)
    for text in ("cuda:77", "cuda:x", "tpu", 5, None):
        saved.stored.sharding = {"kind": "torch", "device": text}
        # What names no device that is here becomes the CPU; a number that is none becomes the first.
        kind = "cuda" if text == "cuda:x" and torch.cuda.is_available() else "cpu"
        assert load(saved).device.type == kind


@pytest.mark.parametrize("kind", ["mps", "xpu", "hpu"])
def test_a_device_that_this_torch_lacks_is_refused(kind: str) -> None:
    with pytest.raises(InvalidInput, match=f"wanted on {kind}, which is not here: "):
        codec().place_of(kind)


def test_a_gpu_without_a_number_is_the_one_in_use() -> None:
    torch_groups.use_device("cuda")
    torch_groups.use_device("cpu")


class Tagged(torch.Tensor):
    pass


def test_plain_subclasses_are_saved_as_tensors() -> None:
    tagged = torch.arange(3.0).as_subclass(Tagged)
    loaded = load(save(tagged))
    assert type(loaded) is torch.Tensor
    assert loaded.tolist() == [0, 1, 2]


def nested() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def compressed() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.eye(3).to_sparse_csr()


def quantized() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: torch.eye(3).to_sparse(), r"to_dense\(\)"),
        (compressed, r"to_dense\(\)"),
        (nested, r"unbind\(\)"),
        (quantized, r"int_repr\(\)"),
        (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8), r"view\(torch.uint8\)"),
    ],
    ids=["sparse", "compressed", "nested", "quantized", "bits"],
)
def test_unsupported_tensors_come_with_advice(make: Callable[[], torch.Tensor], advice: str) -> None:
    with pytest.raises(UnsupportedLeaf, match=advice) as raised:
        codec().sources([torch.zeros(1), make()])
    assert raised.value.context["index"] == 1


def test_wrapper_subclasses_are_unsupported() -> None:
    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("saving must not run operations on it")

    wrapped = torch.Tensor._make_wrapper_subclass(Wrapped, (3,))
    with pytest.raises(UnsupportedLeaf, match="Wrapped wraps other tensors"):
        save(wrapped)


@pytest.mark.parametrize("kind", ["meta", "fake", "lazy"])
def test_tensors_without_data_cannot_be_saved(kind: str) -> None:
    tensor: torch.Tensor
    if kind == "lazy":
        with warnings.catch_warnings(action="ignore"):
            tensor = torch.nn.LazyLinear(3).weight
    elif kind == "fake":
        with FakeTensorMode():
            tensor = torch.empty(3)
    else:
        tensor = torch.empty(3, device="meta")
    with pytest.raises(InvalidInput, match="no data"):
        save(tensor)


@pytest.mark.parametrize("name", ["int4", "uint2", "float8_e3m4", "float4_e2m1fn", "numpy:<U5"])
def test_dtypes_that_torch_lacks_are_unsupported(name: str) -> None:
    entry = dtypes.of_name(name)
    stored = StoredArray((2,), name, "torch", entry.storage, entry.storage_shape((2,)), None, {})
    with pytest.raises(Unsupported, match="torch has no dtype"):
        codec().default_targets([stored])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_are_named_by_their_address_and_return() -> None:
    tensor = torch.arange(24.0, device="cuda").reshape(4, 6)
    plain, strided = codec().sources([tensor, tensor.T])
    assert plain.blocks[0].device == tensor.device.index
    assert plain.blocks[0].address == tensor.data_ptr()
    assert strided.blocks[0].strides == (16, 4)
    assert plain.mutable
    loaded = load(save(tensor.cpu()), tensor)
    assert loaded.device == tensor.device
    assert torch.equal(loaded, tensor)


def test_a_description_of_blocks_partitions_the_tensor() -> None:
    (source,) = codec().sources([torch.zeros(2, 3, dtype=torch.complex128)])
    assert source.storage_shape == (2, 3, 16)
    assert keep(source).stored.storage_dtype == "U8"
