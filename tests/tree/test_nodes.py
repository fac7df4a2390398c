"""Classes as nodes: in memory, through a file, and where the file knows more than the program."""

import copy
import json
import pickle
from collections import namedtuple
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import pytest

from waystation import errors
from waystation.tree import (
    AttributeKey,
    ChildKey,
    DictKey,
    NamedNode,
    SequenceKey,
    Structure,
    _registry,
    flatten,
    format_key_path,
    register_fallback,
    register_leaf,
    register_node,
    unflatten,
)


def stored(tree):
    """What a program that knows the classes of this module loads."""
    leaves, structure = flatten(tree)
    text = json.dumps(structure.to_json())
    return unflatten(Structure.from_json(json.loads(text), path="tree.json"), leaves)


def stored_elsewhere(tree, monkeypatch):
    """What a program loads that has registered none of them."""
    leaves, structure = flatten(tree)
    with monkeypatch.context() as patch:
        patch.setattr(_registry, "_seen", {})
        patch.setattr(_registry, "_registrations", {})
        return unflatten(Structure.from_json(structure.to_json(), path="tree.json"), leaves)


class Moments(NamedTuple):
    mu: Any
    nu: Any = 0


Plain = namedtuple("Plain", "x y")


@dataclass
class Layer:
    weight: Any
    bias: Any = None


@dataclass(frozen=True, slots=True)
class Model:
    layer: Layer
    name: str = field(default="model", metadata={"pytree_node": False})
    width: int = field(default=3, metadata={"static": True})


@dataclass
class Careful:
    value: Any
    seed: InitVar[int]

    def __post_init__(self, seed):
        self.value = self.value + seed


@dataclass
class Dictionary(dict):
    size: int = 0


class Box:
    __hash__ = None

    def __init__(self, content, note=None):
        self.content, self.note = content, note

    def __eq__(self, other):
        return type(other) is Box and (self.content, self.note) == (other.content, other.note)


register_node(
    Box,
    flatten=lambda box: ([(AttributeKey("content"), box.content)], box.note),
    unflatten=lambda children, note: Box(children[0][1], note),
)


@pytest.mark.parametrize(
    "tree",
    [
        Moments(1, [2, 3]),
        {"a": Plain(1, None)},
        Layer([1, 2], {"b": 3}),
        [Model(Layer(1))],
        Box((1, 2)),
    ],
)
def test_known_classes_come_back_from_memory_and_from_files(tree):
    leaves, structure = flatten(tree)
    assert unflatten(structure, leaves) == tree
    again = stored(tree)
    assert (again, type(again)) == (tree, type(tree))


def test_fields_are_attributes_in_key_paths():
    _, structure = flatten({"m": Model(Layer(1, 2)), "b": Box(3), "t": Moments(4, 5)})
    assert [format_key_path(path) for path in structure.key_paths()] == [
        "['m'].layer.weight",
        "['m'].layer.bias",
        "['b'].content",
        "['t'].mu",
        "['t'].nu",
    ]


def test_static_fields_stay_in_memory():
    tree = [Model(Layer(1), name="other"), Box(2, note=object())]
    leaves, structure = flatten(tree)
    assert len(leaves) == 2
    assert unflatten(structure, leaves) == tree
    assert "other" not in json.dumps(structure.to_json())


def test_lost_static_data_never_becomes_a_default():
    model, box = stored([Model(Layer(1), name="other"), Box(2, note="n")])
    assert isinstance(model, NamedNode)
    assert isinstance(box, NamedNode)
    assert model.layer == Layer(1)
    assert box.content == 2


def test_the_abstract_state_supplies_static_data():
    saved = Model(Layer(1), name="other")
    leaves, _ = flatten(saved)
    _, wanted = flatten(Model(Layer(...), name="other"))
    assert unflatten(wanted, leaves) == saved


def test_dataclasses_are_restored_without_their_constructor():
    careful = Careful(1, seed=10)
    leaves, structure = flatten(careful)
    assert leaves == [11]
    assert unflatten(structure, leaves).value == 11
    assert stored(careful).value == 11


def test_unknown_classes_become_named_nodes_and_are_saved_again_unchanged(monkeypatch):
    tree = {"m": Model(Layer(1, [2]), name="other"), "t": Moments(3, 4), "b": Box(5)}
    leaves, structure = flatten(tree)
    loaded = stored_elsewhere(tree, monkeypatch)
    assert all(type(node) is NamedNode for node in loaded.values())
    assert loaded["m"].layer.bias == [2]
    assert loaded["t"]["nu"] == 4
    leaves_again, structure_again = flatten(loaded)
    assert leaves_again == leaves
    assert structure_again == structure
    assert structure_again.to_json() == structure.to_json()


def test_a_class_that_has_changed_is_not_forced():
    leaves, structure = flatten(Layer(1, 2))
    text = structure.to_json()
    text[0]["keys"] = ["weight", "renamed"]
    loaded = unflatten(Structure.from_json(text, path="p"), leaves)
    assert loaded == NamedNode(text[0]["named"], {AttributeKey("weight"): 1, AttributeKey("renamed"): 2})


def test_a_class_that_has_grown_a_field_with_a_default_is_used():
    for grown, plain in ((Layer(1, 5), Layer(1)), (Moments(1, 5), Moments(1))):
        text = flatten(grown)[1].to_json()
        text[0]["keys"] = text[0]["keys"][:1]
        del text[2:]
        assert unflatten(Structure.from_json(text, path="p"), [1]) == plain


def test_children_are_named_not_counted():
    text = flatten(Moments(1, 2))[1].to_json()
    text[0]["keys"].reverse()
    assert unflatten(Structure.from_json(text, path="p"), [1, 2]) == Moments(mu=2, nu=1)


def test_a_tag_is_never_imported():
    tag = "this.module.would.run.code"
    loaded = unflatten(Structure.from_json([{"named": tag, "keys": [{"child": 0}]}, 0], path="p"), [1])
    assert loaded == NamedNode(tag, {ChildKey(0): 1})
    for known in ("builtins.dict", "os.system", "subprocess.Popen"):
        loaded = unflatten(Structure.from_json([{"named": known, "keys": []}], path="p"), [])
        assert type(loaded) is NamedNode


def test_access_to_the_children_of_a_named_node():
    node = NamedNode("t", {AttributeKey("mu"): 1, DictKey("k"): 2, SequenceKey(0): 3, AttributeKey("tag"): 4})
    assert (node.mu, node["mu"], node.k, node["k"], node[0]) == (1, 1, 2, 2, 3)
    assert (node.tag, node["tag"], node[SequenceKey(0)]) == ("t", 4, 3)
    assert len(node) == 4
    assert list(node) == list(node.fields)
    with pytest.raises(AttributeError):
        _ = node.absent
    with pytest.raises(KeyError):
        node["absent"]
    assert node != NamedNode("u", node.fields)
    assert node != 5
    assert copy.copy(node) == copy.deepcopy(node) == pickle.loads(pickle.dumps(node)) == node
    assert repr(NamedNode("t", {AttributeKey("x"): 1})) == "NamedNode('t', {.x: 1})"


def test_subclasses_of_containers_are_leaves_unless_registered():
    class Mine(dict):
        pass

    value = Mine(a=1)
    assert flatten([value, Dictionary(3)])[0] == [value, Dictionary(3)]
    register_node(
        Mine,
        flatten=lambda mine: ([(DictKey(key), child) for key, child in mine.items()], None),
        unflatten=lambda children, _: Mine({key.key: child for key, child in children}),
        tag="tests.Mine",
    )
    leaves, structure = flatten([value])
    assert leaves == [1]
    assert structure.to_json()[1] == {"named": "tests.Mine", "keys": [{"key": "a"}]}
    assert type(stored([value])[0]) is Mine


def test_registered_leaves_are_not_opened():
    @dataclass
    class Handle:
        number: int

    register_leaf(Handle)
    assert flatten([Handle(1)])[0] == [Handle(1)]


def test_what_cannot_be_registered():
    class Other:
        pass

    def no_children(value):
        return [], None

    with pytest.raises(errors.InvalidInput):
        register_node(dict, flatten=no_children, unflatten=lambda children, static: {})
    with pytest.raises(errors.InvalidInput):
        register_leaf(list)
    with pytest.raises(errors.Conflict, match="belongs to"):
        register_node(Other, flatten=no_children, unflatten=no_children, tag=f"{__name__}.Box")


def test_a_fallback_opens_what_nothing_else_does():
    class Pair:
        def __init__(self, first, second):
            self.parts = (first, second)

    def open_pair(value):
        if type(value) is not Pair:
            return None
        return [(ChildKey(i), part) for i, part in enumerate(value.parts)], lambda parts: Pair(*parts)

    pair = Pair(1, {"a": 2})
    assert flatten([pair])[0] == [pair]
    remove = register_fallback(open_pair)
    try:
        leaves, structure = flatten([pair])
        assert leaves == [1, 2]
        assert format_key_path(structure.key_paths()[1]) == "[0]<1>['a']"
        assert unflatten(structure, [3, 4])[0].parts == (3, {"a": 4})
        assert isinstance(
            stored([pair])[0], NamedNode
        )  # nothing says how to make one without its static data
    finally:
        remove()
    assert flatten([pair])[0] == [pair]


def test_a_fallback_is_asked_again_about_types_of_arrays():
    class Quantity:
        shape, dtype = (), "float32"

    value = Quantity()
    assert flatten(value)[0] == [value]
    remove = register_fallback(lambda v: ([], lambda _: Quantity()) if type(v) is Quantity else None)
    try:
        assert flatten(value)[0] == []
    finally:
        remove()


def test_children_named_alike_are_refused():
    class Twins:
        pass

    register_node(
        Twins,
        flatten=lambda twins: ([(ChildKey(0), 1), (ChildKey(0), 2)], None),
        unflatten=lambda children, static: Twins(),
    )
    with pytest.raises(errors.InvalidInput, match="alike") as caught:
        flatten({"a": Twins()})
    assert caught.value.context["key_path"] == "['a']"


def test_a_field_that_is_not_set_is_named():
    layer = Layer(1)
    del layer.weight
    with pytest.raises(errors.InvalidInput, match="'weight'") as caught:
        flatten([layer])
    assert caught.value.context["key_path"] == "[0]"


def test_errors_of_a_class_carry_the_key_path():
    class Broken:
        pass

    def fail(*_):
        raise ZeroDivisionError

    register_node(Broken, flatten=fail, unflatten=fail)
    with pytest.raises(ZeroDivisionError) as caught:
        flatten({"a": [Broken()]})
    assert "['a'][0]" in caught.value.__notes__[0]
    register_node(Broken, flatten=lambda _: ([], None), unflatten=fail)
    with pytest.raises(ZeroDivisionError) as caught:
        unflatten(flatten({"a": [Broken()]})[1], [])
    assert "['a'][0]" in caught.value.__notes__[0]


def test_a_class_and_an_instance_differ():
    assert flatten([Layer, Moments])[0] == [Layer, Moments]
