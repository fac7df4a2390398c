"""The text of how two trees differ shows both sides, and what explains many differences at once."""

import pytest

from waystation.tree import Tolerance, describe_difference, flatten
from waystation.tree._difference import common_rename, nearest

SUBSET = Tolerance(subset=True)


def difference(stored, wanted, **options):
    structures = flatten(stored)[1], flatten(wanted)[1]
    return describe_difference(*structures, lambda _: "same", lambda _: "same", **options).splitlines()


def test_both_sides_of_many_differences_are_shown():
    lines = difference({f"a{n}": 1 for n in range(300)}, {f"b{n}": 1 for n in range(300)}, limit=20)
    assert [line[0] for line in lines[:20]] == ["-"] * 10 + ["+"] * 10
    assert lines[20] == "  … and 580 more differences"


def test_a_side_with_few_differences_leaves_its_room_to_the_other():
    lines = difference({f"a{n}": 1 for n in range(30)}, {"b": 1, "c": 1}, limit=10)
    assert [line[0] for line in lines[:10]] == ["-"] * 8 + ["+"] * 2


def test_renamed_layers_are_one_rule():
    stored = {f"layer_{n}": {"kernel": 1, "bias": 1} for n in range(300)}
    wanted = {f"block_{n}": {"kernel": 1, "bias": 1} for n in range(300)}
    assert difference(stored, wanted)[21:] == [
        "all 600 paths only in the abstract state are in the checkpoint with 'layer' instead of 'block'; "
        "rename them in the abstract state, and the loaded leaves afterwards"
    ]


def test_what_a_rule_does_not_explain_is_compared_by_itself():
    stored = {"params": {"kernel": 1, "bias": 1, "scale": 1}, "steps": 1}
    wanted = {"parameters": {"kernel": 1, "bias": 1, "scale": 1}, "step": 1}
    explained = difference(stored, wanted)[8:]
    assert explained[0].startswith(
        "3 of the 4 paths only in the abstract state are in the checkpoint with 'params' "
    )
    assert explained[1:] == ["instead of ['step'], did you mean ['steps']?"]


def test_leaves_and_kinds_that_differ_stand_at_their_own_paths():
    stored, wanted = {"n": None, "s": "x", "v": 3}, {"n": 1.0, "s": int, "v": None}
    structures = flatten(stored)[1], flatten(wanted)[1]
    text = describe_difference(*structures, ["text", "number"].__getitem__, ["real", "type"].__getitem__)
    assert text.splitlines() == [
        "! ['n']: None in the checkpoint, real wanted",
        "! ['s']: text in the checkpoint, type wanted",
        "! ['v']: number in the checkpoint, None wanted",
    ]


@pytest.mark.parametrize(
    ("stored", "wanted", "text"),
    [
        ("module.", "", "with 'module.' before them, as DistributedDataParallel saves them"),
        ("_orig_mod.", "", "with '_orig_mod.' before them, as torch.compile saves them"),
        ("", "module.", "without 'module.', which DistributedDataParallel adds"),
        ("", "model.", "without 'model.'; rename them"),
        ("model.", "", "with 'model.' before them; rename them"),
    ],
)
def test_prefixes_are_recognised(stored, wanted, text):
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    lines = difference({stored + name: 1 for name in names}, {wanted + name: 1 for name in names})
    assert text in lines[-1]
    assert lines[-1].startswith("all 4 paths only in the abstract state are in the checkpoint ")


def test_a_tree_around_the_state_is_recognised():
    state = {"params": {"kernel": 1}, "step": 1}
    assert "without 'state.'" in difference(state, {"state": state})[-1]
    assert "with 'state.' before them" in difference({"state": state}, state)[-1]


def test_a_key_within_the_path_is_recognised():
    stored = {"model": {"encoder": {"a": 1, "b": 1}}}
    assert "with 'model.encoder.' instead of 'model.'" in difference(stored, {"model": {"a": 1, "b": 1}})[-1]


def test_what_a_subset_lacks_is_sought_among_all_that_is_stored():
    stored, wanted = {"0.weight": 1, "0.bias": 1, "other": 1}, {"0.weigth": 1}
    assert difference(stored, wanted, tolerance=SUBSET) == [
        "+ ['0.weigth']: only in the abstract state",
        "instead of ['0.weigth'], did you mean ['0.weight']?",
    ]


def test_nothing_is_suggested_where_nothing_is_alike():
    assert len(difference({"optimizer": 1}, {"weights": 1})) == 2
    assert nearest("weights", []) is None
    assert common_rename([], []) is None
    assert common_rename(["a", "b"], ["c", "d"]) is None


def test_nothing_is_suggested_where_several_are_as_like():
    layers = {str(number): {"weight": 1, "bias": 1} for number in range(3)}
    assert difference({"model": layers}, {"model": {"x": layers["0"]}})[-1].startswith("+ ['model']['x']")
    assert nearest("weight_3", ["weight_1", "weight_2"]) is None
    assert nearest("weight_3", ["weight_1", "weight_30"]) == "weight_30"


def test_a_rule_is_counted_over_all_paths():
    stored = [f"layer_{number}.w" for number in range(5000)]
    wanted = [f"block_{number}.w" for number in range(5000)]
    found = common_rename(wanted, stored)
    assert found is not None
    assert (found.wanted, found.stored, found.count) == ("block", "layer", 5000)


def test_a_list_and_a_dict_of_its_numbers_are_told_apart():
    lines = difference({"l": [1]}, {"l": {0: 1}})
    assert lines[2:] == [
        "['l'][0] is the key of a dict in one of them, and an element of a list in the other"
    ]
