from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.core import FrozenDict
from flax.training.train_state import TrainState

from waystation.errors import InvalidInput
from waystation.frameworks.jax_nodes import flatten_one_level
from waystation.tree import AttributeKey, ChildKey, DictKey, SequenceKey, flatten, unflatten


@struct.dataclass
class Point:
    x: Any
    name: str = struct.field(pytree_node=False)


@jax.tree_util.register_pytree_node_class
class Unkeyed:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, static: None, parts: tuple[Any, ...]) -> Unkeyed:
        return cls(*parts)


@dataclass
class Twins:
    left: Any
    right: Any


jax.tree_util.register_pytree_with_keys(
    Twins,
    lambda value: (((DictLike, value.left), (DictLike, value.right)), None),
    lambda _, parts: Twins(*parts),
)
DictLike = jax.tree_util.DictKey("same")


def test_flax_dataclasses_open_by_attribute_and_keep_their_static_fields() -> None:
    opened = flatten_one_level(Point({"a": 1}, "p"))
    assert opened is not None
    children, rebuild = opened
    assert children == [(AttributeKey("x"), {"a": 1})]
    assert rebuild([5]) == Point(5, "p")


def test_frozen_dicts_open_by_key() -> None:
    opened = flatten_one_level(FrozenDict({"a.b": 1, "c": {"d": 2}}))
    assert opened is not None
    assert [key for key, _ in opened[0]] == [DictKey("a.b"), DictKey("c")]
    assert opened[1]([1, {"d": 2}]) == FrozenDict({"a.b": 1, "c": {"d": 2}})


def test_classes_without_keys_open_by_position() -> None:
    opened = flatten_one_level(Unkeyed(7, [8]))
    assert opened is not None
    assert opened[0] == [(ChildKey(0), 7), (ChildKey(1), [8])]
    assert opened[1]([1, 2]).parts == (1, 2)


def test_sequences_open_by_index() -> None:
    opened = flatten_one_level([1, 2])
    assert opened is not None
    assert opened[0] == [(SequenceKey(0), 1), (SequenceKey(1), 2)]


@pytest.mark.parametrize(
    "value",
    [3, "x", np.zeros(2), jnp.zeros(2), object(), optax.EmptyState()],
    ids=lambda value: type(value).__name__,  # the same in every process that collects the tests
)
def test_what_is_no_node_of_jax_is_left_alone(value: Any) -> None:
    assert flatten_one_level(value) is None


def test_children_that_share_a_key_are_refused() -> None:
    with pytest.raises(InvalidInput, match="Twins names two of its children alike"):
        flatten_one_level(Twins(1, 2))


def trained() -> TrainState:
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


STATES = {
    "optax": lambda: optax.chain(optax.clip(1.0), optax.adam(1e-3)).init({"w": jnp.ones(3)}),
    "train state": trained,
    "nnx": lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
    "frozen": lambda: FrozenDict({"a": {"b": jnp.ones(2)}}),
    "partial": lambda: jax.tree_util.Partial(max, jnp.ones(2), key=jnp.ones(1)),
}


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_whole_states_flatten_as_jax_does_and_come_back(make: Any) -> None:
    state = make()
    leaves, structure = flatten(state)
    assert sorted(map(id, leaves)) == sorted(map(id, jax.tree.leaves(state)))
    again = unflatten(structure, leaves)
    assert type(again) is type(state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert one is other
