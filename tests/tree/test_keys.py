import pytest

from waystation import errors
from waystation.tree import (
    AttributeKey,
    ChildKey,
    DictKey,
    SequenceKey,
    flatten,
    format_key_path,
    label,
)

PATH = (DictKey("params"), DictKey("w"), SequenceKey(0), AttributeKey("mu"), ChildKey(2), DictKey(7))


def test_a_path_reads_as_python_would_write_it():
    assert format_key_path(PATH) == "['params']['w'][0].mu<2>[7]"
    assert format_key_path(()) == "(root)"


def test_a_label_has_dots():
    assert label(PATH) == "params.w.0.mu.2.7"
    assert label(()) == ""


def test_keys_of_different_kinds_differ():
    keys = {DictKey("0"), DictKey(0), SequenceKey(0), ChildKey(0), AttributeKey("0")}
    assert len(keys) == 5


def test_very_long_paths_are_shown_by_their_ends():
    path = tuple(SequenceKey(index) for index in range(1000))
    assert format_key_path(path) == ("[0][1][2][3][4][5][6][7]…[992][993][994][995][996][997][998][999]")
    assert label(path).count(".") == 16


class Name(str):
    pass


nested = ()
for _ in range(20):
    nested = (nested,)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (frozenset(), "frozenset"),
        (Name("a"), "Name"),
        (("a", object), "type"),
        (float("nan"), "does not equal itself"),
        ((1, complex("nan")), "does not equal itself"),
        (1 << 20_000, "20001 bits"),
        (nested, "deep"),
    ],
    ids=["frozenset", "subclass", "inside a tuple", "NaN", "complex NaN", "huge", "deep"],
)
def test_keys_that_would_not_come_back_are_refused_where_they_are(key, reason):
    with pytest.raises(errors.Unsupported, match=reason) as caught:
        flatten({"outer": [1, {key: 2}]})
    assert caught.value.context["key_path"] == "['outer'][1]"
