"""Memory for tensors on devices: how it is shared, and what goes there. Devices are for `tests/gpu`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from waystation.frameworks import torch_devices, torch_memory
from waystation.frameworks.base import Target
from waystation.frameworks.torch_tensors import Placement
from waystation.grid import whole

MIB = 1 << 20


@given(
    st.lists(
        st.one_of(st.integers(1, 2000), st.integers(MIB - 300, MIB + 300), st.just(5 * MIB)), max_size=90
    )
)
def test_every_buffer_has_its_own_aligned_place(sizes: list[int]) -> None:
    pieces, places = torch_devices.carve(sizes, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    assert [place.numel() for place in places] == sizes
    taken: dict[int, list[tuple[int, int]]] = {}
    for place in places:
        assert place.storage_offset() % torch_devices.ALIGN_BYTES == 0
        own = taken.setdefault(place.untyped_storage().data_ptr(), [])
        own.append((place.storage_offset(), place.storage_offset() + place.numel()))
    assert len(taken) == len(pieces)
    for own in taken.values():
        assert all(end <= begin for (_, end), (begin, _) in zip(sorted(own), sorted(own)[1:], strict=False))
    for piece in pieces:
        shared = len(taken[piece.data_ptr()]) > 1
        assert piece.numel() <= torch_devices.SHARED_BYTES or not shared


def test_small_buffers_share_pieces_that_are_bounded() -> None:
    sizes = [MIB - 1] * 130
    pieces, _ = torch_devices.carve(sizes, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    assert len(pieces) == 3
    assert all(piece.numel() <= torch_devices.SHARED_BYTES for piece in pieces)


@pytest.mark.parametrize("name", sorted(torch_memory._BY_NAME))
def test_bytes_become_tensors_of_every_dtype(name: str) -> None:
    dtype = torch_memory.torch_dtype(name)
    data = torch.zeros(6 * dtype.itemsize + 512, dtype=torch.uint8)[512:]
    tensor = torch_devices.as_tensor(data, dtype, (3, 2))
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, (3, 2))
    assert tensor.data_ptr() == data.data_ptr()
    scalar = torch_devices.as_tensor(data[: dtype.itemsize], dtype, ())
    assert scalar.shape == ()


@pytest.mark.parametrize(
    ("device", "shape", "dtype", "stored", "goes"),
    [
        ("cuda", (4,), "float32", "float32", True),
        ("cuda:1", (4,), "float8_e4m3fn", "float8_e4m3fn", True),
        ("cuda", (4,), "bfloat16", "float32", True),
        ("cuda", (4,), "float8_e4m3fn", "float32", False),  # which devices may round otherwise
        ("cuda", (4,), "float32", "float64", True),
        ("cuda", (4,), "float16", "float64", False),
        ("cuda", (4,), "int32", "float32", False),
        ("cuda", (0, 4), "float32", "float32", False),
        ("cpu", (4,), "float32", "float32", False),
    ],
)
def test_what_the_engine_brings_to_devices(
    device: str, shape: tuple[int, ...], dtype: str, stored: str, goes: bool
) -> None:
    target = Target(shape, dtype, [whole(shape)], Placement(torch.device(device), requires_grad=False))
    assert torch_devices.goes_to_devices(target, stored) is goes
