"""The tensors of some files, each read by one process of a group and sent to those that ask for it.

All processes of the group make the same calls in the same order. Invariants: before the first tensor is sent,
all processes know whether each has read its files, so that one damaged file raises in all of them instead of
leaving the others to wait; a file whose tensors have all been asked for is let go of, in groups of several,
and all processes have the same idea of which were; a tensor that was handed out shares memory with what is
kept only in a group of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from waystation._errors import Corrupt, InvalidInput, TensorNotFound
from waystation.compat.fastsafetensors.common import OutsideOfTensor, SafeTensorsMetadata, TensorFrame
from waystation.compat.fastsafetensors.st_types import Device, DType, logical_name
from waystation.compat.fastsafetensors.tensors import ProcessGroup, TensorBase, packed_shape, torch_groups
from waystation.coordination import collective

_ALIGN_BYTES = 256  # of tensors that are sent together


class NoSuchTensor(TensorNotFound, ValueError):
    """There is no tensor of that name, or it was not selected."""


class NotAlone(InvalidInput, RuntimeError):
    """The call is for a process alone, and there are several."""


class FileShare:
    """A file, and its tensors where this process has read it.

    Args:
        metadata: Its header.
        rank: Of the process that has read it.
        group: The processes.
        device: Where tensors are.
        tensors: Returns the tensors; waits until they are read. Called in the process that reads the file.
        caches: Whether what was sent once is kept for the next time.
    """

    def __init__(
        self,
        metadata: SafeTensorsMetadata,
        rank: int,
        group: ProcessGroup,
        device: Device,
        tensors: Callable[[], Mapping[str, TensorBase]],
        *,
        caches: bool,
    ) -> None:
        self.metadata = metadata
        self.rank = rank
        self._group = group
        self._device = device
        self._tensors: Callable[[], Mapping[str, TensorBase]] | None = tensors
        self._caches = caches
        self._sent: dict[tuple[str, int], TensorBase] = {}
        self._tag = 0

    # ---- what is there -------------------------------------------------------------------------

    def frame(self, name: str) -> TensorFrame:
        """What the header says of a tensor."""
        return self.metadata.tensors[name]

    def own(self, name: str) -> TensorBase:
        """A tensor that this process has read.

        Raises:
            InvalidInput: The file was let go of.
        """
        self.check_open()
        assert self._tensors is not None
        return self._tensors()[name]

    def check_open(self) -> None:
        """Raises InvalidInput if the file was let go of."""
        if self._tensors is None:
            raise InvalidInput(
                "the tensors of this file were let go of, since each had been asked for, or its buffer was "
                "closed; ask for each tensor once, or load the file again",
                path=self.metadata.src,
            )

    def release(self) -> None:
        """Lets go of the tensors; those that were handed out stay."""
        self._tensors = None
        self._sent.clear()

    @property
    def _is_here(self) -> bool:
        return self._group.rank() == self.rank

    # ---- to all --------------------------------------------------------------------------------

    def broadcast(self, name: str) -> TensorBase:
        """The whole tensor, in each process."""
        self.check_open()
        if self._group.size() == 1:
            return self.own(name)
        known = self._sent.get((name, -1))
        if known is not None:
            return known.clone()
        return self._kept(name, -1, *self.broadcast_joined([name]))

    def broadcast_joined(self, names: Sequence[str]) -> list[TensorBase]:
        """Whole tensors, in each process of several, sent together. They share memory with each other."""
        self.check_open()
        frames = [self.frame(name) for name in names]
        found = self._group.collectives.broadcast_joined(
            [self.own(name).real_tensor for name in names] if self._is_here else None,
            [packed_shape(frame.dtype, frame.shape) for frame in frames],
            [logical_name(frame.dtype) for frame in frames],
            self.rank,
            self._device.as_str(),
            _ALIGN_BYTES,
        )
        return [self._wrapped(tensor, frame.dtype) for tensor, frame in zip(found, frames, strict=True)]

    # ---- a part to each ------------------------------------------------------------------------

    def scatter(self, name: str, axis: int) -> TensorBase:
        """A block of the tensor in each process: it is divided evenly along an axis, rounded up."""
        self.check_open()
        if self._group.size() == 1:
            return self.own(name)
        known = self._sent.get((name, axis))
        if known is not None:
            return known.clone()
        return self._kept(name, axis, self.scatter_joined([name], axis))

    def scatter_joined(self, names: Sequence[str], axis: int) -> TensorBase:
        """The blocks of several tensors in each process, one after another along the axis.

        Raises:
            IndexError: There is no such axis.
            ValueError: They differ along another axis, or a block would end within a byte.
        """
        self.check_open()
        frames = [self.frame(name) for name in names]
        check_joinable(names, frames, axis)
        count = self._group.size()
        blocks = [[_block(frame, axis, rank, count) for frame in frames] for rank in range(count)]
        if count == 1:
            tensors = [self.own(name).real_tensor for name in names]
            return self._wrapped(torch_groups().concatenated(tensors, axis), frames[0].dtype)
        shapes = [_joined_shape(frames, axis, own) for own in blocks]
        own = self._empty(shapes[self._group.rank()], frames[0].dtype)
        parts = []
        if self._is_here:
            tensors = [self.own(name).real_tensor for name in names]
            index = (slice(None),) * axis
            for cut in blocks:
                pieces = [tensor[(*index, block)] for tensor, block in zip(tensors, cut, strict=True)]
                parts.append(torch_groups().concatenated(pieces, axis) if len(pieces) > 1 else pieces[0])
        most = max(_nbytes(shape, own) for shape in shapes)
        self._group.collectives.scatter(parts, own.real_tensor, self.rank, most)
        return own

    # ---- to one --------------------------------------------------------------------------------

    def push(self, name: str, destination: int) -> TensorBase | None:
        """The tensor in one process; None in the others."""
        self.check_open()
        if self._group.size() == 1:
            return self.own(name)
        self._tag += 1
        receives = self._group.rank() == destination
        if self._is_here and receives:
            return self.own(name).clone()
        if self._is_here:
            self._group.collectives.send(self.own(name).real_tensor, destination, self._tag)
        if not receives:
            return None
        frame = self.frame(name)
        found = self._empty(packed_shape(frame.dtype, frame.shape), frame.dtype)
        self._group.collectives.receive(found.real_tensor, self.rank, self._tag)
        return found

    # ---- making --------------------------------------------------------------------------------

    def _empty(self, shape: Sequence[int], dtype: DType) -> TensorBase:
        made = torch_groups().empty(shape, logical_name(dtype), self._device.as_str())
        return self._wrapped(made, dtype)

    def _wrapped(self, tensor: object, dtype: DType) -> TensorBase:
        return TensorBase(self._device, dtype, tensor)

    def _kept(self, name: str, axis: int, tensor: TensorBase) -> TensorBase:
        if self._caches:
            self._sent[name, axis] = tensor
        return tensor


def check_joinable(names: Sequence[str], frames: Sequence[TensorFrame], axis: int) -> None:
    """Raises unless tensors can be put one after another along an axis that all of them have."""
    first = frames[0]
    for name, frame in zip(names, frames, strict=True):
        if not 0 <= axis < len(frame.shape):
            raise OutsideOfTensor(f"there is no axis {axis} in the shape {tuple(frame.shape)}", tensor=name)
        others = [shape[:axis] + shape[axis + 1 :] for shape in (first.shape, frame.shape)]
        if others[0] != others[1] or frame.dtype is not first.dtype:
            raise InvalidInput(
                f"{frame.dtype.value} {tuple(frame.shape)} does not go with {first.dtype.value} "
                f"{tuple(first.shape)} of {names[0]!r} along axis {axis}",
                tensor=name,
            )


def _block(frame: TensorFrame, axis: int, rank: int, count: int) -> slice:
    """The block of a process along an axis, as torch counts there."""
    extent = frame.shape[axis]
    block = torch_groups().even_blocks(extent, count)[rank]
    begin, end = block.start, block.stop
    if frame.dtype is not DType.F4 or axis < len(frame.shape) - 1:
        return slice(begin, end)
    if begin % 2 or end % 2:
        raise InvalidInput(f"{extent} packed elements in {count} blocks are no whole bytes each")
    return slice(begin // 2, end // 2)


def _joined_shape(frames: Sequence[TensorFrame], axis: int, blocks: Sequence[slice]) -> list[int]:
    shape = list(packed_shape(frames[0].dtype, frames[0].shape))
    shape[axis] = sum(block.stop - block.start for block in blocks)
    return shape


def _nbytes(shape: Sequence[int], like: TensorBase) -> int:
    count = like.real_tensor.element_size()
    for extent in shape:
        count *= extent
    return int(count)


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
        self.rank_loaders: dict[int, list[FileShare]] = dict(rank_loaders)
        self.pg = pg
        self.auto_mem_delete: bool = auto_mem_delete and pg.size() > 1
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
        with self.pg.collectives.opened("read the files of a group") as session:
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
