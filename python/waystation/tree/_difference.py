"""How two trees differ, as a text for people: one line a difference, and what explains many of them at once.

Both sides are shown, whichever has more differences. Paths that only one side has are compared: where one
renamed part explains them, or another path is spelled nearly alike, the text says so.

Invariant: key paths are made only for differences that are shown, and for a bounded number that are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from waystation.tree._keys import format_key_path, label
from waystation.tree._match import EXACT, Mismatch, Tolerance, match
from waystation.tree._nodes import LEAF, NONE
from waystation.tree._outline import Outline
from waystation.tree._renames import Rename, common_rename, nearest
from waystation.tree._structure import Structure

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
