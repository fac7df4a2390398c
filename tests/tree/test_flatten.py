import gc
from collections import OrderedDict, defaultdict

import pytest
from hypothesis import given
from tests.tree.strategies import trees

from waystation import errors
from waystation.tree import (
    DictKey,
    SequenceKey,
    Structure,
    flatten,
    format_key_path,
    label,
    unflatten,
)


def same(first, second):
    """Equal, in types and order of entries too."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return same(list(first.items()), list(second.items()))
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


@given(trees)
def test_unflatten_is_the_inverse(tree):
    leaves, structure = flatten(tree)
    assert structure.leaf_count == len(leaves)
    assert same(unflatten(structure, leaves), tree)


@given(trees)
def test_every_path_leads_to_its_leaf(tree):
    leaves, structure = flatten(tree)
    paths = structure.key_paths()
    assert len(set(paths)) == len(paths) == len(leaves)
    for path, leaf in zip(paths, leaves, strict=True):
        value = tree
        for key in path:
            value = value[key.index if isinstance(key, SequenceKey) else key.key]
        assert value is leaf
    assert structure.labels() == [label(path) for path in paths]


def test_keys_may_hold_any_character():
    tree = {"a.b": 1, "a": {"b": 2}, "": 3, "\x00/\ud800": 4}
    leaves, structure = flatten(tree)
    assert leaves == [1, 2, 3, 4]
    assert structure.labels()[:3] == ["a.b", "a.b", ""]
    assert structure.key_paths()[0] != structure.key_paths()[1]


def test_order_is_that_of_insertion():
    assert flatten({"b": 1, "a": 2})[0] == [1, 2]


def test_empty_containers_and_none_are_no_leaves():
    leaves, structure = flatten([{}, [], (), None, OrderedDict()])
    assert leaves == []
    assert same(unflatten(structure, []), [{}, [], (), None, OrderedDict()])


def test_a_leaf_alone_is_a_tree():
    leaves, structure = flatten(5)
    assert (leaves, structure.key_paths(), structure.labels()) == ([5], [()], [""])
    assert unflatten(structure, [6]) == 6


def test_a_defaultdict_keeps_its_factory_in_memory():
    _, structure = flatten(defaultdict(int, a=1))
    made = unflatten(structure, [2])
    assert made == {"a": 2}
    assert made["new"] == 0
    stored = Structure.from_json(structure.to_json(), path="tree.json")
    assert type(unflatten(stored, [2])) is dict


def test_is_leaf_keeps_values_whole():
    tree = {"a": (1, 2), "b": [3, None]}
    leaves, _ = flatten(tree, is_leaf=lambda value: type(value) is tuple or value is None)
    assert leaves == [(1, 2), 3, None]


def test_shared_containers_are_no_cycle():
    shared = [1]
    assert flatten([shared, shared, {"again": shared}])[0] == [1, 1, 1]


def test_a_cycle_is_refused_where_it_closes():
    inner = {"x": 1}
    tree = {"first": [0, 1], "loop": [None, inner]}
    inner["back"] = tree["loop"]
    with pytest.raises(errors.InvalidInput, match="contains itself") as caught:
        flatten(tree)
    assert caught.value.context["key_path"] == "['loop'][1]['back']"


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_leaves_is_refused(count):
    with pytest.raises(errors.InvalidInput, match="for a tree of 1"):
        unflatten(flatten([1])[1], range(count))


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.share(2)
def test_trees_a_hundred_thousand_deep(width):
    depth = 100_000
    tree = "end"
    for level in range(depth):
        tree = {"k": tree} if level % 2 else [tree, *([level] * (width - 1))]
    leaves, structure = flatten(tree)
    assert len(leaves) == 1 + (width - 1) * depth // 2
    stored = Structure.from_json(structure.to_json(), path="tree.json")
    assert stored == structure
    assert len(structure.labels()) == len(leaves)
    again, structure_again = flatten(unflatten(stored, leaves))
    assert (again, structure_again) == (leaves, structure)
    (longest,) = structure.paths_of([depth])
    assert len(longest) == depth
    assert format_key_path(longest).startswith("['k'][0]['k']")
    while isinstance(tree, (list, dict)):  # taken apart by hand: some collectors recurse
        tree = tree["k"] if isinstance(tree, dict) else tree[0]
    gc.collect()


def test_paths_of_nodes_that_are_not_leaves():
    _, structure = flatten({"a": [1, None], "b": {}})
    assert structure.paths_of([0, 1, 3, 4]) == [
        (),
        (DictKey("a"),),
        (DictKey("a"), SequenceKey(1)),
        (DictKey("b"),),
    ]
    assert structure.paths_of([]) == []
