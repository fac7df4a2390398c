"""One process of a program that loads a published model once.

The order is always: connect, make the loader, load a small model in the same way so that nothing is
imported, compiled or connected later, say that it is ready, wait for the word, run the clock, say that it has
ended, wait again, and only then check the bytes: whatever is measured beside the load has ended by then.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import measure, processes
from benchmarks.loading_experiments.loaders import LOADERS, Arrays, Loader
from benchmarks.loading_experiments.models import Model, values
from benchmarks.measure import Meter
from benchmarks.states import Leaf

Facts = dict[str, Any]
SPARE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """What the processes of a program are asked to do; the last three are each process's own.

    Attributes:
        loader: See `loaders.LOADERS`.
        way: One of the loader's.
        model: What is loaded.
        directory: Where it is.
        warm_up: A small model and where it is.
        processes: How many there are.
        divided: Whether each wants its block of rows, and not everything.
        cold: Whether the page cache is dropped before; else the files are read into it.
        verify_all: Whether every tensor is to be checked, or one.
        process: Which of them this is.
        coordinator: The address by which those of JAX find each other.
        store: The file by which those of torch do, since a port may be taken meanwhile.
    """

    loader: str
    way: str
    model: Model
    directory: Path
    warm_up: tuple[Model, Path]
    processes: int = 1
    divided: bool = False
    cold: bool = True
    verify_all: bool = False
    process: int = 0
    coordinator: str = ""
    store: Path = Path()

    @property
    def held_bytes(self) -> int:
        """What one process holds in the end, or a little more."""
        return self.model.nbytes // (self.processes if self.divided else 1)


def main(request: Request, connection: Connection, log: Path) -> None:
    """What a process does. Messages to the program are a word or, once, the outcome."""
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    connection.send(processes.attempt(run, request, connection))
    with contextlib.suppress(EOFError):
        connection.recv()  # until the program ends it: none may miss another while it checks


def run(request: Request, connection: Connection) -> Facts:
    """Measures; returns when the load began and ended, counts, and the verdict of the check."""
    kind = LOADERS[request.loader]
    _connect(kind.framework, request)
    loader = kind(request.way, divided=request.divided, processes=request.processes, process=request.process)
    small, directory = request.warm_up
    _check(loader, small.leaves(), loader.load(directory))
    spare_bytes = SPARE_BYTES // request.processes
    measure.back_free_memory(2 * request.held_bytes + spare_bytes, quick=request.model.quick)
    connection.send("ready")
    connection.recv()
    meter = Meter()
    with meter.running():
        begin_s = time.monotonic()
        loaded = loader.load(request.directory)
        loaded_s = time.monotonic()
        if loader.way in loader.mapped_ways:
            measure.touch(bytes_of(loader.framework, array) for array in loaded.values())
        end_s = time.monotonic()
    connection.send("ended")
    connection.recv()
    leaves = request.model.leaves()
    _check(loader, leaves, loaded, everything=request.verify_all)
    return {
        "status": "ok",
        "begin_s": begin_s,
        "loaded_s": loaded_s,
        "end_s": end_s,
        "held_bytes": sum(block_of(loader, leaf).nbytes for leaf in leaves),
        **meter.counts,
    }


def _connect(framework: str, request: Request) -> None:
    if request.processes == 1:
        return
    if framework == "jax":
        import jax

        jax.distributed.initialize(request.coordinator, request.processes, request.process)
        return
    import torch.distributed

    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{request.store}",
        rank=request.process,
        world_size=request.processes,
    )


# ---- what was loaded ---------------------------------------------------------------------------


def block_of(loader: Loader, leaf: Leaf) -> Leaf:
    """What of a tensor this process wants, as a tensor."""
    rows = loader.rows(leaf.shape)
    return leaf if rows is None else Leaf(leaf.name, (rows.stop - rows.start, *leaf.shape[1:]), leaf.dtype)


def bytes_of(framework: str, array: Any) -> npt.NDArray[np.uint8]:
    """The bytes of what this process holds of an array, in C order."""
    if framework == "torch":
        import torch

        tensor: npt.NDArray[np.uint8] = array.contiguous().reshape(-1).view(torch.uint8).numpy()
        return tensor
    return np.asarray(array.addressable_shards[0].data).reshape(-1).view(np.uint8)


def _check(loader: Loader, leaves: list[Leaf], loaded: Arrays, *, everything: bool = True) -> None:
    """Compares all tensors with what was written, or the largest; of all names, shapes and dtypes.

    Raises:
        ValueError: It differs.
    """
    names = {leaf.name for leaf in leaves}
    if names != loaded.keys():
        raise ValueError(f"names differ: {sorted(names ^ loaded.keys())[:5]}")
    for leaf in leaves:
        shape = block_of(loader, leaf).shape
        wanted = shape, loader.dtype or leaf.dtype
        for found in _shapes(loader, loaded[leaf.name]):
            if found != wanted:
                raise ValueError(f"tensor '{leaf.name}' is {found}, not {wanted}")
    for leaf in leaves if everything else [max(leaves, key=lambda leaf: leaf.nbytes)]:
        rows = loader.rows(leaf.shape)
        block = values(leaf) if rows is None else values(leaf)[rows]
        block = block if loader.dtype is None else block.astype(loader.dtype)
        if not np.array_equal(
            bytes_of(loader.framework, loaded[leaf.name]), block.reshape(-1).view(np.uint8)
        ):
            raise ValueError(f"tensor '{leaf.name}' differs")


def _shapes(loader: Loader, array: Any) -> Iterator[tuple[tuple[int, ...], str]]:
    """Shape and dtype of what this process holds of an array."""
    if loader.framework == "torch":
        yield tuple(array.shape), str(array.dtype).removeprefix("torch.")
        return
    for shard in array.addressable_shards:
        yield tuple(shard.data.shape), str(shard.data.dtype)
