from collections import OrderedDict, namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.long import only_long
from tests.tree.strategies import trees

from waystation.tree import (
    AttributeKey,
    ChildKey,
    Mismatch,
    NamedNode,
    Tolerance,
    describe_difference,
    flatten,
    format_key_path,
    match,
)

Moments = namedtuple("Moments", "mu nu")


def matched(stored, wanted):
    """The wanted tree's leaves, each as the stored one that it got; None without a full match."""
    leaves, structure = flatten(stored)
    outcome = match(structure, flatten(wanted)[1])
    return [leaves[number] for number in outcome] if isinstance(outcome, list) else None


def differences(stored, wanted):
    outcome = match(flatten(stored)[1], flatten(wanted)[1])
    assert isinstance(outcome, Mismatch)
    return (
        [format_key_path(path) for path in outcome.missing_paths()],
        [format_key_path(path) for path in outcome.unexpected_paths()],
    )


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [
        ({"a": 1, "b": 2}, {"b": 0, "a": 0}, [2, 1]),
        ([1, (2, 3)], (0, [0, 0]), [1, 2, 3]),
        ({"mu": 1, "nu": 2}, Moments(0, 0), [1, 2]),
        (Moments(1, 2), OrderedDict(nu=0, mu=0), [2, 1]),
        (NamedNode("t", {ChildKey(0): 1, ChildKey(1): 2}), [0, 0], [1, 2]),
        (NamedNode("t", {AttributeKey("nu"): 2, AttributeKey("mu"): 1}), Moments(0, 0), [1, 2]),
        ({0: 1}, {0: 5}, [1]),
        ({0: 1}, [0], None),
        ({0: 1}, {"0": 0}, None),
        ([None, 1], (None, 0), [1]),
        ([{}, 1], [[], 0], [1]),
        ([None], [{}], None),
        ([None], [0], None),
        ([1], [None], None),
        ([1], [[]], None),
        ([[1]], [0], None),
        (1, 0, [1]),
    ],
)
def test_containers_match_by_the_names_of_their_children(stored, wanted, expected):
    assert matched(stored, wanted) == expected


@given(trees)
def test_a_tree_matches_itself(tree):
    _, structure = flatten(tree)
    assert match(structure, flatten(tree)[1]) == list(range(structure.leaf_count))


@given(trees, st.randoms(use_true_random=False))
def test_the_order_of_entries_does_not_matter(tree, random):
    def shuffled(value):
        if isinstance(value, dict):
            entries = [(key, shuffled(child)) for key, child in value.items()]
            random.shuffle(entries)
            return dict(entries)
        if isinstance(value, list | tuple):
            return [shuffled(child) for child in value]
        return value

    other = shuffled(tree)
    assert matched(tree, other) == flatten(other)[0]


@given(trees, trees)
def test_leaves_of_different_trees_pair_up_by_path(first, second):
    _, stored = flatten(first)
    _, wanted = flatten(second)
    outcome = match(stored, wanted)
    numbers = outcome if isinstance(outcome, list) else outcome.leaves
    assert len(numbers) == wanted.leaf_count
    used = [number for number in numbers if number >= 0]
    assert len(set(used)) == len(used)
    ours, theirs = stored.key_paths(), wanted.key_paths()
    assert all(ours[number] == path for number, path in zip(numbers, theirs, strict=True) if number >= 0)
    common = set(ours) & set(theirs)
    assert len(used) == len(common)
    if isinstance(outcome, Mismatch):
        assert outcome.missing or outcome.unexpected


def test_what_is_missing_and_what_is_unexpected():
    stored = {"a": [1, 2], "b": None, "c": {"d": 3, "e": {}}}
    wanted = {"a": [1], "b": 2, "f": (1, None)}
    assert differences(stored, wanted) == (
        ["['b']", "['f'][0]", "['f'][1]"],
        ["['a'][1]", "['b']", "['c']['d']", "['c']['e']"],
    )


def test_a_partial_match_keeps_the_leaves_that_are_there():
    outcome = match(flatten({"a": 1, "b": 2})[1], flatten({"b": 0, "x": 0})[1])
    assert outcome.leaves == [1, -1]
    assert outcome.missing_paths(0) == []


def test_the_difference_reads_like_one():
    stored, wanted = flatten({"a": 1, "b": 2, "c": 3})[1], flatten({"a": 0, "b": 0, "d": None})[1]
    text = describe_difference(
        stored,
        wanted,
        lambda number: f"shape ({number + 3},)",
        lambda number: ["shape (4,)", "shape (4,)"][number],
    )
    assert text.splitlines() == [
        "- ['c']: only in the checkpoint",
        "+ ['d']: only in the abstract state",
        "! ['a']: shape (3,) in the checkpoint, shape (4,) wanted",
    ]


def test_equal_trees_have_no_difference():
    _, structure = flatten({"a": 1, "b": 2})
    assert describe_difference(structure, structure, str, lambda number: None) == ""
    assert describe_difference(structure, structure, str, str) == ""


@pytest.mark.parametrize("limit", [0, 1, 7])
def test_a_long_difference_is_cut_and_counted(limit):
    stored, wanted = flatten([1] * 4 + [2])[1], flatten([1] * 4 + [[]] + [3] * 20)[1]
    text = describe_difference(stored, wanted, lambda _: "have", lambda _: "want", limit=limit)
    lines = text.splitlines()
    assert len(lines) == limit + 1
    assert lines[-1] == f"  … and {25 - limit} more differences"


@pytest.mark.long
@only_long
def test_deep_trees_match():
    def nested(innermost, pair):
        tree = innermost
        for level in range(100_000):
            tree = pair(level, tree)
        return tree

    stored = flatten(nested({"x": 1}, lambda level, tree: [level, tree]))[1]
    wanted = flatten(nested({"y": 1}, lambda level, tree: (level, tree)))[1]
    outcome = match(stored, wanted)
    assert outcome.leaves[:3] == [0, 1, 2]
    assert (len(outcome.missing), len(outcome.unexpected)) == (1, 1)
    text = describe_difference(stored, wanted, lambda _: "same", lambda _: "same")
    assert len(text) < 500


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": ..., "b": 0}, [-1, 2]),
        ({"a": [1, 2], "b": 3}, {"a": ..., "b": 0}, [-1, 3]),
        ({"a": None}, {"a": ...}, [-1]),
        ({"b": 3}, {"a": ..., "b": 0}, [-1, 3]),
        ({"b": 3}, {"a": {"x": ..., "y": [...]}, "b": 0}, [-1, -1, 3]),
        ({"b": 3}, {"a": {"x": ..., "y": 0}, "b": 0}, None),
        ({"b": 3}, {"a": {"x": ..., "y": None}, "b": 0}, None),
        ({"a": 1, "b": 3}, {"a": ...}, None),
        (1, ..., [-1]),
    ],
)
def test_placeholders_match_whatever_is_there(stored, wanted, expected):
    leaves, structure = flatten(stored)
    abstracts, asked = flatten(wanted)
    absent = frozenset(number for number, leaf in enumerate(abstracts) if leaf is ...)
    outcome = match(structure, asked, Tolerance(absent))
    found = None
    if isinstance(outcome, list):
        pairs = enumerate(outcome)
        found = [-1 if number in absent else leaves[place] for number, place in pairs]
    assert found == expected


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [
        ({"a": 1, "b": 2}, {"b": 0}, [2]),
        ({"a": {"x": 1, "y": 2}, "b": [3]}, {"a": {"y": 0}}, [2]),
        ([1, 2, 3], [0, 0], [1, 2]),
        ({"a": 1}, {}, []),
        ({"a": 1}, {"a": 0, "b": 0}, None),
        ({"a": {"x": 1}}, {"a": 0}, None),
        ({"a": 1}, {"a": {"x": 0}}, None),
    ],
)
def test_a_subset_needs_all_that_it_has(stored, wanted, expected):
    leaves, structure = flatten(stored)
    outcome = match(structure, flatten(wanted)[1], Tolerance(subset=True))
    assert ([leaves[place] for place in outcome] if isinstance(outcome, list) else None) == expected
