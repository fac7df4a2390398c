"""Whose arrays a state has: found however deep they are, in states that no stack could walk."""

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest

import waystation
from waystation.checkpoint import remote_state


class Stand:
    """Stands for an array of the backend."""


class RemoteStateBackend:
    def has(self, leaf: Any) -> bool:
        return isinstance(leaf, Stand)

    def save(self, path: str, state: Any, *, overwrite: bool) -> None:
        raise AssertionError("nobody saves here")

    def save_async(self, path: str, state: Any, *, overwrite: bool) -> waystation.AsyncResponse[None]:
        raise AssertionError("nobody saves here")

    def load(self, path: str, abstract_state: Any) -> Any:
        raise AssertionError("nobody loads here")

    def load_async(self, path: str, abstract_state: Any) -> waystation.AsyncResponse[Any]:
        raise AssertionError("nobody loads here")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> RemoteStateBackend:
    backend = RemoteStateBackend()
    monkeypatch.setattr(remote_state, "_backends", [backend])
    return backend


@pytest.mark.parametrize(
    "wrap", [lambda inner: [inner], lambda inner: {"x": inner}, lambda inner: (1, inner)]
)
def test_deeper_than_any_stack(backend: RemoteStateBackend, wrap: Any) -> None:
    without: Any = 1
    having: Any = Stand()
    for _ in range(20_000):
        without, having = wrap(without), wrap(having)
    assert remote_state.backend_of(without) is None
    assert remote_state.backend_of(having) is backend


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Training:
    step: int
    optimizer: Any


def test_in_any_container(backend: RemoteStateBackend) -> None:
    def state(leaf: Any) -> Any:
        return {"state": Training(3, Pair(None, OrderedDict(mu=[(1, leaf)])))}

    assert remote_state.backend_of(state(Stand())) is backend
    assert remote_state.backend_of(state(2)) is None


class Broken:
    """Cannot be taken apart."""


def test_what_cannot_be_taken_apart_has_none(backend: RemoteStateBackend) -> None:
    def fail(value: Broken) -> Any:
        raise RuntimeError("it is broken")

    waystation.tree.register_node(Broken, flatten=fail, unflatten=fail)  # type: ignore[arg-type]
    assert remote_state.backend_of([Broken(), {1.5: 2}]) is None
    assert remote_state.backend_of([Broken(), Stand()]) is backend


def test_what_holds_itself(backend: RemoteStateBackend) -> None:
    state: dict[str, Any] = {"n": 1, "shared": [1]}
    state["again"] = [state, state["shared"]]
    assert remote_state.backend_of(state) is None
    state["w"] = Stand()
    assert remote_state.backend_of(state) is backend


def test_without_backends_nothing_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_state, "_backends", [])
    assert remote_state.backend_of({"w": Stand()}) is None
