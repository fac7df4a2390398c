"""Functions on slices: shardings, donation, static arguments, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from waystation import runtime
from waystation.errors import InvalidInput, Unsupported, WaystationError
from waystation.runtime.errors import NotEnoughDevices, SliceNotPlaced


@pytest.fixture
def grid(client: runtime.Client) -> runtime.Slice:
    return client.make_virtual_device_set().add_slice(shape=(2, 2))


def test_results_lie_as_they_were_asked_for(client: runtime.Client, grid: runtime.Slice) -> None:
    x = np.arange(32, dtype="float32").reshape(8, 4)
    function = client.jit(
        jax.jit(lambda x, y: (x @ y, {"sum": x.sum()})),
        grid,
        in_shardings=(P("x", "y"), P("y")),
        out_shardings=(P(("x", "y")), None),
    )
    product, rest = function(x, x.T)
    assert (product.shape, product.dtype) == ((8, 8), np.float32)
    assert product.sharding.spec == P(("x", "y"))
    assert rest["sum"].sharding.spec == P()
    np.testing.assert_allclose(product, x @ x.T)
    assert float(rest["sum"]) == x.sum()


def test_what_was_not_said_follows_the_operands(client: runtime.Client, grid: runtime.Slice) -> None:
    rows = client.put(np.arange(8), grid, P("x"))
    added = client.jit(lambda x, y: x + y, grid)(rows, 1)
    assert added.sharding.spec == P("x")
    assert added.tolist() == list(range(1, 9))


def test_arrays_go_from_slice_to_slice(client: runtime.Client, grid: runtime.Slice) -> None:
    other = client.make_virtual_device_set().add_slice(devices=4, axes=("row",), island="right")
    doubled = client.jit(lambda x: x * 2, grid, in_shardings=P("y", "x"))
    centered = client.jit(lambda x: x - x.mean(), other, in_shardings=P(None, "row"))
    x = np.arange(64, dtype="float32").reshape(8, 8)
    found = centered(doubled(centered(x)))
    assert found.slice is other
    np.testing.assert_allclose(found, 2 * (x - x.mean()), atol=1e-5)


def test_a_donated_array_is_gone(client: runtime.Client, grid: runtime.Slice) -> None:
    step = client.jit(lambda state, x: state + x, grid, donate_argnums=0, name="step")
    state = client.put(np.zeros(4, "float32"), grid)
    state.block_until_ready()
    for _ in range(3):
        before, state = state, step(state, 1.0)
        with pytest.raises(InvalidInput, match="donated to 'step'"):
            before.numpy()
    assert state.tolist() == [3.0] * 4
    with pytest.raises(InvalidInput, match="donated to 'step'"):
        step(before, 1.0)
    with pytest.raises(InvalidInput, match="given a second time"):
        step(state, state)


def test_static_arguments(client: runtime.Client, grid: runtime.Slice) -> None:
    power = client.jit(
        lambda x, n, *, negate: -(x**n) if negate else x**n, grid, static_argnums=1, static_argnames="negate"
    )
    assert power(np.arange(3), 2, negate=True).tolist() == [0, -1, -4]
    assert power(np.arange(3), 3, negate=False).tolist() == [0, 1, 8]


def test_equal_functions_are_sent_once(client: runtime.Client, grid: runtime.Slice) -> None:
    doubled = client.jit(lambda x: x * 2, grid)
    x = np.arange(3)
    keys = {doubled.exported(x), doubled.exported(client.put(x, grid)), doubled.exported(doubled(x))}
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [(P("x"), "cannot be divided evenly"), (P("z"), "must name axes"), (P("x", "y"), "has 2 parts")],
)
def test_shardings_that_do_not_fit_are_refused(
    client: runtime.Client, grid: runtime.Slice, spec: P, message: str
) -> None:
    function = client.jit(lambda x: x, grid, in_shardings=spec)
    with pytest.raises(InvalidInput, match=message):
        function(np.arange(3))


def test_what_is_no_array_is_refused(client: runtime.Client, grid: runtime.Slice) -> None:
    with pytest.raises(Unsupported, match="static"):
        client.jit(lambda x: x, grid)("text")


def test_slices_are_granted_and_released(client: runtime.Client) -> None:
    devices = client.make_virtual_device_set()
    first, second = devices.add_slice(devices=2), devices.add_slice(shape=(2, 2))
    assert [repr(device) for device in second.devices[:2]] == ["Device(@1[0])", "Device(@1[1])"]
    assert (first.shape, second.shape, second.axes) == ((2,), (2, 2), ("x", "y"))
    first.release()
    with pytest.raises(NotEnoughDevices):
        devices.add_slice(devices=5)  # no island has so many
    second.release()
    assert devices.add_slice(devices=4, island="left").placement.island == "left"
    with pytest.raises(InvalidInput, match="same"):
        devices.add_slice(devices=1, tpu_devices=1)


def test_a_slice_moves_between_calls(client: runtime.Client) -> None:
    on = client.make_virtual_device_set().add_slice(devices=2, island=None)
    step = client.jit(lambda x: x + 1, on, in_shardings=P("x"))
    x = step(np.arange(4))
    there = {"left": "right", "right": "left"}[on.placement.island]
    on.remap(island=there)
    assert on.placement.island == there
    assert step(x).tolist() == [2, 3, 4, 5]
    client.suspend()
    assert x.block_until_ready().is_ready()  # it has been made
    called = step(x)
    for array, advice in ((called, ", and make the call again"), (x, " to read or use it")):
        with pytest.raises(SliceNotPlaced, match=f"resume client 'local.*'{advice}"):
            array.numpy()
    client.resume()
    assert x.tolist() == [1, 2, 3, 4]
    with pytest.raises(SliceNotPlaced, match="make the call again"):
        called.numpy()
    assert step(x).tolist() == [2, 3, 4, 5]
    before = on.placement
    client.migrate(without_hosts=before.hosts)
    assert on.placement.island != before.island
    assert step(x).tolist() == [2, 3, 4, 5]
    with pytest.raises(NotEnoughDevices):
        client.migrate(without_hosts=["left/0", "right/0"])
    assert step(x).tolist() == [2, 3, 4, 5]


def test_an_error_names_where_it_happened(client: runtime.Client, grid: runtime.Slice) -> None:
    huge = client.jit(lambda x: jnp.broadcast_to(x, (1 << 46,)), grid, name="huge")
    total = client.jit(lambda x: x.sum(), grid, name="total")
    fine = client.jit(lambda x: x + 1, grid)
    other = fine(1).block_until_ready()  # all results of a run have its error
    failed = total(huge(np.float32(1)))
    with pytest.raises(WaystationError) as raised:
        failed.numpy()
    context = raised.value.context
    assert (context["program"], context["host"]) == ("untraced", grid.placement.devices[0].host)
    assert context["computation"] in ("huge", "total")
    assert str(grid.placement.devices[0]) in context["device"]
    assert int(other) == 2, "what does not depend on it is there"
    assert "cannot be read" in repr(failed)
