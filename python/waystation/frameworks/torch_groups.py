"""The collectives of torch that loaders need: what one process has read, to the others that need it.

Everything travels as the bytes that it is, since no backend knows all dtypes. Two kinds of users: a
`TorchGroup` carries tensors of any device in the one process group that a caller gives; a `TorchBroadcaster`
carries host memory in whatever groups the loaded arrays need. Invariants: all processes of a group make the
same calls in the same order, as for any collective; what has no elements is never sent; on CPUs no collective
waits longer than `multiprocessing.deadline_s`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as distributed
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from waystation import coordination
from waystation._errors import InvalidInput, Unavailable, WaystationError
from waystation._options.in_effect import current_options
from waystation.coordination import Session, collective
from waystation.frameworks import torch_memory
from waystation.frameworks.base import Group

T = TypeVar("T")

_PATIENCE_S = 1.0  # which collectives may take before deaths are looked for
_NEWS_S = 15.0  # a death that made a collective fail is known by then
_LAST_S = 5.0  # what a collective still gets once the process with the store is gone
_PAUSE_S = 0.1


def of_group(group: Any) -> TorchGroup:
    """A process group as it is used here; None stands for this process alone.

    Raises:
        InvalidInput: It is no process group, or this process is not in it.
    """
    if group is None:
        return TorchGroup(None)
    is_int = isinstance(group, int) and distributed.is_available()
    if is_int and group == distributed.GroupMember.NON_GROUP_MEMBER:
        raise InvalidInput(
            "this process is not in the group: torch.distributed.new_group() has returned "
            "GroupMember.NON_GROUP_MEMBER here; only the processes of a group call this with it"
        )
    if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
        raise InvalidInput(
            f"group is {group!r:.60}, which is no process group; give one of torch.distributed "
            "(torch.distributed.group.WORLD is that of all processes), or None for this process alone"
        )
    return TorchGroup(group)


class TorchGroup:
    """A process group, or a process alone.

    Attributes:
        group: The process group; None for a process alone.
        size: The number of its processes.
        rank: Which of them this is.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size: int = 1 if group is None else group.size()
        self.rank: int = 0 if group is None else group.rank()
        self._ranks = [_rank()] if group is None else distributed.get_process_group_ranks(group)
        self._session: Session | None = None
        self._raised_in_all: BaseException | None = None

    @contextlib.contextmanager
    def opened(self, what: str) -> Iterator[Session]:
        """A session of these processes, which all of them open.

        While it is open, what one process fails with ends the waits of the others for what it does not send
        any more.
        """
        with contextlib.closing(
            coordination.of_torch().open(
                what,
                deadline_s=_deadline_s(),
                primary=min(self._ranks),
                sequence="" if self.group is None else f"group {self.group.group_name}",
                processes=self._ranks,
            )
        ) as self._session:
            yield self._session

    def attempt(self, work: Callable[[], T]) -> T:
        """Does something that can fail in one process and not in others; then all go on, or none.

        Raises:
            WaystationError: The work failed in some process. That one raises its error as it is, the others
                the error of the first that failed: of the same class and message, with its rank in the
                program as `process` in the context and its traceback as a note.
            Unavailable: A process has died.
            KeyboardInterrupt, SystemExit: This process was interrupted; the others raise Cancelled.
        """
        if self.size == 1:
            return work()
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        except BaseException as interrupt:
            failed, begin = self._vote(has_failed=True)
            _keep(begin(), failed)  # the others come to it, and this process waits for nobody
            self._raise_in_all(interrupt)
            raise
        failed, begin = self._vote(has_failed=failure is not None)
        self._carry(failed, begin, failure=failure)
        if failed.item():
            self._raise_in_all(failure)
        return result

    def _vote(self, *, has_failed: bool) -> tuple[torch.Tensor, Callable[[], Any]]:
        """What becomes nonzero if a process has failed, and the collective for that."""
        failed = torch.tensor([has_failed], dtype=torch.uint8, device=_device_of(self.group))
        largest = distributed.ReduceOp.MAX
        return failed, lambda: distributed.all_reduce(failed, largest, group=self.group, async_op=True)

    def _carry(
        self,
        tensor: torch.Tensor,
        begin: Callable[[], Any],
        *,
        failure: Exception | None = None,
        may_wait_again: bool = True,
    ) -> None:
        """Waits for a collective on a tensor. If it fails, an earlier failure of this process counts."""
        look = None if self._session is None else self._session.look
        try:
            _finish(begin(), tensor, self._ranks, look, may_wait_again=may_wait_again)
        except WaystationError:  # of another process; some of them are RuntimeErrors
            _unusable.add(self.group)
            raise
        except RuntimeError as error:
            _unusable.add(self.group)
            said = (
                "a process group could not carry what its processes have read: "
                f"{_first_line(error)}; see the output of all, and restart the program"
            )
            raise (failure or Unavailable(said)) from error

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """A block of collectives. What ends it in this process alone leaves others waiting for the rest."""
        try:
            yield
        except BaseException as error:
            if self.size > 1 and error is not self._raised_in_all:
                _unusable.add(self.group)
            raise

    def require_usable(self) -> None:
        """Raises InvalidInput if a collective of the group was given up, so that it carries nothing more."""
        if self.group is not None and self.group in _unusable:
            raise InvalidInput(
                "a load by these processes ended while they sent tensors, which leaves a process group that "
                "carries nothing more; give another group, or restart the program"
            )

    def _raise_in_all(self, failure: BaseException | None) -> None:
        """Raises, in all processes, what has gone wrong in one."""
        assert self._session is not None, "what can fail is attempted in a session"

        def work() -> None:
            if failure is not None:
                raise failure

        try:
            collective.attempt(self._session, work)
        except BaseException as error:
            self._raised_in_all = error
            raise

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fills a contiguous tensor with what that of the source has."""
        if self.size > 1 and tensor.numel():
            data, group = as_bytes(tensor), self.group
            self._carry(
                data, lambda: distributed.broadcast(data, group=group, group_src=source, async_op=True)
            )

    def broadcast_joined(
        self,
        tensors: Sequence[torch.Tensor] | None,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[str],
        source: int,
        device: str,
        align_bytes: int,
    ) -> list[torch.Tensor]:
        """Tensors that one process has, in all, in one message. They share memory with each other.

        Args:
            tensors: What is sent, in the source.
            shapes: Of the tensors.
            dtypes: Of their elements, logical.
            source: Who has them.
            device: Where they go.
            align_bytes: Each begins at a multiple of so many bytes.
        """
        kinds = [torch_memory.torch_dtype(dtype) for dtype in dtypes]
        sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
        rooms = [-(-nbytes // align_bytes) * align_bytes for nbytes in sizes]
        begins = list(itertools.accumulate(rooms, initial=0))
        # Nothing beyond the last: a tensor alone has all of its storage.
        flat = torch.empty(begins[len(sizes) - 1] + sizes[-1], dtype=torch.uint8, device=device)
        for tensor, begin, nbytes in zip(tensors or (), begins, sizes, strict=False):
            flat[begin : begin + nbytes].copy_(bytes_in_order(tensor))
        self.broadcast(flat, source)
        return [
            flat[begin : begin + nbytes].view(kind).reshape(tuple(shape))
            for begin, nbytes, kind, shape in zip(begins, sizes, kinds, shapes, strict=False)
        ]

    def scatter(self, parts: Sequence[torch.Tensor], own: torch.Tensor, source: int, most_bytes: int) -> None:
        """Fills a contiguous tensor in each process with its part of what the source has.

        Args:
            parts: What the source sends, by rank; empty elsewhere.
            own: What is filled.
            source: Who sends.
            most_bytes: Bytes of the largest part.
        """
        if not most_bytes:
            return
        # Backends want parts of one size; the last ones of a tensor may be smaller.
        nbytes = own.numel() * own.element_size()
        padded = own if nbytes == most_bytes else own.new_empty(most_bytes, dtype=torch.uint8)
        sent = [_padded(part, most_bytes) for part in parts] if self.rank == source else None
        data, group = as_bytes(padded), self.group
        self._carry(
            data, lambda: distributed.scatter(data, sent, group=group, group_src=source, async_op=True)
        )
        if padded is not own and nbytes:
            as_bytes(own).copy_(padded[:nbytes])

    def exchange(
        self, parts: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int], device: str
    ) -> torch.Tensor:
        """Sends bytes to every process, and receives some of every process.

        Args:
            parts: What goes to each, by rank: arrays of bytes of any strides.
            sizes: How many bytes come from each.
            device: Where they go.

        Returns:
            The bytes of all processes, one after another.
        """
        lengths = [sum(part.numel() for part in own) for own in parts]
        sent = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        begin = 0
        for part in (part for own in parts for part in own):
            sent[begin : begin + part.numel()].view(part.shape).copy_(part)
            begin += part.numel()
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._carry(
            received,
            lambda: distributed.all_to_all_single(
                received, sent, list(sizes), lengths, group=self.group, async_op=True
            ),
        )
        return received

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        """Sends a tensor to one process, which receives it."""
        if tensor.numel():
            data, group = bytes_in_order(tensor), self.group
            self._carry(
                data,
                lambda: distributed.isend(data, group=group, group_dst=destination, tag=tag),
                may_wait_again=False,
            )

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Fills a contiguous tensor with what one process sends."""
        if tensor.numel():
            data, group = as_bytes(tensor), self.group
            self._carry(
                data,
                lambda: distributed.irecv(data, group=group, group_src=source, tag=tag),
                may_wait_again=False,
            )


# Groups that still wait for what never comes.
_unusable: weakref.WeakSet[Any] = weakref.WeakSet()

# torch itself keeps them, until the program ends its process group.
_made: weakref.WeakValueDictionary[Group, Any] = weakref.WeakValueDictionary()


class TorchBroadcaster:
    """Carries host memory within process groups. See `base.Broadcaster`.

    A group that exactly the right processes form is taken where there is one: that of the program, or that of
    an axis of a mesh that the loaded tensors are on. Otherwise its members alone make one, which stays for as
    long as torch knows it. All members come to the same choice, since they look at the same meshes in the
    same order.

    Args:
        meshes: Of the tensors that are loaded; None for plain ones.
    """

    def __init__(self, meshes: Iterable[DeviceMesh | None]) -> None:
        self.process_index: int = _rank()
        self._meshes = list({id(mesh): mesh for mesh in meshes if mesh is not None}.values())
        self._groups: dict[Group, Any] = {}

    def broadcast(self, layer: Sequence[Group], nbytes: int, piece: NDArray[np.uint8]) -> None:
        """Carries one piece in each group of a layer; each on its own, so that empty ones do nothing."""
        if not piece.size:
            return
        own = next(group for group in layer if self.process_index in group)
        host = torch.from_numpy(piece)
        try:
            group = self._group(tuple(sorted(own)))
            carried = host.to(_device_of(group))
            _finish(distributed.broadcast(carried, src=own[0], group=group, async_op=True), carried, own)
            if carried is not host and own[0] != self.process_index:
                host.copy_(carried)
        except RuntimeError as error:
            raise Unavailable(
                f"torch could not send what process {own[0]} has read to the processes that need it as well "
                f"({', '.join(map(str, own[1:]))}): {_first_line(error)}. Set "
                "array.loading.load_and_broadcast = False to have every process read for itself"
            ) from error

    def _group(self, ranks: Group) -> Any:
        """The process group of the given processes."""
        group = self._groups.get(ranks)
        if group is None:
            group = self._groups[ranks] = self._present(ranks) or _make(ranks)
        return group

    def _present(self, ranks: Group) -> Any:
        if len(ranks) == distributed.get_world_size():
            return distributed.group.WORLD
        for mesh in self._meshes:
            if mesh.get_coordinate() is None:
                continue
            for axis in range(mesh.ndim):
                group = mesh.get_group(axis)
                if tuple(sorted(distributed.get_process_group_ranks(group))) == ranks:
                    return group
        return None


def _make(ranks: Group) -> Any:
    """Makes a group; all of its members do, in the same order as any others that they have in common."""
    group = _made.get(ranks)
    if group is None:
        group = distributed.new_group(list(ranks), use_local_synchronization=True)
        _made[ranks] = group
    return group


def _rank() -> int:
    place = place_in_program()
    return 0 if place is None else place[0]


def _device_of(group: Any) -> torch.device:
    """What the tensors of a group are on: the CPU if it can."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    kind = sorted(kinds)[0]
    return torch.device(kind, getattr(torch, kind).current_device())


# Collectives that nobody waits for, and what they work on.
_left: list[tuple[Any, torch.Tensor]] = []


def _keep(work: Any, tensor: torch.Tensor) -> None:
    _left[:] = [(earlier, its) for earlier, its in _left if not earlier.is_completed()]
    _left.append((work, tensor))


def _finish(
    work: Any,
    tensor: torch.Tensor,
    ranks: Sequence[int],
    look: Callable[[], None] | None = None,
    *,
    may_wait_again: bool = True,
) -> None:
    """Waits for a collective.

    One whose process has died can keep others waiting that are not connected to it, so deaths are looked for
    where it takes long. That of GPUs is only queued: torch's own watchdog ends what never comes.

    Args:
        work: The collective.
        tensor: What it is about.
        ranks: The processes that take part.
        look: Raises what another process has failed with, if any has.
        may_wait_again: Whether it goes on after a wait that was given up.

    Raises:
        RuntimeError: It failed, or did not end within the deadline.
        Unavailable: A process has died, and the collective has not come in spite of that.
        WaystationError: What `look` raises.
    """
    if tensor.device.type != "cpu":
        work.wait()
        return
    deadline_s = _deadline_s()
    begun_s = time.monotonic()
    failed_s: float | None = None
    patience_s = min(_PATIENCE_S, deadline_s) if may_wait_again else deadline_s
    with contextlib.ExitStack() as watching:
        require_alive: Callable[[], None] | None = None
        while True:
            try:
                work.wait(timedelta(seconds=patience_s))
                return
            except RuntimeError as error:
                failure = error
            try:
                if look is not None:
                    look()
                if require_alive is None:
                    what = "sending what one process has read to the others"
                    require_alive = watching.enter_context(coordination.of_torch().watching(what, ranks))
                require_alive()
            except Unavailable:
                # Process 0 may have had its part, and have left with the store.
                if _comes(work, min(_LAST_S, deadline_s)):
                    return
                raise
            now_s = time.monotonic()
            if work.is_completed():
                failed_s = failed_s or now_s
                time.sleep(_PAUSE_S)
            if now_s - begun_s > deadline_s or (failed_s is not None and now_s - failed_s > _NEWS_S):
                raise failure


def _comes(work: Any, timeout_s: float) -> bool:
    """Whether a collective ends well within so long."""
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]  # what follows is where in torch it happened


def _deadline_s() -> float:
    return current_options().multiprocessing.deadline_s


def even_blocks(extent: int, count: int) -> list[range]:
    """An axis as so many blocks, even and rounded up: the last ones may be smaller, or empty."""
    step = -(-extent // count)
    return [range(min(rank * step, extent), min((rank + 1) * step, extent)) for rank in range(count)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in the same memory."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():  # of which torch may say that its elements do not follow one another
        return flat.new_empty(0, dtype=torch.uint8)
    return flat.view(torch.uint8)


def bytes_in_order(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of any strides, copied if they do not follow one another."""
    # torch copies no elements of some narrow dtypes, but any bytes.
    plain = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return as_bytes(plain.contiguous())


def byte_array(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as an array of bytes, in the same memory: those of an element are its last axis."""
    return as_bytes(tensor).reshape(*tensor.shape, tensor.element_size())


def _padded(part: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The bytes of a tensor, and others after them."""
    data = bytes_in_order(part)
    if data.numel() == nbytes:
        return data
    padded = data.new_empty(nbytes)
    padded[: data.numel()].copy_(data)
    return padded


def empty(shape: Sequence[int], dtype: str, device: str) -> torch.Tensor:
    """A tensor whose elements are not set; the dtype is a logical one."""
    return torch.empty(tuple(shape), dtype=torch_memory.torch_dtype(dtype), device=device)


def concatenated(tensors: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Tensors of one dtype, one after another along an axis."""
    dtype = tensors[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(list(tensors), dim=axis)
    # torch joins no narrow floats on some devices, but any bytes.
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors], dim=axis).view(dtype)


def use_device(device: str) -> None:
    """Makes a GPU the one that collectives of this thread use; one without a number is that already."""
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is not None:
        torch.cuda.set_device(chosen)


def converted(tensor: torch.Tensor, device: str | None, dtype: str | None) -> torch.Tensor:
    """A tensor on another device, of another dtype, or both."""
    return tensor.to(device=device, dtype=None if dtype is None else torch_memory.torch_dtype(dtype))


def finished(device: str) -> None:
    """Waits for what the present stream of a GPU has to do."""
    if torch.device(device).type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def place_in_program() -> tuple[int, int] | None:
    """Which process this is, and of how many, in a program of torch; None where there is none."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()
