"""How much of which file is loaded at a time, so that a load stays within the memory that it may take.

What is counted, in bytes of one process: tensors that stay, by what was loaded so far; and as many parts of
files as are in memory at a time, each at most as large as the budget of its file. Invariants: plans follow
from headers, filters and sizes alone, so that all processes of a group make the same; no tensor is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from waystation._errors import InvalidInput
from waystation.compat.fastsafetensors.common import SafeTensorsMetadata

Keep = Callable[[str], bool]


class BudgetInfeasibleError(InvalidInput):
    """What is to be loaded does not fit into the memory that it may take."""


@dataclass(frozen=True, slots=True)
class FileWeight:
    """What a file weighs, by the tensors that are loaded of it.

    Attributes:
        path: The file.
        kept_bytes: Of all of them.
        resident_bytes: Of those that stay on the device.
        largest_bytes: Of the largest.
    """

    path: str
    kept_bytes: int
    resident_bytes: int
    largest_bytes: int

    @classmethod
    def of(cls, metadata: SafeTensorsMetadata, keep: Keep | None, is_resident: Keep | None) -> FileWeight:
        """That of a file."""
        sizes = {name: frame.nbytes for name, frame in metadata.tensors.items() if keep is None or keep(name)}
        staying = sum(nbytes for name, nbytes in sizes.items() if is_resident is None or is_resident(name))
        return cls(metadata.src, sum(sizes.values()), staying, max(sizes.values(), default=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a load may take, and how it goes.

    Attributes:
        budget_bytes: Most bytes that it may take; None for any.
        part_bytes: Most bytes of a part of a file; None for any.
        group_size: The number of processes; as many files are loaded together, and all have all of them.
        accumulates: Whether what was loaded stays on the device.
    """

    budget_bytes: int | None
    part_bytes: int | None
    group_size: int
    accumulates: bool


def parts_in_memory(queue_size: int, group_size: int) -> int:
    """How many parts of files are in memory at a time.

    One for `queue_size` -1; else those in the queue, one that is read and one that is handed out. In a group
    there is one more: the tensor that is received.
    """
    return (1 if queue_size < 0 else queue_size + 2) + (1 if group_size > 1 else 0)


def file_budgets(
    weights: Sequence[FileWeight], queue_size: int, terms: Terms
) -> tuple[int, list[int | None]]:
    """Most bytes of the parts of each file, and how deep the queue may be for that.

    The queue becomes as deep as was asked for, or as fits.

    Raises:
        BudgetInfeasibleError: Not even one part at a time fits.
    """
    if terms.budget_bytes is None:
        return queue_size, [terms.part_bytes] * len(weights)
    if terms.budget_bytes <= 0:
        raise BudgetInfeasibleError(f"a budget of {terms.budget_bytes} bytes holds nothing")
    depth = queue_size
    while depth > -1 and not all(_fits(weights, number, depth, terms) for number in range(len(weights))):
        depth -= 1
    return depth, [_budget(weights, number, depth, terms) for number in range(len(weights))]


def _fits(weights: Sequence[FileWeight], number: int, queue_size: int, terms: Terms) -> bool:
    return _room(weights, number, queue_size, terms) >= weights[number].largest_bytes


def _budget(weights: Sequence[FileWeight], number: int, queue_size: int, terms: Terms) -> int:
    room = _room(weights, number, queue_size, terms)
    own = weights[number]
    if room < own.largest_bytes:
        staying = _staying(weights, number, terms)
        copies = parts_in_memory(queue_size, terms.group_size)
        raise BudgetInfeasibleError(
            f"{terms.budget_bytes} bytes are too few to load '{own.path}': {staying} stay on the device, and "
            f"{copies} times its largest tensor, of {own.largest_bytes} bytes, are in memory meanwhile; free "
            "memory, or give a larger budget",
            path=own.path,
        )
    return room


def _room(weights: Sequence[FileWeight], number: int, queue_size: int, terms: Terms) -> int:
    """Bytes that each part of a file may have."""
    assert terms.budget_bytes is not None
    left = terms.budget_bytes - _staying(weights, number, terms)
    room = left // parts_in_memory(queue_size, terms.group_size)
    return room if terms.part_bytes is None else min(room, terms.part_bytes)


def _staying(weights: Sequence[FileWeight], number: int, terms: Terms) -> int:
    """What stays on the device once a file and those that are loaded with it are."""
    if not terms.accumulates:
        return 0
    end = (number // terms.group_size + 1) * terms.group_size
    return sum(weight.resident_bytes for weight in weights[:end])


def parts_of(metadata: SafeTensorsMetadata, part_bytes: int | None, keep: Keep | None) -> list[list[str]]:
    """The names of the tensors of a file, in the order of its data, in parts of at most so many bytes.

    Bytes between tensors of a part that are not loaded count, as they do in fastsafetensors.

    Raises:
        ValueError: A tensor is larger.
    """
    parts: list[list[str]] = []
    begin = 0
    for name, frame in metadata.tensors.items():
        if keep is not None and not keep(name):
            continue
        if part_bytes is not None and frame.nbytes > part_bytes:
            raise InvalidInput(
                f"the tensor has {frame.nbytes} bytes, and at most {part_bytes} are loaded at a time; no "
                "tensor is divided, so max_batch_bytes has to be as large as the largest",
                path=metadata.src,
                tensor=name,
            )
        first, end = frame.data_offsets
        if not parts or (part_bytes is not None and end - begin > part_bytes):
            parts.append([])
            begin = first
        parts[-1].append(name)
    return parts
