"""Safetensors files under `checkpoint_layout`: loaded, described and refused as genuine Orbax does it."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as oracle
from tests.orbax import process_scenarios
from tests.support.programs import running

import waystation
from waystation import errors

LAYOUTS = ("AUTO", "SAFETENSORS")
DTYPES = (np.float32, np.float64, np.int8, np.uint16, np.int64, np.bool_, ml_dtypes.bfloat16, np.float16)


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind() -> Iterator[None]:
    """Collects the coroutines that Orbax leaves behind where it raises: here, where warnings of them are
    expected, and not in the next test of another module."""
    yield
    gc.collect()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A published model in one file."""
    generator = np.random.default_rng(3)
    tensors = {
        f"layers.{number}.weight": generator.integers(0, 2, (8, 4 + number)).astype(dtype)
        for number, dtype in enumerate(DTYPES)
    }
    tensors["scalar"], tensors["empty"] = np.array(2.5, np.float32), np.zeros((0, 3), np.float32)
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"licence": "none"})
    return path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A directory of files, of which no name says that they belong together."""
    directory = tmp_path / "shards"
    directory.mkdir()
    for number, name in enumerate(("model", "adapter", "other")):
        tensors = {f"{name}.a": np.full(5, number, np.float32), f"{name}.b": np.arange(number + 1)}
        safetensors.numpy.save_file(tensors, directory / f"{name}.safetensors", metadata={"from": name})
    return directory


def _with_layout(library: Any, layout: str, call: Callable[[], Any]) -> Any:
    context = library.Context()
    context.checkpoint_layout = getattr(library.options.CheckpointLayout, layout)
    with context:
        return call()


def _outcome(library: Any, layout: str, call: Callable[[], Any]) -> Any:
    """What a call returns, or raises."""
    try:
        return _with_layout(library, layout, call)
    except Exception as error:
        return error


def _same(ours: Any, theirs: Any) -> None:
    assert set(ours) == set(theirs)
    for name, other in theirs.items():
        own = ours[name]
        assert isinstance(own, jax.Array) == isinstance(other, jax.Array), name
        assert own.dtype == other.dtype
        if isinstance(own, jax.Array):
            assert own.sharding.is_equivalent_to(other.sharding, other.ndim)
        assert np.asarray(own).tobytes() == np.asarray(other).tobytes(), name


def _same_kind(ours: Any, theirs: Exception) -> None:
    """An error of ours that a program catches which was written for Orbax's."""
    assert isinstance(ours, errors.WaystationError), ours
    kind = type(theirs)
    named = getattr(errors, kind.__name__, kind)
    assert isinstance(ours, named), (repr(ours), repr(theirs))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_comes_as_numpy_arrays(model: Path, shards: Path, layout: str) -> None:
    for path in (model, shards):
        theirs = _with_layout(oracle, layout, lambda path=path: oracle.load(path))
        for name in ("AUTO", None, "anything"):
            ours = _with_layout(
                waystation,
                layout,
                lambda path=path, name=name: waystation.load(path, checkpointable_name=name),
            )
            _same(ours, theirs)
        _same(
            _with_layout(waystation, layout, lambda path=path: waystation.load_async(path)).result(), theirs
        )


@pytest.mark.parametrize("seed", range(6))
def test_abstract_states_are_loaded_as_orbax_loads_them(model: Path, seed: int) -> None:
    chance = random.Random(seed)
    devices = jax.devices()
    mesh = Mesh(np.array(devices).reshape(2, -1), ("x", "y"))
    stored = safetensors.numpy.load_file(model)
    abstract = {}
    for name in chance.sample(sorted(stored), chance.randint(0, len(stored))):
        shape, dtype = stored[name].shape, stored[name].dtype
        if dtype.itemsize == 8:
            dtype = np.dtype(f"{dtype.kind}4")  # what JAX has unless told otherwise
        specs = [
            PartitionSpec(),
            *([PartitionSpec("x"), PartitionSpec(("x", "y"))] if shape[:1] == (8,) else []),
        ]
        sharding = chance.choice([None, *(NamedSharding(mesh, spec) for spec in specs)])
        if chance.random() < 0.3 and dtype == np.float32:
            dtype = np.dtype(ml_dtypes.bfloat16)
        abstract[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    theirs = _with_layout(oracle, "SAFETENSORS", lambda: oracle.load(model, abstract))
    for layout in LAYOUTS:
        _same(_with_layout(waystation, layout, lambda: waystation.load(model, abstract)), theirs)


SPEC = jax.ShapeDtypeStruct((8, 4), np.float32)
REFUSED_STATES: dict[str, Any] = {
    "a tensor that is not there": {"layers.9.weight": SPEC},
    "one of several is not there": {"layers.0.weight": SPEC, "layers.9.weight": SPEC},
    "nested": {"layers": {"0": SPEC}},
    "nested beside flat": {"layers.0.weight": SPEC, "layers": [SPEC]},
    "a list": [SPEC],
    "an array alone": SPEC,
    "None in a dict": {"layers.0.weight": None},
    "another shape": {"layers.0.weight": jax.ShapeDtypeStruct((8, 5), np.float32)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", REFUSED_STATES)
def test_what_orbax_refuses_is_refused(model: Path, layout: str, case: str) -> None:
    abstract = REFUSED_STATES[case]
    theirs = _outcome(oracle, layout, lambda: oracle.load(model, abstract))
    assert isinstance(theirs, Exception)
    _same_kind(_outcome(waystation, layout, lambda: waystation.load(model, abstract)), theirs)


CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "load_checkpointables": lambda library, path: library.load_checkpointables(path),
    "load_checkpointables_async": lambda library, path: library.load_checkpointables_async(path),
    "checkpointables_metadata": lambda library, path: library.checkpointables_metadata(path),
}
SAVES: dict[str, Callable[[Any, Path], Any]] = {
    "save": lambda library, path: library.save(path, {"a": np.ones(2)}),
    "save_async": lambda library, path: library.save_async(path, {"a": np.ones(2)}).result(),
    "save_checkpointables": lambda library, path: library.save_checkpointables(
        path, {"s": {"a": np.ones(2)}}
    ),
    "an overwriting save": lambda library, path: library.save(path, {"a": np.ones(2)}, overwrite=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CALLS)
def test_a_model_has_no_checkpointables(model: Path, layout: str, case: str) -> None:
    theirs = _outcome(oracle, layout, lambda: CALLS[case](oracle, model))
    assert isinstance(theirs, NotImplementedError)
    _same_kind(_outcome(waystation, layout, lambda: CALLS[case](waystation, model)), theirs)


@pytest.mark.parametrize("case", SAVES)
def test_orbax_saves_no_model_and_ours_a_state(tmp_path: Path, case: str) -> None:
    theirs = _outcome(oracle, "SAFETENSORS", lambda: SAVES[case](oracle, tmp_path / "theirs"))
    assert isinstance(theirs, NotImplementedError)
    ours = tmp_path / "ours"
    outcome = _outcome(waystation, "SAFETENSORS", lambda: SAVES[case](waystation, ours))
    if case == "save_checkpointables":
        _same_kind(outcome, theirs)
        assert list(tmp_path.glob("*ours*")) == []
        return
    assert outcome is None
    assert [path.name for path in ours.iterdir()] == ["model.safetensors"]
    for library in (oracle, waystation):
        loaded = _with_layout(library, "SAFETENSORS", lambda library=library: library.load(ours))
        np.testing.assert_array_equal(loaded["a"], np.ones(2))


def _saved(path: Path, state: Any, **arguments: Any) -> Any:
    return _with_layout(waystation, "SAFETENSORS", lambda: waystation.save(path, state, **arguments))


def test_what_is_saved_as_a_model_is_opened_by_the_package(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))
    sharded = jax.device_put(
        jax.numpy.arange(64.0).reshape(8, 8), NamedSharding(mesh, PartitionSpec("x", "y"))
    )
    state = {"layers": [{"w": sharded}, {"w": np.arange(3, dtype=np.int8)}], "head": torch.ones(2, 2)}
    _saved(tmp_path / "m.safetensors", state, custom_metadata={"licence": "none"})
    with safetensors.safe_open(tmp_path / "m.safetensors", "np") as opened:
        assert opened.metadata()["licence"] == "none"
        assert set(opened.keys()) == {"layers.0.w", "layers.1.w", "head"}
        np.testing.assert_array_equal(opened.get_tensor("layers.0.w"), np.asarray(sharded))


def test_a_model_is_replaced_only_when_that_is_asked_for(tmp_path: Path) -> None:
    model = tmp_path / "m"
    _saved(model, {"a": np.zeros(2)})
    with pytest.raises(errors.Conflict):
        _saved(model, {"a": np.ones(2)})
    _saved(model, {"a": np.ones(2)}, overwrite=True)
    assert _with_layout(waystation, "SAFETENSORS", lambda: waystation.load(model))["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"checkpointable_name": "weights"}, errors.Unsupported, "checkpointable_name"),
        ({"unchanged_from": "earlier"}, errors.Unsupported, "unchanged_from"),
        ({"custom_metadata": {"step": 3}}, errors.InvalidInput, "dict of strings"),
        ({"custom_metadata": ["licence"]}, errors.InvalidInput, "dict of strings"),
    ],
)
def test_what_a_model_has_no_place_for_is_refused(
    tmp_path: Path, arguments: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        _saved(tmp_path / "m", {"a": np.ones(2)}, **arguments)
    with pytest.raises(errors.UnsupportedLeaf, match="hold arrays only"):
        _saved(tmp_path / "m", {"a": np.ones(2), "step": 3})
    assert not list(tmp_path.iterdir())


def test_partial_saves_and_checkpointers_save_no_models(tmp_path: Path) -> None:
    def partial() -> None:
        waystation.partial.save(tmp_path / "c", {"a": np.ones(2)})

    def step() -> None:
        with waystation.training.Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(1, {"a": np.ones(2)})

    for call in (partial, step):
        with pytest.raises(errors.Unsupported, match="SAFETENSORS"):
            _with_layout(waystation, "SAFETENSORS", call)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("layout", [*LAYOUTS, "ORBAX"])
def test_what_is_no_checkpoint_of_the_layout(model: Path, shards: Path, tmp_path: Path, layout: str) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "model.bin").write_bytes(model.read_bytes())
    oracle.save(tmp_path / "orbax", {"a": np.ones(2)})
    for path in (model, shards, tmp_path / "none", tmp_path / "model.bin", tmp_path / "orbax"):
        theirs = _outcome(oracle, layout, lambda path=path: oracle.load(path))
        ours = _outcome(waystation, layout, lambda path=path: waystation.load(path))
        if isinstance(theirs, Exception):
            assert isinstance(theirs, oracle.errors.InvalidLayoutError)
            assert isinstance(ours, errors.InvalidLayoutError), (path, ours)
        else:
            _same(ours, theirs)
        # Orbax's answer is True for any directory, also for an empty one.
        assert waystation.is_orbax_checkpoint(path) == (path.name == "orbax")


def test_native_checkpoints_are_no_models_though_their_data_are_safetensors(tmp_path: Path) -> None:
    waystation.save(tmp_path / "c", {"a": np.arange(3)})
    with pytest.raises(errors.InvalidLayoutError, match=r"set AUTO"):
        _with_layout(waystation, "SAFETENSORS", lambda: waystation.load(tmp_path / "c"))
    assert _with_layout(waystation, "AUTO", lambda: waystation.load(tmp_path / "c"))["a"].tolist() == [
        0,
        1,
        2,
    ]
    for layout in LAYOUTS:
        with pytest.raises(errors.CheckpointNotFound):
            _with_layout(waystation, layout, lambda: waystation.load(tmp_path / "absent.safetensors"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metadata_are_those_of_orbax(model: Path, shards: Path, layout: str) -> None:
    for path in (model, shards):
        theirs = _with_layout(oracle, layout, lambda path=path: oracle.metadata(path))
        ours = _with_layout(waystation, layout, lambda path=path: waystation.metadata(path))
        assert ours.metadata == theirs.metadata
        assert ours.custom_metadata == theirs.custom_metadata
        assert ours.init_timestamp_nsecs is theirs.init_timestamp_nsecs is None
        # Orbax's is in seconds, whatever its name.
        assert ours.commit_timestamp_nsecs // 10**9 == theirs.commit_timestamp_nsecs
        asked = {name: leaf for name, leaf in ours.metadata.items() if leaf.dtype.itemsize < 8}
        _same(
            _with_layout(waystation, layout, lambda path=path, asked=asked: waystation.load(path, asked)),
            _with_layout(oracle, layout, lambda path=path, asked=asked: oracle.load(path, asked)),
        )


def test_damaged_files_are_refused(model: Path, shards: Path) -> None:
    with model.open("r+b") as file:
        file.truncate(model.stat().st_size - 8)
    twice = shards / "twice.safetensors"
    twice.write_bytes((shards / "model.safetensors").read_bytes())
    for path in (model, shards):
        theirs = _outcome(oracle, "SAFETENSORS", lambda path=path: oracle.load(path))
        assert isinstance(theirs, ValueError)
        ours = _outcome(waystation, "SAFETENSORS", lambda path=path: waystation.load(path))
        assert isinstance(ours, errors.Corrupt)
    twice.rename(shards / "part-00001-of-00002.safetensors")
    (shards / "model.safetensors").unlink()
    with pytest.raises(errors.Corrupt, match="part-00002-of-00002"):
        _with_layout(waystation, "SAFETENSORS", lambda: waystation.load(shards))


def test_lossy_casts_and_selections_are_those_of_every_load(model: Path) -> None:
    asked = {"layers.0.weight": jax.ShapeDtypeStruct((8, 4), np.int32)}
    with pytest.raises(errors.LossyCast):
        _with_layout(waystation, "AUTO", lambda: waystation.load(model, asked))
    context = waystation.Context(checkpoint_layout="safetensors")
    context.pytree.loading.select = r"^layers\.1\."
    with context:
        loaded = waystation.load(model)
    assert [name for name, leaf in loaded.items() if leaf is not waystation.PLACEHOLDER] == [
        "layers.1.weight"
    ]


def test_processes_load_what_their_devices_need(model: Path, tmp_path: Path) -> None:
    arguments = {"count": 2, "framework": "jax", "directory": tmp_path}
    with running(process_scenarios.load_model, 2, model, **arguments) as programs:
        assert programs.values() == [[], []]
