"""What the processes of torch programs do that load and broadcast. Each function returns what it saw."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from tests.distributed.broadcast_common import Case, damage, loading, meet, outcome, told
from tests.support.programs import Place

import waystation
from waystation.checkpoint import broadcast

DTYPES = ("float32", "bfloat16", "int64", "complex64", "bool", "float8_e4m3fn", "float8_e5m2")


def bits_of(tensor: Any) -> bytes:
    """The memory of a torch tensor."""
    import torch

    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def start(place: Place) -> None:
    import torch

    torch.set_num_threads(1)
    place.connect()


def make_state() -> dict[str, Any]:
    """Plain tensors, which all processes have; DTensors on a mesh of two axes; and others."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    count = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replica", "shard"))
    state: dict[str, Any] = {}
    for number, dtype in enumerate(DTYPES):
        values = Case(dtype, (9, 7), number).values()
        plain = torch.from_numpy(values.view(f"u{values.dtype.itemsize}").copy())
        state[f"plain, {dtype}"] = plain.view(getattr(torch, dtype))
    table = torch.from_numpy(Case("int32", (31, 18), 50).values())
    for name, placements in {
        "rows": [Replicate(), Shard(0)],
        "other rows": [Shard(0), Replicate()],
        "replicated": [Replicate(), Replicate()],
        "own": [Shard(0), Shard(1)],
        "own by both": [Shard(0), Shard(0)],
    }.items():
        state[name] = distribute_tensor(table, mesh, placements, src_data_rank=None)
    state["large"] = torch.from_numpy(Case("uint8", (1_000_003,), 51).values())
    state["gradient"] = torch.nn.Parameter(torch.ones(5))
    state["empty"] = torch.zeros(0, 3)
    state["part"] = distribute_tensor(table, mesh["shard"], [Shard(0)], src_data_rank=None)
    assert all(isinstance(state[name], DTensor) for name in ("rows", "part"))
    return {**state, "host": np.arange(5), "step": 7}


def wrong(state: dict[str, Any], loaded: dict[str, Any]) -> list[str]:
    """The leaves that differ in a bit, a type or a placement."""
    wrong = []
    for name, value in state.items():
        other = loaded[name]
        if hasattr(value, "to_local"):
            same = value.placements == other.placements
            same = same and bits_of(value.to_local()) == bits_of(other.to_local())
        elif hasattr(value, "requires_grad"):
            same = value.requires_grad == other.requires_grad and bits_of(value) == bits_of(other)
        else:
            same = bool(np.all(value == other))
        if not same:
            wrong.append(name)
    return wrong


def loads(place: Place) -> dict[str, Any]:
    """Loads in all the ways that there are, one after another."""
    import torch

    start(place)
    path = place.directory / "checkpoint"
    state = make_state()
    seen: list[Any] = []
    found: dict[str, Any] = {}
    waystation.save(path, state)

    def load(name: str, abstract: Any = state, in_background: bool = False, **options: Any) -> Any:
        memory_bytes = options.pop("read_concurrent_bytes", None)
        with loading(seen, **options) as context:
            bounded = waystation.Context(context)
            bounded.memory.read_concurrent_bytes = memory_bytes
            with bounded:
                loaded = (
                    waystation.load_async(path, abstract).result()
                    if in_background
                    else waystation.load(path, abstract)
                )
        if abstract is state or abstract is None:
            found[name] = {"wrong": wrong(state, loaded), **told(seen)}
        return loaded

    load("everyone", load_and_broadcast=False)
    load("small by itself")
    load("broadcast", load_and_broadcast=True)
    load("as saved", None, load_and_broadcast=True)
    load("small pieces", load_and_broadcast=True, broadcast_concurrent_bytes=1)
    load("little memory", load_and_broadcast=True, read_concurrent_bytes=2 << 20)
    load("background", in_background=True)
    load("background by force", in_background=True, load_and_broadcast=True)
    load("mapped by itself", mmap=True)
    load("mapped by force", mmap=True, load_and_broadcast=True)

    # Those that share it have no group in its mesh, so that one is made for them.
    waystation.save(place.directory / "part", {"part": state["part"]})
    for _ in range(2):
        with loading(seen, load_and_broadcast=True):
            loaded = waystation.load(place.directory / "part", {"part": state["part"]})
    found["part"] = {"wrong": wrong({"part": state["part"]}, loaded), **told(seen)}

    cast = {**state, "large": torch.empty(1_000_003, dtype=torch.float32)}
    loaded = load("cast", cast, load_and_broadcast=True)
    found["cast"] = {**told(seen), "same": torch.equal(loaded["large"], state["large"].float())}
    wider = {**state, "large": torch.empty(1_000_010, dtype=torch.uint8)}
    loaded = load("wider", wider, load_and_broadcast=True, enable_padding_and_truncation=True)
    whole = torch.cat([state["large"], torch.zeros(7, dtype=torch.uint8)])
    found["wider"] = {**told(seen), "same": torch.equal(loaded["large"], whole)}

    other = {**state, "large": torch.empty(1_000_003, dtype=torch.int16)} if place.index == 1 else state
    with loading(seen):
        found["other dtype by itself"] = str(waystation.load(path, other)["large"].dtype)
    with loading(seen, load_and_broadcast=True):
        found["other dtype by force"] = outcome(lambda: waystation.load(path, other))
    with loading(seen, load_and_broadcast=True if place.index == 1 else None):
        found["other wish"] = outcome(lambda: waystation.load(path, state))

    meet("before the damage")
    if place.index == 0:
        damage(path)
    meet("damage")
    with loading(seen, load_and_broadcast=True):
        found["damage"] = outcome(lambda: waystation.load(path, state))
    place.disconnect()
    return found


def tries(place: Place, slow: str, count: int) -> dict[str, Any]:
    """A load of 8 MiB in arrays that chooses by itself, with a storage or a network that is slow."""
    import torch

    from waystation.frameworks import torch_groups

    start(place)
    path = place.directory / "checkpoint"
    rows = torch.arange(2 << 20, dtype=torch.float32).reshape(1 << 10, -1)
    state = {f"{number}": part.clone() for number, part in enumerate(rows.chunk(count))}
    waystation.save(path, state)
    broadcast.LEAST_RECEIVED_BYTES = 0
    broadcast.LEAST_READING_S = 0.0
    if slow == "storage":
        broadcast.fill_buffers = slow_storage(place.directory / "storage", broadcast.fill_buffers)
    elif slow == "network":
        carry = torch_groups.TorchBroadcaster.broadcast

        def carry_slowly(self: Any, layer: Any, nbytes: int, piece: Any) -> None:
            time.sleep(nbytes / 1e6)
            carry(self, layer, nbytes, piece)

        torch_groups.TorchBroadcaster.broadcast = carry_slowly  # type: ignore[method-assign]
    else:
        broadcast.LEAST_READING_S = float("inf")
    seen: list[Any] = []
    with loading(seen):
        loaded = waystation.load(path, state)
    place.disconnect()
    return {"wrong": wrong(state, loaded), **told(seen)}


def slow_storage(lock: Path, fill: Any) -> Any:
    """A storage that all processes share, and that reads 2 MB a second."""

    def fill_slowly(reading: Any, arrays: Any) -> None:
        arrays = list(arrays)
        boxes = [(incoming, box) for incoming in arrays for box in incoming.target.boxes]
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(sum(incoming.item_bytes * int(np.prod(box[1])) for incoming, box in boxes) / 2e6)
        fill(reading, arrays)

    return fill_slowly


def dies(place: Place) -> None:
    """The last process is killed as it enters the first collective; the others report what they raise."""
    import torch

    from waystation.frameworks import torch_groups

    start(place)
    path = place.directory / "checkpoint"
    state = {"large": torch.ones(1 << 20), "small": torch.ones(3)}
    waystation.save(path, state)
    if place.index == place.count - 1:
        torch_groups.TorchBroadcaster.broadcast = (  # type: ignore[method-assign]
            lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        )
    with loading([], load_and_broadcast=True):
        place.report(outcome(lambda: waystation.load(path, state)))
    place.receive()  # a process that has ended looks like one that was killed
