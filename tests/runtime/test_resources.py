"""Slices: who gets which devices, and what happens to them when hosts come and go."""

from __future__ import annotations

import pytest

from waystation.errors import Conflict, InvalidInput, NotFound
from waystation.runtime import DeviceId, Host, Island, ResourceManager, SliceRequest
from waystation.runtime.devices import labels
from waystation.runtime.errors import NoSuchSlice, NotEnoughDevices, SliceNotPlaced
from waystation.runtime.resources import SliceState


def island(name: str, hosts: int = 2, devices: int = 2, **described) -> Island:
    return Island(name, tuple(Host(f"{name}{number}", name, devices, **described) for number in range(hosts)))


def manager_of(*islands: Island) -> ResourceManager:
    manager = ResourceManager()
    for added in islands:
        manager.add_island(added)
    return manager


def devices_of(text: str) -> tuple[DeviceId, ...]:
    return tuple(map(DeviceId.parse, text.split()))


def test_devices_are_shown_and_read() -> None:
    assert str(DeviceId.parse("rack:7:3")) == "rack:7:3"
    assert DeviceId.parse("rack:7:3") == DeviceId("rack:7", 3)
    for text in ("host", "host:", ":3", "host:x", "host:-1"):
        with pytest.raises(InvalidInput, match="names no device"):
            DeviceId.parse(text)


def test_descriptions_are_checked() -> None:
    with pytest.raises(InvalidInput, match="at least one device"):
        Host("h", "i", 0)
    with pytest.raises(InvalidInput, match="of another island"):
        Island("a", (Host("h", "b", 1),))
    with pytest.raises(InvalidInput, match="two hosts of one name"):
        Island("a", (Host("h", "a", 1), Host("h", "a", 2)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "a number of devices or a shape"),
        ({"devices": 3, "shape": (2, 2)}, "has 4 devices, asked for are 3"),
        ({"devices": 0}, "has 0 devices"),
        ({"shape": (2, -1)}, "has -2 devices"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SliceRequest.of(**arguments)


def test_load_is_spread_over_islands_and_hosts() -> None:
    manager = manager_of(island("a"), island("b"))
    request = SliceRequest.of(2, shared=True)
    hosts = [manager.grant("c", request).placement.hosts for _ in range(8)]
    assert hosts == [("a0",), ("b0",), ("a1",), ("b1",)] * 2


def test_constraints_choose_the_hosts() -> None:
    manager = manager_of(
        island("a"),
        island("b", kind="gpu", device_memory_bytes=1 << 30),
        island("c", kind="gpu", labels=labels({"place": "cellar"}), device_memory_bytes=1 << 34),
    )

    def where(**arguments) -> str:
        return manager.grant("x", SliceRequest.of(1, shared=True, **arguments)).placement.island

    assert where(kind="cpu", device_memory_bytes=1 << 40) == "a"
    assert where(kind="gpu", device_memory_bytes=1 << 33) == "c"
    assert where(host_labels={"place": "cellar"}) == "c"
    assert where(island="b") == "b"
    with pytest.raises(NotEnoughDevices) as caught:
        manager.grant("x", SliceRequest.of(4, kind="gpu", host_labels={"place": "attic"}))
    assert str(caught.value) == (
        "no island has 4 gpu devices with place=attic free: island 'a' has 0 free of 0 that fit, island 'b' "
        "has 0 free of 0 that fit, island 'c' has 0 free of 0 that fit; ask for fewer, share them "
        "(shared=True), release or suspend slices, or add hosts"
    )


def test_an_island_that_is_not_there_is_named_with_those_that_are() -> None:
    manager = manager_of(island("left"), island("right"))
    with pytest.raises(NotEnoughDevices) as caught:
        manager.grant("x", SliceRequest.of(1, island="lft"))
    assert str(caught.value) == "there is no island 'lft'; the islands are 'left', 'right'"


def test_slices_of_their_own_and_shared_ones_exclude_each_other() -> None:
    manager = manager_of(island("a"))
    own = manager.grant("x", SliceRequest.of(3))
    shared = manager.grant("y", SliceRequest.of(1, shared=True))
    again = manager.grant("y", SliceRequest.of(1, shared=True))
    assert shared.placement.devices == again.placement.devices == devices_of("a1:1")
    for request in (SliceRequest.of(1), SliceRequest.of(2, shared=True)):
        with pytest.raises(NotEnoughDevices, match="of 4 that fit"):
            manager.grant("z", request)
    manager.release(own.number)
    assert manager.grant("z", SliceRequest.of(3)).placement.devices == own.placement.devices


def test_a_slice_moves_and_its_epoch_tells() -> None:
    manager = manager_of(island("a"), island("b"))
    granted = manager.grant("x", SliceRequest.of(2))
    (change,) = manager.remap(granted.number)
    assert change.slice.placement.devices == devices_of("a1:0 a1:1")
    assert (granted.placement.epoch, change.slice.placement.epoch) == (1, 2)
    (change,) = manager.remap(granted.number, island="b", without_hosts=["b0"])
    assert change.slice.placement == manager.placement(granted.number)
    assert change.slice.placement.devices == devices_of("b1:0 b1:1")
    assert manager.users(DeviceId("a1", 0)) == frozenset()


def test_a_slice_that_cannot_move_stays() -> None:
    manager = manager_of(island("a"))
    granted = manager.grant("x", SliceRequest.of(4, island="a"))
    assert manager.remap(granted.number) == []
    with pytest.raises(NotEnoughDevices, match=r"without hosts \['a1'\]"):
        manager.remap(granted.number, without_hosts=["a1"])
    with pytest.raises(InvalidInput, match="in island 'a', and does not leave it for 'b'; ask for"):
        manager.remap(granted.number, island="b")
    assert manager.placement(granted.number) == granted.placement
    assert manager.users(DeviceId("a1", 1)) == {granted.number}


def test_the_slices_of_a_lost_host_go_elsewhere_or_wait() -> None:
    manager = manager_of(island("a", 3))
    first, second, third = (manager.grant("x", SliceRequest.of(2)) for _ in range(3))
    (change,) = manager.remove_host("a1")
    assert change.slice.state is SliceState.WAITING
    with pytest.raises(SliceNotPlaced, match=f"slice {second.number} has lost devices and waits"):
        manager.placement(second.number)
    assert manager.placement(first.number) == first.placement
    released, placed = manager.release(third.number)
    assert released.released
    assert released.slice.number == third.number
    assert placed.slice.placement.devices == third.placement.devices
    assert placed.slice.placement.epoch == 2
    with pytest.raises(NoSuchSlice):
        manager.placement(third.number)


def test_a_new_host_takes_what_waits() -> None:
    manager = manager_of(island("a", 1))
    granted = manager.grant("x", SliceRequest.of(2))
    manager.remove_island("a")
    assert manager.islands == ()
    (change,) = manager.add_island(island("b"))
    assert (change.slice.number, change.slice.state) == (granted.number, SliceState.PLACED)
    assert change.slice.placement.island == "b"


def test_a_suspended_client_gives_its_devices_to_others() -> None:
    manager = manager_of(island("a"))
    own = [manager.grant("x", SliceRequest.of(2)) for _ in range(2)]
    assert [change.slice.state for change in manager.suspend("x")] == [SliceState.SUSPENDED] * 2
    assert manager.suspend("x") == []
    with pytest.raises(SliceNotPlaced, match="resume client 'x'"):
        manager.placement(own[0].number)
    other = manager.grant("y", SliceRequest.of(1))
    with pytest.raises(NotEnoughDevices):
        manager.resume("x")
    assert {found.state for found in manager.slices if found.client == "x"} == {SliceState.SUSPENDED}
    manager.release_client("y")
    assert other not in manager.slices
    assert [change.slice.placement.epoch for change in manager.resume("x")] == [2, 2]


def test_what_is_not_there_cannot_be_removed_nor_added_twice() -> None:
    manager = manager_of(island("a"))
    with pytest.raises(NotFound, match=r"no host 'b0'; there are \['a0', 'a1'\]"):
        manager.remove_host("b0")
    with pytest.raises(NotFound, match="no island 'b'"):
        manager.remove_island("b")
    with pytest.raises(Conflict, match="host 'a1' is there already"):
        manager.add_island(Island("b", (Host("Z", "b", 1), Host("a1", "b", 1))))
    assert [found.name for found in manager.islands] == ["a"]
