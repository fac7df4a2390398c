"""The small files of Orbax's layouts, against the classes of genuine Orbax that read and write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint._src.metadata import array_metadata, array_metadata_store, sharding, tree
from orbax.checkpoint._src.metadata import step_metadata_serialization as step_metadata
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions
from tests.frameworks.jax_mesh import mesh
from tests.orbax.oracle import FIXTURES

from waystation.errors import Corrupt, InvalidInput
from waystation.frameworks.jax_shardings import describe_sharding, sharding_from_description
from waystation.layouts.orbax import (
    array_metadatas,
    names,
    paths,
    rich_types,
    shard_index,
    shardings_file,
    strings_file,
    tree_metadata,
    zarr,
)
from waystation.layouts.orbax.checkpoint_metadata import CheckpointMetadata
from waystation.layouts.orbax.tree_metadata import Entry, TreeMetadata, Value
from waystation.tree import flatten, unflatten

PLAIN = PyTreeMetadataOptions(support_rich_types=False)


class Pair(NamedTuple):
    first: Any
    second: Any


TREE = {"x": [1, (2, {"y": Pair(3, None)})], "e": {}, "l": [], "7": 5, "t": (), "a/b": {"c.d": 6}}


def entries(state: Any) -> list[Entry]:
    _, structure = flatten(state)
    return [Entry(place.path, Value(place.empty or "scalar")) for place in paths.places_of(structure)]


# ---- `_METADATA` -------------------------------------------------------------------------------


def test_what_is_said_of_a_tree_is_what_orbax_says() -> None:
    ours = TreeMetadata(entries(TREE), use_ocdbt=True, use_zarr3=True)
    theirs = tree.InternalTreeMetadata.from_json(json.loads(ours.encode()), PLAIN)
    assert json.loads(json.dumps(theirs.to_json())) == json.loads(ours.encode())
    flat, _ = jax.tree_util.tree_flatten_with_path(TREE, is_leaf=tree.tree_utils.is_empty_or_leaf)
    names_by_orbax = {str(tuple(str(tree.tree_utils.get_key_name(key)) for key in path)) for path, _ in flat}
    assert json.loads(ours.encode())["tree_metadata"].keys() == names_by_orbax
    assert TreeMetadata.decode(ours.encode(), "file") == ours


def test_an_untyped_tree_is_what_orbax_makes_of_it() -> None:
    ours = TreeMetadata(entries(TREE), use_ocdbt=True, use_zarr3=True)
    theirs = tree.InternalTreeMetadata.from_json(json.loads(ours.encode()), PLAIN).as_nested_tree()
    structure, order = paths.structure_of(
        [(entry.path, entry.value.kind if entry.value.is_empty else "") for entry in ours.entries]
    )
    mine = unflatten(structure, [ours.entries[number].value.kind for number in order])

    def empty(value: Any) -> Any:
        return {"None": None, "Dict": {}, "List": [], "Tuple": ()}.get(value.value_type, value.value_type)

    assert mine == jax.tree.map(empty, theirs)


@pytest.mark.parametrize("path", sorted(FIXTURES.rglob("_METADATA")), ids=lambda path: path.parent.name)
def test_files_of_earlier_releases_come_back_byte_by_byte(path: Path) -> None:
    content = path.read_bytes()
    if content == b"dummy":  # one of those that are damaged on purpose
        with pytest.raises(Corrupt):
            TreeMetadata.decode(content, str(path))
        return
    assert TreeMetadata.decode(content, str(path)).encode() == content


def test_rich_types_are_those_of_orbax() -> None:
    leaves, structure = flatten(TREE)
    empties = [Value(place.empty) for place in paths.places_of(structure) if place.empty]
    ours = rich_types.encode(structure, [Value("scalar") for _ in leaves], empties)
    theirs = tree.tree_rich_types.value_metadata_tree_from_json_str(ours)
    assert type(theirs["x"][1]) is tuple
    assert theirs["x"][1][1]["y"]._fields == ("first", "second")
    assert theirs["x"][1][1]["y"].second.value_type == "None"
    assert {value.value_type for value in (theirs["e"], theirs["l"], theirs["t"])} == {
        "Dict",
        "List",
        "Tuple",
    }
    mine, values = rich_types.decode(ours, "file")
    assert mine == structure
    assert unflatten(mine, leaves) == TREE
    assert {value.kind for value in values} == {"scalar"}


def test_a_key_that_would_change_the_meaning_of_rich_types_is_refused() -> None:
    leaves, structure = flatten({"category": 1})
    with pytest.raises(InvalidInput, match="category"):
        rich_types.encode(structure, [Value("scalar")], [])
    assert leaves == [1]


@pytest.mark.parametrize(
    "keys",
    [
        [["a"], ["a"]],
        [["a"], ["a", "b"]],
        [["a"], [0]],
        [[1]],
        [[0], [2]],
        [[], ["a"]],
    ],
    ids=str,
)
def test_what_is_no_tree_is_refused(keys: list[list[Any]]) -> None:
    steps = [tuple(paths.Step(str(key), isinstance(key, int)) for key in path) for path in keys]
    with pytest.raises(ValueError, match=r"place|children|list|leaf"):
        paths.structure_of([(path, "") for path in steps])


def test_a_place_that_was_filled_later_is_no_empty_container() -> None:
    """A partial save leaves both entries behind."""
    placeholder, child = (paths.Step("a"),), (paths.Step("a"), paths.Step("b"))
    for order in ([(placeholder, "Dict"), (child, "")], [(child, ""), (placeholder, "Dict")]):
        structure, found = paths.structure_of(order)
        assert unflatten(structure, found) == {"a": {"b": order.index((child, ""))}}


@pytest.mark.parametrize("name", ["..", "a/../b", "/etc", "a//b", ".", "a/.", "a\0"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(Corrupt):
        names.check_parameter(name, "file")


def test_two_arrays_under_one_name_are_refused() -> None:
    """`{'a.b': …, 'a': {'b': …}}`: Orbax writes one over the other and says nothing."""
    with pytest.raises(Corrupt, match="only one was kept"):
        tree_metadata.check_distinct(["a.b", "c", "a.b"], "file")


# ---- shardings, keys, strings ------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        NamedSharding(mesh(4, 2), PartitionSpec("x", "y")),
        NamedSharding(mesh(4, 2), PartitionSpec(("y", "x"), None)),
        NamedSharding(mesh(2, 2, 2), PartitionSpec(None, "z")),
        NamedSharding(mesh(8), PartitionSpec()),
    ],
    ids=str,
)
def test_shardings_are_those_of_orbax(value: NamedSharding) -> None:
    content = shardings_file.encode({"a.b": describe_sharding(value, (16, 16))})
    (written,) = json.loads(content).values()
    metadata = sharding.from_serialized_string(written)
    assert metadata.to_jax_sharding() == value
    assert json.loads(written) == json.loads(sharding.from_jax_sharding(value).to_serialized_string())  # type: ignore[union-attr]
    decoded = shardings_file.decode(content, "file")["a.b"]
    assert sharding_from_description(decoded, (16, 16)) == value


@pytest.mark.parametrize("written", ["cpu:3", "TFRT_CPU_3"])
def test_devices_have_two_names(written: str) -> None:
    text = json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": written})
    decoded = shardings_file.decode(json.dumps({"YQ==": text}).encode(), "file")["a"]
    assert sharding_from_description(decoded, (2,)) == SingleDeviceSharding(jax.devices()[3])
    assert sharding.from_serialized_string(text).to_jax_sharding() == SingleDeviceSharding(jax.devices()[3])


@pytest.mark.parametrize("written", ["TPU_7(process=0,(1,1,0,0))", "cuda:1", "a device of somebody's own"])
def test_devices_that_are_not_here_are_no_damage(written: str) -> None:
    text = json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": written})
    for decoded in shardings_file.decode(json.dumps({"YQ==": text}).encode(), "file").values():
        assert sharding_from_description(decoded, (2,)) is None


def test_array_metadatas_are_those_of_orbax() -> None:
    ours = [
        array_metadatas.ArrayMetadata("a.b", (4, 2), (2, 2)),
        array_metadatas.ArrayMetadata("k", (2,), (2,), "threefry2x32"),
    ]
    serializer = array_metadata_store.Serializer()
    theirs = serializer.deserialize(array_metadatas.encode(ours).decode())
    assert [(one.param_name, one.write_shape, one.chunk_shape) for one in theirs] == [
        (one.name, one.write_shape, one.chunk_shape) for one in ours
    ]
    assert theirs[1].ext_metadata == {array_metadata.RANDOM_KEY_IMPL: "threefry2x32"}
    assert array_metadatas.decode(array_metadatas.encode(ours), "file") == ours


def test_checkpoint_metadata_are_those_of_orbax() -> None:
    ours = CheckpointMetadata({"state": "a.B"}, {"loss": 1.5}, {}, 5, 6, {"mine": [1]})
    theirs = step_metadata.InternalCheckpointMetadata.deserialize(json.loads(ours.encode()))
    assert theirs.serialize() == json.loads(ours.encode())
    assert CheckpointMetadata.decode(ours.encode(), "file") == ours


def test_what_is_not_known_of_checkpoint_metadata_is_the_callers() -> None:
    body = json.dumps({"item_handlers": None, "lr": 2}).encode()
    theirs = step_metadata.InternalCheckpointMetadata.deserialize(json.loads(body))
    assert CheckpointMetadata.decode(body, "file").custom_metadata == theirs.custom_metadata == {"lr": 2}


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), st.text()))
def test_strings_come_back(strings: dict[str, str]) -> None:
    try:
        body = strings_file.decode(strings_file.encode(strings), "file")
    except InvalidInput:
        assert any("/" in name or "~" in name for name in strings)
        return
    assert {name: strings_file.find(body, name, "file") for name in strings} == strings


# ---- zarr --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        zarr.ZarrArray(3, (5, 4), "bfloat16", (4, 4), (2, 2)),
        zarr.ZarrArray(3, (5, 4), "float32", (4, 4), codecs=(zarr.Codec("zstd", {"level": 3}),)),
        zarr.ZarrArray(3, (5, 4), "float32", (4, 4), codecs=(zarr.CHECKSUM,)),
        zarr.ZarrArray(
            3, (5, 4), "int16", (4, 4), (2, 2), codecs=(zarr.Codec("zstd", {"level": 3}), zarr.CHECKSUM)
        ),
        zarr.ZarrArray(3, (), "int4", ()),
        zarr.ZarrArray(2, (5, 4), "float8_e5m2", (4, 4), separator=".", has_prefix=False),
        zarr.ZarrArray(
            2,
            (3,),
            "int64",
            (2,),
            codecs=(zarr.Codec("zstd", {"level": 1}),),
            separator=".",
            has_prefix=False,
        ),
    ],
    ids=str,
)
def test_tensorstore_reads_the_metadata_of_arrays(array: zarr.ZarrArray, tmp_path: Path) -> None:
    import tensorstore

    path = tmp_path / ("zarr.json" if array.version == 3 else ".zarray")
    path.write_bytes(array.encode())
    store = tensorstore.open(
        {
            "driver": "zarr3" if array.version == 3 else "zarr",
            "kvstore": {"driver": "file", "path": f"{tmp_path}/"},
        }
    ).result()
    assert store.shape == array.shape
    assert store.dtype.name == array.dtype
    assert (store.chunk_layout.read_chunk.shape or ()) == array.read_shape
    assert (store.chunk_layout.write_chunk.shape or ()) == array.chunk_shape
    store.write(np.ones(array.shape, store.dtype.numpy_dtype)).result()
    place = (0,) * len(array.shape)
    assert (tmp_path / array.chunk_key(place)).is_file()
    again = zarr.decode(path.read_bytes(), str(path), array.version)
    assert (again.shape, again.dtype, again.chunk_shape, again.read_shape) == (
        array.shape,
        array.dtype,
        array.chunk_shape,
        array.read_shape,
    )
    assert again.is_known
    assert again.is_direct == ("zstd" not in [codec.name for codec in array.codecs])
    assert again.has_checksum == (zarr.CHECKSUM in array.codecs)
    if array.inner_chunk_shape is None and again.is_direct:
        nbytes = (tmp_path / array.chunk_key(place)).stat().st_size
        assert nbytes == np.prod(array.chunk_shape) * array.item_bytes + array.checksum_bytes


@pytest.mark.parametrize("has_checksum", [True, False])
def test_an_index_comes_back(has_checksum: bool) -> None:
    array = zarr.ZarrArray(3, (4, 4), "int8", (4, 4), (2, 2), index=zarr.ShardIndex(True, has_checksum))
    absent = shard_index.ABSENT
    data = shard_index.encode([0, 4, absent, 8], [4, 4, absent, 4], has_checksum=has_checksum)
    nbytes = 12 + len(data)
    assert len(data) == shard_index.index_bytes(array)
    assert shard_index.decode(data, array, nbytes, "file").tolist() == [[0, 4], [4, 4], [-1, -1], [8, 4]]
    with pytest.raises(Corrupt, match="outside"):
        shard_index.decode(data, array, nbytes - 1, "file")
    damaged = bytes([data[0] ^ 1]) + data[1:]
    if has_checksum:
        with pytest.raises(Corrupt, match="checksum"):
            shard_index.decode(damaged, array, nbytes, "file")


@pytest.mark.parametrize(
    ("dtype", "written", "expected"),
    [
        ("float32", "NaN", np.float32("nan")),
        ("float32", "-Infinity", np.float32("-inf")),
        ("float32", "0x3f800000", np.float32(1)),
        ("float32", 1.5, np.float32(1.5)),
        ("int8", -3, np.int8(-3)),
        ("bool", True, np.True_),
        ("complex64", [1, "Infinity"], np.complex64(complex(1, np.inf))),
        ("bfloat16", None, np.float32(0)),
    ],
)
def test_fill_values(dtype: str, written: Any, expected: Any) -> None:
    found = zarr.ZarrArray(3, (1,), dtype, (1,), fill_value=written).fill_element()
    np.testing.assert_array_equal(found.astype(np.asarray(expected).dtype), expected)
