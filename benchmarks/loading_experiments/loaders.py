"""The loaders: each library as a program of one or several processes uses it to load a published model.

A process wants the model whole, or its block of the rows of every tensor of two axes and the others whole. A
loader is made before the clock starts and imports what it needs; `load` holds only what a user of that
library would write. In programs of several processes the framework has connected them already.

- Waystation loads together in torch (`load_in_group`); in JAX by a `sharding_fn`.
- fastsafetensors spreads the files over the processes and broadcasts or scatters each tensor.
- Run:ai's streamer can read shares and broadcast them (`distributed`), or each process reads everything; it
  has no slices, so a block is copied out of every tensor as it comes.
- safetensors opens the files in every process, and takes slices.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.loading_experiments.models import files_of

Arrays = dict[str, Any]
DEFAULT = "default"
CAST = "float32"
"""The way of a loader that makes arrays of that dtype, whatever the files hold."""


class Loader:
    """One library, set up.

    Attributes:
        name: How it is called in the results.
        framework: Whose arrays it makes.
        mapped_ways: The ways after which the bytes are not in memory yet.
    """

    name: ClassVar[str]
    framework: ClassVar[str]
    mapped_ways: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, way: str, *, divided: bool, processes: int, process: int) -> None:
        self.way = way
        self.divided = divided
        self.processes = processes
        self.process = process

    @property
    def dtype(self) -> str | None:
        """What arrays are cast to; None where they stay as the files have them."""
        return CAST if self.way == CAST else None

    def load(self, directory: Path) -> Arrays:
        """Loads; the arrays are complete when it returns, unless they are mapped."""
        raise NotImplementedError

    def rows(self, shape: Any) -> slice | None:
        """Which rows of a tensor this process wants; None for a tensor that it wants whole."""
        if not self.divided or len(shape) != 2:
            return None
        count = shape[0] // self.processes
        return slice(self.process * count, (self.process + 1) * count)


class WaystationSafetensorsTorch(Loader):
    name = "waystation-safetensors-torch"
    framework = "torch"
    mapped_ways = frozenset({"mmap"})

    def __init__(self, way: str, *, divided: bool, processes: int, process: int) -> None:
        super().__init__(way, divided=divided, processes=processes, process=process)
        import torch.distributed

        import waystation.safetensors

        self._library = waystation.safetensors
        self._group = torch.distributed.group.WORLD if processes > 1 else None

    def load(self, directory: Path) -> Arrays:
        if self.processes == 1 and not self.divided:
            return self._library.load(directory, framework="torch", mmap=self.way == "mmap", dtype=self.dtype)
        rows = self._library.Divided(axis=0)
        placement = (lambda _, shape: rows if len(shape) == 2 else None) if self.divided else None
        return self._library.load_in_group(directory, group=self._group, placement=placement)


class WaystationSafetensorsJax(Loader):
    name = "waystation-safetensors-jax"
    framework = "jax"
    mapped_ways = frozenset({"mmap"})

    def __init__(self, way: str, *, divided: bool, processes: int, process: int) -> None:
        super().__init__(way, divided=divided, processes=processes, process=process)
        import jax

        import waystation.safetensors

        self._library = waystation.safetensors
        self._jax = jax
        self._shardings = row_shardings()

    def load(self, directory: Path) -> Arrays:
        by_rows, whole = self._shardings
        loaded = self._library.load(
            directory,
            framework="jax",
            sharding_fn=lambda _, array: by_rows if self.divided and len(array.shape) == 2 else whole,
            mmap=self.way == "mmap",
        )
        ready: Arrays = self._jax.block_until_ready(loaded)
        return ready


class SafetensorsTorch(Loader):
    """`mmap` gives views of the mapping, `pread` memory of its own; a cast reads the mapping."""

    name = "safetensors-torch"
    framework = "torch"
    mapped_ways = frozenset({"mmap"})

    def __init__(self, way: str, *, divided: bool, processes: int, process: int) -> None:
        super().__init__(way, divided=divided, processes=processes, process=process)
        import safetensors.torch

        self._load_file = safetensors.torch.load_file
        self._open = safetensors.safe_open

    def load(self, directory: Path) -> Arrays:
        found: Arrays = {}
        for file in files_of(directory):
            if self.dtype is not None:
                found.update({name: tensor.float() for name, tensor in self._load_file(file).items()})
                continue
            if not self.divided:
                found.update(self._load_file(file, backend=self.way))
                continue
            with self._open(file, framework="pt", backend=self.way) as opened:
                for name in opened.keys():  # noqa: SIM118  it is no mapping
                    rows = self.rows(opened.get_slice(name).get_shape())
                    found[name] = opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows]
        return found


class SafetensorsJax(Loader):
    """Both backends end in a copy, because `safetensors.flax` always makes arrays of its own."""

    name = "safetensors-jax"
    framework = "jax"

    def __init__(self, way: str, *, divided: bool, processes: int, process: int) -> None:
        super().__init__(way, divided=divided, processes=processes, process=process)
        import jax
        import safetensors.flax

        self._load_file = safetensors.flax.load_file
        self._open = safetensors.safe_open
        self._jax = jax
        self._shardings = row_shardings()

    def load(self, directory: Path) -> Arrays:
        found: Arrays = {}
        for file in files_of(directory):
            if self.divided:
                found.update(self._blocks(file))
            else:
                found.update(self._load_file(file, backend=self.way))
        ready: Arrays = self._jax.block_until_ready(found)
        return ready

    def _blocks(self, file: str) -> Arrays:
        found: Arrays = {}
        by_rows, whole = self._shardings
        with self._open(file, framework="flax", backend=self.way) as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                shape = tuple(opened.get_slice(name).get_shape())
                rows = self.rows(shape)
                own = opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows]
                sharding = whole if rows is None else by_rows
                found[name] = self._jax.make_array_from_single_device_arrays(shape, sharding, [own])
        return found


class Fastsafetensors(Loader):
    """Reads `direct` or `buffered`; every file is of one process."""

    name = "fastsafetensors"
    framework = "torch"

    def __init__(self, way: str, *, divided: bool, processes: int, process: int) -> None:
        super().__init__(way, divided=divided, processes=processes, process=process)
        os.environ["FASTSAFETENSORS_ODIRECT"] = "1" if way == "direct" else "0"
        import fastsafetensors  # type: ignore[import-untyped]
        import torch.distributed

        self._library = fastsafetensors
        single = fastsafetensors.SingleGroup()
        self._group = torch.distributed.group.WORLD if processes > 1 else single

    def load(self, directory: Path) -> Arrays:
        files = files_of(directory)
        loader = self._library.SafeTensorsFileLoader(self._group, device="cpu", nogds=True)
        loader.add_filenames({rank: files[rank :: self.processes] for rank in range(self.processes)})
        buffers = loader.copy_files_to_device()
        found = {}
        for name in loader.get_keys():
            is_divided = self.rows(loader.get_shape(name)) is not None
            found[name] = buffers.get_sharded(name, 0) if is_divided else buffers.get_tensor(name)
        buffers.close()
        loader.close()
        return found


class FastsafetensorsPipeline(Fastsafetensors):
    """Its `ParallelLoader`, which reads ahead and broadcasts runs of tensors; whole tensors alone."""

    name = "fastsafetensors-pipeline"

    def load(self, directory: Path) -> Arrays:
        loader = self._library.ParallelLoader(
            self._group, files_of(directory), use_tqdm_on_load=False, device="cpu", nogds=True
        )
        found = dict(loader.iterate_weights())
        loader.close()
        return found


class RunaiStreamer(Loader):
    """`distributed` reads shares and broadcasts them; other ways are strategies of its file engine."""

    name = "runai"
    framework = "torch"

    def __init__(self, way: str, *, divided: bool, processes: int, process: int) -> None:
        super().__init__(way, divided=divided, processes=processes, process=process)
        if way == "distributed":
            os.environ["RUNAI_STREAMER_DIST"] = "1"  # or it is for NCCL alone
        elif way != DEFAULT:
            os.environ["RUNAI_STREAMER_FS_STRATEGY"] = way
        from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-untyped]

        self._streamer = SafetensorsStreamer

    def load(self, directory: Path) -> Arrays:
        found: Arrays = {}
        with self._streamer() as streamer:
            streamer.stream_files(
                files_of(directory),
                device="cpu",
                is_distributed=self.way == "distributed",
                owned=not self.divided,  # blocks are copied, so its buffers can be used again
            )
            for name, tensor in streamer.get_tensors():
                rows = self.rows(tensor.shape)
                block = tensor if rows is None else tensor[rows]
                found[name] = block.clone() if self.divided else block
        return found


LOADERS: dict[str, type[Loader]] = {
    loader.name: loader
    for loader in (
        WaystationSafetensorsTorch,
        WaystationSafetensorsJax,
        SafetensorsTorch,
        SafetensorsJax,
        Fastsafetensors,
        FastsafetensorsPipeline,
        RunaiStreamer,
    )
}


def row_shardings() -> tuple[Any, Any]:
    """The shardings over all devices that divide the rows, and that divide nothing."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    return NamedSharding(mesh, PartitionSpec("rows")), NamedSharding(mesh, PartitionSpec())
