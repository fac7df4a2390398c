"""What the processes of a torch program do in the tests. Each function runs in every process and returns what
it saw there."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support.programs import Place, raised
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import waystation
from waystation.checkpoint.loading import Loading

DEADLINE_S = 60.0
ORDERED_MIB = 24


def connect(place: Place) -> None:
    """Joins the other processes; threads of torch's own would only be in each other's way."""
    torch.set_num_threads(1)
    place.connect()


def outcome(function: Callable[[], Any]) -> Any:
    """What a function returns or raises."""
    try:
        return function()
    except BaseException as error:
        return raised(error)


@contextlib.contextmanager
def options(**saving: Any) -> Iterator[None]:
    """A short deadline, and options of `array.saving`."""
    context = waystation.Context()
    context.multiprocessing.deadline_s = DEADLINE_S
    for name, value in saving.items():
        setattr(context.array.saving, name, value)
    with context:
        yield


def make_state(place: Place) -> dict[str, Any]:
    """A state of sharded, replicated and plain leaves; only NumPy's differ between the processes."""
    mesh = init_device_mesh("cpu", (place.count,), mesh_dim_names=("all",))
    table = torch.arange(64 * 48, dtype=torch.float32).reshape(64, 48)
    return {
        "rows": distribute_tensor(table, mesh, [Shard(0)]),
        "uneven": distribute_tensor(table[:37, :5].clone(), mesh, [Shard(0)]),
        "columns": distribute_tensor(table.to(torch.bfloat16), mesh, [Shard(1)]),
        "replicated": distribute_tensor(table * 2, mesh, [Replicate()]),
        "plain": table * 3,
        "large": torch.arange(1 << 20, dtype=torch.float32),
        "empty": torch.zeros(0, 3),
        "host": np.arange(5) + place.index,
        "step": 7 + place.index,
        "text": "words",
    }


def entries(place: Place) -> list[str]:
    """What is in the directory of checkpoints."""
    return sorted(name for name in os.listdir(place.directory / "checkpoints"))


StorageOptions = waystation.options.ArrayOptions.Saving.StorageOptions


def stored_as(dtype: str) -> dict[str, Any]:
    """Options of `array.saving` that store floats in another dtype."""
    return {"storage_options": StorageOptions(dtype=dtype), "allow_lossy_casts": True}


def cut_along(axis: int) -> Callable[[str, Any], StorageOptions | None]:
    """Cuts matrices along an axis."""
    cut = StorageOptions(chunk_bytes=1024, chunk_axes=(axis,))
    return lambda _, leaf: cut if len(leaf.shape) == 2 else None


# Options of one process and of the others, with which each could write without noticing.
OTHER_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layout": ({"use_ocdbt": True}, {}),
    "Orbax's layout": ({"use_ocdbt": True}, {"use_ocdbt": False}),
    "version of zarr": ({"use_ocdbt": False}, {"use_ocdbt": False, "use_zarr3": False}),
    "compression": ({"use_ocdbt": False}, {"use_ocdbt": False, "use_compression": False}),
    "compression in a database": ({"use_ocdbt": True}, {"use_ocdbt": True, "use_compression": False}),
    "checksums": ({"use_ocdbt": True}, {"use_ocdbt": True, "use_crc32c": False}),
    "size of files": ({"use_ocdbt": True, "ocdbt_target_data_file_size": 64}, {"use_ocdbt": True}),
    "dtype": (stored_as("float16"), stored_as("bfloat16")),
    "dtype in a database": (
        {"use_ocdbt": True, **stored_as("float16")},
        {"use_ocdbt": True, **stored_as("bfloat16")},
    ),
    "cut": (
        {"use_ocdbt": False, "storage_options_for": cut_along(0)},
        {"use_ocdbt": False, "storage_options_for": cut_along(1)},
    ),
    "sharing": ({"use_replica_parallel": False}, {"min_slice_bytes_for_replica_parallel": 64}),
}


def save_with(saving: dict[str, Any], path: Path, state: Any) -> Any:
    """How a save with options of `array.saving` ends."""
    with options(**saving):
        return outcome(lambda: waystation.save(path, state, overwrite=True))


def survivable(place: Place) -> dict[str, Any]:
    """One failure after another, none of which may stop the next save from working."""
    connect(place)
    root = place.directory / "checkpoints"
    state = make_state(place)
    one = place.index == 1
    seen: dict[str, Any] = {}
    with options():
        waystation.save(root / "good", state)
        seen["good"] = sorted(os.listdir(root / "good" / "state"))
        seen["exists"] = outcome(lambda: waystation.save(root / "good", state))
        seen["exists async"] = outcome(lambda: waystation.save_async(root / "good", state))
        other = {**state, "extra": 1} if one else state
        seen["other structure"] = outcome(lambda: waystation.save(root / "bad", other))
        shorter = {**state, "plain": torch.zeros(3)} if one else state
        seen["other shape"] = outcome(lambda: waystation.save(root / "bad", shorter))
        strange = {**state, "plain": object()} if one else state
        seen["bad leaf"] = outcome(lambda: waystation.save_async(root / "bad", strange))
        with full_disk(one):
            seen["full disk"] = outcome(lambda: waystation.save(root / "bad", state))
            response = waystation.save_async(root / "bad", state)
            seen["full disk async"] = outcome(response.result)
        seen["missing"] = outcome(lambda: waystation.load(root / "missing"))
        seen["wrong structure"] = outcome(lambda: waystation.load(root / "good", {"a": 1} if one else state))
        for name, (own, others) in OTHER_OPTIONS.items():
            seen[f"other {name}"] = save_with(own if one else others, root / "good", state)
        seen["left"] = entries(place)
        waystation.save(root / "good-2", state)
        seen["overwritten"] = waystation.save(root / "good-2", state, overwrite=True)
        seen["deleted"] = waystation.delete(root / "good-2")
        seen["deleted again"] = waystation.delete(root / "good-2", missing_ok=True)
        loaded = waystation.load(root / "good", state)
        seen["equal"] = equal(state, loaded)
        seen["host"] = (loaded["host"].tolist(), loaded["step"])
        seen["as saved"] = equal(state, waystation.load(root / "good"))
    place.disconnect()
    return seen


@contextlib.contextmanager
def full_disk(here: bool) -> Iterator[None]:
    """No file may grow beyond some bytes, in this process if it is the one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def equal(state: dict[str, Any], loaded: dict[str, Any]) -> bool:
    """Whether all that must be equal is."""
    for key, value in state.items():
        if key in ("host", "step"):
            continue
        other = loaded[key]
        if type(value) is not type(other):
            return False
        if hasattr(value, "to_local"):
            same = value.placements == other.placements and torch.equal(value.to_local(), other.to_local())
        elif isinstance(value, torch.Tensor):
            same = torch.equal(value, other)
        else:
            same = value == other
        if not same:
            return False
    return True


def shared_writing(place: Place, saving: dict[str, Any]) -> None:
    """Saves tensors that all processes hold."""
    connect(place)
    state = {"large": torch.ones(4 << 20, dtype=torch.uint8)}
    state |= {f"small {number}": torch.ones(1000 + number, dtype=torch.uint8) for number in range(40)}
    with options(**saving):
        waystation.save(place.directory / "checkpoint", state)
    place.disconnect()


def save_beside(place: Place, step: int, earlier: int | None) -> tuple[int, int]:
    """Saves a step, with what has not changed since an earlier one shared; returns the bytes that this
    process has shared and written."""
    connect(place)
    seen: list[waystation.SaveStatistics] = []
    state = make_state(place)
    state["trained"] = distribute_tensor(
        torch.full((place.count * 100, 10), float(step)), state["rows"].device_mesh, [Shard(0)]
    )
    checkpoints = place.directory / "checkpoints"
    with options(on_statistics=seen.append):
        before = None if earlier is None else checkpoints / str(earlier)
        waystation.save(checkpoints / str(step), state, unchanged_from=before)
        loaded = waystation.load(checkpoints / str(step), state)
    assert equal(state, loaded)
    place.disconnect()
    return seen[0].bytes_shared, seen[0].bytes_written


def load_elsewhere(place: Place, path: Path) -> bool:
    """Loads what other processes have saved, into DTensors of these."""
    if place.count > 1:
        connect(place)
    state = make_state(place) if place.count > 1 else {}
    table = torch.arange(64 * 48, dtype=torch.float32).reshape(64, 48)
    with options():
        if place.count > 1:
            good = equal(state, waystation.load(path, state))
            place.disconnect()
            return good
        whole = {
            "rows": torch.empty(64, 48),
            "uneven": np.empty((37, 5), np.float32),
            "columns": torch.empty(64, 48, dtype=torch.bfloat16),
            "replicated": torch.empty(64, 48),
            "plain": torch.empty(64, 48),
            "large": torch.empty(1 << 20),
            "empty": torch.empty(0, 3),
            "host": np.empty(5, int),
            "step": int,
            "text": str,
        }
        loaded = waystation.load(path, whole)
    return bool(
        torch.equal(loaded["rows"], table)
        and np.array_equal(loaded["uneven"], table[:37, :5].numpy())
        and torch.equal(loaded["columns"], table.to(torch.bfloat16))
        and torch.equal(loaded["replicated"], table * 2)
        and loaded["host"].tolist() == [0, 1, 2, 3, 4]
    )


def load_in_place(place: Place, path: Path) -> bool:
    """Whether tensors of other shardings, whose memory stays where it is, take what was saved."""
    connect(place)
    state = make_state(place)
    mesh = init_device_mesh("cpu", (place.count,), mesh_dim_names=("all",))
    others = {"rows": Shard(1), "uneven": Shard(0), "columns": Shard(0), "replicated": Shard(0)}
    own = {
        name: distribute_tensor(torch.zeros_like(state[name].full_tensor()), mesh, [placement])
        for name, placement in others.items()
    }
    own |= {"plain": torch.zeros(64, 48), "large": torch.zeros(1 << 20), "empty": torch.zeros(0, 3)}
    addresses = [local(tensor).data_ptr() for tensor in own.values()]
    context = waystation.Context()
    context.array.loading.in_place = True
    context.pytree.loading.partial_load = True
    with options(), context:
        waystation.save(path, state)
        loaded = waystation.load(path, own)
    return (
        all(loaded[name] is tensor for name, tensor in own.items())
        and addresses == [local(tensor).data_ptr() for tensor in own.values()]
        and all(torch.equal(whole(own[name]), whole(state[name])) for name in own)
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_until_killed(place: Place, path: Path, saving: dict[str, Any] | None = None) -> Any:
    """Saves, over what is there, once the test says so; a process may be killed meanwhile."""
    connect(place)
    state = make_state(place)
    place.report("ready")
    place.receive()
    with options(**(saving or {})):
        return outcome(lambda: waystation.save(path, state, overwrite=True))


@dataclass(frozen=True)
class Order:
    """Where to save.

    Attributes:
        path: There.
        deadline_s: For the others.
        throttles: For processes whose disk is slow, the throttle.
    """

    path: Path
    deadline_s: float
    throttles: dict[int, Path]


def save_when_told(place: Place) -> None:
    """Saves as the test orders it, a block after the other, and reports how each save ended."""
    connect(place)
    state = {
        "mine": distribute_tensor(
            torch.arange(ORDERED_MIB << 18, dtype=torch.float32),
            init_device_mesh("cpu", (place.count,)),
            [Shard(0)],
        )
    }
    place.report("ready")
    while (order := place.receive()) is not None:
        context = waystation.Context()
        context.multiprocessing.deadline_s = order.deadline_s
        context.engine.block_bytes = 1 << 20
        if place.index in order.throttles:
            context.engine.throttle_path = str(order.throttles[place.index])
        with context:
            place.report(outcome(lambda to=order.path: waystation.save(to, state)))  # type: ignore[misc]
    place.disconnect()


MESHES = {"line": (4,), "square": (2, 2), "column": (4, 1), "row": (1, 4)}


def save_on_meshes(place: Place) -> None:
    """Saves one checkpoint for each of several meshes."""
    connect(place)
    for number, (name, shape) in enumerate(MESHES.items()):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"m{axis}" for axis in range(len(shape))))
        values = torch.arange(48.0).reshape(8, 6) + number
        leaf = distribute_tensor(values, mesh, [Shard(0)] + [Replicate()] * (len(shape) - 1))
        waystation.save(place.directory / name, {"a": leaf})
    place.disconnect()


def load_at_once(place: Place) -> list[bool]:
    """Loads all of them at the same time, as they were saved; the process groups of their meshes are made in
    threads, which get to it in another order in every process."""
    connect(place)
    decide = Loading._decide

    def late(self: Loading, state: str, opened: Any, *arguments: Any) -> Any:
        number = list(MESHES).index(Path(opened.directory).parent.name)
        time.sleep(0.3 * ((number + place.index) % len(MESHES)))
        return decide(self, state, opened, *arguments)

    Loading._decide = late  # type: ignore[method-assign]
    with options():
        loads = [waystation.load_async(place.directory / name) for name in MESHES]
        loaded = [load.result()["a"] for load in reversed(loads)]
    found = [
        leaf.device_mesh.shape == shape
        and torch.equal(leaf.full_tensor(), torch.arange(48.0).reshape(8, 6) + number)
        for leaf, (number, shape) in zip(reversed(loaded), enumerate(MESHES.values()), strict=True)
    ]
    place.disconnect()
    return found
