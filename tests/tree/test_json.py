import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tree.strategies import dict_keys, trees

from waystation import errors
from waystation.tree import Structure, flatten, parse_json


def decode(value, **options):
    return Structure.from_json(value, path="tree.json", **options)


@given(trees)
def test_structures_survive_as_strict_json(tree):
    _, structure = flatten(tree)
    text = json.dumps(structure.to_json(), ensure_ascii=False, allow_nan=False).encode("utf-8")
    again = decode(parse_json(text, "tree.json"), leaf_count=structure.leaf_count)
    assert again == structure
    assert again.key_paths() == structure.key_paths()
    assert again.to_json() == structure.to_json()


@given(st.lists(dict_keys, unique=True, max_size=6))
def test_keys_keep_their_types(keys):
    (again,) = decode(flatten(dict.fromkeys(keys))[1].to_json()).nodes[:1]
    assert [(type(key), repr(key)) for key in again.keys] == [(type(key), repr(key)) for key in keys]


def test_the_form_is_the_documented_one():
    tree = {"w": 1, 7: None, "l": [2, ()], b"\x01": {}}
    assert flatten(tree)[1].to_json() == [
        {"dict": ["w", {"int": "7"}, "l", {"bytes": "01"}]},
        0,
        None,
        {"list": 2},
        0,
        {"tuple": 0},
        {"dict": []},
    ]


HOSTILE_STRUCTURES = [
    None,
    {},
    [],
    [0, 0],  # a second root
    [{"list": 2}, 0],  # a child is lacking
    [{"list": 1}, 0, 0],
    [{"list": -1}],
    [{"list": 10**18}],
    [{"list": True}, 0],
    [{"list": 1.0}, 0],
    [False],
    [0.0],
    [1],
    ["leaf"],
    [[]],
    [{}],
    [{"set": 1}, 0],
    [{"list": 0, "tuple": 0}],
    [{"dict": ["a", "a"]}, 0, 0],
    [{"dict": [{"int": "1"}, {"bool": True}]}, 0, 0],  # equal keys
    [{"dict": ["a"]}],
    [{"dict": "a"}, 0],
    [{"dict": [1]}, 0],
    [{"dict": [None]}, 0],
    [{"dict": [{}]}, 0],
    [{"dict": [{"int": "1", "bool": True}]}, 0],
    [{"dict": [{"int": 1}]}, 0],
    [{"dict": [{"int": " 1"}]}, 0],
    [{"dict": [{"int": "1_0"}]}, 0],
    [{"dict": [{"int": "9" * 5000}]}, 0],
    [{"dict": [{"int": "9" * 4000}]}, 0],
    [{"dict": [{"float": "nan"}]}, 0],
    [{"dict": [{"float": "1.5"}]}, 0],
    [{"dict": [{"float": 1.5}]}, 0],
    [{"dict": [{"float": "0x1p+9999"}]}, 0],
    [{"dict": [{"complex": ["0x1.0000000000000p+0"]}]}, 0],
    [{"dict": [{"complex": "ab"}]}, 0],
    [{"dict": [{"bool": 1}]}, 0],
    [{"dict": [{"none": None}]}, 0],
    [{"dict": [{"bytes": "0"}]}, 0],
    [{"dict": [{"bytes": "0 0"}]}, 0],
    [{"dict": [{"bytes": 7}]}, 0],
    [{"dict": [{"tuple": "ab"}]}, 0],
    [{"dict": [{"tuple": [{"list": []}]}]}, 0],
    [{"dict": [{"surrogates": "ff"}]}, 0],
    [{"dict": [{"surrogates": 3}]}, 0],
    [{"dict": [{"frozenset": "a"}]}, 0],
    [{"named": "a.B"}],
    [{"named": 5, "keys": []}],
    [{"named": {"int": "5"}, "keys": []}],
    [{"named": "a.B", "keys": {}}],
    [{"named": "a.B", "keys": [], "more": 1}],
    [{"named": "a.B", "keys": [], "static": False}],
    [{"named": "a.B", "keys": ["x", "x"]}, 0, 0],
    [{"named": "a.B", "keys": [{"index": -1}]}, 0],
    [{"named": "a.B", "keys": [{"child": True}]}, 0],
    [{"named": "a.B", "keys": [{"attribute": "x"}]}, 0],
    [{"named": "a.B", "keys": [{"key": 5}]}, 0],
    [{"named": "a.B", "keys": [0]}, 0],
]


@pytest.mark.parametrize("value", HOSTILE_STRUCTURES, ids=lambda value: repr(value)[:60])
def test_hostile_structures_are_corrupt(value):
    with pytest.raises(errors.Corrupt) as caught:
        decode(value)
    assert caught.value.context["path"] == "tree.json"


def test_deeply_nested_keys_are_corrupt():
    key = "a"
    for _ in range(sys.getrecursionlimit() * 2):
        key = {"tuple": [key]}
    with pytest.raises(errors.Corrupt):
        decode([{"dict": [key]}, 0])


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-1, 3),
        st.floats(),
        st.sampled_from(["a", "", "1", "0x1.0000000000000p+0"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                [
                    "list",
                    "tuple",
                    "dict",
                    "ordered_dict",
                    "named",
                    "keys",
                    "static",
                    "int",
                    "float",
                    "key",
                    "bytes",
                    "bool",
                    "none",
                    "complex",
                    "surrogates",
                    "index",
                    "child",
                    "x",
                ]
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=12,
)


@given(st.one_of(json_values, st.lists(json_values, max_size=5)))
def test_any_json_is_a_structure_or_corrupt(value):
    try:
        structure = decode(value)
    except errors.Corrupt:
        return
    assert decode(structure.to_json()) == structure
    assert len(structure.key_paths()) == structure.leaf_count


def test_the_number_of_leaves_must_agree():
    with pytest.raises(errors.Corrupt, match="2 leaves where 3"):
        decode([{"list": 2}, 0, 0], leaf_count=3)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":1}',
        '[{"x":{"a":1,"b":2,"a":3}}]',
        "NaN",
        "[-Infinity]",
        "1e999",
        "",
        "[1,]",
        "{} {}",
        "\ufeff{}",
        "9" * 10_000,
        b"\xff",
        '"a"'.encode("utf-16"),
        "[" * 1_000_000,
        '{"a":' * 1_000_000,
    ],
    ids=lambda text: repr(text[:20]),
)
def test_json_that_is_not_strict_is_corrupt(text):
    with pytest.raises(errors.Corrupt) as caught:
        parse_json(text, "somewhere/tree.json")
    assert caught.value.context["path"] == "somewhere/tree.json"


@given(json_values.filter(lambda value: "nan" not in repr(value) and "inf" not in repr(value)))
def test_strict_json_is_parsed_as_it_is(value):
    text = json.dumps(value)
    assert parse_json(text, "p") == parse_json(text.encode(), "p") == value
