"""`load_in_group`: a model that the processes of a torch program load together, each reading a share of it.

Tensors are dealt out in the order of the files, so that each process reads about as many bytes as any other,
one range after the other; then they go to all processes, or a block of each to every process, over the
devices. Invariants: who reads what follows from the headers alone, and all processes make sure that they have
the same ones; what one process cannot read fails in all. Beyond the tensors a process holds what it reads
ahead, within its limit, and what is just being sent.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from waystation._errors import InvalidInput
from waystation.safetensors.choices import DType, Rename, Select, dtype_chooser, renamed, selected
from waystation.safetensors.handle import Tensors
from waystation.safetensors.handle import open as open_files
from waystation.safetensors.making import codec_of
from waystation.safetensors.sources import Files
from waystation.safetensors.stream import stream

Axis: TypeAlias = Mapping[str, int] | Callable[[str, tuple[int, ...]], int | None]

# Small tensors are sent together: each message waits for every process.
_RUN_BYTES = 16 << 20
_ALIGN_BYTES = 256


def load_in_group(
    files: Files | Tensors,
    *,
    group: Any,
    device: Any = None,
    axis: Axis | None = None,
    dtype: DType = None,
    select: Select | None = None,
    rename: Rename | None = None,
    memory_limit: int | None = None,
) -> dict[str, Any]:
    """Loads a published model into torch, in all processes of a group at once: each reads a share of it.

    All processes call it, with the same arguments but for the device.

    Args:
        files: What `load` takes.
        group: A process group of torch; None for this process alone.
        device: Where tensors go: a device or its name, by default the CPU. The group has to reach it.
        axis: Which tensors are divided, and along which axis: by their names, or by a function of name and
            shape that returns an axis, or None for a tensor that all processes get whole. Of an axis each
            process gets one block, even and rounded up: the last ones may be smaller, or empty.
        dtype: What `load` takes, as are the next.
        select: Load only some tensors.
        rename: Names of arrays by names of tensors.
        memory_limit: Most bytes of host memory that are read ahead and on their way to the device.

    Returns:
        The tensors by name, in the order of the files.

    Raises:
        InvalidInput: The processes were given other files, or something cannot be had as wanted.
        Unavailable: Another process could not read its share.
        NotFound, Corrupt, Conflict, Unsupported: As `load` does.
    """
    codec = codec_of("torch")
    from waystation.frameworks import torch_groups

    collectives = torch_groups.of_group(group)
    place = codec.place_of(device)
    opened = files if isinstance(files, Tensors) else open_files(files, framework="torch")
    plan = _Plan(opened, collectives.size, axis=axis, dtype=dtype, select=select, rename=rename)
    collectives.agree_on(plan.digest())
    torch_groups.use_device(str(place.device))
    own = [tensor.stored for turn in plan.turns for tensor in turn[collectives.rank]]
    # What is sent takes memory as well, once as it is read and once as it goes.
    coming = stream(
        opened, framework="torch", device=device, dtype=dtype, select=own, memory_limit=memory_limit
    )
    found: dict[str, Any] = {}
    with contextlib.closing(coming):
        for turn in plan.turns:
            held = _read(coming, turn[collectives.rank], collectives)
            for source, tensors in enumerate(turn):
                mine = held if source == collectives.rank else None
                found.update(_sent(tensors, mine, source, collectives, str(place.device)))
    return {name: found[name] for name in plan.names}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor that is loaded.

    Attributes:
        stored: Its name in the files.
        name: Its name in the result.
        shape: As torch has it.
        dtype: Of the result, logical.
        nbytes: In the files.
        axis: Along which it is divided; None if it is not.
    """

    stored: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    axis: int | None


# What each process sends, by its rank.
_Turn: TypeAlias = list[list[_Tensor]]


class _Plan:
    """Who reads what, and what is sent when.

    Attributes:
        names: Of the result, in order.
        turns: In each of them every process reads some tensors, and then each sends its own.
    """

    def __init__(
        self,
        opened: Tensors,
        size: int,
        *,
        axis: Axis | None,
        dtype: DType,
        select: Select | None,
        rename: Rename | None,
    ) -> None:
        choose = dtype_chooser(dtype)
        shapes, dtypes = opened.shapes, opened.dtypes
        stored = selected(list(opened.keys()), select)
        sizes = {tensor[0]: tensor[4] - tensor[3] for tensor in opened.opened.tensors}
        tensors = [
            _Tensor(
                old,
                new,
                shapes[old],
                choose(old, dtypes[old]),
                sizes[old],
                _axis_of(axis, old, shapes[old]),
            )
            for old, new in zip(stored, renamed(stored, rename), strict=True)
        ]
        self.names = [tensor.name for tensor in tensors]
        runs = [list(_runs(share)) for share in _dealt(tensors, size)]
        self.turns: list[_Turn] = [
            [own[number] if number < len(own) else [] for own in runs]
            for number in range(max(map(len, runs), default=0))
        ]

    def digest(self) -> str:
        """What tells this plan from others."""
        return hashlib.sha256(repr(self.turns).encode()).hexdigest()


def _axis_of(axis: Axis | None, name: str, shape: tuple[int, ...]) -> int | None:
    chosen = axis(name, shape) if callable(axis) else (axis or {}).get(name)
    if chosen is not None and not -len(shape) <= chosen < len(shape):
        raise InvalidInput(f"there is no axis {chosen} in the shape {shape}", tensor=name)
    return None if chosen is None else chosen % len(shape)


def _dealt(tensors: Sequence[_Tensor], size: int) -> list[list[_Tensor]]:
    """Tensors as consecutive shares of about as many bytes, one for each process."""
    total = sum(tensor.nbytes for tensor in tensors)
    shares: list[list[_Tensor]] = [[] for _ in range(size)]
    passed = 0
    for tensor in tensors:
        middle = passed + tensor.nbytes // 2
        shares[min(size - 1, middle * size // max(1, total))].append(tensor)
        passed += tensor.nbytes
    return shares


def _runs(tensors: Sequence[_Tensor]) -> Iterator[list[_Tensor]]:
    """Consecutive tensors that are sent in one turn: those that go whole together."""
    run: list[_Tensor] = []
    for tensor in tensors:
        if run and sum(own.nbytes for own in run) + tensor.nbytes > _RUN_BYTES:
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _read(coming: Iterator[tuple[str, Any]], own: Sequence[_Tensor], collectives: Any) -> list[Any]:
    """The tensors that this process sends next, once every process has its own."""
    held: list[Any] = []
    problem: Exception | None = None
    try:
        held = [next(coming)[1] for _ in own]
    except Exception as error:
        problem = error
    collectives.agree(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    return held


def _sent(
    tensors: Sequence[_Tensor], held: Sequence[Any] | None, source: int, collectives: Any, device: str
) -> Iterator[tuple[str, Any]]:
    """What this process has of the tensors that one process sends; `held` are those, in that one."""
    from waystation.frameworks import torch_groups

    whole = [number for number, tensor in enumerate(tensors) if tensor.axis is None]
    if len(whole) == 1 or collectives.size == 1:
        for number in whole:
            tensor = tensors[number]
            value = torch_groups.empty(tensor.shape, tensor.dtype, device) if held is None else held[number]
            collectives.broadcast(value, source)
            yield tensor.name, value
    elif whole:
        shapes = [tensors[number].shape for number in whole]
        dtypes = [tensors[number].dtype for number in whole]
        sent = None if held is None else [held[number] for number in whole]
        values = collectives.broadcast_joined(sent, shapes, dtypes, source, device, _ALIGN_BYTES)
        yield from zip([tensors[number].name for number in whole], values, strict=True)
    for number, tensor in enumerate(tensors):
        if tensor.axis is not None:
            value = None if held is None else held[number]
            yield (
                tensor.name,
                collectives.scatter_blocks(value, tensor.shape, tensor.dtype, tensor.axis, source, device),
            )
