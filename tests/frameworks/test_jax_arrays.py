from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from tests.frameworks.jax_mesh import mesh
from tests.frameworks.store import bits, keep, load, save

from waystation.errors import Corrupt, InvalidInput, Unsupported
from waystation.frameworks import AbstractNumpy, dtypes, registry

JAX_DTYPES = [
    entry
    for entry in dtypes.TABLE.values()
    if entry.name not in ("complex32", "bcomplex32", "float4_e2m1fn_x2", "int1", "uint1")
]
WIDE = ("int64", "uint64", "float64", "complex128")
WAYS = pytest.mark.parametrize("way", ["private", "public"], indirect=True)


@pytest.fixture
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "public":
        request.getfixturevalue("without_private_jax")
    return str(request.param)


def codec() -> Any:
    return registry.codec_by_name("jax")


# ---- dtypes ------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("entry", JAX_DTYPES, ids=lambda entry: entry.name)
def test_every_dtype_round_trips(entry: dtypes.LogicalDtype, pattern: Any, way: str) -> None:
    host = pattern((3, 5), entry.host)
    with jax.enable_x64(entry.name in WIDE):
        array = jax.device_put(host)
        assert array.dtype == entry.host
        saved = save(array)
        assert saved.stored.dtype == entry.name
        loaded = load(saved)
    assert isinstance(loaded, jax.Array)
    assert loaded.dtype == entry.host
    assert bits(loaded) == bits(host)


@pytest.mark.share(3)
@WAYS
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("spec", [None, P(), P("x"), P(None, ("x", "y"))], ids=str)
def test_keys_round_trip_with_their_sharding(implementation: str, spec: Any, way: str) -> None:
    keys = jax.random.split(jax.random.key(7, impl=implementation), (4, 8))
    if spec is not None:
        keys = jax.device_put(keys, NamedSharding(mesh(2, 4), spec))
    saved = save(keys)
    assert saved.stored.dtype == f"key<{implementation}>"
    assert saved.stored.storage_dtype == "U32"
    for loaded in (load(saved), load(saved, codec().abstract(saved.stored)), load(saved, keys)):
        assert loaded.dtype == keys.dtype
        assert loaded.sharding.is_equivalent_to(keys.sharding, keys.ndim)
        assert bits(jax.random.key_data(loaded)) == bits(jax.random.key_data(keys))
        assert jax.random.normal(loaded[0, 0]) == jax.random.normal(keys[0, 0])


def test_keys_of_an_unknown_implementation_are_unsupported() -> None:
    saved = save(jax.random.key(0))
    saved.stored.dtype = "key<nobody>"
    with pytest.raises(Unsupported, match="PRNG implementation 'nobody'"):
        load(saved)


def test_key_data_of_another_width_is_corrupt() -> None:
    saved = save(jax.random.key(0))
    saved.stored.dtype = "key<rbg>"
    with pytest.raises(Corrupt, match="not that of key<rbg>"):
        load(saved)


def test_keys_are_not_numbers() -> None:
    with pytest.raises(InvalidInput, match="key_data"):
        load(save(jax.random.key(0)), AbstractNumpy((), "uint32"))


def test_weak_types_are_saved_as_what_they_are() -> None:
    weak = jnp.asarray(1.5)
    assert save(weak).stored.dtype == "float32"
    assert load(save(weak)) == 1.5


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_odd_shapes_round_trip(shape: tuple[int, ...]) -> None:
    array = jnp.ones(shape, jnp.bfloat16)
    loaded = load(save(array))
    assert (loaded.shape, loaded.dtype) == (array.shape, array.dtype)
    assert bits(loaded) == bits(array)


# ---- 64-bit values without 64-bit mode ---------------------------------------------------------


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_an_integer_that_does_not_fit_is_refused(value: int) -> None:
    abstract = jax.ShapeDtypeStruct((2,), np.int64)
    with pytest.raises(InvalidInput, match=r"jax_enable_x64.*abstract dtype"):
        load(save(np.array([0, value])), abstract)
    with jax.enable_x64(True):
        assert load(save(np.array([0, value])), abstract).tolist() == [0, value]


def test_an_integer_that_fits_is_narrowed() -> None:
    loaded = load(save(np.array([2**31 - 1, -(2**31)])), jax.ShapeDtypeStruct((2,), np.int64))
    assert loaded.dtype == jnp.int32
    assert loaded.tolist() == [2**31 - 1, -(2**31)]


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_wide_floats_are_refused_before_anything_is_read(dtype: str) -> None:
    stored = save(np.ones(2, dtype)).stored
    with pytest.raises(InvalidInput, match="would narrow") as raised:
        codec().targets([jax.ShapeDtypeStruct((2,), np.dtype(dtype))], [stored])
    assert raised.value.context["index"] == 0


def test_the_mode_of_the_asking_thread_counts() -> None:
    saved = save(np.array([2**40]))
    with jax.enable_x64(True):
        (target,) = codec().targets([jax.ShapeDtypeStruct((1,), np.int64)], [saved.stored])
    (loaded,) = codec().assemble([target], [saved.boxes(target)])
    with jax.enable_x64(True):
        assert loaded.dtype == np.int64
        assert loaded.tolist() == [2**40]


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.bool_, jnp.complex64])
def test_cpu_arrays_are_viewed_and_buffers_aliased(dtype: Any) -> None:
    array = jnp.ones((64, 3), dtype)
    (source,) = codec().sources([array])
    assert source.blocks[0].address == array.unsafe_buffer_pointer()
    assert not source.mutable
    saved = keep(source)
    (target,) = codec().default_targets([saved.stored])
    (buffer,) = saved.boxes(target)
    (loaded,) = codec().assemble([target], [[buffer]])
    assert loaded.unsafe_buffer_pointer() == buffer.ctypes.data


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int4])
@pytest.mark.parametrize("end", ["donate", "delete"])
@pytest.mark.parametrize("spec", [None, P("x"), P()], ids=str)
def test_sources_survive_donation_and_deletion(dtype: Any, end: str, spec: Any) -> None:
    host = (np.arange(512) % 7).astype(dtype)
    array = jax.jit(lambda: jnp.arange(512) % 7)().astype(dtype)
    if spec is not None:
        array = jax.device_put(array, NamedSharding(mesh(8), spec))
    (source,) = codec().sources([array])
    if end == "delete":
        array.delete()
    else:
        add = jax.jit(lambda value: value + jnp.ones((), value.dtype), donate_argnums=0)
        array = add(array)
        for _ in range(5):
            array = add(array)
        array.block_until_ready()
    filler = [jnp.full(512, 3, dtype) for _ in range(20)]
    jax.block_until_ready(filler)
    assert bits(keep(source).data) == bits(host)


@pytest.mark.parametrize("spec", [P(), P("x")], ids=str)
def test_donating_a_loaded_array_leaves_its_shared_buffer_alone(spec: Any) -> None:
    sharding = NamedSharding(mesh(8), spec)
    host = np.arange(1024, dtype=np.float32)
    saved = save(host)
    (target,) = codec().targets(
        [jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=sharding)], [saved.stored]
    )
    buffers = saved.boxes(target)
    before = [bits(buffer) for buffer in buffers]
    (loaded,) = codec().assemble([target], [buffers])
    addresses = {shard.data.unsafe_buffer_pointer() for shard in loaded.addressable_shards}
    assert addresses == {buffer.ctypes.data for buffer in buffers}
    changed = jax.jit(lambda value: value * 2, donate_argnums=0)(loaded)
    assert bits(changed) == bits(host * 2)
    assert [bits(buffer) for buffer in buffers] == before


def test_a_layout_of_its_own_is_saved_in_row_major_order() -> None:
    layout = pytest.importorskip("jax.experimental.layout")
    host = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    device = SingleDeviceSharding(jax.devices()[0])
    array = jax.device_put(host, layout.Format(layout.Layout((1, 0)), device))
    assert bits(load(save(array))) == bits(host)
    wanted = jax.ShapeDtypeStruct((2, 3), np.float32, sharding=array.format)
    loaded = load(save(host), wanted)
    assert loaded.format == array.format
    assert bits(loaded) == bits(host)


# ---- shardings ---------------------------------------------------------------------------------

SPECS = [P(), P("x"), P("y"), P(None, "x"), P("x", "y"), P(("x", "y")), P(("y", "x")), P(None, ("x", "y"))]


@WAYS
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int4])
def test_sharded_arrays_round_trip(spec: Any, dtype: Any, way: str) -> None:
    host = (np.arange(128) % 8).reshape(16, 8).astype(dtype)
    array = jax.device_put(host, NamedSharding(mesh(2, 4), spec))
    (source,) = codec().sources([array])
    assert len(source.blocks) == len({str(shard.index) for shard in array.addressable_shards})
    saved = keep(source)
    for loaded in (load(saved), load(saved, array)):
        assert loaded.sharding == array.sharding
        assert loaded.committed
        assert bits(loaded) == bits(host)


@WAYS
def test_any_sharding_becomes_any_other(way: str) -> None:
    host = np.arange(128, dtype=np.float32).reshape(16, 8)
    saved = save(jax.device_put(host, NamedSharding(mesh(2, 4), P("x", "y"))))
    for wanted in (
        NamedSharding(mesh(4), P(None, "x")),
        NamedSharding(mesh(8), P("x")),
        SingleDeviceSharding(jax.devices()[3]),
    ):
        abstract = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16, sharding=wanted)
        loaded = load(saved, abstract)
        assert loaded.sharding == wanted
        assert bits(loaded) == bits(host.astype(jnp.bfloat16))


@WAYS
def test_a_batch_may_mix_everything(way: str) -> None:
    sharding = NamedSharding(mesh(2, 4), P("y"))
    leaves = [
        jnp.arange(8),
        jax.device_put(jnp.arange(8.0), sharding),
        jax.random.key(1),
        jax.device_put(jnp.arange(3), jax.devices()[5]),
        jnp.ones((2, 2), jnp.int4),
    ]
    batch = [keep(source) for source in codec().sources(leaves)]
    for leaf, made in zip(leaves, load(batch), strict=True):
        assert made.sharding == leaf.sharding
        assert made.committed == leaf.committed
        assert made.dtype == leaf.dtype
    description = batch[0].stored.sharding
    assert description is not None
    assert codec().sources([leaves[0], leaves[4]])[0].sharding is not None


def test_equal_shardings_are_described_by_one_object() -> None:
    sharding = NamedSharding(mesh(2, 4), P("y"))
    sources = codec().sources([jax.device_put(jnp.zeros((n, 2)), sharding) for n in (4, 8, 12)])
    assert sources[0].sharding is sources[1].sharding is sources[2].sharding


def test_uncommitted_arrays_follow_the_default_device() -> None:
    saved = save(jnp.arange(4))
    with jax.default_device(jax.devices()[2]):
        loaded = load(saved)
        by_abstract = load(saved, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert loaded.devices() == by_abstract.devices() == {jax.devices()[2]}
    assert not loaded.committed
    assert not by_abstract.committed


def test_an_array_of_one_absent_device_goes_to_the_default_device() -> None:
    saved = save(jax.device_put(jnp.arange(4), jax.devices()[1]))
    assert saved.stored.sharding is not None
    saved.stored.sharding["device"] = 99
    assert load(saved).devices() == {jax.devices()[0]}


def test_a_mesh_that_is_not_here_is_refused_with_advice() -> None:
    saved = save(jax.device_put(jnp.arange(8), NamedSharding(mesh(8), P("x"))))
    assert saved.stored.sharding is not None
    saved.stored.sharding["mesh"]["devices"][3] = 99
    with pytest.raises(InvalidInput, match=r"mesh of 8 cpu devices.*ShapeDtypeStruct") as raised:
        load(saved)
    assert raised.value.context["index"] == 0
    abstract = codec().abstract(saved.stored)
    assert abstract.sharding is None
    assert load(saved, abstract).tolist() == list(range(8))


def test_metadata_is_an_abstract_state() -> None:
    array = jax.device_put(jnp.arange(8.0), NamedSharding(mesh(2, 4), P("y")))
    abstract = codec().abstract(save(array).stored)
    assert (abstract.shape, abstract.dtype, abstract.sharding) == (array.shape, array.dtype, array.sharding)
    assert load(save(array), abstract).sharding == array.sharding


def test_deleted_arrays_are_good_abstract_leaves() -> None:
    array = jax.device_put(jnp.arange(8.0), NamedSharding(mesh(8), P("x")))
    saved, sharding = save(array), array.sharding
    array.delete()
    assert load(saved, array).sharding == sharding


def test_descriptions_are_plain_json() -> None:
    for spec in SPECS:
        array = jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh(2, 4), spec))
        description = codec().sources([array])[0].sharding
        assert json.loads(json.dumps(description)) == description
