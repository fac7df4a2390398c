"""One file as the processes of a group have it: read by one of them, and sent to those that ask for it.

Invariants: all processes make the same calls in the same order, as for any collective, and have the same idea
of which files were let go of, so that all of them raise, or none; a tensor that was handed out shares memory
with what is kept only in a group of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from waystation._errors import InvalidInput
from waystation.compat.fastsafetensors.common import OutsideOfTensor, SafeTensorsMetadata, TensorFrame
from waystation.compat.fastsafetensors.st_types import Device, DType, logical_name
from waystation.compat.fastsafetensors.tensors import ProcessGroup, TensorBase, packed_shape, torch_groups

_ALIGN_BYTES = 256  # of tensors that are sent together


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
        frame = self.frame(name)
        shape = packed_shape(frame.dtype, frame.shape)
        found = self.own(name).clone().contiguous() if self._is_here else self._empty(shape, frame.dtype)
        self._group.collectives.broadcast(found.real_tensor, self.rank)
        return self._kept(name, -1, found)

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
