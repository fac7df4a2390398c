"""Clients that are suspended and resumed, in worlds of modelled hosts: where their arrays are then."""

from __future__ import annotations

from typing import Any

import pytest
from tests.runtime.controller.world import World, error_of, step

from waystation.errors import Conflict, InvalidInput, Unavailable, WaystationError
from waystation.runtime.controller import MemoryLimits
from waystation.runtime.controller.suspensions import SuspendedStatePlaces
from waystation.runtime.devices import Host, Island
from waystation.runtime.errors import NotEnoughDevices, SliceNotPlaced
from waystation.runtime.host_options import PARTIAL_LOAD, SaveManner
from waystation.runtime.messages import Load, Save
from waystation.runtime.resources import SliceRequest
from waystation.runtime.state_trees import StateTree

ARRAY_BYTES = 16


class Scene:
    """A client with some arrays on a slice of its own that may lie anywhere."""

    def __init__(self, memory_bytes: int = 1 << 20) -> None:
        self.world = World()
        self.controller = self.world.controller
        self.controller.suspensions.places = lambda: SuspendedStatePlaces("memory", memory_bytes, "disk")
        self.client = self.controller.add_client("x")
        self.slice = self.controller.grant(self.client, SliceRequest.of(4))
        self.arrays = [self.world.put(self.client, self.slice) for _ in range(2)]
        self.world.run()
        self.ended: list[WaystationError | None] = []

    @property
    def island(self) -> str:
        return self.controller.resources.slice(self.slice).placement.island

    def suspend(self) -> None:
        self.controller.suspensions.suspend(self.client, self.ended.append)

    def resume(self) -> None:
        self.controller.suspensions.resume(self.client)

    def told(self, kind: type[Any]) -> list[tuple[str, Any]]:
        """What hosts have done of a kind."""
        return [
            (host, each)
            for host, message in self.world.told
            for each in message.instructions
            if isinstance(each, kind)
        ]

    def run_while_full(self, full: str) -> None:
        """Has saves to a directory fail."""
        while True:
            self.world.carry_out()
            lines = [(host, line[0][2]) for host, line in self.world.lines.items() if line]
            if not lines:
                return
            host, message = self.world.chance.choice(lines)
            saves = [each for each in message.instructions if isinstance(each, Save)]
            self.world.end(host, float(any(save.path.startswith(full) for save in saves)))

    def errors(self) -> list[WaystationError | None]:
        return [error_of(self.world, self.client, handle) for handle in self.arrays]

    def device_bytes(self) -> int:
        return self.controller.arrays.table.client_bytes(self.client)


def test_arrays_leave_their_devices_and_come_back_under_their_handles() -> None:
    scene = Scene()
    before = scene.island
    scene.suspend()
    scene.world.run()
    assert scene.ended == [None]
    saved = scene.told(Save)
    assert sorted(host for host, _ in saved) == [f"{before}/0", f"{before}/1"]
    assert {save.path for _, save in saved} == {"memory/1"}
    assert scene.device_bytes() == 0
    assert len([host for host, _ in scene.world.released if host.startswith(before)]) == 4
    assert scene.controller.suspensions.memory_bytes == 2 * ARRAY_BYTES
    scene.resume()
    scene.world.run()
    assert scene.errors() == [None, None]
    assert {load.path for _, load in scene.told(Load)} == {"memory/1"}
    assert scene.device_bytes() == 2 * ARRAY_BYTES
    assert scene.controller.suspensions.take_removed() == ["memory/1"]
    assert scene.controller.suspensions.memory_bytes == 0
    made = scene.world.call(scene.client, step(), [scene.slice], scene.arrays[0])
    scene.world.run()
    assert error_of(scene.world, scene.client, made) is None


def test_they_outlive_their_island() -> None:
    scene = Scene()
    before = scene.island
    scene.suspend()
    scene.world.run()
    scene.world.remove(before)
    assert scene.errors() == [None, None]
    scene.resume()
    scene.world.run()
    assert scene.errors() == [None, None]
    assert {host[0] for host, _ in scene.told(Load)} == set("ab") - {before}


def test_what_was_asked_for_before_is_waited_for() -> None:
    scene = Scene()
    made = scene.world.call(scene.client, step(), [scene.slice], scene.arrays[0])
    scene.arrays.append(made)
    scene.suspend()
    scene.world.run()
    (_, save), _ = scene.told(Save)
    assert save.tree.build({}, 0).node.keys == tuple(map(str, scene.arrays))
    assert [leaf for leaf, _ in save.arrays] == [0, 1, 2]
    with pytest.raises(SliceNotPlaced, match="resume client 'x'"):
        scene.controller.works.get(scene.client, made, lambda work: None)
    with pytest.raises(SliceNotPlaced):
        scene.controller.checkpoints.save(
            scene.client, "p", StateTree.of_names("x"), [(0, made)], SaveManner(), scene.ended.append
        )
    later = scene.world.call(scene.client, step(), [scene.slice], made)
    assert isinstance(error_of(scene.world, scene.client, later), SliceNotPlaced)


def test_an_array_that_was_never_made_stays_what_it_is() -> None:
    scene = Scene()
    failed = scene.world.put(scene.client, scene.slice)
    while scene.world.step(fails=1.0):
        pass
    scene.suspend()
    scene.world.run()
    assert scene.ended == [None]
    assert isinstance(error_of(scene.world, scene.client, failed), InvalidInput)


def test_what_has_no_room_in_memory_goes_to_the_directory() -> None:
    scene = Scene(memory_bytes=2 * ARRAY_BYTES - 1)
    scene.suspend()
    scene.world.run()
    assert {save.path for _, save in scene.told(Save)} == {"disk/1"}
    assert scene.controller.suspensions.memory_bytes == 0


def test_memory_that_is_full_after_all_is_no_failure() -> None:
    scene = Scene()
    scene.suspend()
    scene.run_while_full("memory")
    assert scene.ended == [None]
    assert scene.device_bytes() == 0
    assert scene.controller.suspensions.take_removed() == ["memory/1"]


def test_what_cannot_be_saved_stays_on_its_devices_and_comes_back() -> None:
    scene = Scene(memory_bytes=0)
    scene.suspend()
    scene.run_while_full("disk")
    assert [type(error) for error in scene.ended] == [InvalidInput]
    assert scene.device_bytes() == 2 * ARRAY_BYTES
    scene.resume()
    made = scene.world.call(scene.client, step(), [scene.slice], scene.arrays[0])
    scene.world.run()
    assert error_of(scene.world, scene.client, made) is None


def test_a_directory_that_cannot_be_made_is_told() -> None:
    scene = Scene()

    def places() -> SuspendedStatePlaces:
        raise Unavailable("there is no such place")

    scene.controller.suspensions.places = places
    scene.suspend()
    scene.world.run()
    assert [type(error) for error in scene.ended] == [Unavailable]


def test_an_island_that_is_lost_while_it_saves_takes_its_arrays_along() -> None:
    scene = Scene()
    scene.suspend()
    scene.world.carry_out()
    before = scene.island
    scene.world.lose(before)
    scene.controller.rebuilt(before)
    scene.world.run()
    assert [type(error) for error in scene.ended] == [Unavailable]
    assert all(isinstance(error, Unavailable) for error in scene.errors())
    assert scene.controller.suspensions.take_removed() == ["memory/1"]


@pytest.mark.parametrize("when", ["saving", "suspended", "loading"])
def test_a_client_that_leaves_leaves_nothing(when: str) -> None:
    scene = Scene()
    scene.suspend()
    scene.world.carry_out()
    if when != "saving":
        scene.world.run()
    if when == "loading":
        scene.resume()
        scene.world.carry_out()
    scene.controller.drop_client(scene.client)
    scene.world.run()
    assert scene.controller.suspensions.take_removed() == ["memory/1"]
    assert scene.controller.suspensions.memory_bytes == 0
    assert len(scene.controller.arrays.table) == 0


def test_arrays_that_are_freed_meanwhile_are_gone() -> None:
    scene = Scene()
    scene.suspend()
    scene.world.run()
    scene.controller.free(scene.client, scene.arrays[:1])
    assert scene.controller.suspensions.take_removed() == []
    scene.resume()
    scene.world.run()
    (_, load), _ = scene.told(Load)
    assert load.tree.build({}, 0).node.keys == (str(scene.arrays[1]),)
    assert [leaf for leaf, *_ in load.arrays] == [0]
    assert load.options.has(PARTIAL_LOAD)
    scene.suspend()
    scene.world.run()
    scene.controller.free(scene.client, scene.arrays)
    assert scene.controller.suspensions.take_removed() == ["memory/1", "memory/2"]


def test_who_is_being_suspended_is_not_resumed_meanwhile() -> None:
    scene = Scene()
    scene.suspend()
    for call in (scene.suspend, scene.resume):
        with pytest.raises(Conflict, match="being suspended"):
            call()


def test_it_is_resumed_without_some_hosts_or_not_at_all() -> None:
    scene = Scene()
    before = scene.island
    scene.suspend()
    scene.world.run()
    every = [f"{name}/{index}" for name in "ab" for index in range(2)]
    with pytest.raises(NotEnoughDevices, match="without hosts"):
        scene.controller.suspensions.resume(scene.client, every)
    scene.controller.suspensions.resume(scene.client, [host for host in every if host[0] == before])
    scene.world.run()
    assert scene.island != before
    assert scene.errors() == [None, None]


def test_shared_arrays_stay_where_others_use_them() -> None:
    scene = Scene()
    scene.controller.share(scene.controller.hold(scene.client, scene.arrays[0]), "base")
    scene.suspend()
    scene.world.run()
    (_, save), _ = scene.told(Save)
    assert save.tree.build({}, 0).node.keys == (str(scene.arrays[1]),)
    assert scene.controller.arrays.table.named_bytes() == {"base": ARRAY_BYTES}


def test_devices_go_to_others_at_once() -> None:
    scene = Scene()
    scene.controller.add_island(Island("c", (Host("c/0", "c", 4),)), MemoryLimits())
    other = scene.controller.add_client("y")
    taken = [scene.controller.grant(other, SliceRequest.of(4)) for _ in range(2)]
    with pytest.raises(NotEnoughDevices):
        scene.controller.grant(other, SliceRequest.of(4))
    scene.suspend()
    assert scene.controller.grant(other, SliceRequest.of(4)) not in taken
    scene.world.run()
    with pytest.raises(NotEnoughDevices):
        scene.resume()
    scene.controller.release(other, taken[0])
    scene.resume()
    scene.world.run()
    assert scene.errors() == [None, None]
