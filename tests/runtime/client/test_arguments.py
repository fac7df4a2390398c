"""Arguments of clients that cannot work are refused at once; a client that was closed says so."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from waystation import runtime
from waystation.errors import InvalidInput, Unsupported, WrongType
from waystation.runtime.cluster.status import IslandRequest


@pytest.mark.parametrize(
    ("islands", "text"),
    [
        (5, r"a dict of device counts by name.*not 5; give devices=4"),
        ("left", "a dict of device counts by name"),
        ({"left": 1.5}, r"devices of island 'left' must be an integer, not 1\.5"),
        ({"left": "2"}, "must be an integer, not '2'"),
        ({"left": True}, "must be an integer, not True"),
        ({1: 1}, "the name of an island must be a string, not 1"),
    ],
)
def test_islands_of_something_else_are_refused(islands: Any, text: str) -> None:
    with pytest.raises(WrongType, match=text):
        runtime.local(islands)


def test_a_client_without_islands_is_refused() -> None:
    with pytest.raises(InvalidInput, match="there has to be an island"):
        runtime.local({})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"devices": 1.5}, r"the number of devices of a slice must be an integer, not 1\.5"),
        ({"devices": "2"}, "must be an integer, not '2'"),
        ({"devices": True}, "must be an integer, not True"),
        ({"shape": 5}, "the shape of a slice must be a tuple of integers, not 5"),
        ({"shape": "ab"}, "must be a tuple of integers, not 'ab'"),
        ({"shape": (1.5,)}, "an extent of a slice must be an integer"),
        ({"devices": 2, "axes": 5}, "axes must be a tuple of names, not 5"),
        ({"shape": (2, 2), "axes": "xy"}, "axes must be a tuple of names, not 'xy'"),
        ({"devices": 2, "axes": (1,)}, "names of axes must be strings"),
    ],
)
def test_slices_of_something_else_are_refused(
    client: runtime.Client, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(WrongType, match=text):
        client.make_virtual_device_set().add_slice(**arguments)
    assert client.make_virtual_device_set().add_slice(devices=4, island="left"), "nothing was taken"


def test_functions_arguments_and_arrays_of_something_else_are_refused(client: runtime.Client) -> None:
    on = client.make_virtual_device_set().add_slice(devices=2)
    with pytest.raises(WrongType, match="only a function can be placed on a slice, not 5"):
        client.jit(5, on)  # type: ignore[arg-type]
    with pytest.raises(WrongType, match=r"on a slice .*, not on 5"):
        client.jit(abs, 5)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="was given an array of <U1, which is no array of JAX"):
        client.jit(lambda x: x, on)(np.array(["a"]))
    with pytest.raises(WrongType, match="only arrays on slices can be shared, not ndarray"):
        client.share(np.ones(2), "base")  # type: ignore[arg-type]


def test_a_closed_client_says_so() -> None:
    client = runtime.local({"left": 2})
    devices = client.make_virtual_device_set()
    double = client.jit(lambda x: 2 * x, devices.add_slice(devices=1), name="double")
    x = double(np.ones(2))
    client.close()
    for use in (lambda: double(np.ones(2)), x.numpy, lambda: devices.add_slice(devices=1)):
        with pytest.raises(InvalidInput, match="closed"):
            use()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"address": 5}, "an address must be text"),
        ({"hosts": -1}, "hosts must be 0 or more, not -1"),
        ({"hosts": "two"}, "the number of hosts must be an integer"),
    ],
)
def test_connections_to_something_else_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        runtime.connect(**arguments)


def test_a_name_of_an_island_leaves_room_for_the_names_of_its_hosts() -> None:
    assert IslandRequest("i" * 240, 1, 1).host_name(1 << 40)
    with pytest.raises(InvalidInput, match="may have at most 240 bytes, not 242"):
        IslandRequest("é" * 121, 1, 1)
    for wrong in ("", "left/right", "left\n"):
        with pytest.raises(InvalidInput, match="no name of an island"):
            IslandRequest(wrong, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"devices_per_host": "two"}, "devices_per_host of island 'left' must be an integer, not 'two'"),
        ({"hosts": 1.5}, "hosts of island 'left' must be an integer"),
        ({"deadline_s": "60"}, "deadline_s of island 'left' must be a number"),
        ({"computation_limit_s": True}, "computation_limit_s of island 'left' must be a number"),
        ({"device_memory_bytes": "8GiB"}, "device_memory_bytes of island 'left' must be an integer"),
    ],
)
def test_islands_of_no_size_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(WrongType, match=text):
        IslandRequest(**{"name": "left", "hosts": 1, "devices_per_host": 1} | arguments)


@pytest.mark.parametrize(
    ("in_shardings", "text"),
    [
        (5, "a sharding of an argument has to be a PartitionSpec or a NamedSharding, not int"),
        ((P("x"), P("x")), "'double' was given 1 arguments and has in_shardings for 2"),
        ((), "'double' was given 1 arguments and has in_shardings for 0"),
        ([{"a": P("x")}], "in_shardings is not like the tree"),
    ],
)
def test_shardings_of_other_arguments_are_refused(
    client: runtime.Client, in_shardings: Any, text: str
) -> None:
    on = client.make_virtual_device_set().add_slice(devices=2)
    double = client.jit(lambda x: 2 * x, on, in_shardings=in_shardings, name="double")
    with pytest.raises(InvalidInput, match=text):
        double(np.ones(2))


def test_arrays_are_not_compared_by_identity_in_silence(client: runtime.Client) -> None:
    on = client.make_virtual_device_set().add_slice(devices=2)
    x, y = (client.put(np.arange(2.0), on) for _ in range(2))
    for compare in (
        lambda: x == y,
        lambda: x != y,
        lambda: x == 1.0,
        lambda: jnp.arange(2.0) == x,
        lambda: x in [y],
    ):
        with pytest.raises(WrongType, match=r"by client\.jit\(lambda x, y: x == y, slice\)"):
            compare()
    assert (x == np.array([0, 2])).tolist() == [True, False]  # which NumPy does
    assert {x: 1, y: 2}[y] == 2
    assert len({x, y, x}) == 2
