"""What each process of the tests of DTensors runs.

All processes do the same, case by case, and each tells how every case ended. After a failure a process stops,
since the others are out of step with it.
"""

from __future__ import annotations

import datetime
import os
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from tests.frameworks.store import Saved, bits, load
from tests.frameworks.torch_checks import (
    check,
    codec,
    counted,
    distribute,
    everyone,
    raw,
    refused,
    same,
    saved_by_all,
)
from tests.support.programs import Place
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from waystation.errors import InvalidInput, Unsupported
from waystation.frameworks import torch_meshes
from waystation.frameworks.base import StoredArray

CASES: dict[int, dict[str, Callable[[], None]]] = {2: {}, 4: {}}
_directory = Path()  # of the test; its stores are there


def case(*counts: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers what programs of so many processes run."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        for count in counts:
            CASES[count][function.__name__] = function
        return function

    return register


def random_placement(source: random.Random, shape: tuple[int, ...]) -> Any:
    kind = source.randrange(3) if shape else 0
    axis = source.randrange(len(shape)) if shape else 0
    if kind == 0:
        return Replicate()
    return Shard(axis) if kind == 1 else _StridedShard(axis, split_factor=source.randint(2, 4))


# ---- cases -------------------------------------------------------------------------------------


@case(2, 4)
def random_meshes_and_placements() -> None:
    count = distributed.get_world_size()
    numbers = torch.arange(count)
    meshes = [DeviceMesh("cpu", numbers), DeviceMesh("cpu", numbers.reshape(2, -1))]
    meshes += [DeviceMesh("cpu", numbers.reshape(1, count)), DeviceMesh("cpu", numbers[1:])]
    source = random.Random(count)
    dtypes_tried = (torch.float32, torch.bfloat16, torch.complex128, torch.int64)
    for number in range(144 // count):
        mesh = meshes[number % len(meshes)]
        shape = tuple(source.choice((0, 1, 1, 2, 3, 4, 7, 8, 12)) for _ in range(source.randrange(4)))
        placements = [random_placement(source, shape) for _ in mesh.shape]
        check(counted(shape, source.choice(dtypes_tried)), mesh, placements, gather=number % 8 < 4)


@case(4)
def processes_in_another_order() -> None:
    # torch gathers such a mesh in the order of the processes, so full_tensor() is no oracle.
    mesh = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]))
    check(counted((7, 5)), mesh, [Shard(0), Shard(1)], gather=False)
    check(counted((9,)), mesh, [_StridedShard(0, split_factor=2), Shard(0)], gather=False)


@case(4)
def meshes_cut_out_of_a_larger_one() -> None:
    larger = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, columns = larger["dp"], larger["tp"]
    check(counted((6, 3)), columns, [Shard(0)])
    check(counted((6, 3)), rows, [Shard(1)])
    source, _ = saved_by_all(distribute(counted((4,)), columns, [Shard(0)]))
    assert source.spread.holders == ((0, 2), (1, 3))
    assert source.sharding["mesh"]["ranks"] == [0, 1, 2, 3]
    source, saved = saved_by_all(distribute(counted((4,)), rows, [Shard(0)]))
    assert source.spread.holders == ((0, 1), (2, 3))
    # A mesh that this program does not have yet, of the same kind: made once, and cut like the first.
    assert saved.stored.sharding is not None
    saved.stored.sharding["mesh"]["axis_names"] = ["rows"]
    loaded = load(saved)
    assert loaded.device_mesh.mesh_dim_names == ("rows",)
    assert loaded.device_mesh.mesh.tolist() == rows.mesh.tolist()
    assert torch.equal(loaded.full_tensor(), counted((4,)))
    joined = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a", "b"]._flatten("all")
    check(counted((9,)), joined, [Shard(0)])


@case(2)
def a_mesh_is_made_once_and_only_by_loads() -> None:
    _, saved = saved_by_all(distribute(counted((5, 3)), DeviceMesh("cpu", [0, 1]), [Shard(0)]))
    assert saved.stored.sharding is not None
    saved.stored.sharding["mesh"]["axis_names"] = ["unheard of"]
    if distributed.get_rank() == 0:  # alone: looking at a checkpoint must not need the others
        shown = codec().abstract(saved.stored)
        assert (shown.shape, shown.placements) == ((5, 3), (Shard(0),))
        assert shown.device.type == "meta"
        assert shown.device_mesh.mesh_dim_names == ("unheard of",)
    shown = codec().abstract(saved.stored)
    first = load(saved, shown)
    assert first.device_mesh == shown.device_mesh
    second, third = load([saved, saved])
    assert first.device_mesh is second.device_mesh is third.device_mesh
    assert torch.equal(second.full_tensor(), counted((5, 3)))
    assert codec().abstract(saved.stored).device_mesh is first.device_mesh


@case(2)
def meshes_of_other_programs_are_refused_with_advice() -> None:
    _, saved = saved_by_all(distribute(counted((5,)), DeviceMesh("cpu", [0, 1]), [Shard(0)]))
    assert saved.stored.sharding is not None
    mesh = saved.stored.sharding["mesh"]
    for change in ({"process_count": 3}, {"device_type": "unheard of"}):
        saved.stored.sharding["mesh"] = mesh | change
        refused(InvalidInput, "device='meta'", lambda: load(saved))
        abstract = codec().abstract(saved.stored)
        assert type(abstract) is torch.Tensor
        assert torch.equal(load(saved, abstract), counted((5,)))
    # What one process held can be had whole by any program.
    saved.stored.sharding["mesh"] = mesh | {"process_count": 1, "ranks": [0], "shape": [1]}
    assert torch.equal(load(saved), counted((5,)))


@case(2, 4)
def plain_tensors_are_held_by_all() -> None:
    first, second = counted((3, 4)), torch.nn.Parameter(counted((3, 4)))
    one, other = codec().sources([first, second])
    assert one.spread is other.spread
    assert one.spread.boxes == (((0, 0), (3, 4)),)
    assert one.spread.holders == (tuple(range(distributed.get_world_size())),)
    _, saved = saved_by_all(counted((), torch.float64))
    assert load(saved).shape == ()


@case(2)
def parameters_gradients_and_casts() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    full = counted((5, 2))
    parameter = torch.nn.Parameter(distribute(full, mesh, [Shard(0)]))
    source, saved = saved_by_all(parameter)
    assert source.extra == {"requires_grad": True}
    assert source.blocks[0].address == parameter.to_local().data_ptr()
    assert source.mutable
    for loaded in (load(saved), load(saved, parameter), load(saved, codec().abstract(saved.stored))):
        same(loaded, parameter)
        assert loaded.requires_grad
        assert loaded.is_leaf
    narrow = distribute(full.to(torch.bfloat16), mesh, [Shard(0)])
    same(load(saved, narrow), narrow)
    assert not load(saved, narrow).requires_grad
    refused(InvalidInput, "shape", lambda: load(saved, distribute(counted((5, 3)), mesh, [Shard(0)])))
    # The view of a transposed one is not copied either.
    turned = DTensor.from_local(counted((2, 3)).T, mesh, [Shard(0)], run_check=False)
    (source,) = codec().sources([turned])
    assert source.blocks[0].strides == (4, 12)
    assert source.blocks[0].address == turned.to_local().data_ptr()


@case(2)
def one_spread_and_one_description_for_equal_ones() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    leaves = [distribute(counted((5, 2)), mesh, [Shard(0)]) for _ in range(3)]
    leaves.append(distribute(counted((7,)), mesh, [Shard(0)]))
    first, second, third, other = codec().sources(leaves)
    again = codec().sources(leaves)[0]
    assert first.spread is second.spread is third.spread is again.spread
    assert first.sharding is other.sharding


@case(2)
def what_cannot_be_saved() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    sums = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    refused(Unsupported, "redistribute", lambda: codec().sources([sums]))
    # Its parts have 3 and 2 rows, which torch is not told: each process believes in another whole.
    uneven = DTensor.from_local(torch.ones(3 - distributed.get_rank(), 2), mesh, [Shard(0)], run_check=False)
    (source,) = codec().sources([uneven])
    assert source.shape == (6 - 2 * distributed.get_rank(), 2)
    wrong = DTensor.from_local(
        torch.ones(2, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((5, 2)), stride=(2, 1)
    )
    (found,) = everyone_raises(wrong)
    assert "holds (2, 2)" in found
    meta = distribute(torch.empty(4, device="meta"), mesh, [Shard(0)])
    refused(InvalidInput, "no data", lambda: codec().sources([meta]))


def everyone_raises(leaf: DTensor) -> list[str]:
    """The messages of the processes that refuse a leaf."""
    try:
        codec().sources([leaf])
    except InvalidInput as error:
        message = str(error)
    else:
        message = ""
    return [found for found in everyone(message) if found]


@case(2)
def arrays_of_other_frameworks() -> None:
    full = counted((5, 4))
    mesh = DeviceMesh("cpu", [0, 1])
    sharding = {"kind": "named", "mesh": {}, "spec": []}
    stored = StoredArray((5, 4), "float32", "jax", "F32", (5, 4), sharding, {})
    saved = Saved(stored, full.numpy().view("V4"))
    for placements in ([Shard(0)], [Shard(1)], [Replicate()], [_StridedShard(0, split_factor=2)]):
        wanted = distribute(full, mesh, placements)
        same(load(saved, wanted), wanted)


@case(2)
def tensors_put_together_piece_by_piece() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    full = counted((9, 4)).to(torch.bfloat16)
    for placements in ([Shard(0)], [_StridedShard(0, split_factor=2)], [Replicate()]):
        leaf = distribute(full, mesh, placements)
        _, saved = saved_by_all(leaf)
        (target,) = codec().targets([leaf], [saved.stored])
        assert codec().stays_on_host(target) == (len(target.boxes) == 1)
        writer = codec().open_in_pieces(target)
        for number, buffer in enumerate(saved.boxes(target)):
            for row, values in enumerate(buffer):
                writer.put(number, (row, 0), values[None])
        same(writer.finish(), leaf)


@case(2)
def scattered_and_asynchronous_tensors() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    full = counted((5, 4))
    scattered = distribute_tensor(full, mesh, [Shard(-2)])
    _, saved = saved_by_all(scattered)
    assert bits(saved.data) == raw(full)
    gathered = scattered.redistribute(placements=[Replicate()], async_op=True)
    _, saved = saved_by_all(gathered)
    assert bits(saved.data) == raw(full)
    conjugate = distribute_tensor(full * (1 + 2j), mesh, [Shard(0)]).conj()
    _, saved = saved_by_all(conjugate)
    assert bits(saved.data) == raw((full * (1 + 2j)).conj())


@case(4)
def sharded_and_tensor_parallel_modules() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    larger = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    layers = (torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 7), torch.nn.LayerNorm(7))
    plain = torch.nn.Sequential(*layers)
    expected = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    module: Any = parallelize_module(plain, larger["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (*module, module):
        if not isinstance(layer, torch.nn.ReLU):
            fully_shard(layer, mesh=larger["dp"])
    state = module.state_dict()
    assert any(isinstance(entry, _StridedShard) for leaf in state.values() for entry in leaf.placements)
    for name, leaf in state.items():
        _, saved = saved_by_all(leaf)
        assert bits(saved.data) == raw(expected[name]), name
        for loaded in (load(saved), load(saved, leaf), load(saved, codec().abstract(saved.stored))):
            same(loaded, leaf)
            assert raw(loaded.full_tensor()) == raw(expected[name])
    module.load_state_dict({name: load(saved_by_all(leaf)[1], leaf) for name, leaf in state.items()})


@case(2)
def a_new_process_group_knows_nothing_of_the_last() -> None:
    # The last case: it ends the group.
    first = DeviceMesh("cpu", [0, 1])
    codec().sources([distribute(counted((4,)), first, [Shard(0)])])
    rank, count = distributed.get_rank(), distributed.get_world_size()
    distributed.destroy_process_group()
    refused(InvalidInput, "torch.distributed", lambda: torch_meshes.known_mesh(first))
    start(_directory / "second", rank, count)
    check(counted((4,)), DeviceMesh("cpu", [0, 1]), [Shard(0)])


# ---- running -----------------------------------------------------------------------------------


def start(store: Path, rank: int, count: int) -> None:
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(str(store), count),
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=60),
    )


def run(place: Place) -> dict[str, str | None]:
    """Runs the cases of so many processes; returns how they ended."""
    global _directory
    _directory = place.directory
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    start(_directory / "first", place.index, place.count)
    ended: dict[str, str | None] = {}
    try:
        for name, function in CASES[place.count].items():
            function()
            ended[name] = None
    except BaseException:
        ended[name] = traceback.format_exc()
    distributed.destroy_process_group()
    return ended
