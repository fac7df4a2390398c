"""Real states of flax and optax, opened through JAX's own registry by a fallback."""

import json

import pytest

from waystation.tree import (
    AttributeKey,
    ChildKey,
    DictKey,
    NamedNode,
    SequenceKey,
    Structure,
    flatten,
    label,
    register_fallback,
    register_node,
    unflatten,
)

jax = pytest.importorskip("jax")
flax = pytest.importorskip("flax")
optax = pytest.importorskip("optax")

from flax import struct  # noqa: E402
from flax.core import FrozenDict, freeze  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402


def translate(key):
    match key:
        case jax.tree_util.DictKey():
            return DictKey(key.key)
        case jax.tree_util.GetAttrKey():
            return AttributeKey(key.name)
        case jax.tree_util.SequenceKey():
            return SequenceKey(key.idx)
        case _:
            return ChildKey(key.key)


def open_by_jax(value):
    """One level of anything that JAX's registry knows."""
    entries, definition = jax.tree_util.tree_flatten_with_path(
        value, is_leaf=lambda other: other is not value
    )
    if jax.tree_util.treedef_is_leaf(definition):
        return None
    return [(translate(path[0]), child) for path, child in entries], definition.unflatten


@pytest.fixture(autouse=True)
def jax_fallback():
    remove = register_fallback(open_by_jax)
    yield
    remove()


def through_a_file(tree):
    leaves, structure = flatten(tree)
    return unflatten(Structure.from_json(json.loads(json.dumps(structure.to_json())), path="p"), leaves)


def params():
    return {"dense": {"kernel": jax.numpy.ones((2, 3)), "bias": jax.numpy.zeros(3)}}


def same(first, second):
    return jax.tree.structure(first) == jax.tree.structure(second) and all(
        (a == b).all() for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1.0, 0.0, 5))),
        optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2),
        optax.masked(optax.adam(1e-3), {"dense": {"kernel": True, "bias": False}}),
    ],
    ids=["adam", "chain", "multi steps", "masked"],
)
def test_optimizer_states_come_back_whole(optimizer):
    state = optimizer.init(params())
    assert same(through_a_file(state), state)
    by_jax = flatten(state)[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("waystation.tree._registry._fallbacks", [])
        assert flatten(unflatten(by_jax, flatten(state)[0]))[1].leaf_count == by_jax.leaf_count


def test_paths_agree_with_those_of_jax():
    state = optax.adam(1e-3).init(params())
    theirs = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    ours = {label(path) for path in flatten(state)[1].key_paths()}
    assert ours == {label(tuple(map(translate, path))) for path in theirs}


@struct.dataclass
class Carry:
    hidden: jax.Array
    name: str = struct.field(pytree_node=False, default="carry")


def test_flax_dataclasses():
    carry = Carry(jax.numpy.arange(3))
    loaded = through_a_file(carry)
    assert type(loaded) is Carry
    assert same(loaded, carry)
    named = carry.replace(name="other")
    assert isinstance(through_a_file(named), NamedNode)
    leaves, structure = flatten(named)
    assert unflatten(structure, leaves).name == "other"


def test_train_states_need_their_static_fields():
    state = TrainState.create(apply_fn=abs, params=params(), tx=optax.adam(1e-3))
    leaves, structure = flatten(state)
    rebuilt = unflatten(structure, leaves)
    assert rebuilt.apply_fn is abs
    assert same(rebuilt.params, state.params)
    loaded = through_a_file(state)
    assert isinstance(loaded, NamedNode)
    assert same(loaded.params, state.params)
    assert type(loaded.opt_state[0]) is type(state.opt_state[0])


def test_frozen_dicts():
    frozen = freeze(params())
    leaves, structure = flatten(frozen)
    assert type(unflatten(structure, leaves)) is FrozenDict
    assert sorted(structure.labels()) == ["dense.bias", "dense.kernel"]
    loaded = through_a_file(frozen)
    assert isinstance(loaded, NamedNode)
    assert (loaded["dense"]["kernel"] == frozen["dense"]["kernel"]).all()


def test_registered_frozen_dicts_come_back_from_files():
    register_node(
        FrozenDict,
        flatten=lambda frozen: ([(DictKey(key), child) for key, child in frozen.items()], None),
        unflatten=lambda children, _: FrozenDict({key.key: child for key, child in children}),
    )
    frozen = freeze(params())
    assert same(through_a_file(frozen), frozen)


def test_jax_arrays_are_leaves():
    tree = {"a": jax.numpy.ones(3), "b": jax.ShapeDtypeStruct((2,), "float32"), "k": jax.random.key(0)}
    assert len(flatten(tree)[0]) == 3
