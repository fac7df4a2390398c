"""States that programs give to `waystation.save` and `load`: what goes to hosts, and what is refused."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import waystation
from waystation import runtime
from waystation.errors import InvalidInput, Unsupported
from waystation.frameworks import AbstractNumpy
from waystation.frameworks.carried import AbstractKeys
from waystation.frameworks.registry import keys_of_program
from waystation.runtime.host_options import DEFAULT_OPTIONS, HostOptions, SaveManner
from waystation.runtime.ir import Value
from waystation.runtime.state_trees import StateTree
from waystation.tree import flatten


@pytest.fixture(name="array")
def made_array(client: runtime.Client) -> runtime.Array:
    on = client.make_virtual_device_set().add_slice(devices=2)
    return client.put(np.arange(4), on)


class Backend:
    """Hosts that remember what they are asked, in one process."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, StateTree, dict[int, Any]]] = []
        self.values: tuple[Any, ...] = ()

    def begin_save(
        self, path: str, tree: StateTree, arrays: dict[int, int], manner: SaveManner
    ) -> Callable[[float | None], None]:
        self.manner = manner
        self.asked.append((path, tree, arrays))
        return lambda timeout_s: None

    def begin_load(
        self, path: str, tree: StateTree, arrays: dict[int, tuple[int, Value]], *, options: HostOptions
    ) -> Callable[[float | None], tuple[Any, ...]]:
        self.asked.append((path, tree, arrays))
        self.options = options
        return lambda timeout_s: self.values


@pytest.fixture
def hosts(client: runtime.Client, array: runtime.Array, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Saves and loads go to hosts that only remember them."""
    backend = Backend()
    for name in ("begin_save", "begin_load"):
        monkeypatch.setattr(client.backend, name, getattr(backend, name), raising=False)
    return backend


class Moments(NamedTuple):
    count: Any
    mean: Any


@dataclasses.dataclass
class Training:
    step: Any
    optimizer: Any


def test_what_is_said_of_a_state(client: runtime.Client, array: runtime.Array, hosts: Backend) -> None:
    counts = np.arange(3)
    state = Training(3, (Moments(array, counts), (), None, ["adam", array]))
    waystation.save("here", state)
    client.save("there", state)
    counts[0] = 7  # what was said does not change any more
    leaves, structure = flatten(state)
    for path, tree, arrays in hosts.asked:
        assert path in (str(Path("here").absolute()), "there")
        assert arrays == dict.fromkeys((1, 4), array.usable("saved").handle)
        assert [number for number, _ in tree.values] == [0, 2, 3]
        built, found = flatten(tree.build({**dict(tree.values), 1: array, 4: array}, None))
        assert found == structure
        np.testing.assert_array_equal(built[2], [0, 1, 2])
        assert [built[0], built[3]] == [leaves[0], leaves[3]]


def test_arrays_of_jax_in_this_process_are_put_on_a_slice(
    client: runtime.Client, array: runtime.Array, hosts: Backend
) -> None:
    waystation.save("here", {"w": array, "step": jnp.int32(3)})
    ((_, tree, arrays),) = hosts.asked
    assert not tree.values
    assert sorted(arrays) == [0, 1]
    np.testing.assert_array_equal(client.backend.get(arrays[1]), 3)


def test_and_are_loaded_to_where_they_were(array: runtime.Array, hosts: Backend) -> None:
    hosts.values = (np.int32(4), np.ones(3, np.float32))
    wanted = {"w": array, "step": jnp.int32(3), "mean": jax.ShapeDtypeStruct((3,), jnp.float32)}
    loaded = waystation.load("here", wanted)
    ((_, tree, _),) = hosts.asked
    assert dict(tree.values) == {1: AbstractNumpy((), np.int32), 2: AbstractNumpy((3,), np.float32)}
    for name, value in (("step", 4), ("mean", np.ones(3))):
        assert isinstance(loaded[name], jax.Array)
        np.testing.assert_array_equal(loaded[name], value)
    assert loaded["step"].sharding == wanted["step"].sharding


def test_what_is_loaded_has_the_containers_of_the_abstract_state(
    client: runtime.Client, array: runtime.Array, hosts: Backend
) -> None:
    wanted = Training(int, (Moments(array, np.zeros(3)), ..., None, [np.float32(1), array]))
    hosts.values = (4, np.ones(3), np.float32(2))
    for loaded in (client.load("there", wanted), waystation.load("there", wanted)):
        assert type(loaded) is Training
        (moments, absent, nothing, (number, last)) = loaded.optimizer
        assert (loaded.step, absent, nothing, number) == (4, ..., None, 2)
        assert type(moments) is Moments
        np.testing.assert_array_equal(moments.mean, np.ones(3))
        assert moments.count is not array
        for made in (moments.count, last):
            assert (made.shape, made.dtype, made.slice) == (array.shape, array.dtype, array.slice)
    _, tree, arrays = hosts.asked[0]
    assert dict(tree.values) == {
        0: int,
        2: AbstractNumpy((3,), np.float64),
        4: AbstractNumpy((), np.float32, True),
    }
    assert {number: value.shape for number, (_, value) in arrays.items()} == {1: (4,), 5: (4,)}


def test_the_state_may_be_an_array(client: runtime.Client, array: runtime.Array, hosts: Backend) -> None:
    waystation.save("here", array)
    assert isinstance(waystation.load("here", array), runtime.Array)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (object(), "hosts cannot save a builtins.object; save arrays, numbers"),
        (torch.eye(3).to_sparse(), "save leaf.to_dense()"),
        (np.array([None]), "object"),
    ],
)
def test_leaves_that_cannot_be_saved_are_named(
    array: runtime.Array, hosts: Backend, value: Any, problem: str
) -> None:
    for save in (waystation.save, waystation.save_async):
        with pytest.raises(Unsupported, match=problem) as raised:
            save("here", {"a": [array, {"b": value}]})
        assert raised.value.context["array"] == "['a'][1]['b']"
    assert not hosts.asked


def test_options_reach_hosts(array: runtime.Array, hosts: Backend) -> None:
    waystation.load("here", array)
    assert hosts.options == DEFAULT_OPTIONS
    waystation.save("here", array, overwrite=True, custom_metadata={"step": (1, 2)})
    assert hosts.manner == SaveManner(True, {"step": [1, 2]})
    context = waystation.Context()
    context.pytree.loading.partial_load = True
    context.array.loading.enable_padding_and_truncation = True
    context.array.saving.storage_options.dtype = "bfloat16"
    context.engine.threads = 3
    context.memory.write_concurrent_bytes = 8 << 20
    context.memory.transfer_concurrent_bytes = 4 << 20
    context.memory.caller_keeps = True
    with context:
        waystation.load("here", array)
        waystation.save_async("here", array).result()
    assert hosts.options == hosts.manner.options
    assert dict(hosts.options.values) == {
        "pytree.loading.partial_load": True,
        "array.loading.enable_padding_and_truncation": True,
        "array.saving.storage_options.dtype": "bfloat16",
        "engine.threads": 3,
        "memory.write_concurrent_bytes": 4 << 20,
    }


@pytest.mark.parametrize("by_path", [False, True])
def test_how_single_arrays_are_stored_is_asked_here(
    array: runtime.Array, hosts: Backend, by_path: bool
) -> None:
    asked: list[Any] = []

    def by_name(label: str, described: Any) -> waystation.StorageOptions | None:
        asked.append((label, described.shape, described.dtype))
        return waystation.StorageOptions(dtype="bfloat16") if label == "b.w" else None

    def by_key(key: Any, value: Any) -> waystation.StorageOptions | None:
        asked.append((key, value))
        return waystation.StorageOptions(dtype="bfloat16") if key[0] == jax.tree_util.DictKey("b") else None

    state = {"a": array, "b": {"w": np.ones(3)}, "step": 3}
    context = waystation.Context()
    if by_path:
        context.array.saving.scoped_storage_options_creator = by_key
    else:
        context.array.saving.storage_options_for = by_name
    with context:
        waystation.save("here", state)
    assert hosts.manner.options.storage == ((1, ("bfloat16", None, None)),)
    if by_path:
        assert [value for _, value in asked] == [array, state["b"]["w"]]
    else:
        assert asked == [("a", (4,), "int32"), ("b.w", (3,), "float64")]
    paths = flatten(state)[1].key_paths()
    creator = hosts.manner.options.context(paths).array.saving.scoped_storage_options_creator
    assert creator is not None
    found = [creator(keys_of_program(path), None) for path in paths]
    assert found == [None, waystation.StorageOptions(dtype="bfloat16"), None]


def test_options_that_hosts_cannot_heed_are_refused(array: runtime.Array, hosts: Backend) -> None:
    for group, name, value in (
        ("array", "in_place", True),
        ("array", "sharding_for", lambda *_: None),
        ("pytree", "select", "w"),
    ):
        context = waystation.Context()
        setattr(getattr(context, group).loading, name, value)
        with context, pytest.raises(Unsupported, match=rf"cannot heed the option {group}\.loading\.{name}"):
            waystation.load("here", array)
    context = waystation.Context()
    context.array.saving.storage_options_for = lambda *_: 3  # type: ignore[assignment, return-value]
    with context, pytest.raises(InvalidInput, match="must return StorageOptions or None, not 3") as raised:
        waystation.save("here", {"x": array})
    assert raised.value.context["array"] == "['x']"
    with pytest.raises(InvalidInput, match="custom_metadata must be a JSON value"):
        waystation.save("here", {"x": array}, custom_metadata=object())
    assert not hosts.asked


def test_what_is_to_be_called_once_it_is_committed_is(array: runtime.Array, hosts: Backend) -> None:
    called: list[str] = []
    context = waystation.Context()
    context.asynchronous.post_finalization_callback = lambda: called.append("now")
    with context:
        saving = waystation.save_async("here", array)
    saving.result()
    assert called == ["now"]
    assert hosts.manner.options == DEFAULT_OPTIONS


def test_tensors_and_keys_travel_as_they_are_stored(array: runtime.Array, hosts: Backend) -> None:
    tensor, key = torch.arange(6.0).reshape(2, 3).T, jax.random.key(5)
    waystation.save("here", [array, tensor, key])
    tensor += 1  # what was said does not change any more
    ((_, tree, _),) = hosts.asked
    first, second = (carried for _, carried in tree.values)
    assert (first.stored.framework, first.stored.shape, first.stored.dtype) == ("torch", (3, 2), "float32")
    np.testing.assert_array_equal(first.data.view(np.float32), [0, 3, 1, 4, 2, 5])
    assert (second.stored.framework, second.stored.dtype) == ("jax", "key<threefry2x32>")
    np.testing.assert_array_equal(second.data.view(np.uint32), [0, 5])


def test_tensors_and_keys_are_made_of_what_hosts_give(array: runtime.Array, hosts: Backend) -> None:
    hosts.values = (np.ones((3, 2), ml_dtypes.bfloat16), np.array([[0, 5]], np.uint32))
    wanted = [
        array,
        torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True),
        jax.random.split(jax.random.key(0), 1),
    ]
    _, tensor, keys = waystation.load("here", wanted)
    assert torch.equal(tensor, torch.ones(3, 2, dtype=torch.bfloat16))
    assert tensor.requires_grad
    assert keys.dtype == jax.random.key(0).dtype
    np.testing.assert_array_equal(jax.random.bits(keys[0]), jax.random.bits(jax.random.key(5)))
    ((_, tree, _),) = hosts.asked
    assert dict(tree.values) == {
        1: AbstractNumpy((3, 2), ml_dtypes.bfloat16),
        2: AbstractKeys((1,), "key<threefry2x32>"),
    }


class Row(np.ndarray[Any, Any]):
    """A class that hosts do not have."""


def test_arrays_travel_as_plain_ones(array: runtime.Array, hosts: Backend) -> None:
    waystation.save("here", [array, np.arange(3).view(Row)])
    ((_, tree, _),) = hosts.asked
    assert type(dict(tree.values)[1]) is np.ndarray


def test_a_client_waits_for_its_saves(
    client: runtime.Client, array: runtime.Array, hosts: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = threading.Event()
    monkeypatch.setattr(
        client.backend, "begin_save", lambda *_, **__: lambda _: committed.wait(), raising=False
    )
    saving = waystation.save_async("here", array)
    closing = threading.Thread(target=client.close)
    closing.start()
    assert not saving.done()
    assert closing.is_alive()
    committed.set()
    closing.join()
    assert saving.done()


def test_leaves_that_cannot_be_loaded_are_named(array: runtime.Array, hosts: Backend) -> None:
    with pytest.raises(InvalidInput, match="hosts cannot load a") as raised:
        waystation.load("here", {"a": [array, object()]})
    assert raised.value.context["array"] == "['a'][1]"


def test_what_travels_has_to_be_small(array: runtime.Array, hosts: Backend) -> None:
    large = {"a": array, "b": [np.zeros((3, 1 << 20)), "c" * (1 << 20)]}
    for use in (waystation.save, waystation.load):
        with pytest.raises(InvalidInput, match="put it on a slice") as raised:
            use("here", large)
        assert raised.value.context["array"] == "['b'][0]"


def test_an_array_that_was_donated_is_named(client: runtime.Client, hosts: Backend) -> None:
    on = client.make_virtual_device_set().add_slice(devices=2)
    given = client.put(np.arange(4), on)
    client.jit(lambda x: x + 1, on, donate_argnums=0)(given)
    with pytest.raises(InvalidInput, match="donated") as raised:
        waystation.save("here", {"x": (given,)})
    assert raised.value.context["array"] == "['x'][0]"


def test_a_state_without_arrays_of_hosts_is_none_of_theirs(client: runtime.Client, hosts: Backend) -> None:
    for use in (client.save, client.load):
        with pytest.raises(InvalidInput, match="no array of the runtime"):
            use("here", {"x": np.zeros(3)})


def test_hosts_save_no_more_than_arrays(array: runtime.Array, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    for save in (waystation.save, waystation.save_async):
        with pytest.raises(Unsupported, match="under the name 'state', not 'other'"):
            save(path, {"x": array}, checkpointable_name="other")
    for load in (waystation.load, waystation.load_async):
        with pytest.raises(Unsupported, match="hosts load what was saved as 'state', not 'other'"):
            load(path, {"x": array}, checkpointable_name="other")


def test_arrays_of_several_clients_are_saved_apart(array: runtime.Array, tmp_path: Path) -> None:
    with runtime.local({"other": 2}) as client:
        other = client.put(np.arange(4), client.make_virtual_device_set().add_slice(devices=2))
        with pytest.raises(InvalidInput, match="several clients"):
            waystation.save(str(tmp_path / "saved"), {"x": array, "y": other})
