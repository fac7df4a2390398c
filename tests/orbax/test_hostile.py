"""Damaged and malicious checkpoints in Orbax's layouts: typed errors that name what is wrong, no mischief.

What Orbax protects by no checksum (arrays that are not compressed) cannot be told from what is right.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.orbax import oracle
from tests.support.long import amount

import waystation
from waystation.errors import Corrupt, Unsupported, WaystationError
from waystation.layouts.orbax import (
    array_metadatas,
    checkpoint_metadata,
    deletion,
    rich_types,
    shard_index,
    shardings_file,
    strings_file,
    tree_metadata,
    zarr,
)

STATE = {
    "w": jnp.arange(600.0).reshape(20, 30),
    "b": np.arange(5),
    "s": "text",
    "k": jax.random.key(1),
    "n": 4,
}
KINDS = {
    "plain": {"use_ocdbt": False, "use_compression": False},
    "zarr2": {"use_ocdbt": False, "use_compression": False, "use_zarr3": False},
    "compressed": {"use_ocdbt": False},
    "ocdbt": {},
}
_function_scoped = settings(
    max_examples=amount(25, 1200),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "c"
    oracle.save(path, STATE, chunk_bytes=1000, **KINDS[request.param])
    return path


def copy_of(saved: Path, tmp_path: Path) -> Path:
    """A copy in a directory of its own, however often an example is run again."""
    return shutil.copytree(saved, Path(tempfile.mkdtemp(dir=tmp_path)), dirs_exist_ok=True)


def check_outcome(path: Path, *, may_load: bool) -> None:
    """A load fails with a typed error, or gives values of the right shape."""
    try:
        loaded = oracle.ours(path)
    except WaystationError:
        return
    assert may_load
    assert set(loaded) == set(STATE)


@pytest.mark.share(3)
@_function_scoped
@given(data=st.data())
def test_bits_that_flip(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    path = copy_of(saved, tmp_path)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
    file = data.draw(st.sampled_from(files), label="file")
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1), label="at")
    content[at] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    file.write_bytes(content)
    check_outcome(path, may_load=True)
    shutil.rmtree(path)


@pytest.mark.share(3)
@_function_scoped
@given(data=st.data())
def test_files_that_are_cut_or_gone(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    path = copy_of(saved, tmp_path)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
    file = data.draw(st.sampled_from(files), label="file")
    content = file.read_bytes()
    if data.draw(st.booleans(), label="gone"):
        file.unlink()
    else:
        file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    optional = ("_sharding", "_CHECKPOINT_METADATA", "orbax.checkpoint", "commit_success.txt", "process_0")
    is_unused = "ocdbt.process_" in str(file) or file.name in optional
    check_outcome(path, may_load=is_unused)
    shutil.rmtree(path)


@pytest.mark.parametrize("index_of", ["w"])
def test_an_index_that_lies(saved: Path, tmp_path: Path, index_of: str) -> None:
    """Its checksum is right, what it says is not."""
    path = shutil.copytree(saved, tmp_path / "c")
    directory = path / "state" / index_of
    if not (directory / "zarr.json").is_file():
        pytest.skip("no index in files")
    array = zarr.decode((directory / "zarr.json").read_bytes(), "zarr.json", 3)
    chunk = directory / array.chunk_key((0, 0))
    content = chunk.read_bytes()
    nbytes = shard_index.index_bytes(array)
    (offset, length), *_ = shard_index.decode(content[-nbytes:], array, len(content), "chunk").tolist()
    for lie in [(offset + 1, length), (offset, length + 8), (1 << 62, length), (0, 1 << 63)]:
        chunk.write_bytes(content[:-nbytes] + shard_index.encode([lie[0]], [lie[1]]))
        with pytest.raises(Corrupt):
            oracle.ours(path)
    absent = shard_index.ABSENT
    chunk.write_bytes(content[:-nbytes] + shard_index.encode([absent], [absent]))
    with pytest.raises(Corrupt, match=r"missing"):
        oracle.ours(path)
    context = waystation.Context()
    context.array.loading.raise_array_data_missing_error = False
    with context:
        loaded = oracle.ours(path)["w"]
    x, y = array.read_shape
    expected = np.array(STATE["w"])
    expected[:x, :y] = 0
    np.testing.assert_array_equal(loaded, expected)


def edited(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    body = json.loads(path.read_text())
    edit(body)
    path.write_text(json.dumps(body))


def escape(body: dict[str, Any]) -> None:
    for entry in body["tree_metadata"].values():
        entry["key_metadata"][0]["key"] = "../../../elsewhere"


def twice(body: dict[str, Any]) -> None:
    body["tree_metadata"]["again"] = next(iter(body["tree_metadata"].values()))


def unknown_kind(body: dict[str, Any]) -> None:
    next(iter(body["tree_metadata"].values()))["value_metadata"]["value_type"] = "bytes"


def mixed(body: dict[str, Any]) -> None:
    next(iter(body["tree_metadata"].values()))["key_metadata"][0]["key_type"] = 1


def not_there(body: dict[str, Any]) -> None:
    body["tree_metadata"]["x"] = {
        "key_metadata": [{"key": "x", "key_type": 2}],
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }


@pytest.mark.parametrize(
    "edit", [escape, twice, unknown_kind, mixed, not_there], ids=lambda edit: edit.__name__
)
def test_trees_that_lie(saved: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = shutil.copytree(saved, tmp_path / "c")
    edited(path / "state" / "_METADATA", edit)
    with pytest.raises((Corrupt, Unsupported)):
        oracle.ours(path)


def huge(body: dict[str, Any]) -> None:
    body["shape"] = [1 << 40, 30]


def huge_chunks(body: dict[str, Any]) -> None:
    body["shape"] = [1 << 40, 30]
    chunks = body["chunk_grid"]["configuration"] if "chunk_grid" in body else body
    chunks["chunk_shape" if "chunk_grid" in body else "chunks"] = [1 << 40, 30]
    if "codecs" in body:
        body["codecs"][0]["configuration"]["chunk_shape"] = [1 << 40, 30]


def other_dtype(body: dict[str, Any]) -> None:
    body["data_type" if "data_type" in body else "dtype"] = "int16" if "data_type" in body else "<i2"


def no_rank(body: dict[str, Any]) -> None:
    body["shape"] = []


def empty_chunks(body: dict[str, Any]) -> None:
    chunks = body["chunk_grid"]["configuration"] if "chunk_grid" in body else body
    chunks["chunk_shape" if "chunk_grid" in body else "chunks"] = [0, 30]


@pytest.mark.parametrize(
    "edit", [huge, huge_chunks, other_dtype, no_rank, empty_chunks], ids=lambda edit: edit.__name__
)
def test_arrays_that_lie(saved: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = shutil.copytree(saved, tmp_path / "c")
    for name in ("zarr.json", ".zarray"):
        file = path / "state" / "w" / name
        if file.is_file():
            edited(file, edit)
            with pytest.raises((Corrupt, Unsupported)):
                oracle.ours(path)


def test_a_link_out_of_the_directory_is_not_followed_by_names(saved: Path, tmp_path: Path) -> None:
    """Names of leaves stay inside, so that a checkpoint cannot make a load read other files."""
    path = shutil.copytree(saved, tmp_path / "c")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "zarr.json").write_text("{}")

    def point_there(body: dict[str, Any]) -> None:
        entry = next(iter(body["tree_metadata"].values()))
        entry["key_metadata"] = [{"key": str(tmp_path / "secret"), "key_type": 2}]

    edited(path / "state" / "_METADATA", point_there)
    with pytest.raises(Corrupt, match=r"no place"):
        oracle.ours(path)


# ---- any bytes ---------------------------------------------------------------------------------

_json = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["jax.Array", "string", "zstd", "bytes", "regular", "NamedSharding", "array"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                [
                    *("tree_metadata", "key_metadata", "value_metadata", "value_type", "key", "key_type"),
                    *("shape", "data_type", "chunk_grid", "configuration", "codecs", "name", "zarr_format"),
                    *("sharding_type", "axis_names", "partition_spec", "device_mesh", "mesh", "device_str"),
                    *("array_metadatas", "array_metadata", "param_name", "ext_metadata", "item_handlers"),
                    *("category", "clazz", "entries", "data", "module", "value_metadata_tree", "YQ=="),
                    *("operation_id", "checkpointable_name", "original_metadata", "updated_metadata"),
                ]
            ),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=20,
)
DECODERS: dict[str, Callable[[bytes], Any]] = {
    "tree": lambda data: tree_metadata.TreeMetadata.decode(data, "file"),
    "rich types": lambda data: rich_types.decode(data.decode("utf-8", "replace"), "file"),
    "zarr3": lambda data: zarr.decode(data, "file", 3),
    "zarr2": lambda data: zarr.decode(data, "file", 2),
    "shardings": lambda data: shardings_file.decode(data, "file"),
    "array metadatas": lambda data: array_metadatas.decode(data, "file"),
    "checkpoint": lambda data: checkpoint_metadata.CheckpointMetadata.decode(data, "file"),
    "deletion": lambda data: deletion.DeletionRecord.decode(data, "file"),
    "strings": lambda data: strings_file.find(strings_file.decode(data, "file"), "a/b", "file"),
}


@pytest.mark.share(12)
@pytest.mark.parametrize("decode", DECODERS.values(), ids=list(DECODERS))
@settings(max_examples=amount(150))
@given(content=st.one_of(st.binary(max_size=40), _json.map(lambda value: json.dumps(value).encode())))
def test_any_file_is_read_or_refused(decode: Callable[[bytes], Any], content: bytes) -> None:
    with contextlib.suppress(Corrupt, Unsupported):
        decode(content)


@settings(max_examples=amount(100))
@given(content=_json)
def test_any_sharding_is_read_or_refused(content: Any) -> None:
    name = base64.urlsafe_b64encode(b"a").decode()
    with contextlib.suppress(Corrupt):
        shardings_file.decode(json.dumps({name: json.dumps(content)}).encode(), "file")


@pytest.mark.parametrize("decode", DECODERS.values(), ids=list(DECODERS))
def test_values_that_nest_too_deeply_are_refused(decode: Callable[[bytes], Any]) -> None:
    with pytest.raises(Corrupt):
        decode(b'{"tree_metadata":' * 100_000 + b"1" + b"}" * 100_000)
