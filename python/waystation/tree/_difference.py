"""How two trees differ, as a text for people: one line a difference, and what explains many of them at once.

Both sides are shown, whichever has more differences. Paths that only one side has are compared: where one
renamed part explains them, or another path is spelled nearly alike, the text says so.

Invariant: key paths are made only for differences that are shown, and for a bounded number that are compared.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice

from waystation.tree._keys import format_key_path, label
from waystation.tree._match import EXACT, Mismatch, Tolerance, match
from waystation.tree._nodes import LEAF, NONE
from waystation.tree._structure import Outline, Structure

LeafText = Callable[[int], "str | None"]

_COMPARED_PATHS_LIMIT = 20_000
# What wrappers of modules put before the names of a `state_dict`.
_WRAPPERS = {"module.": "DistributedDataParallel", "_orig_mod.": "torch.compile"}
_SUGGESTIONS_LIMIT = 5
_ADVICE = "rename them in the abstract state, and the loaded leaves afterwards"
_UNWRAPPED = "take the abstract state of such a wrapper, or load without one and remove the prefix"


def describe_difference(
    stored: Structure,
    wanted: Structure,
    stored_leaf_text: LeafText,
    wanted_leaf_text: LeafText,
    *,
    tolerance: Tolerance = EXACT,
    limit: int = 20,
) -> str:
    """A text of one line per difference, at most `limit` of them; empty if there is none.

    Args:
        stored: The structure in the checkpoint.
        wanted: The structure of the abstract state.
        stored_leaf_text: Describes what has to agree of a leaf, by its number: `shape (3,)`.
        wanted_leaf_text: The same of a wanted leaf; None where anything will do.
        tolerance: What is no difference.
        limit: The most lines; one more then counts the rest.
    """
    outcome = match(stored, wanted, tolerance)
    if isinstance(outcome, list):
        outcome = Mismatch(stored, wanted, outcome, [], [], {})
    differing = _differing_leaves(outcome, stored_leaf_text, wanted_leaf_text)
    differing |= _differing_kinds(outcome, stored_leaf_text, wanted_leaf_text)
    differing = dict(sorted(differing.items()))  # in the order in which the paths are listed
    paired = set(outcome.clashes.values())
    missing = [place for place in outcome.missing if place not in outcome.clashes]
    unexpected = [place for place in outcome.unexpected if place not in paired]
    apart = Mismatch(stored, wanted, outcome.leaves, missing, unexpected, {})
    total = len(missing) + len(unexpected) + len(differing)
    lines = list(_lines(apart, differing, _shares([len(unexpected), len(missing), len(differing)], limit)))
    if total > len(lines):
        lines.append(f"  … and {total - len(lines)} more differences")
    return "\n".join([*lines, *_explained(apart, tolerance)])


def _shares(counts: Sequence[int], limit: int) -> list[int]:
    """How many of each kind are shown: equally many, and more where other kinds leave room."""
    shares = [0] * len(counts)
    while sum(shares) < min(limit, sum(counts)):
        for kind, count in enumerate(counts):
            if shares[kind] < count and sum(shares) < limit:
                shares[kind] += 1
    return shares


def _differing_leaves(outcome: Mismatch, stored_text: LeafText, wanted_text: LeafText) -> dict[int, str]:
    """What differs in the leaves that both trees have, by place in the wanted tree."""
    places = [place for place, node in enumerate(outcome.wanted.nodes) if node is LEAF]
    differing = {}
    for number, stored_number in enumerate(outcome.leaves):
        want = wanted_text(number) if stored_number >= 0 else None
        have = stored_text(stored_number) if want is not None else None
        if have is not None and have != want:
            differing[places[number]] = f"{have} in the checkpoint, {want} wanted"
    return differing


def _differing_kinds(outcome: Mismatch, stored_text: LeafText, wanted_text: LeafText) -> dict[int, str]:
    """What stands at the paths at which only one tree has a leaf, by place in the wanted tree."""
    if not outcome.clashes:
        return {}
    stored, wanted = Outline(outcome.stored), Outline(outcome.wanted)
    differing = {}
    for there, here in sorted(outcome.clashes.items()):
        have, want = _kind(stored, here, stored_text), _kind(wanted, there, wanted_text)
        differing[there] = f"{have} in the checkpoint, {want} wanted"
    return differing


def _kind(outline: Outline, place: int, leaf_text: LeafText) -> str:
    node = outline.nodes[place]
    if node is LEAF:
        return leaf_text(outline.leaf_numbers[place]) or "a leaf"
    return "None" if node is NONE else "an empty container"


def _lines(outcome: Mismatch, differing: dict[int, str], shares: Sequence[int]) -> Iterator[str]:
    for path in outcome.unexpected_paths(shares[0]):
        yield f"- {format_key_path(path)}: only in the checkpoint"
    for path in outcome.missing_paths(shares[1]):
        yield f"+ {format_key_path(path)}: only in the abstract state"
    shown = dict(islice(differing.items(), shares[2]))
    paths = outcome.wanted.paths_of(shown)
    for path, text in zip(paths, shown.values(), strict=True):
        yield f"! {format_key_path(path)}: {text}"


# ---- what explains differences -----------------------------------------------------------------


def _explained(outcome: Mismatch, tolerance: Tolerance) -> Iterator[str]:
    """What the paths that only the abstract state has are likely to be in the checkpoint."""
    if tolerance.subset and outcome.missing:
        # What the checkpoint has beyond is no difference, but one of those may be what was meant.
        everything = match(outcome.stored, outcome.wanted, Tolerance(tolerance.placeholders))
        assert isinstance(everything, Mismatch), "what lacks leaves of a subset lacks them of the whole"
        unexpected = everything.unexpected_paths(_COMPARED_PATHS_LIMIT)
    else:
        unexpected = outcome.unexpected_paths(_COMPARED_PATHS_LIMIT)
    missing = outcome.missing_paths(_COMPARED_PATHS_LIMIT)
    if not missing or not unexpected:
        return
    wanted, stored = list(map(label, missing)), dict(zip(map(label, unexpected), unexpected, strict=True))
    rename = common_rename(wanted, list(stored))
    if rename is not None:
        yield _rename_text(rename, len(wanted))
    for path, name in list(zip(missing, wanted, strict=True))[:_SUGGESTIONS_LIMIT]:
        if rename is None or rename.apply(name) not in stored:
            meant = nearest(name, list(stored))
            if meant is None:
                continue
            want, have = format_key_path(path), format_key_path(stored[meant])
            if want == have:
                yield f"{want} is the key of a dict in one of them, and an element of a list in the other"
            else:
                yield f"instead of {want}, did you mean {have}?"


def _rename_text(rename: Rename, total: int) -> str:
    number = f"all {total}" if rename.count == total else f"{rename.count} of the {total}"
    paths = f"{number} paths only in the abstract state are in the checkpoint"
    if not rename.wanted:
        wrapper = _WRAPPERS.get(rename.stored)
        advice = f", as {wrapper} saves them: {_UNWRAPPED}" if wrapper else f"; {_ADVICE}"
        return f"{paths} with '{rename.stored}' before them{advice}"
    if not rename.stored:
        wrapper = _WRAPPERS.get(rename.wanted)
        advice = f", which {wrapper} adds: take the abstract state of the wrapped module"
        return f"{paths} without '{rename.wanted}'{advice if wrapper else f'; {_ADVICE}'}"
    return f"{paths} with '{rename.stored}' instead of '{rename.wanted}'; {_ADVICE}"


# ---- names that are close ----------------------------------------------------------------------
# What explains that paths of one tree are not in another: a part with another name, or a misspelling.
#
# Paths are their dotted labels. Rules are guessed from a few paths and then counted over all, so the cost
# is linear in the number of paths.


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
    """The rule that turns most wanted paths into stored ones; None where no rule does so for several, or
    several rules do that make them different ones."""
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
    if best is None or best.count < 2 or 2 * best.count <= len(wanted):
        return None
    made = [_made(rename, wanted, present) for rename in found if rename.count == best.count]
    return best if all(other == made[0] for other in made) else None


def nearest(path: str, others: Sequence[str]) -> str | None:
    """The path that is spelled nearly like another one, if there is one that is nearer than all others."""
    found = difflib.get_close_matches(path, others[:_CANDIDATES_LIMIT], n=2, cutoff=_SIMILAR)
    if len(found) == 2 and _likeness(path, found[0]) == _likeness(path, found[1]):
        return None
    return found[0] if found else None


def _likeness(path: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, path).ratio()


def _made(rename: Rename, wanted: Sequence[str], present: Set[str]) -> list[str | None]:
    """What stored path a rule makes of each wanted one."""
    return [made if (made := rename.apply(path)) in present else None for path in wanted]


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
