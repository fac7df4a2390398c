"""Headers against the `safetensors` package, in both directions, over NumPy and torch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.published.models import TORCH_DTYPES

from waystation import _native
from waystation.errors import Corrupt, InvalidInput

ALL_DTYPES = [*TORCH_DTYPES, "F4", "F6_E2M3", "F6_E3M2"]


def header_length(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def make_file(text: str | bytes, data_bytes: int) -> bytes:
    """A file with this JSON and so many bytes of data."""
    encoded = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded + bytes(data_bytes)


def parse(data: bytes) -> tuple[dict[str, str] | None, list[tuple[str, str, tuple[int, ...], int, int]], int]:
    return _native.parse_safetensors_header(data, len(data), "model.safetensors")


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_what_torch_writes_is_read(dtype: str) -> None:
    values = torch.arange(48, dtype=torch.uint8).view(2, 3, 8) % 2
    tensors = {
        "values": values.view(TORCH_DTYPES[dtype]),
        "scalar": torch.zeros((), dtype=TORCH_DTYPES[dtype]),
    }
    data = safetensors.torch.save(tensors, {"format": "pt"})
    metadata, described, start = parse(data)
    assert metadata == {"format": "pt"}
    assert start == header_length(data)
    assert {name for name, *_ in described} == {"values", "scalar"}
    for name, found_dtype, shape, begin, end in described:
        assert (found_dtype, shape) == (dtype, tuple(tensors[name].shape))
        assert data[begin:end] == tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_what_we_write_torch_reads(dtype: str, tmp_path: Path) -> None:
    item_bytes = TORCH_DTYPES[dtype].itemsize
    content = bytes(range(2)) * (3 * item_bytes)
    header = _native.build_safetensors_header([("a.b", dtype, (2, 3)), ("e", dtype, (0,))], None, 4096)
    assert len(header) == 4096
    path = tmp_path / "model.safetensors"
    path.write_bytes(header + content)
    loaded = safetensors.torch.load_file(path)
    assert loaded["a.b"].dtype == TORCH_DTYPES[dtype]
    assert loaded["a.b"].shape == (2, 3)
    assert loaded["a.b"].view(torch.uint8).numpy().tobytes() == content
    assert loaded["e"].shape == (0,)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_every_dtype_is_laid_out_as_the_reference_does(dtype: str) -> None:
    header = _native.build_safetensors_header([("x", dtype, (3, 8))], {"k": "v"}, 8)
    _, [(name, found, shape, begin, end)], start = _native.parse_safetensors_header(
        header, len(header) + json.loads(header[8:])["x"]["data_offsets"][1], "x"
    )
    assert (name, found, shape, begin) == ("x", dtype, (3, 8), start)
    [(_, described)] = safetensors.deserialize(header + bytes(end - begin))  # type: ignore[no-untyped-call]
    assert (described["dtype"], described["shape"]) == (dtype, [3, 8])
    assert len(described["data"]) == end - begin


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
NAMES = st.lists(TEXT.filter(lambda name: name != "__metadata__"), unique=True, max_size=6)


@given(names=NAMES, metadata=st.none() | st.dictionaries(TEXT, TEXT, max_size=3), data=st.data())
def test_any_header_is_read_alike(
    names: list[str], metadata: dict[str, str] | None, data: st.DataObject
) -> None:
    shapes = [tuple(data.draw(st.lists(st.integers(0, 4), max_size=3))) for _ in names]
    arrays = {
        name: np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
        for name, shape in zip(names, shapes, strict=True)
    }
    header = _native.build_safetensors_header(
        [(name, "I32", shape) for name, shape in zip(names, shapes, strict=True)], metadata, 64
    )
    assert len(header) % 64 == 0
    ours = header + b"".join(array.tobytes() for array in arrays.values())
    loaded = safetensors.numpy.load(ours)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
    assert parse(ours)[0] == metadata

    if arrays or metadata != {}:  # of nothing at all their writer makes invalid JSON
        theirs = safetensors.numpy.save(arrays, metadata)
        found_metadata, described, _ = parse(theirs)
        assert found_metadata == metadata
        assert {name: theirs[begin:end] for name, _, _, begin, end in described} == {
            name: array.tobytes() for name, array in arrays.items()
        }
        assert all(one[4] == other[3] for one, other in itertools.pairwise(described))


ENTRY = '"dtype":"U8","shape":[4],"data_offsets":[0,4]'
HOSTILE = {
    "bytes appended": (f'{{"a":{{{ENTRY}}}}}', 5, "appended"),
    "data cut off": (f'{{"a":{{{ENTRY}}}}}', 3, "cut off"),
    "a key twice": (f'{{"a":{{{ENTRY}}},"a":{{{ENTRY}}}}}', 4, "twice"),
    "a key twice in two spellings": (f'{{"a":{{{ENTRY}}},"\\u0061":{{{ENTRY}}}}}', 4, "twice"),
    "a field twice": (f'{{"a":{{{ENTRY},"dtype":"U8"}}}}', 4, "twice"),
    "metadata twice": ('{"__metadata__":{},"__metadata__":{}}', 0, "twice"),
    "a metadata key twice": ('{"__metadata__":{"k":"v","k":"v"}}', 0, "twice"),
    "metadata that are a number": ('{"__metadata__":{"k":1}}', 0, "expected a string"),
    "three offsets": (
        '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4,4]}}',
        4,
        "the end of data_offsets after two integers",
    ),
    "an unknown field": (f'{{"a":{{{ENTRY},"codec":"zstd"}}}}', 4, "unknown field"),
    "a lone surrogate escaped": (f'{{"\\ud800":{{{ENTRY}}}}}', 4, "lone surrogate"),
    "a lone surrogate encoded": (f'{{"\ud800":{{{ENTRY}}}}}', 4, "UTF-8"),
    "a NUL": (f'{{"a\\u0000":{{{ENTRY}}}}}', 4, "NUL"),
    "float offsets": ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4.0]}}', 4, "unsigned integer"),
    "a list": ("[]", 0, "JSON object"),
    "deep nesting": ('{"a":' * 200_000, 0, "unknown field"),
    "deep lists": ("[" * 200_000, 0, "expected"),
    "a hole": ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}}', 5, "hole"),
    "a size that overflows": (
        '{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4]}}',
        4,
        "overflows",
    ),
    "an unknown dtype": ('{"a":{"dtype":"F128","shape":[4],"data_offsets":[0,4]}}', 4, "unknown dtype"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_corrupt(case: str) -> None:
    text, data_bytes, reason = HOSTILE[case]
    with pytest.raises(Corrupt, match=reason) as caught:
        parse(make_file(text, data_bytes))
    assert caught.value.context["path"] == "model.safetensors"


@pytest.mark.parametrize("data", [b"", b"\x02", b"\xff" * 8, b"\x03\0\0\0\0\0\0\0{}"])
def test_lengths_that_lie_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        parse(data)


def test_an_error_says_which_tensor_and_where() -> None:
    text = '{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'
    with pytest.raises(Corrupt, match=r"takes 8 bytes.*tensor: w, offset: 0, path: model\.safetensors"):
        parse(make_file(text, 4))


def test_a_short_prefix_is_invalid_input() -> None:
    data = make_file("{}", 0)
    with pytest.raises(InvalidInput, match="first 10 bytes"):
        _native.parse_safetensors_header(data[:9], 10, "x")


@pytest.mark.parametrize(
    ("tensors", "metadata", "align_bytes", "reason"),
    [
        ([("a", "F32", (1,)), ("a", "F32", (1,))], None, 8, "one name"),
        ([("a", "F31", (1,))], None, 8, "no dtype 'F31'"),
        ([("a", "F32", (-1,))], None, 8, "unsigned 64-bit"),
        ([("a", "F32", (1 << 64,))], None, 8, "unsigned 64-bit"),
        ([("a", "F32", (1.5,))], None, 8, "unsigned 64-bit"),
        ([("a", "F4", (3,))], None, 8, "whole number of bytes"),
        ([("a\0", "F32", (1,))], None, 8, "NUL"),
        ([("\ud800", "F32", (1,))], None, 8, "lone surrogate"),
        ([("__metadata__", "F32", (1,))], None, 8, "reserves"),
        ([], {"k": 1}, 8, "strings to strings"),
        ([], {"k": "\udfff"}, 8, "lone surrogate"),
        ([], None, 12, "power of two"),
    ],
)
def test_the_writer_refuses(tensors: object, metadata: object, align_bytes: int, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        _native.build_safetensors_header(tensors, metadata, align_bytes)  # type: ignore[arg-type]
