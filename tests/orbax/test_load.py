"""What genuine Orbax has saved, loaded by us: bit by bit what it loads itself."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from tests.frameworks.jax_mesh import mesh
from tests.orbax import oracle, states
from tests.support.long import amount

import waystation
from waystation.errors import Corrupt, InvalidInput, StructureMismatch, Unsupported
from waystation.tree import flatten

FORMATS = [
    {"use_ocdbt": ocdbt, "use_zarr3": zarr3, "use_compression": compression}
    for ocdbt, zarr3, compression in itertools.product([False, True], repeat=3)
]
_numbers = itertools.count()
_hypothesis = settings(
    max_examples=amount(2, 300),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def name_of(options: dict[str, Any]) -> str:
    return "-".join(name.removeprefix("use_") for name, value in options.items() if value) or "plain"


formats = pytest.mark.parametrize("options", FORMATS, ids=name_of)


@formats
@_hypothesis
@given(data=st.data())
def test_any_tree_in_any_format(tmp_path: Path, options: dict[str, Any], data: st.DataObject) -> None:
    state = data.draw(states.trees(), label="state")
    chunk_bytes = data.draw(st.sampled_from([None, 16, 64]), label="chunk_bytes")
    path = tmp_path / str(next(_numbers))
    oracle.save(path, state, chunk_bytes=chunk_bytes, **options)
    oracle.assert_same(oracle.ours(path), oracle.load(path))


@formats
@_hypothesis
@given(data=st.data())
@pytest.mark.share(4)
def test_any_sharding_to_any_other(tmp_path: Path, options: dict[str, Any], data: st.DataObject) -> None:
    dtype, seed = data.draw(st.sampled_from(states.DTYPES)), data.draw(st.integers(0, 1000))
    values = states.values((8, 16), dtype, seed)
    specs = st.sampled_from([(), ("x",), (None, "x"), ("y", "x"), (("x", "y"),), (None, ("y", "x"))])
    sizes = st.sampled_from([(8, 1), (4, 2), (2, 2), (1, 4)])
    drawn = [data.draw(st.tuples(specs, sizes)) for _ in range(2)]
    saved, wanted = (NamedSharding(mesh(*size), PartitionSpec(*spec)) for spec, size in drawn)
    path = tmp_path / str(next(_numbers))
    chunk_bytes = data.draw(st.sampled_from([None, 8]), label="chunk_bytes")
    oracle.save(path, {"array": jax.device_put(values, saved)}, chunk_bytes=chunk_bytes, **options)
    abstract = {"array": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=wanted)}
    loaded = oracle.ours(path, abstract)
    assert loaded["array"].sharding == wanted
    oracle.assert_same(loaded, oracle.load(path, abstract))  # whose NaN may be others than those saved


def everything() -> dict[str, Any]:
    """A leaf of every kind."""
    sharding = NamedSharding(mesh(4, 2), PartitionSpec("x", "y"))
    parameters = {
        "w": jax.device_put(jnp.arange(128.0).reshape(16, 8), sharding),
        "b": jnp.ones(3, jnp.bfloat16),
    }
    return {
        "params": parameters,
        "optimizer": optax.adamw(1e-3).init(parameters),
        "step": 7,
        "rate": 0.1,
        "done": True,
        "name": "run/1 ~ü",
        "host": np.arange(6, dtype=np.int64).reshape(2, 3),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(5, impl="rbg"), 4),
        "nothing": None,
        "pairs": ((), [], {}, (jnp.int32(1), [2, "x"])),
        "a/b": np.float32([1, 2]),
    }


@pytest.mark.share(9)
@formats
def test_a_training_state(tmp_path: Path, options: dict[str, Any]) -> None:
    oracle.save(tmp_path / "c", everything(), **options)
    oracle.assert_same(oracle.ours(tmp_path / "c"), oracle.load(tmp_path / "c"))


def abstract_of(state: Any) -> Any:
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        state,
    )


@formats
def test_the_containers_of_the_abstract_state_come_back(tmp_path: Path, options: dict[str, Any]) -> None:
    state = everything()
    oracle.save(tmp_path / "c", state, **options)
    loaded = oracle.ours(tmp_path / "c", abstract_of(state))
    oracle.assert_same(loaded, state)
    assert type(loaded["optimizer"]) is tuple
    assert loaded["optimizer"][0].mu["w"].sharding == state["params"]["w"].sharding


@formats
@pytest.mark.share(4)
def test_what_metadata_returns_is_an_abstract_state(tmp_path: Path, options: dict[str, Any]) -> None:
    state = {
        name: leaf for name, leaf in everything().items() if name != "done"
    }  # Orbax has no metadata of it
    oracle.save(tmp_path / "c", state, **options)
    found = waystation.metadata(tmp_path / "c")
    oracle.assert_same(oracle.ours(tmp_path / "c", found), oracle.load(tmp_path / "c"))
    theirs = oracle.v1.metadata(tmp_path / "c").metadata
    mine = found.metadata
    assert mine["params"]["w"].shape == theirs["params"]["w"].shape
    assert mine["params"]["w"].sharding == theirs["params"]["w"].sharding
    assert (mine["step"], mine["rate"]) == (theirs["step"], theirs["rate"]) == (0, 0.0)


@formats
def test_other_dtypes_and_kinds(tmp_path: Path, options: dict[str, Any]) -> None:
    oracle.save(tmp_path / "c", {"a": jnp.arange(12.0).reshape(3, 4), "n": 5, "h": np.arange(4)}, **options)
    abstract = {
        "a": np.empty((3, 4), np.float16),
        "n": jax.ShapeDtypeStruct((), jnp.int32),
        "h": jax.ShapeDtypeStruct((4,), jnp.float32),
    }
    loaded = oracle.ours(tmp_path / "c", abstract)
    assert loaded["a"].dtype == np.float16
    np.testing.assert_array_equal(loaded["a"], np.arange(12, dtype=np.float16).reshape(3, 4))
    assert int(loaded["n"]) == 5
    assert isinstance(loaded["h"], jax.Array)
    np.testing.assert_array_equal(loaded["h"], np.arange(4, dtype=np.float32))


@pytest.mark.share(3)
@pytest.mark.parametrize("limit_bytes", [1, 3 << 20, 64 << 20])
@formats
def test_within_a_bound_of_memory(tmp_path: Path, options: dict[str, Any], limit_bytes: int) -> None:
    sharding = NamedSharding(mesh(4, 2), PartitionSpec("x", "y"))
    values = np.random.default_rng(0).standard_normal((1024, 1536), np.float32)
    state = {
        "a": jax.device_put(values, sharding),
        "b": values[:100],
        "small": [values[i, :3] for i in range(9)],
    }
    oracle.save(tmp_path / "c", state, chunk_bytes=100_000, **options)
    context = waystation.Context()
    context.memory.read_concurrent_bytes = limit_bytes
    with context:
        loaded = oracle.ours(tmp_path / "c", {**abstract_of(state), "b": np.empty((100, 1536), np.float16)})
    oracle.assert_same({**loaded, "b": 0}, {**state, "b": 0})
    np.testing.assert_array_equal(loaded["b"], values[:100].astype(np.float16))


@formats
def test_other_extents(tmp_path: Path, options: dict[str, Any]) -> None:
    oracle.save(tmp_path / "c", {"a": jnp.arange(12.0).reshape(3, 4)}, **options)
    context = waystation.Context()
    context.array.loading.enable_padding_and_truncation = True
    with context:
        loaded = oracle.ours(tmp_path / "c", {"a": jax.ShapeDtypeStruct((4, 2), jnp.float32)})
    expected = np.zeros((4, 2), np.float32)
    expected[:3] = np.arange(12.0).reshape(3, 4)[:, :2]
    np.testing.assert_array_equal(loaded["a"], expected)


@formats
def test_in_the_background_and_on_the_host(tmp_path: Path, options: dict[str, Any]) -> None:
    state = {"a": jnp.arange(5), "n": 3}
    oracle.save(tmp_path / "c", state, **options)
    assert waystation.load_async(tmp_path / "c").result()["n"] == 3
    context = waystation.Context()
    context.array.loading.restore_on_host = True
    with context:
        loaded = oracle.ours(tmp_path / "c")
    assert type(loaded["a"]) is np.ndarray
    assert loaded["n"] == 3


@pytest.mark.parametrize(
    "options",
    [
        {"use_ocdbt": False, "use_compression": False},
        {"use_ocdbt": True},
        {"use_ocdbt": False, "use_zarr3": False},
    ],
    ids=name_of,
)
def test_tensorstore_is_not_needed(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = everything()
    oracle.save(tmp_path / "c", state, **options)
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    oracle.assert_same(oracle.ours(tmp_path / "c", abstract_of(state)), state)


def test_only_the_bytes_that_are_needed_are_read(tmp_path: Path) -> None:
    oracle.save(
        tmp_path / "c", {"a": np.arange(1 << 20, dtype=np.float32)}, use_ocdbt=False, use_compression=False
    )
    found: list[waystation.LoadStatistics] = []
    context = waystation.Context()
    context.array.loading.on_statistics = found.append
    context.array.loading.enable_padding_and_truncation = True
    with context:
        oracle.ours(tmp_path / "c", {"a": np.empty(1 << 10, np.float32)})
    (statistics,) = found
    assert statistics.bytes_needed == 4 << 10
    assert statistics.bytes_read < 16 << 10


def test_rich_types_where_they_are_asked_for(tmp_path: Path) -> None:
    state = {"pair": states.Pair(jnp.ones(2), (1, [2, None])), "empty": optax.EmptyState(), "t": ()}
    oracle.save(tmp_path / "c", state, rich=True)
    oracle.assert_same(oracle.ours(tmp_path / "c"), oracle.load(tmp_path / "c"))
    waystation.register_node(states.Pair)
    options = waystation.Context()
    options.pytree.saving.pytree_metadata_options.support_rich_types = True
    with options:
        loaded = oracle.ours(tmp_path / "c")
    assert type(loaded["pair"]) is states.Pair
    assert type(loaded["pair"].second) is tuple
    assert (loaded["empty"], loaded["t"]) == ((), ())
    with oracle.context(rich=True):
        theirs = oracle.load(tmp_path / "c")
    assert theirs["pair"]._fields == loaded["pair"]._fields
    assert (theirs["empty"], theirs["t"]) == ((), ())


@pytest.mark.share(3)
@pytest.mark.parametrize(
    "state",
    [jnp.arange(3), 5, 2.5, "text", [jnp.ones(2), "x"], (1, 2)],
    ids=lambda state: type(state).__name__,
)
@formats
def test_states_that_are_no_dict(tmp_path: Path, options: dict[str, Any], state: Any) -> None:
    try:
        oracle.save(tmp_path / "c", state, **options)
    except Exception:
        pytest.skip("genuine Orbax cannot save it")
    oracle.assert_same(oracle.ours(tmp_path / "c"), oracle.load(tmp_path / "c"))


# ---- what is refused ---------------------------------------------------------------------------


def test_a_difference_to_the_abstract_state_is_shown(tmp_path: Path) -> None:
    oracle.save(tmp_path / "c", {"layers": [jnp.ones(2)] * 3, "step": 1})
    abstract = {"layers": [jax.ShapeDtypeStruct((2,), jnp.float32)] * 4, "step": int}
    with pytest.raises(StructureMismatch, match=r"layers.*3.*only in the abstract state"):
        oracle.ours(tmp_path / "c", abstract)
    with pytest.raises(ValueError, match=r"(?i)do not match"):
        oracle.load(tmp_path / "c", abstract)


def test_keys_of_one_text_are_refused(tmp_path: Path) -> None:
    oracle.save(tmp_path / "c", {7: jnp.ones(2)})
    loaded = oracle.ours(tmp_path / "c", {7: jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert list(loaded) == [7]
    with pytest.raises(InvalidInput, match="'7'"):
        oracle.ours(tmp_path / "c", {7: jax.ShapeDtypeStruct((2,), jnp.float32), "7": int})


def test_an_array_that_was_written_over_another_is_refused(tmp_path: Path) -> None:
    state = {"a.b": np.zeros(2), "a": {"b": np.ones(2)}}
    oracle.save(tmp_path / "c", state)
    with pytest.raises(Corrupt, match="only one was kept"):
        oracle.ours(tmp_path / "c")


def test_checksums_cannot_be_verified(tmp_path: Path) -> None:
    oracle.save(tmp_path / "c", {"a": jnp.ones(2)})
    context = waystation.Context()
    context.array.loading.verify = True
    with context, pytest.raises(InvalidInput, match="no checksums"):
        oracle.ours(tmp_path / "c")


def test_a_missing_sharding_file_matters_to_nobody(tmp_path: Path) -> None:
    """Genuine Orbax then wants an abstract state."""
    oracle.save(tmp_path / "c", {"a": jnp.arange(4)})
    (tmp_path / "c" / "state" / "_sharding").unlink()
    np.testing.assert_array_equal(oracle.ours(tmp_path / "c")["a"], np.arange(4))


CODECS: list[tuple[str, Callable[[], dict[str, Any]]]] = [
    ("gzip", lambda: {"name": "gzip", "configuration": {"level": 5}}),
    (
        "blosc",
        lambda: {
            "name": "blosc",
            "configuration": {
                "cname": "lz4",
                "clevel": 5,
                "shuffle": "shuffle",
                "typesize": 4,
                "blocksize": 0,
            },
        },
    ),
]


@pytest.mark.parametrize(("name", "codec"), CODECS, ids=[name for name, _ in CODECS])
def test_other_codecs_go_through_tensorstore(
    tmp_path: Path, name: str, codec: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorstore

    oracle.save(tmp_path / "c", {"a": jnp.zeros((4, 6))}, use_ocdbt=False)
    directory = tmp_path / "c" / "state" / "a"
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        path.unlink()
    values = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
    store = tensorstore.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{directory}/"},
            "metadata": {
                "shape": [4, 6],
                "data_type": "float32",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 4]}},
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, codec()],
            },
        },
        create=True,
    ).result()
    store.write(values).result()
    np.testing.assert_array_equal(oracle.ours(tmp_path / "c")["a"], values)
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(Unsupported, match=r"pip install 'tensorstore>="):
        oracle.ours(tmp_path / "c")


def test_nothing_but_the_leaves_of_the_tree_is_compared(tmp_path: Path) -> None:
    """Lists for tuples, dicts for named tuples: what Orbax does not tell apart, an abstract state may."""
    oracle.save(tmp_path / "c", {"a": [jnp.ones(2), jnp.zeros(2)]})
    abstract = {"a": tuple(jax.ShapeDtypeStruct((2,), jnp.float32) for _ in range(2))}
    leaves, structure = flatten(oracle.ours(tmp_path / "c", abstract))
    assert structure == flatten(abstract)[1]
    assert len(leaves) == 2
