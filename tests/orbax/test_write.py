"""What we write in Orbax's layouts, genuine Orbax loads as what it would have written itself.

The oracle of nearly every test is Orbax twice: it saves the same state itself, and it loads both.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.orbax import oracle, writing

import waystation
from waystation import errors

LAYOUTS: dict[str, dict[str, Any]] = {
    "ocdbt": {"use_ocdbt": True},
    "ocdbt-plain": {"use_ocdbt": True, "use_compression": False},
    "ocdbt-zarr2": {"use_ocdbt": True, "use_zarr3": False},
    "files": {"use_ocdbt": False},
    "files-plain": {"use_ocdbt": False, "use_compression": False},
    "files-zarr2": {"use_ocdbt": False, "use_zarr3": False},
    "files-zarr2-plain": {"use_ocdbt": False, "use_zarr3": False, "use_compression": False},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)

DTYPES = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float8_e3m4", "float8_e8m0fnu"),
    *("int4", "int2", "float4_e2m1fn"),
]


class Moments(NamedTuple):
    first: Any
    second: Any


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("x", "y"))


def sharded(array: np.ndarray[Any, Any], *spec: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh(), PartitionSpec(*spec)))


def rich_state() -> dict[str, Any]:
    values = np.arange(96.0, dtype=np.float32).reshape(12, 8)
    return {
        "params": {
            "w": sharded(values, "x", "y"),
            "rows": sharded(values, ("x", "y")) if values.shape[0] % 8 == 0 else sharded(values, "x"),
            "same": sharded(values),
            "bias": jnp.float32(0.5),
        },
        "opt": Moments([jnp.zeros(3), (np.ones((2, 2)), 7)], None),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 4),
        "host": np.arange(10, dtype=np.int16),
        "step": 41,
        "large": 2**63 + 1,
        "rate": 1e-3,
        "flag": True,
        "name": "run/7 with \u00fcml\u00e4ut",
        "long": "x" * 100_000,
        "nothing": None,
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "numbers": {7: np.float64(2.5) * np.ones(1), 11: 2.5},
        "a/slash": np.ones(2, np.uint8),
    }


@layouts
@pytest.mark.share(4)
def test_orbax_loads_it_as_its_own(layout: dict[str, Any], tmp_path: Path) -> None:
    state = rich_state()
    oracle.save(tmp_path / "theirs", state, **layout)
    writing.save(tmp_path / "ours", state, **layout)
    oracle.assert_same(oracle.load(tmp_path / "ours"), oracle.load(tmp_path / "theirs"))


@layouts
def test_orbax_loads_it_into_an_abstract_state(layout: dict[str, Any], tmp_path: Path) -> None:
    state = rich_state()
    other = NamedSharding(mesh(), PartitionSpec("y", "x"))

    def abstract(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        sharding = other if leaf.shape == (12, 8) else leaf.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    wanted = jax.tree.map(abstract, state)
    writing.save(tmp_path / "ours", state, **layout)
    loaded = oracle.load(tmp_path / "ours", wanted)
    expected = jax.tree.map(
        lambda leaf, want: jax.device_put(leaf, want.sharding) if isinstance(leaf, jax.Array) else leaf,
        state,
        wanted,
    )
    oracle.assert_same(loaded, expected)


@layouts
def test_version_0_loads_it_too(layout: dict[str, Any], tmp_path: Path) -> None:
    state = rich_state()
    oracle.save(tmp_path / "theirs", state, **layout)
    writing.save(tmp_path / "ours", state, **layout)
    oracle.assert_same(
        writing.load_by_version0(tmp_path / "ours"), writing.load_by_version0(tmp_path / "theirs")
    )


@pytest.mark.share(3)
@layouts
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str, layout: dict[str, Any], tmp_path: Path) -> None:
    host = np.dtype(getattr(ml_dtypes, dtype, dtype))
    bits = np.random.default_rng(0).integers(0, 256, 64 * host.itemsize, np.uint8)
    if dtype == "bool":
        bits %= 2
    array = bits.view(host)
    if dtype in ("int4", "int2", "float4_e2m1fn"):  # in memory one to a byte, of which not all bits count
        array = np.arange(64).astype(host)
    state: dict[str, Any] = {"numpy": array.reshape(8, 8)}
    if host.itemsize < 8 or dtype == "complex64":  # what JAX has without x64
        state |= {"jax": sharded(array.reshape(8, 8), "x", "y")}
    writing.save(tmp_path / "ours", state, **layout)
    loaded = oracle.load(tmp_path / "ours")
    assert loaded.keys() == state.keys()
    for name, leaf in state.items():
        writing.assert_same_bits(loaded[name], leaf)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 0), (2, 3, 4), (1, 1, 1, 1, 1)])
@layouts
def test_every_shape(shape: tuple[int, ...], layout: dict[str, Any], tmp_path: Path) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    state = {"array": array, "strided": np.ones((*shape, 2), np.float32)[..., 1]}
    writing.save(tmp_path / "ours", state, **layout)
    oracle.assert_same(oracle.load(tmp_path / "ours"), state)


@layouts
def test_a_bare_array(layout: dict[str, Any], tmp_path: Path) -> None:
    array = jnp.arange(6.0)
    writing.save(tmp_path / "ours", array, **layout)
    oracle.assert_same(oracle.load(tmp_path / "ours"), array)


@layouts
def test_chunks_of_a_size_and_along_axes(layout: dict[str, Any], tmp_path: Path) -> None:
    array = np.arange(64.0 * 48).reshape(64, 48)
    state = {"sharded": sharded(array.astype(np.float32), "x", "y"), "single": array}
    context = writing.layout_of(layout)
    context.array.saving.storage_options.chunk_bytes = 1024
    context.array.saving.storage_options.chunk_axes = (1,)
    with context:
        waystation.save(tmp_path / "ours", state)
    oracle.assert_same(oracle.load(tmp_path / "ours"), state)
    metadata = json.loads((tmp_path / "ours/state/array_metadatas/process_0").read_bytes())
    (entry,) = metadata["array_metadatas"]
    assert entry["array_metadata"]["chunk_shape"][1] < 24


@pytest.mark.share(9)
@layouts
def test_arrays_larger_than_a_chunk(layout: dict[str, Any], tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    large = random.integers(0, 1 << 16, (4, 40 << 18), np.uint16)  # 80 MiB
    state = {"large": large, "sharded": sharded(large[:, : 8 << 18], "x"), "small": np.ones(3)}
    writing.save(tmp_path / "ours", state, **layout)
    oracle.assert_same(oracle.load(tmp_path / "ours"), state)


def test_a_cast_on_the_way(tmp_path: Path) -> None:
    context = writing.layout_of({"use_ocdbt": False, "use_compression": False})
    context.array.saving.storage_options.dtype = "bfloat16"
    values = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    with context:
        waystation.save(tmp_path / "ours", {"w": sharded(values, "x", "y"), "n": np.arange(3)})
    loaded = oracle.load(tmp_path / "ours")
    writing.assert_same_bits(loaded["w"], values.astype(ml_dtypes.bfloat16))
    assert loaded["n"].dtype == np.int64


def test_custom_metadata(tmp_path: Path) -> None:
    context = writing.layout_of({"use_ocdbt": True})
    with context:
        waystation.save(tmp_path / "ours", {"a": np.ones(1)}, custom_metadata={"loss": 0.5, "tags": ["x"]})
    found = oracle.v1.metadata(tmp_path / "ours")
    assert found.custom_metadata == {"loss": 0.5, "tags": ["x"]}
    assert found.init_timestamp_nsecs < found.commit_timestamp_nsecs
    with context, pytest.raises(ValueError, match="strings as keys"):
        waystation.save(tmp_path / "other", {"a": np.ones(1)}, custom_metadata=[1])


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_files_and_metadata_are_those_of_orbax(use_ocdbt: bool, tmp_path: Path) -> None:
    state = {**rich_state(), "opt": [1, (2.0, None)]}
    oracle.save(tmp_path / "theirs", state, use_ocdbt=use_ocdbt)
    writing.save(tmp_path / "ours", state, use_ocdbt=use_ocdbt)

    def content(root: str, file: str) -> Any:
        return json.loads((tmp_path / root / file).read_bytes())

    for file in ("state/_METADATA", "state/_sharding", "state/_strings.json"):
        theirs, ours = content("theirs", file), content("ours", file)
        if file.endswith("_METADATA"):
            for body in (theirs, ours):
                for entry in body["tree_metadata"].values():
                    entry["value_metadata"].pop("write_shape", None)  # where arrays are cut is ours to say
        assert ours == theirs, file
    theirs, ours = (content(root, "_CHECKPOINT_METADATA") for root in ("theirs", "ours"))
    assert ours.keys() == theirs.keys()
    assert ours["item_handlers"] == theirs["item_handlers"]
    expected = (tmp_path / "theirs" / "commit_success.txt").read_text().replace("theirs", "ours")
    assert (tmp_path / "ours" / "commit_success.txt").read_text() == expected
    # Orbax asks only whether it is there; ours says that there are checksums.
    assert (tmp_path / "theirs" / "orbax.checkpoint").read_text() == ""
    assert ".waystation-checksums" in (tmp_path / "ours" / "orbax.checkpoint").read_text()


def test_overwriting(tmp_path: Path) -> None:
    path = tmp_path / "ours"
    for number, layout in enumerate(LAYOUTS.values()):
        writing.save(path, {"n": np.full(3, number)}, overwrite=True, **layout)
        assert oracle.load(path)["n"].tolist() == [number] * 3
    with pytest.raises(ValueError, match="exists already"):
        writing.save(path, {"n": 1}, use_ocdbt=True)
    waystation.save(path, {"n": 1}, overwrite=True)
    assert waystation.load(path) == {"n": 1}
    writing.save(path, {"n": 2}, overwrite=True, use_ocdbt=True)
    assert oracle.load(path) == {"n": 2}
    assert os.listdir(tmp_path) == ["ours"]


@layouts
def test_an_asynchronous_save_holds_what_it_was_given(layout: dict[str, Any], tmp_path: Path) -> None:
    state = {"changes": np.arange(1 << 20), "odd": np.arange(999.0), "jax": jnp.arange(1 << 18)}
    expected = jax.tree.map(np.array, state)
    context = writing.layout_of(layout)
    context.memory.snapshot_bytes = 3 << 20  # less than there is
    with context:
        response = waystation.save_async(tmp_path / "ours", state)
    state["changes"][:] = -1
    state["odd"][:] = -1
    response.result()
    loaded = oracle.load(tmp_path / "ours")
    for name, leaf in expected.items():
        writing.assert_same_bits(loaded[name], leaf)


@layouts
def test_a_cancelled_save_leaves_nothing(layout: dict[str, Any], tmp_path: Path) -> None:
    context = writing.layout_of(layout)
    with context:
        response = waystation.save_async(tmp_path / "ours", {"a": np.ones(32 << 20)})
    response.cancel()
    with pytest.raises(errors.Cancelled):
        response.result()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_what_the_layout_cannot_hold_is_refused(use_ocdbt: bool, tmp_path: Path) -> None:
    ones = np.ones(2)
    refused: list[tuple[dict[Any, Any], str]] = [
        ({"a.b": ones, "a": {"b": ones}}, "in one place"),
        ({7: ones, "7": ones}, "in one place"),
        ({"a": {"x": b"bytes"}}, r"\['a'\]\['x'\].*bytes"),
        ({"a": b"b" * 100_000}, "bytes"),
        ({"a": 2**64}, "65 bits"),
        ({"a": 1j}, "complex"),
        ({"a": np.array(["text"])}, "no arrays of"),
        ({"a": np.ones(2, ">f4")}, "no arrays of"),
        ({"a": np.zeros(2, ml_dtypes.uint4)}, "no arrays of uint4"),
        ({"a": np.zeros(2, ml_dtypes.float8_e4m3)}, "no arrays of float8_e4m3"),
        ({"..": ones}, "is no path"),
        ({"": {"": ones}, "b": ones}, "is no path"),  # the name is a dot alone
        ({"a": "\ud800"}, "not Unicode"),
        ({"x" * 300: ones}, "255 bytes"),
    ]
    for state, message in refused:
        with pytest.raises((errors.InvalidInput, errors.Unsupported), match=message) as raised:
            writing.save(tmp_path / "ours", state, use_ocdbt=use_ocdbt)
        assert raised.value.context["array"], state
    assert os.listdir(tmp_path) == []


def test_files_in_the_way_of_each_other_are_refused(tmp_path: Path) -> None:
    ones = np.ones(2)
    for number, name in enumerate(("a/c.0", "a/zarr.json", "_METADATA", "_sharding/x")):
        state = {name: ones, "a": ones}
        path = tmp_path / f"checkpoint {number}"
        with pytest.raises(errors.InvalidInput, match="rename it"):
            writing.save(path, state, use_ocdbt=False)
        writing.save(path, state, use_ocdbt=True)
        assert oracle.load(path).keys() == state.keys()
    fine = {"a": ones, "a/b": ones, "a/c": {"d": ones}}
    writing.save(tmp_path / "fine", fine, use_ocdbt=False)
    oracle.assert_same(oracle.load(tmp_path / "fine"), fine)


def test_numpy_scalars_come_back_as_arrays_without_axes(tmp_path: Path) -> None:
    writing.save(tmp_path / "ours", {"a": np.float32(1.5), "b": np.int8(-3)}, use_ocdbt=True)
    loaded = oracle.load(tmp_path / "ours")
    oracle.assert_same(loaded, {"a": np.array(1.5, np.float32), "b": np.array(-3, np.int8)})


def test_bounded_memory(tmp_path: Path) -> None:
    context = writing.layout_of({"use_ocdbt": True})
    context.memory.write_concurrent_bytes = 4 << 20
    state = [np.full(1 << 18, number, np.int32) for number in range(40)]
    with context:
        waystation.save(tmp_path / "ours", state)
    oracle.assert_same(oracle.load(tmp_path / "ours"), state)
    data = list((tmp_path / "ours/state/ocdbt.process_0/d").iterdir())
    assert len(data) >= 40, "one file for each batch, of one array here"


def test_data_files_are_rolled_over(tmp_path: Path) -> None:
    state = [np.full(100_000, number, np.int32) for number in range(8)]
    options = {"use_ocdbt": True, "use_compression": False, "ocdbt_target_data_file_size": 1_000_000}
    writing.save(tmp_path / "ours", state, **options)
    oracle.assert_same(oracle.load(tmp_path / "ours"), state)
    sizes = [file.stat().st_size for file in (tmp_path / "ours/state/ocdbt.process_0/d").iterdir()]
    assert len(sizes) == 4
    assert max(sizes) <= 1_000_000
