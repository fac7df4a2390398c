"""Traced programs: what they become, what they return, and what cannot be traced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from waystation import runtime
from waystation.errors import InvalidInput
from waystation.runtime.errors import TracedValueRead
from waystation.runtime.ir import Compute, Reshard, show


@pytest.fixture
def client() -> Iterator[runtime.Client]:
    with runtime.local({"left": 4, "right": 4}) as started:
        yield started


@pytest.fixture
def double(client: runtime.Client) -> Any:
    on = client.make_virtual_device_set().add_slice(devices=4, island="left")
    return client.jit(lambda x: x * 2, on, in_shardings=P("x"), name="double")


@pytest.fixture
def add(client: runtime.Client) -> Any:
    on = client.make_virtual_device_set().add_slice(shape=(2, 2), island="right")
    return client.jit(lambda x, y: x + y, on, in_shardings=(P(("x", "y")), P("y")), name="add")


X = np.arange(8, dtype="float32")


def nodes(program: Any, kind: type) -> list[Any]:
    return [node for node in program.nodes if isinstance(node, kind)]


def test_calls_become_one_graph(double: Any, add: Any) -> None:
    @runtime.program
    def twice(x):
        y = double(double(x))
        return add(y, double(y)), {"y": y}

    total, rest = twice(X)
    np.testing.assert_array_equal(total, X * 12)
    np.testing.assert_array_equal(rest["y"], X * 4)
    traced = twice.programs[0]
    computes = nodes(traced, Compute)
    assert [node.label for node in computes] == ["double", "double", "double", "add"]
    assert len({node.function for node in computes}) == 2, "equal functions are one"
    assert len(nodes(traced, Reshard)) == 2
    assert 'program "twice"' in show(traced)
    assert "traced 1 times" in repr(twice)


def test_it_is_traced_once_for_each_kind_of_arguments(double: Any) -> None:
    seen = []

    @runtime.program(static_argnames="count")
    def repeat(x, *, count):
        seen.append(count)
        for _ in range(count):  # control flow of Python, while it is traced
            x = double(x)
        return x

    for _ in range(3):
        assert repeat(X, count=3).tolist() == (X * 8).tolist()
    assert repeat(repeat(X, count=1), count=1).tolist() == (X * 4).tolist()
    assert seen == [3, 1, 1], "arrays of the runtime are of another kind than those of NumPy"


def test_programs_within_programs_are_one(double: Any, add: Any) -> None:
    @runtime.program
    def inner(x):
        return double(x), x

    @runtime.program
    def outer(x):
        y, same = inner(x)
        return add(y, same)

    assert outer(X).tolist() == (3 * X).tolist()
    assert len(outer.programs) == 1
    assert not inner.programs


def test_constants_are_kept(client: runtime.Client, add: Any) -> None:
    ones = client.put(np.ones(8, "float32"), add.slice)
    waiting = add(ones, ones)  # not sent yet

    @runtime.program
    def shift(x):
        return add(add(add(x, ones), waiting), np.full(8, 10, "float32"))

    assert shift(X).tolist() == (X + 13).tolist()
    assert shift(X + 1).tolist() == (X + 14).tolist()


def test_what_goes_through_stays_the_same(double: Any) -> None:
    @runtime.program
    def both(x, y):
        made = double(x)
        return x, made, made, y, "text", None

    x = double(X)
    same, first, second, y, text, nothing = both(x, X)
    assert same is x
    assert y is X
    assert (text, nothing) == ("text", None)
    assert first.tolist() == second.tolist() == (X * 4).tolist()


@pytest.mark.parametrize(
    "read",
    [np.asarray, bool, float, list, lambda x: x.tolist()],
    ids=["array", "bool", "float", "list", "tolist"],
)
def test_a_traced_value_has_no_elements(double: Any, read: Any) -> None:
    @runtime.program
    def reads(x):
        y = double(x)
        read(y)
        return y

    with pytest.raises((TracedValueRead, TypeError), match=r"traced|iterable"):
        reads(X)


def test_an_argument_has_no_elements(double: Any) -> None:
    @runtime.program
    def reads(x):
        return double(x) if x.sum else double(np.asarray(x))

    with pytest.raises((TracedValueRead, AttributeError)):
        reads(X)


def test_shapes_may_depend_on_data_where_nothing_is_traced(client: runtime.Client) -> None:
    """The sequential way: a read waits, calls between reads are one program, found again by its shapes."""
    on = client.make_virtual_device_set().add_slice(devices=4, island="left")
    count = client.jit(lambda x: (x > 0).sum(), on, name="count")
    size_of = {"static_argnames": "size"}
    keep = client.jit(lambda x, size: x[jax.numpy.nonzero(x > 0, size=size)], on, name="keep", **size_of)
    total = client.jit(lambda x: (x, x.sum()), on, name="total")
    ran: list[str] = []
    run = client.backend.run

    def watched(known: str, *rest: Any, **options: Any) -> None:
        ran.append(known)
        run(known, *rest, **options)

    client.backend.run = watched  # type: ignore[method-assign]

    def positives(x: Any) -> Any:
        return total(keep(x, size=int(count(x))))

    drawn = np.random.default_rng(0)
    sizes = []
    for _ in range(20):
        x = drawn.normal(size=6).astype(np.float32)
        kept, summed = positives(x)
        sizes.append(kept.shape[0])
        np.testing.assert_array_equal(kept, x[x > 0])
        np.testing.assert_allclose(float(summed), x[x > 0].sum(), rtol=1e-5)
    assert len(ran) == 2 * len(sizes)
    assert len(set(ran)) == 1 + len(set(sizes)) > 3
    with pytest.raises(TracedValueRead, match="leave the function untraced"):
        runtime.program(positives)(X)


def test_a_traced_value_ends_with_its_trace(double: Any) -> None:
    leaked = []

    @runtime.program
    def leaks(x):
        leaked.append(double(x))
        return leaked[0]

    leaks(X)
    with pytest.raises(TracedValueRead, match="program 'leaks'"):
        double(leaked[0])
    assert "traced" in repr(leaked[0])


def test_arguments_can_be_donated(client: runtime.Client) -> None:
    on = client.make_virtual_device_set().add_slice(devices=4)
    step = client.jit(lambda state, x: (state + x, x), on, donate_argnums=0, name="step")

    @runtime.program
    def two_steps(state, x):
        state, x = step(state, x)
        return step(state, x)[0]

    state = client.put(X, on)
    after = two_steps(state, X)
    assert after.tolist() == (3 * X).tolist()
    with pytest.raises(InvalidInput, match="donated to 'step'"):
        state.numpy()

    @runtime.program
    def donates_a_constant(x):
        return step(after, x)

    with pytest.raises(InvalidInput, match="constant"):
        donates_a_constant(X)
    assert after.tolist() == (3 * X).tolist()
