"""Who reads what of a model that several processes load together, and what is sent when.

What only one process needs of the files, it reads itself, straight to where it stays: blocks of rows, and
tensors that are its alone. Everything else is dealt out in *pieces*, which go over the devices: tensors that
all need, and blocks so short that a process reading its own would read those of the others as well.
Invariants: all processes come to the same plan from the headers alone; each has about as many bytes to read
as any other, and its share of what every disk holds, in an order in which the disks take turns: all of them
are busy from the first read to the last.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from waystation._errors import InvalidInput
from waystation.grid import Box, volume, whole
from waystation.safetensors.open_files import OpenFiles
from waystation.safetensors.placement import Divided, Only, Result, Source
from waystation.transfers.pieces import cut, runs

# Smaller tensors that are divided go whole to everyone, together with others: each message takes its time.
_LEAST_DIVIDED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an array that one process reads for all.

    Attributes:
        result: The number of the array.
        source: Of which of its tensors.
        box: Of that tensor.
        nbytes: In the file.
    """

    result: int
    source: int
    box: Box
    nbytes: int


# What each process sends in one step, by its rank.
Step = list[list[Piece]]


class GroupPlan:
    """A load of several processes, decided.

    Attributes:
        results: What the processes get.
        dtypes: What each is cast to, logical.
        own: The numbers of those that each process reads for itself.
        sent: Those of the others.
        divided: In each step every process reads some pieces, and sends each process its part of them.
        replicated: Likewise, of what goes whole to all.
    """

    divided: list[Step]
    replicated: list[Step]

    def __init__(
        self,
        opened: OpenFiles,
        results: Sequence[Result],
        choose: Callable[[str, str], str],
        *,
        size: int,
        run_bytes: int,
        least_stretch_bytes: int,
    ) -> None:
        self.results: list[Result] = list(results)
        self.dtypes: list[str] = [_dtype(result, choose) for result in results]
        self._size = size
        self.own: list[int] = [
            number
            for number, result in enumerate(results)
            if size == 1 or all(_reads_own(source, size, least_stretch_bytes) for source in result.sources)
        ]
        self.sent: list[int] = sorted(set(range(len(results))) - set(self.own))
        divided: list[Piece] = []
        replicated: list[Piece] = []
        for number in self.sent:
            result = self.results[number]
            for place, source in enumerate(result.sources):
                is_divided = isinstance(source.place, Divided) and source.nbytes >= _LEAST_DIVIDED_BYTES
                is_cut = is_divided or len(result.sources) > 1
                pieces = _pieces(number, place, source, run_bytes if is_cut else None)
                (divided if is_divided else replicated).extend(pieces)
        shares = _shares(self._own_bytes(), sum(piece.nbytes for piece in (*divided, *replicated)))
        self.divided, self.replicated = (
            _steps(self._assigned(opened, pieces, shares), run_bytes) for pieces in (divided, replicated)
        )

    def digest(self) -> str:
        """What tells this plan from others."""
        what = (self.results, self.dtypes, self.own, self.divided, self.replicated)
        return hashlib.sha256(repr(what).encode()).hexdigest()

    def tensors(self) -> dict[str, int]:
        """The numbers of all tensors that are read, by their names."""
        return {source.name: source.number for result in self.results for source in result.sources}

    def aspects(self) -> dict[str, str]:
        """What tells by which argument this plan differs from others."""
        sources = [(result, source) for result in self.results for source in result.sources]
        names = [(result.name, source.name) for result, source in sources]
        tensors = {source.name: (source.shape, result.dtype) for result, source in sources}
        given = {
            "files, select, rename or join": names,
            "files": sorted(tensors.items()),
            "placement or join": [source.place for _, source in sources],
            "dtype": self.dtypes,
        }
        return {name: hashlib.sha256(repr(what).encode()).hexdigest() for name, what in given.items()}

    def source_of(self, piece: Piece) -> Source:
        """The tensor that a piece is of."""
        return self.results[piece.result].sources[piece.source]

    def page_cache_bytes(self) -> int:
        """What it takes if all processes read what would be sent through the page cache: their arrays, and
        what is cached of the files."""
        sources = [source for number in self.sent for source in self.results[number].sources]
        return sum(source.nbytes * (1 + source.copies(self._size)) for source in sources)

    def goes_whole(self, number: int) -> bool:
        """Whether a result that is sent is a tensor that goes to all in one piece."""
        sources = self.results[number].sources
        return len(sources) == 1 and sources[0].place is None

    def _own_bytes(self) -> list[float]:
        """About how many bytes each process reads for itself."""
        even = 0.0
        alone = [0.0] * self._size
        for number in self.own:
            for source in self.results[number].sources:
                if isinstance(source.place, Only):
                    alone[source.place.rank] += source.nbytes
                else:
                    even += source.nbytes / self._size
        return [even + nbytes for nbytes in alone]

    def _assigned(
        self, opened: OpenFiles, pieces: Sequence[Piece], shares: Sequence[float]
    ) -> list[list[Piece]]:
        """The pieces that each process reads, in order."""
        by_device: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_device.setdefault(opened.device_of(self.source_of(piece).number), []).append(piece)
        ends = list(itertools.accumulate(shares))
        found: list[list[tuple[float, Piece]]] = [[] for _ in shares]
        for own in by_device.values():
            total = sum(piece.nbytes for piece in own)
            passed = 0
            for piece in own:
                middle = (passed + piece.nbytes / 2) / max(1, total) * ends[-1]
                rank = min(bisect_right(ends, middle), len(shares) - 1)
                # How far a process is in its share of one disk, it is in those of the others.
                progress = (middle - ends[rank] + shares[rank]) / (shares[rank] or 1.0)
                found[rank].append((progress, piece))
                passed += piece.nbytes
        return [[piece for _, piece in sorted(own, key=lambda pair: pair[0])] for own in found]


def _dtype(result: Result, choose: Callable[[str, str], str]) -> str:
    chosen = {choose(source.name, result.dtype) for source in result.sources}
    if len(chosen) > 1:
        raise InvalidInput(f"{result.name!r} joins tensors that become {' and '.join(sorted(chosen))}")
    return chosen.pop()


def _reads_own(source: Source, size: int, least_bytes: int) -> bool:
    """Whether each process reads what it gets of a tensor for itself."""
    place = source.place
    if isinstance(place, Only):
        return True
    if place is None or place.blocks not in (None, size):
        return False
    # What follows one another in the file: the elements of a block along this axis and those after it.
    stretches = math.prod(source.shape[: place.axis]) * size
    return source.nbytes >= least_bytes * stretches


def _pieces(number: int, place: int, source: Source, most_bytes: int | None) -> Iterator[Piece]:
    if most_bytes is None:
        yield Piece(number, place, whole(source.shape), source.nbytes)
        return
    items = math.prod(source.shape)
    for box in cut(source.shape, max(1, most_bytes * items // max(1, source.nbytes))):
        yield Piece(number, place, box, source.nbytes * volume(box) // items)


def _shares(own_bytes: Sequence[float], sent_bytes: int) -> list[float]:
    """How much of what is sent each process reads, as parts of 1: who reads less for itself reads more."""
    level = 0.0
    ascending = sorted(own_bytes)
    for count in range(1, len(ascending) + 1):
        level = (sent_bytes + sum(ascending[:count])) / count
        if count == len(ascending) or level <= ascending[count]:
            break
    return [max(0.0, level - nbytes) / max(1, sent_bytes) for nbytes in own_bytes]


def _steps(assigned: Sequence[Sequence[Piece]], run_bytes: int) -> list[Step]:
    dealt = [list(runs(pieces, run_bytes)) for pieces in assigned]
    return [
        [own[number] if number < len(own) else [] for own in dealt]
        for number in range(max(map(len, dealt), default=0))
    ]
