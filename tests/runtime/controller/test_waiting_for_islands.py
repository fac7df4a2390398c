"""What waits while an island is being rebuilt, and what does not."""

from __future__ import annotations

import pytest
from tests.runtime.controller.world import World

from waystation.errors import Unavailable
from waystation.runtime.errors import NotEnoughDevices
from waystation.runtime.resources import SliceRequest


def test_a_slice_is_waited_for_only_while_an_island_that_may_have_it_is_rebuilt() -> None:
    world = World()
    controller = world.controller
    on_a, anywhere = SliceRequest.of(4, island="a"), SliceRequest.of(4)
    too_many = SliceRequest.of(5, island="a")
    client = controller.add_client("x")
    assert not any(map(controller.is_to_wait, (on_a, anywhere, too_many)))
    world.lose("a")
    assert controller.is_to_wait(on_a)
    assert not controller.is_to_wait(anywhere)  # the other island has it
    assert not controller.is_to_wait(too_many)
    controller.grant(client, anywhere)
    assert controller.is_to_wait(anywhere)
    controller.rebuilt("a")
    assert not any(map(controller.is_to_wait, (on_a, anywhere, too_many)))
    world.lose("a")
    controller.failures["a"] = Unavailable("it could not be built again")
    assert not controller.is_to_wait(on_a)


def test_resuming_waits_for_an_island_that_may_have_all_slices() -> None:
    world = World()
    controller = world.controller
    client, other = controller.add_client("x"), controller.add_client("y")
    for devices in (1, 2):
        controller.grant(client, SliceRequest.of(devices, island="a"))
    controller.resources.suspend(client)

    def waits(without_hosts: tuple[str, ...] = ()) -> bool:
        return controller.is_to_wait_for_resuming(client, without_hosts)

    assert not waits()
    controller.grant(other, SliceRequest.of(2, island="a"))
    assert not waits()  # for devices that others have there is no waiting
    world.lose("a")
    assert waits()
    assert not waits(("a/0", "a/1"))
    controller.rebuilt("a")
    used = [controller.resources.users(device) for device in controller.resources.islands[0].devices]
    assert not waits()
    # Asking has changed nothing.
    assert used == [controller.resources.users(device) for device in controller.resources.islands[0].devices]
    with pytest.raises(NotEnoughDevices):
        controller.suspensions.resume(client)
