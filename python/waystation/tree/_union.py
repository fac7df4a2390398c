"""The structure that holds what two structures hold, where mappings alone have more than one part.

Invariants: nothing is built, so that classes of either need not be here; each leaf of both is in the union
once; mappings keep the order of the first, with what only the second has behind; both are walked once.
"""

from __future__ import annotations

from waystation._errors import Conflict
from waystation.tree._keys import format_key_path
from waystation.tree._nodes import MAPPING_KINDS, Node
from waystation.tree._outline import Outline
from waystation.tree._structure import Structure

_BOTH = 2  # a mapping of both structures, among the numbers of the structures


def union(first: Structure, second: Structure) -> tuple[Structure, list[int]]:
    """Joins two structures.

    Returns:
        The union, and for each of its leaves which one it was: those of the second are counted from the
        number of leaves of the first.

    Raises:
        Conflict: Both have something at the same place other than a mapping; names the place.
    """
    sides = Outline(first), Outline(second)
    nodes: list[Node] = []
    leaves: list[int] = []
    # What comes next, last first: a place in one structure, or one in each where both have a mapping.
    pending: list[tuple[int, int, int]] = [(_BOTH, 0, 0)]
    while pending:
        which, here, there = pending.pop()
        if which == _BOTH:
            node, children = _joined(first, sides, here, there)
            nodes.append(node)
            pending += reversed(children)
            continue
        own, begin = sides[which], (here, there)[which]
        nodes += own.nodes[begin : own.ends[begin]]
        offset = first.leaf_count * which
        leaves += [number + offset for number in own.leaves_in(begin)]
    return Structure(nodes, len(leaves)), leaves


def _joined(
    first: Structure, sides: tuple[Outline, Outline], here: int, there: int
) -> tuple[Node, list[tuple[int, int, int]]]:
    """The mapping that two become, and where its children are."""
    have, more = sides[0].nodes[here], sides[1].nodes[there]
    if have.kind not in MAPPING_KINDS or more.kind not in MAPPING_KINDS:
        place = format_key_path(first.paths_of([here])[0])
        raise Conflict(f"both have {place}; only what is not there yet can be added", array=place)
    ours = dict(zip(have.keys, sides[0].children(here), strict=True))
    theirs = dict(zip(more.keys, sides[1].children(there), strict=True))
    children = []
    for key, place in ours.items():
        other = theirs.pop(key, None)
        children.append((0, place, 0) if other is None else (_BOTH, place, other))
    children += [(1, 0, place) for place in theirs.values()]
    return Node(have.kind, len(children), (*ours, *theirs)), children
