"""The union of structures: everything of both, at its place, or an error that names the place of both."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tree.strategies import trees

from waystation import errors
from waystation.tree import flatten, unflatten, union

Moments = namedtuple("Moments", "mu nu")


def united(first, second):
    """The tree that two make."""
    leaves, structure = flatten(first)
    more, other = flatten(second)
    joined, order = union(structure, other)
    both = [*leaves, *more]
    return unflatten(joined, [both[number] for number in order])


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"b": {"x": 1}}, {"a": 3, "b": {"y": [2]}}, {"b": {"x": 1, "y": [2]}, "a": 3}),
        ({}, {"a": Moments(1, None)}, {"a": Moments(1, None)}),
        ({"a": {}}, {"a": {"b": {}}}, {"a": {"b": {}}}),
        ({"a": {}}, {"a": {}}, {"a": {}}),
        ({0: 1}, {"0": 2}, {0: 1, "0": 2}),
        (OrderedDict(a=1), {"b": 2}, OrderedDict(a=1, b=2)),
    ],
)
def test_mappings_are_joined_by_key(first, second, expected):
    made = united(first, second)
    assert made == expected
    assert type(made) is type(expected)
    assert list(made) == list(expected)


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [
        ({"a": 1}, {"a": 1}, r"\['a'\]"),
        ({"a": {"b": 1}}, {"a": 2}, r"\['a'\]"),
        ({"a": 2}, {"a": {"b": 1}}, r"\['a'\]"),
        ({"a": None}, {"a": {}}, r"\['a'\]"),
        ({"x": {"a": [1]}}, {"x": {"a": [2, 3]}}, r"\['x'\]\['a'\]"),
        ({"a": Moments(1, 2)}, {"a": Moments(1, 2)}, r"\['a'\]"),
        ([1], {"a": 1}, r"\(root\)"),
        (1, 2, r"\(root\)"),
    ],
)
def test_what_both_have_is_an_error_that_names_it(first, second, place):
    with pytest.raises(errors.Conflict, match=f"both have {place};"):
        united(first, second)


@given(st.dictionaries(st.text(max_size=3), trees, max_size=5), st.data())
def test_a_tree_is_the_union_of_its_parts(tree, data):
    chosen = {key for key in tree if data.draw(st.booleans())}
    first = {key: value for key, value in tree.items() if key in chosen}
    second = {key: value for key, value in tree.items() if key not in chosen}
    made = united({"deep": first}, {"deep": second})
    leaves, structure = flatten({"deep": {**first, **second}})
    found, same = flatten(made)
    assert same == structure
    assert all(one is other or one == other or one != one for one, other in zip(found, leaves, strict=True))
