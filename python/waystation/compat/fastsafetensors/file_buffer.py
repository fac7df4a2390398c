"""The tensors of some files, spread over the processes of a group.

All processes of the group make the same calls in the same order. Invariants: before the first tensor is sent,
all processes know whether each has read its files, so that one damaged file raises in all of them instead of
leaving the others to wait; a file whose tensors have all been asked for is let go of, in groups of several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from waystation._errors import Corrupt, InvalidInput, TensorNotFound
from waystation.compat.fastsafetensors.shares import FileShare
from waystation.compat.fastsafetensors.st_types import Device, DType
from waystation.compat.fastsafetensors.tensors import ProcessGroup, TensorBase, torch_groups
from waystation.coordination import collective


class NoSuchTensor(TensorNotFound, ValueError):
    """There is no tensor of that name, or it was not selected."""


class NotAlone(InvalidInput, RuntimeError):
    """The call is for a process alone, and there are several."""


class FilesBufferOnDevice:
    """The tensors of some files. `SafeTensorsFileLoader.copy_files_to_device` makes it.

    Tensors that were handed out own their memory: they stay when the buffer is closed.

    Args:
        rank_loaders: The files, by the process that reads them.
        pg: The processes.
        auto_mem_delete: Let go of a file once each of its tensors was asked for, in groups of several.
        keep_tensor: Which tensors are there; all by default.
        borrowed_tensors: Kept for the name.
        wait: Waits until this process has read its files; raises what went wrong.
        on_close: Called once, when the buffer is closed.

    Attributes:
        key_to_rank_lidx: By the name of each tensor, which process has read it, and which of its files holds
            it.
    """

    def __init__(
        self,
        rank_loaders: Mapping[int, list[FileShare]],
        pg: ProcessGroup,
        framework: Any = None,
        auto_mem_delete: bool = True,
        keep_tensor: Callable[[str], bool] | None = None,
        borrowed_tensors: bool = False,
        *,
        wait: Callable[[], None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.framework = framework
        self.borrowed_tensors = borrowed_tensors
        self.rank_loaders = dict(rank_loaders)
        self.pg = pg
        self.auto_mem_delete = auto_mem_delete and pg.size() > 1
        self.key_to_rank_lidx: dict[str, tuple[int, int]] = {}
        self._asked: dict[tuple[int, int], set[str]] = {}
        self._wait: Callable[[], None] | None = wait
        self._on_close: Callable[[], None] | None = on_close
        for rank, files in self.rank_loaders.items():
            for index, file in enumerate(files):
                for name in file.metadata.tensors:
                    if keep_tensor is None or keep_tensor(name):
                        self._add(name, rank, index)

    def _add(self, name: str, rank: int, index: int) -> None:
        other = self.key_to_rank_lidx.setdefault(name, (rank, index))
        if other != (rank, index):
            path = self.rank_loaders[other[0]][other[1]].metadata.src
            raise Corrupt(
                f"a tensor is in this file and in '{path}'",
                path=self.rank_loaders[rank][index].metadata.src,
                tensor=name,
            )

    # ---- what is there -------------------------------------------------------------------------

    def get_filename(self, tensor_name: str) -> str:
        """The file of a tensor.

        Raises:
            ValueError: There is no such tensor.
        """
        return self._file(tensor_name).metadata.src

    def get_shape(self, tensor_name: str) -> list[int]:
        """The shape of a tensor, as the file has it.

        Raises:
            ValueError: There is no such tensor.
        """
        return list(self._file(tensor_name).frame(tensor_name).shape)

    def _file(self, name: str) -> FileShare:
        found = self.key_to_rank_lidx.get(name)
        if found is None:
            raise NoSuchTensor(
                f"there is no tensor {name!r} among the {len(self.key_to_rank_lidx)} loaded ones"
            )
        rank, index = found
        if not self.rank_loaders:
            raise InvalidInput("the buffer was closed; load the files again")
        return self.rank_loaders[rank][index]

    def _ready(self, name: str) -> FileShare:
        """The file of a tensor, once every process has read its own."""
        file = self._file(name)
        self.settle()
        return file

    def settle(self) -> None:
        """Waits until every process has read its files.

        Raises:
            Corrupt, Conflict: A file could not be read, by this process or the one that the context names.
        """
        if self._wait is None:
            return
        wait, self._wait = self._wait, None
        with contextlib.closing(self.pg.collectives.open("read the files of a group")) as session:
            collective.attempt(session, wait)

    # ---- tensors -------------------------------------------------------------------------------

    def get_tensor(self, tensor_name: str, device: Device | None = None, dtype: DType = DType.AUTO) -> Any:
        """The whole tensor, in each process.

        Args:
            tensor_name: Its name.
            device: Where to; by default where it is.
            dtype: As what; by default as it is.

        Raises:
            ValueError: There is no such tensor.
        """
        return self.get_tensor_wrapped(tensor_name, device, dtype).get_raw()

    def get_tensor_wrapped(
        self, tensor_name: str, device: Device | None = None, dtype: DType = DType.AUTO
    ) -> TensorBase:
        """What `get_tensor` returns, with its device and dtype."""
        return self.get_sharded_wrapped(tensor_name, -1, device, dtype)

    def get_sharded(
        self, tensor_name: str, dim: int, device: Device | None = None, dtype: DType = DType.AUTO
    ) -> Any:
        """In each process one of as many blocks of the tensor as there are processes.

        Args:
            tensor_name: Its name.
            dim: The axis that is divided, evenly, rounded up: the last blocks may be smaller, or empty. -1
                for the whole tensor.
            device: Where to; by default where it is.
            dtype: As what; by default as it is.

        Raises:
            ValueError: There is no such tensor.
            IndexError: It has no such axis.
        """
        return self.get_sharded_wrapped(tensor_name, dim, device, dtype).get_raw()

    def get_sharded_wrapped(
        self, tensor_name: str, dim: int, device: Device | None = None, dtype: DType = DType.AUTO
    ) -> TensorBase:
        """What `get_sharded` returns, with its device and dtype."""
        file = self._ready(tensor_name)
        found = file.broadcast(tensor_name) if dim == -1 else file.scatter(tensor_name, dim)
        self._count([tensor_name])
        return found.to(device=device, dtype=dtype)

    def get_multi_cols(
        self, tensor_names: Sequence[str], dim: int, device: Device | None = None, dtype: DType = DType.AUTO
    ) -> TensorBase:
        """In each process one block of each of several tensors, joined along the axis that is divided.

        Tensors come in the order of the processes that have read them and of their files, those of one file
        as they are given.
        """
        by_file: dict[tuple[int, int], list[str]] = {}
        for name in tensor_names:
            self._ready(name)
            by_file.setdefault(self.key_to_rank_lidx[name], []).append(name)
        parts = [
            self.rank_loaders[rank][index].scatter_joined(names, dim)
            for (rank, index), names in sorted(by_file.items())
        ]
        # Of tensors of one file only the first counts as asked for, in fastsafetensors as well.
        self._count(tensor_names if len(parts) > 1 else tensor_names[:1])
        if len(parts) == 1:
            return parts[0].to(device=device, dtype=dtype)
        raw = torch_groups().concatenated([part.real_tensor for part in parts], dim)
        return TensorBase(parts[0].device, parts[0].dtype, raw).to(device=device, dtype=dtype)

    def push_tensor(
        self, tensor_name: str, dst_rank: int, device: Device | None = None, dtype: DType = DType.AUTO
    ) -> Any:
        """The whole tensor in one process, None in the others.

        Raises:
            ValueError: There is no such tensor.
        """
        found = self._ready(tensor_name).push(tensor_name, dst_rank)
        return None if found is None else found.to(device=device, dtype=dtype).get_raw()

    def as_dict(self, tensor_shard_dim: Mapping[str, int]) -> dict[str, TensorBase]:
        """What `get_sharded_wrapped` returns of each tensor, by the axis that is given for it."""
        return {name: self.get_sharded_wrapped(name, axis) for name, axis in tensor_shard_dim.items()}

    def iter_local_tensors(self, tensor_names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Names and tensors, in a group of one process.

        Raises:
            RuntimeError: There are several.
        """
        if self.pg.size() != 1:
            raise NotAlone(f"iter_local_tensors is for one process, and the group has {self.pg.size()}")
        for name in tensor_names:
            yield name, self._ready(name).own(name).get_raw()

    def _count(self, names: Iterable[str]) -> None:
        """Lets go of files whose tensors have all been asked for."""
        if not self.auto_mem_delete:
            return
        for name in names:
            place = self.key_to_rank_lidx[name]
            file = self.rank_loaders[place[0]][place[1]]
            asked = self._asked.setdefault(place, set())
            asked.add(name)
            if len(asked) == len(file.metadata.tensors):
                file.release()

    # ---- in runs -------------------------------------------------------------------------------

    def iterate_in_runs(
        self, names: Sequence[str], max_bytes: int, max_tensors: int
    ) -> Iterator[tuple[str, Any]]:
        """Names and whole tensors in each process; small ones of one file are sent together.

        Args:
            names: Of the tensors, in the order in which they come.
            max_bytes: Most bytes that are sent together; a larger tensor goes alone.
            max_tensors: Most tensors.
        """
        for run in self._runs(names, max_bytes, max_tensors):
            file = self._ready(run[0])
            tensors = [file.broadcast(run[0])] if len(run) == 1 else file.broadcast_joined(run)
            self._count(run)
            for name, tensor in zip(run, tensors, strict=True):
                yield name, tensor.get_raw()

    def _runs(self, names: Sequence[str], max_bytes: int, max_tensors: int) -> Iterator[list[str]]:
        run: list[str] = []
        held = 0
        for name in names:
            nbytes = self._file(name).frame(name).nbytes
            is_elsewhere = bool(run) and self.key_to_rank_lidx[name] != self.key_to_rank_lidx[run[0]]
            if run and (is_elsewhere or held + nbytes > max_bytes or len(run) >= max_tensors):
                yield run
                run, held = [], 0
            run.append(name)
            held += nbytes
        if run:
            yield run

    # ---- closing -------------------------------------------------------------------------------

    def close(self) -> None:
        """Lets go of all files; stops what is still being read. Idempotent."""
        for files in self.rank_loaders.values():
            for file in files:
                file.release()
        self.rank_loaders = {}
        self._wait = None
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            on_close()
