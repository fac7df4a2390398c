"""What each process of a group gets of a model: all of a tensor, a block of it, or nothing.

Invariants: what is decided follows from the arguments, the headers and the size of the group alone, so that
all processes decide the same; what cannot be had is refused before anything is read, naming the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from waystation._errors import InvalidInput, TensorNotFound, WrongType
from waystation.grid import Box, whole
from waystation.safetensors.choices import Rename, Select, renamed, selected
from waystation.safetensors.composed import Composition, Part
from waystation.safetensors.description import PACKED
from waystation.safetensors.open_files import OpenFiles

_PACKED_ITEMS = 2  # in a byte


@dataclass(frozen=True, slots=True)
class Divided:
    """A tensor of which each process gets one block.

    Attributes:
        axis: Along which it is divided, evenly and rounded up: the last blocks may be smaller, or empty. Of
            37 rows four processes get 10, 10, 10 and 7, and of 6 rows 2, 2, 2 and none.
        blocks: How many there are, by default as many as processes, whose number it has to divide. Where
            there are fewer, as many processes one after another get the same block, as of the keys and
            values of attention that has fewer heads of these than there are processes.
    """

    axis: int
    blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Only:
    """A tensor that one process gets, such as an expert of a mixture; the others do not have it.

    Attributes:
        rank: Of that process, in the group.
    """

    rank: int


@dataclass(frozen=True, slots=True)
class Joined:
    """An array of several tensors: what a process gets of each, one after another.

    Attributes:
        names: Of the tensors, in their order in the array.
        axis: Along which they follow one another.
    """

    names: Sequence[str]
    axis: int = 0


Place: TypeAlias = Divided | Only | None
Placement: TypeAlias = Mapping[str, Place] | Callable[[str, tuple[int, ...]], Place]


class Source(NamedTuple):
    """A tensor that is loaded.

    Attributes:
        number: Of the tensor.
        name: In the files.
        shape: As torch has it.
        nbytes: In the files.
        place: Who gets what of it; an axis that is divided is not negative.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    nbytes: int
    place: Place

    def copies(self, size: int) -> int:
        """How many times so many processes hold its bytes together."""
        if isinstance(self.place, Divided):
            return size // (self.place.blocks or size)
        return size if self.place is None else 1

    def box(self, rank: int, size: int) -> Box | None:
        """What one of so many processes gets of it; None where it does not have the tensor."""
        if isinstance(self.place, Only):
            return whole(self.shape) if self.place.rank == rank else None
        if self.place is None:
            return whole(self.shape)
        count = size if self.place.blocks is None else self.place.blocks
        axis = self.place.axis
        step = -(-self.shape[axis] // count)
        begin = min(rank * count // size * step, self.shape[axis])
        extent = min(step, self.shape[axis] - begin)
        offset = tuple(begin if number == axis else 0 for number in range(len(self.shape)))
        return offset, (*self.shape[:axis], extent, *self.shape[axis + 1 :])


class Result(NamedTuple):
    """An array that a process gets.

    Attributes:
        name: Of the array.
        sources: The tensors that it is made of.
        axis: Along which these follow one another.
        dtype: Of the tensors, logical.
    """

    name: str
    sources: tuple[Source, ...]
    axis: int
    dtype: str

    def composition(self, rank: int, size: int) -> Composition | None:
        """What one of so many processes gets; None where it does not have the array."""
        if len(self.sources) == 1:
            box = self.sources[0].box(rank, size)
            return None if box is None else part_of(self.sources[0], box)
        boxes = [source.box(rank, size) for source in self.sources]
        parts: list[Part] = []
        length = 0
        for source, box in zip(self.sources, boxes, strict=True):
            if box is None:  # as of the others, see `_beside`
                return None
            offset = tuple(length if axis == self.axis else 0 for axis in range(len(box[1])))
            parts.append(Part(source.number, box, offset))
            length += box[1][self.axis]
        shape = parts[0].box[1]
        joined = (*shape[: self.axis], length, *shape[self.axis + 1 :])
        return Composition(self.sources[0].name, joined, tuple(parts))


def part_of(source: Source, box: Box) -> Composition:
    """A box of a tensor as an array."""
    return Composition(source.name, box[1], (Part(source.number, box, (0,) * len(box[1])),))


def results_of(
    opened: OpenFiles,
    size: int,
    *,
    placement: Placement | None,
    join: Mapping[str, Joined] | None,
    select: Select | None,
    rename: Rename | None,
) -> list[Result]:
    """What the processes of a group of a size get, in the order of the files.

    Raises:
        InvalidInput: Something cannot be had as wanted.
        TensorNotFound: A tensor is named that there is not, or that is not selected.
    """
    names = selected(opened.labels, select)
    sources = {name: _source(opened, name, placement, size) for name in names}
    if isinstance(placement, Mapping):
        _require(placement, sources, "placement")
    joined = _joined_names(join or {}, sources)
    alone = [name for name in names if name not in joined]
    new_names = dict(zip(alone, renamed(alone, rename), strict=True))
    results: dict[str, Result] = {}
    for name in names:
        key = joined.get(name)
        new_name = new_names[name] if key is None else key
        if new_name not in results:
            results[new_name] = _result(opened, new_name, key, name, join or {}, sources)
        elif key is None or results[new_name].sources[0].name not in joined:
            raise InvalidInput(f"two arrays get the name {new_name!r}", tensor=name)
    for source in sources.values():
        _check_packed(opened, source, size)
    return list(results.values())


def _result(
    opened: OpenFiles,
    new_name: str,
    key: str | None,
    name: str,
    join: Mapping[str, Joined],
    sources: Mapping[str, Source],
) -> Result:
    if key is None:
        return Result(new_name, (sources[name],), 0, opened.array(sources[name].number).dtype)
    own = tuple(sources[other] for other in join[key].names)
    axis = _axis(join[key].axis, own[0])
    dtype = opened.array(own[0].number).dtype
    for source in own[1:]:
        if opened.array(source.number).dtype != dtype or _beside(source, axis) != _beside(own[0], axis):
            raise InvalidInput(
                f"{key!r} joins {opened.array(source.number).dtype} {source.shape} to {dtype} {own[0].shape} "
                f"of {own[0].name!r} along axis {axis}; all but that axis have to be the same, and go to the "
                "same processes",
                tensor=source.name,
            )
    return Result(new_name, own, axis, dtype)


def _beside(source: Source, axis: int) -> tuple[tuple[int, ...], int, Place]:
    """What tensors that are joined along an axis have in common."""
    shape, place = source.shape, source.place
    if isinstance(place, Divided) and place.axis == axis:
        place = None
    return (*shape[:axis], *shape[axis + 1 :]), len(shape), place


def _source(opened: OpenFiles, name: str, placement: Placement | None, size: int) -> Source:
    number = opened.numbers[name]
    shape = opened.array(number).shape
    place = placement(name, shape) if callable(placement) else (placement or {}).get(name)
    *_, begin, end = opened.tensors[number]
    source = Source(number, name, shape, end - begin, place)
    if isinstance(place, Only):
        if not 0 <= place.rank < size:
            raise InvalidInput(f"there is no process {place.rank} in a group of {size}", tensor=name)
        return source
    if place is None:
        return source
    if not isinstance(place, Divided):
        raise WrongType(f"a placement must be Divided, Only or None, not {place!r:.60}", tensor=name)
    if place.blocks is not None and (place.blocks < 1 or size % place.blocks):
        raise InvalidInput(
            f"{place.blocks} blocks cannot be dealt evenly to the {size} processes of the group", tensor=name
        )
    return Source(number, name, shape, end - begin, Divided(_axis(place.axis, source), place.blocks))


def _axis(axis: int, source: Source) -> int:
    if not -len(source.shape) <= axis < len(source.shape):
        raise InvalidInput(f"there is no axis {axis} in the shape {source.shape}", tensor=source.name)
    return axis % len(source.shape)


def _joined_names(join: Mapping[str, Joined], sources: Mapping[str, Source]) -> dict[str, str]:
    """The array that each tensor is joined to."""
    joined: dict[str, str] = {}
    for key, own in join.items():
        if not own.names:
            raise InvalidInput(f"{key!r} joins no tensor; give the names of some")
        _require(own.names, sources, f"join of {key!r}")
        for name in own.names:
            if name in joined:
                raise InvalidInput(f"a tensor is joined twice: to {joined[name]!r} and {key!r}", tensor=name)
            joined[name] = key
    return joined


def _require(names: Sequence[str] | Mapping[str, Place], sources: Mapping[str, Source], what: str) -> None:
    absent = next((name for name in names if name not in sources), None)
    if absent is not None:
        raise TensorNotFound(f"the {what} names {absent!r}, and no tensor of that name is loaded")


def _check_packed(opened: OpenFiles, source: Source, size: int) -> None:
    """Refuses blocks that would end within a byte."""
    place = source.place
    if not isinstance(place, Divided) or opened.array(source.number).dtype != PACKED:
        return
    items = source.shape[-1] * _PACKED_ITEMS
    count = size if place.blocks is None else place.blocks
    if place.axis == len(source.shape) - 1 and count > 1 and -(-items // count) % _PACKED_ITEMS:
        raise InvalidInput(
            f"{items} elements, two to a byte, do not make {count} blocks of whole bytes; divide another "
            "axis, or into other blocks",
            tensor=source.name,
        )
