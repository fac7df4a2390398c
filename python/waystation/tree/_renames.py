"""What explains that paths of one tree are not in another: a part with another name, or a misspelling.

Paths are their dotted labels. Rules are guessed from a few paths and then counted over all, so the cost is
linear in the number of paths.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_SAMPLES = 8
_CANDIDATES_LIMIT = 500
_SIMILAR = 0.75  # of difflib's ratio: one or two slips in a short word


@dataclass(frozen=True, slots=True)
class Rename:
    """A rule that makes paths of one tree paths of the other.

    Attributes:
        wanted: What stands in the wanted paths; empty where the stored ones only have more.
        stored: What stands in the stored paths in its place.
        count: How many wanted paths the rule makes stored ones.
    """

    wanted: str
    stored: str
    count: int

    def apply(self, wanted: str) -> str | None:
        """The stored path that a wanted one would be; None if the rule does not concern it."""
        if not self.wanted:
            return self.stored + wanted
        return wanted.replace(self.wanted, self.stored, 1) if self.wanted in wanted else None


def common_rename(wanted: Sequence[str], stored: Sequence[str]) -> Rename | None:
    """The rule that turns most wanted paths into stored ones; None where no rule does so for several."""
    present = set(stored)
    by_end = defaultdict(list)
    for path in stored:
        by_end[_last(path)].append(path)
    rules: dict[tuple[str, str], None] = {}
    for path in wanted[:: max(1, len(wanted) // _SAMPLES)]:
        for other in _alike(path, by_end[_last(path)][:_CANDIDATES_LIMIT]):
            rules.update(dict.fromkeys(_rules(path, other)))
    found = [_counted(Rename(*rule, 0), wanted, present) for rule in rules]
    best = max(found, key=lambda rename: rename.count, default=None)
    return best if best is not None and best.count > 1 and 2 * best.count > len(wanted) else None


def nearest(path: str, others: Sequence[str]) -> str | None:
    """The path that is spelled nearly like another one, if there is one."""
    found = difflib.get_close_matches(path, others[:_CANDIDATES_LIMIT], n=1, cutoff=_SIMILAR)
    return found[0] if found else None


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _alike(path: str, others: Sequence[str]) -> Iterator[str]:
    """Those that may be the path under another name: longer or shorter at the front, or spelled alike."""
    yield from (other for other in others if other.endswith(path) or path.endswith(other))
    yield from difflib.get_close_matches(path, others, n=2, cutoff=0.3)


def _rules(wanted: str, stored: str) -> Iterator[tuple[str, str]]:
    """Replacements that make one path the other: of the smallest run of whole words, and of whole keys."""
    front = _common_length(wanted, stored)
    back = min(_common_length(wanted[::-1], stored[::-1]), min(len(wanted), len(stored)) - front)
    for is_inside in (str.isalpha, _is_in_key):
        begin, end = front, back
        while any(_splits(path, begin, is_inside) for path in (wanted, stored)):
            begin -= 1
        while any(_splits(path, len(path) - end, is_inside) for path in (wanted, stored)):
            end -= 1
        if 0 < begin == len(wanted) - end:  # what is inserted within a path is named with the key before it
            begin = wanted.rfind(".", 0, begin - 1) + 1
        yield wanted[begin : len(wanted) - end], stored[begin : len(stored) - end]


def _common_length(one: str, two: str) -> int:
    """How many characters two texts begin with alike."""
    differing = (place for place, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1])
    return next(differing, min(len(one), len(two)))


def _is_in_key(character: str) -> bool:
    return character != "."


def _splits(path: str, place: int, is_inside: Callable[[str], bool]) -> bool:
    """Whether a cut at a place goes through a word or key."""
    return 0 < place < len(path) and is_inside(path[place - 1]) and is_inside(path[place])


def _counted(rename: Rename, wanted: Sequence[str], present: set[str]) -> Rename:
    count = sum(rename.apply(path) in present for path in wanted)
    return Rename(rename.wanted, rename.stored, count)
