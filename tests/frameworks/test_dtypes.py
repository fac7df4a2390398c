from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from waystation.errors import Corrupt, InvalidInput, Unsupported
from waystation.frameworks import casts, dtypes
from waystation.frameworks.base import CastRule, StoredArray

NUMBERS = [entry for entry in dtypes.TABLE.values() if entry.category not in ("packed", "key", "other")]


def test_every_dtype_of_jax_has_a_name() -> None:
    names = set(dtypes.TABLE)
    assert {"bool", "int2", "int4", "uint2", "uint4", "bfloat16", "complex64", "complex128"} <= names
    assert {name for name in dir(ml_dtypes) if name.startswith(("float", "int", "uint"))} <= names


@pytest.mark.parametrize("entry", dtypes.TABLE.values(), ids=dtypes.TABLE)
def test_storage_holds_exactly_the_bytes_of_the_host(entry: dtypes.LogicalDtype) -> None:
    items = int(np.prod(entry.trailing, dtype=int))
    assert items * entry.storage_item_bytes == entry.host.itemsize
    assert dtypes.of_name(entry.name) is entry
    if entry.category != "packed":
        assert dtypes.of_numpy(entry.host) is entry


@pytest.mark.parametrize("entry", [e for e in NUMBERS if not e.trailing], ids=lambda entry: entry.name)
def test_torch_reads_named_storage_as_the_same_dtype(entry: dtypes.LogicalDtype, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors")
    nbytes = 4 * entry.host.itemsize
    tensor = {"dtype": entry.storage, "shape": [4], "data_offsets": [0, nbytes]}
    header = json.dumps({"a": tensor}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(nbytes))
    with safetensors.safe_open(path, "pt") as file:
        assert file.get_tensor("a").dtype is getattr(torch, entry.name)


@pytest.mark.parametrize(
    "dtype",
    [
        "<U5",
        "U0",
        "S3",
        "M8[ns]",
        "m8[25s]",
        ">f4",
        ">c16",
        "V8",
        [("a", "f4"), ("b", ">i8", (2, 3))],
        [("a", [("c", "U3"), ("d", [("e", "?")])]), ("b", "?")],
        np.dtype([("a", "i1"), ("b", "f8")], align=True),
        [(("title", "a"), "f4")],
    ],
    ids=str,
)
def test_other_numpy_dtypes_round_trip_through_their_names(dtype: object) -> None:
    wanted = np.dtype(dtype)  # type: ignore[call-overload]
    name = dtypes.of_numpy(wanted).name
    assert name.startswith("numpy:")
    dtypes.of_name.cache_clear()
    found = dtypes.of_name(json.loads(json.dumps(name)))
    assert found.host == wanted
    assert found.trailing == (wanted.itemsize,)


@pytest.mark.parametrize(
    "dtype", ["O", [("a", "O")], np.dtypes.StringDType(), [("a", ml_dtypes.bfloat16)]], ids=str
)
def test_what_cannot_be_described_is_unsupported(dtype: object) -> None:
    with pytest.raises(Unsupported):
        dtypes.of_numpy(np.dtype(dtype))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "text",
    [
        *("", "O", "|O", "<f4", "f4,f4", "(3,)f4", "object_", "<U99999999999999999", "<M8[xx]"),
        *("[", "[1]", "[[1,2]]", '[["a"]]', '[["a","|O"]]', '[["a","<f4",[-1]]]', '[["a","<f4","x"]]'),
        "[" * 100_000,
    ],
    ids=lambda text: repr(text[:20]),
)
def test_hostile_descriptions_are_corrupt(text: str) -> None:
    with pytest.raises(Corrupt):
        dtypes.of_name(f"numpy:{text}")


@pytest.mark.parametrize("name", ["", "float33", "key<>", "key", "object", "os.system"])
def test_unknown_names_are_unsupported(name: str) -> None:
    with pytest.raises(Unsupported, match="unknown dtype"):
        dtypes.of_name(name)


@pytest.mark.parametrize(
    ("storage_dtype", "storage_shape"), [("F16", (2,)), ("F32", (2, 4)), ("F32", (3,)), ("U8", (2, 4))]
)
def test_a_stored_form_that_contradicts_the_dtype_is_corrupt(
    storage_dtype: str, storage_shape: tuple[int, ...]
) -> None:
    stored = StoredArray((2,), "float32", "numpy", storage_dtype, storage_shape, None, {})
    with pytest.raises(Corrupt, match="is said to be stored"):
        dtypes.of_stored(stored)


def test_keys_are_words_in_storage_and_on_the_host() -> None:
    stored = StoredArray((3,), "key<threefry2x32>", "jax", "U32", (3, 2), None, {})
    found = dtypes.of_stored(stored)
    assert (found.host, found.trailing, found.host_trailing) == (np.uint32, (2,), (2,))
    assert dtypes.numpy_dtype(stored.dtype) is None
    assert dtypes.storage_numpy_dtype("U32") == np.uint32


# ---- casts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("complex64", "float32"),
        ("complex128", "int8"),
        ("complex32", "bool"),
        ("key<threefry2x32>", "uint32"),
        ("uint32", "key<threefry2x32>"),
        ("key<threefry2x32>", "key<rbg>"),
        ("numpy:<U5", "numpy:<U6"),
        ("numpy:<M8[ns]", "int64"),
        ("float32", "numpy:<U5"),
        ("float4_e2m1fn_x2", "float4_e2m1fn"),
        ("uint8", "float4_e2m1fn_x2"),
    ],
)
def test_refused_casts(stored: str, wanted: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be loaded as"):
        casts.check(stored, wanted, CastRule(may_lose=False, option=""))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("numpy:>f4", "float32"), ("float4_e2m1fn_x2", "uint8"), ("numpy:<U5", "numpy:<U5"), ("bool", "int4")],
)
def test_allowed_casts_beyond_numbers(stored: str, wanted: str) -> None:
    casts.check(stored, wanted, CastRule(may_lose=False, option=""))


def test_numpy_states_never_import_jax_or_torch() -> None:
    program = (
        "import sys, numpy as np, waystation\n"
        "from waystation.frameworks import registry\n"
        "from waystation.tree import flatten\n"
        "leaves, _ = flatten({'a': np.zeros(3), 'b': [1, object()]})\n"
        "codecs = [registry.codec_for(leaf) for leaf in leaves]\n"
        "codecs[0].sources([leaves[0]])\n"
        "assert codecs[1:] == [None, None]\n"
        "assert not {'jax', 'jaxlib', 'torch'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
