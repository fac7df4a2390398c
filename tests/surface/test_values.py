"""Every value that an option of Orbax takes is taken here and works, or is in `docs/orbax.md`.

Values come from the annotations of Orbax's own classes: all members of enumerations, booleans, None, numbers
as configurations compute them. Each is given to the constructor of its group, and set in a context with which
a state is saved and loaded, in both libraries. Where Orbax works, so must ours; where Orbax raises, ours may
be able to do more, or raises an error of the same kind.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import gc
import inspect
import pathlib
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from etils import epath
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as oracle
from orbax.checkpoint._src.serialization.types import DefaultSerializationStatusCallback
from tests.support.long import IS_LONG
from tests.surface.walk import public

import waystation

PAGE = Path(__file__).parents[2] / "docs" / "orbax.md"

# What only some options take, by their names; a function of the library that is asked.
TYPICAL: dict[str, Callable[[Any], list[Any]]] = {
    "array.saving.storage_options.dtype": lambda _: [
        "float32",
        np.float16,
        np.dtype("float32"),
        ml_dtypes.bfloat16,
        jax.numpy.bfloat16,
    ],
    "array.saving.storage_options.shard_axes": lambda _: [(), [], None],
    "array.saving.scoped_storage_options_creator": lambda library: [
        lambda key, value: library.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=4096),
        None,
    ],
    "array.saving.array_metadata_store": lambda library: [
        library.Context().array.saving.array_metadata_store,
        None,
    ],
    "array.loading.load_and_broadcast_options.replica_axis_index": lambda _: [0, 1, np.int64(0)],
    "array.loading.load_and_broadcast_options.primary_replica_id": lambda _: [0, np.int32(0), None],
    "array.loading.load_and_broadcast_options.broadcast_memory_scaling_factor": lambda _: [
        0.5,
        1.0,
        np.float32(0.25),
        None,
    ],
    "asynchronous.post_finalization_callback": lambda _: [lambda: None, None],
    "checkpointables.registry": lambda library: [library.handlers.local_registry()],
    "file.path_class": lambda _: [epath.Path, pathlib.Path],
    "file.path_permission_mode": lambda _: [0o700, 0o755, 0o2770, np.int64(0o750), None],
    "memory.is_prioritized_key_fn": lambda _: [lambda key: True, None],
    "memory.regulator_options": lambda _: [None],
    "memory.serialization_status_callback": lambda _: [DefaultSerializationStatusCallback(), None],
    "memory.expected_surge_bytes": lambda _: [0, 1 << 20, 0.5, np.float64(4096.0), None],
    "multiprocessing.primary_host": lambda _: [0, np.int64(0)],
    "multiprocessing.active_processes": lambda _: [{0}, frozenset({0}), {np.int64(0)}, None],
    "multiprocessing.barrier_sync_key_prefix": lambda _: ["run", "a/b", None],
}

# Members and values that are refused, and stand so in the page.
REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    (
        "array.saving.array_metadata_store",
        type(oracle.Context().array.saving.array_metadata_store),
        "array_metadata_store",
    ),
]


def _options(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Names and annotations of a group's options, also those of groups in it."""
    annotations = typing.get_type_hints(type(group))
    for field in dataclasses.fields(group):
        name, value = f"{prefix}{field.name}", getattr(group, field.name)
        if field.name.startswith("_"):
            continue
        if dataclasses.is_dataclass(value):
            yield from _options(value, f"{name}.")
        else:
            yield name, annotations[field.name]


def _all_options() -> dict[str, Any]:
    context: Any = oracle.Context()
    found: dict[str, Any] = {}
    for name in dir(type(context)):
        group = None if name.startswith("_") or name.endswith("_options") else getattr(context, name)
        if dataclasses.is_dataclass(group):
            found.update(_options(group, f"{name}."))
    return found


def _of_annotation(annotation: Any) -> list[Any]:
    """Typical values of a type."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return [value for part in typing.get_args(annotation) for value in _of_annotation(part)]
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return list(annotation)
    known: dict[Any, list[Any]] = {
        type(None): [None],
        bool: [True, False, np.True_, np.False_],
        int: [4096, 1 << 20, 1 << 31, np.int64(1 << 20), np.int32(4096)],
        float: [1.0, 2.5, np.float32(1.5), np.float64(3.0)],
        str: ["a", ""],
    }
    return known[annotation]


def _values(name: str, annotation: Any, library: Any) -> list[Any]:
    return TYPICAL[name](library) if name in TYPICAL else _of_annotation(annotation)


OPTIONS = _all_options()
CASES = [
    (name, number)
    for name, annotation in OPTIONS.items()
    for number in range(0, len(_values(name, annotation, oracle)), 1 if IS_LONG else 3)
]


def _assign(context: Any, name: str, value: Any) -> None:
    *groups, last = name.split(".")
    setattr(functools.reduce(getattr, groups, context), last, value)


def _construct(context: Any, name: str, value: Any) -> None:
    """Replaces the option's group by a new one."""
    *groups, group_name, last = name.split(".")
    parent = functools.reduce(getattr, groups, context)
    if parent is not context:  # the groups of a context are given to its constructor
        setattr(parent, group_name, type(getattr(parent, group_name))(**{last: value}))
        return
    type(getattr(context, group_name))(**{last: value})
    _assign(context, name, value)


def _use(library: Any, directory: Path, prepare: Callable[[Any], None]) -> Exception | None:
    """Saves and loads with an option; returns what was raised."""
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    sharding = SingleDeviceSharding(jax.devices()[0])
    state = {"a": values, "b": jax.device_put(values, sharding)}
    abstract = {
        "a": np.zeros((8, 4), np.float32),
        "b": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding),
    }
    try:
        context = library.Context()
        prepare(context)
        with context:
            library.save(directory / "saved", state)
            loaded = library.load(directory / "saved", abstract)
            library.save_async(directory / "in background", state).result()
    except Exception as error:
        return error
    for leaf in loaded.values():
        np.testing.assert_array_equal(np.asarray(leaf), values)
    return None


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("name", "number"), CASES, ids=str)
@pytest.mark.share(2)
def test_what_orbax_takes_is_taken_and_works(name: str, number: int, tmp_path: Path) -> None:
    annotation = OPTIONS[name]
    if any(name == refused and number_of(value()) == number for refused, value, _ in REFUSED):
        return  # which the next test is about
    raised = []
    for library in (oracle, waystation):
        value = _values(name, annotation, library)[number]
        _construct(library.Context(), name, value)
        directory = tmp_path / library.__name__
        directory.mkdir()
        raised.append(_use(library, directory, lambda context, value=value: _assign(context, name, value)))
    theirs, ours = raised
    if theirs is not None:  # Orbax leaves coroutines behind, of which later tests would be warned
        gc.collect()
    assert ours is None or theirs is not None, (repr(value), repr(ours))
    if ours is not None:
        kind = next(base for base in type(theirs).__mro__ if base.__module__ == "builtins")
        assert isinstance(ours, kind | waystation.errors.InvalidInput), (repr(ours), repr(theirs))


def number_of(value: Any) -> int | None:
    """The place of a member in its enumeration, as cases are numbered."""
    return list(type(value)).index(value) if isinstance(value, enum.Enum) else None


@pytest.mark.parametrize(("name", "value", "shown"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_what_is_refused_is_in_the_page(name: str, value: Callable[[], Any], shown: str) -> None:
    paragraph = PAGE.read_text().split("What cannot be honoured is refused")[1].split("\n\n")[0]
    assert shown in " ".join(paragraph.split())
    with pytest.raises(waystation.errors.Unsupported):
        _assign(waystation.Context(), name, value())


def _enumerations(module: Any) -> Iterator[type[enum.Enum]]:
    for _, value in public(module):
        if inspect.ismodule(value):
            yield from _enumerations(value)
        elif inspect.isclass(value) and issubclass(value, enum.Enum):
            yield value


def test_enumerations_have_the_members_of_orbax() -> None:
    found = {kind.__name__: kind for kind in _enumerations(oracle)}
    assert found.keys() >= {"AtomicityMode", "CheckpointLayout"}
    for name, theirs in found.items():
        ours = getattr(waystation.options, name)
        assert {member.name: member.value for member in ours} == {
            member.name: member.value for member in theirs
        }


@pytest.mark.parametrize("wrong", ["zarr", 3, 1.5, None], ids=str)
def test_what_means_no_layout_is_refused_with_the_ones_that_do(wrong: Any) -> None:
    with pytest.raises(waystation.errors.InvalidInput, match=r"'orbax', 'safetensors', 'auto'"):
        waystation.Context().checkpoint_layout = wrong


@pytest.mark.parametrize("layout", oracle.options.CheckpointLayout)
def test_layouts_are_taken_however_they_are_written(layout: enum.Enum) -> None:
    for written in (layout, layout.value, waystation.options.CheckpointLayout(layout.value)):
        context = waystation.Context(checkpoint_layout=written)
        assert context.checkpoint_layout.value == layout.value
        context.checkpoint_layout = written


def _of_policies() -> list[tuple[str, str, dict[str, Any]]]:
    """Policies of training with arguments: their module, name and keywords."""
    numbers = [{"1": 1, "7": 7, "int64": np.int64(5)}[key] for key in ("1", "7", "int64")]
    preservation = {
        "PreserveAll": [{}],
        "LatestN": [{}, {"n": None}, {"n": 0}, *({"n": n} for n in numbers)],
        "EveryNSeconds": [{"interval_secs": n} for n in (0, *numbers)],
        "EveryNSteps": [
            {"interval_steps": n, "exact_interval": exact, "max_to_keep": most}
            for n in numbers
            for exact in (True, False)
            for most in (None, 0, 2)
        ],
        "EveryNStepsClosest": [
            {"interval_steps": n, "max_to_keep": m} for n in numbers for m in (None, 0, 2)
        ],
        "CustomSteps": [{"steps": steps} for steps in ([], {1}, range(3), (2, 4))],
        "LatestDuration": [{"duration": datetime.timedelta(seconds=n)} for n in (0, 5, 3600)],
        "BestN": [
            {"get_metric_fn": len, "reverse": way, "n": n, "keep_checkpoints_without_metrics": keep}
            for way in (True, False)
            for n in (None, 0, 3)
            for keep in (True, False)
        ],
        "AnyPreservationPolicy": [{"policies": []}, {"policies": ()}],
    }
    decisions = {
        "FixedIntervalPolicy": [{"interval": n} for n in numbers],
        "SpecificStepsPolicy": [{"steps": steps} for steps in ([], {1}, range(3), (2, 4))],
        "ContinuousCheckpointingPolicy": [{"minimum_interval_secs": n} for n in (None, 0, *numbers)],
        "AnySavePolicy": [{"policies": []}, {"policies": ()}],
        "InitialSavePolicy": [{}],
        "PreemptionCheckpointingPolicy": [{}],
    }
    return [
        (module, name, keywords)
        for module, known in (("preservation_policies", preservation), ("save_decision_policies", decisions))
        for name, cases in known.items()
        for keywords in cases
    ]


@pytest.mark.parametrize(("module", "name", "keywords"), _of_policies(), ids=str)
def test_policies_take_what_those_of_orbax_take(module: str, name: str, keywords: dict[str, Any]) -> None:
    getattr(getattr(oracle.training, module), name)(**keywords)
    getattr(getattr(waystation.training, module), name)(**keywords)


def test_every_policy_of_orbax_is_tried() -> None:
    tried = {name for _, name, _ in _of_policies()}
    for module in ("preservation_policies", "save_decision_policies"):
        for name, value in public(getattr(oracle.training, module)):
            if inspect.isclass(value) and name.endswith(
                ("Policy", "All", "N", "Steps", "Seconds", "Duration", "Closest")
            ):
                is_protocol = getattr(value, "_is_protocol", False)
                assert is_protocol or name in tried, name
