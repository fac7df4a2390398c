"""Saves and loads of arrays on several islands, in worlds of modelled hosts: what hosts are told."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from tests.runtime.controller.world import ROWS, World, error_of, step

from waystation.errors import InvalidInput, Unavailable, Unsupported, WaystationError
from waystation.runtime.errors import NoSuchSlice
from waystation.runtime.host_options import LAYOUT, HostOptions, SaveManner
from waystation.runtime.ir import Sharding, Value
from waystation.runtime.messages import BeginJoining, EndJoining, Identify, Load, Run, Save
from waystation.runtime.resources import SliceRequest
from waystation.runtime.state_trees import StateTree

T = TypeVar("T")
BIG = 1 << 20
MANNER = SaveManner(True, {"step": 1}, HostOptions((("engine.threads", 2),)))


class Scene:
    """A client with a big array on each of two islands, by the name of the island."""

    def __init__(self, seed: int = 0) -> None:
        self.world = World(seed)
        self.controller = self.world.controller
        self.client, self.slices = self.world.client("x", "a", "b")
        self.arrays: dict[str, int] = {}
        self.ended: list[WaystationError | None] = []
        self.heard: list[WaystationError | tuple[Any, ...]] = []
        for name, number in zip("ab", self.slices, strict=True):
            self.arrays[name] = handle = 100 + number
            self.load("before", {name: handle})
        self.world.run()
        self.world.told.clear()
        self.heard.clear()

    def load(self, path: str, handles: dict[str, int], values: Any = None) -> None:
        wanted = [
            (2 * leaf, handle, Value(handle, (BIG,), "float32", self.slices["ab".index(name)], ROWS))
            for leaf, (name, handle) in enumerate(handles.items())
        ]
        self.controller.checkpoints.load(self.client, path, self.tree(values), wanted, on_end=self.hear)

    def save(self) -> None:
        arrays = list(zip((0, 2), self.arrays.values(), strict=True))
        self.controller.checkpoints.save(
            self.client, "here", self.tree("saved"), arrays, MANNER, self.ended.append
        )

    def hear(self, error: WaystationError | None, values: tuple[Any, ...]) -> None:
        self.heard.append(error or values)

    def tree(self, value: Any) -> StateTree:
        """An array, a value, and another array."""
        return replace(StateTree.of_names("avb"), values=() if value is None else ((1, value),))

    def told(self, kind: type[T]) -> list[tuple[str, T]]:
        """What hosts have been told of a kind, in the order in which they did it."""
        return [
            (host, each)
            for host, message in self.world.told
            for each in message.instructions
            if isinstance(each, kind)
        ]

    def run_until(self, kind: type[Any]) -> None:
        """Goes on until a host is told something."""
        self.world.carry_out()
        while not any(
            isinstance(each, kind)
            for line in self.world.lines.values()
            for _, _, message in line
            for each in message.instructions
        ):
            assert self.world.step()


def test_parts_are_of_the_native_layout() -> None:
    scene = Scene()
    arrays = list(zip((0, 2), scene.arrays.values(), strict=True))
    manner = SaveManner(options=HostOptions(((LAYOUT, True),)))
    save = scene.controller.checkpoints.save
    with pytest.raises(Unsupported, match="in the native layout; leave the option"):
        save(scene.client, "here", scene.tree(0), arrays, manner, scene.ended.append)
    save(scene.client, "here", scene.tree(0), arrays[:1], manner, scene.ended.append)
    scene.world.run()
    assert scene.ended == [None]


@pytest.mark.parametrize("seed", range(5))
def test_each_island_saves_a_part_and_one_host_makes_them_a_checkpoint(seed: int) -> None:
    scene = Scene(seed)
    scene.save()
    scene.world.run()
    assert scene.ended == [None]
    assert scene.told(BeginJoining) == [("a/0", BeginJoining("here", MANNER))]
    parts = scene.told(Save)
    assert sorted(host for host, _ in parts) == ["a/0", "a/1", "b/0", "b/1"]
    for host, save in parts:
        number = "ab".index(host[0])
        assert save.path == f"here.parts/00000{number}"
        assert [leaf for leaf, _ in save.arrays] == [2 * number]
        assert save.tree == (scene.tree("saved") if number == 0 else scene.tree(None))
        assert save.processes == (0, 1)
        assert save.manner == SaveManner(False, {"step": 1} if number == 0 else None, MANNER.options)
    assert scene.told(EndJoining) == [("a/0", EndJoining("here.parts", 2, (0, 0, 1)))]
    kinds = [type(message.instructions[0]) for _, message in scene.world.told]
    assert kinds == [BeginJoining, *[Save] * 4, EndJoining]
    # No element of the arrays, which are of 4 MiB, is in what hosts are told.
    assert sum(len(pickle.dumps(message)) for _, message in scene.world.told) < 8192


def test_what_is_called_later_comes_later_on_each_island() -> None:
    scene = Scene()
    small = scene.world.put(scene.client, scene.slices[0])
    scene.arrays["a"] = small
    scene.save()
    scene.world.call(scene.client, step(donates=True), scene.slices[:1], small)
    scene.world.run()
    assert scene.ended == [None]
    on_a = [type(message.instructions[0]) for host, message in scene.world.told if host == "a/1"]
    assert on_a[-2:] == [Save, Run]


def test_where_a_part_fails_nothing_is_left() -> None:
    scene = Scene()
    scene.save()
    scene.run_until(Save)
    while scene.world.lines["b/1"] or scene.world.lines["b/0"]:
        scene.world.end("b/1" if scene.world.lines["b/1"] else "b/0", 1.0)
    scene.world.run()
    assert scene.told(EndJoining) == [("a/0", EndJoining("here.parts", None))]
    [error] = scene.ended
    assert isinstance(error, InvalidInput)
    assert error.context["host"] in {"b/0", "b/1"}


def test_where_it_cannot_be_begun_no_part_is_saved() -> None:
    scene = Scene()
    scene.save()
    scene.run_until(BeginJoining)
    scene.world.end("a/0", 1.0)
    scene.world.run()
    assert not scene.told(Save)
    assert not scene.told(EndJoining)
    assert [type(error) for error in scene.ended] == [InvalidInput]
    assert not any(scene.controller.orders.pending(island) for island in "ab")


@pytest.mark.parametrize("island", ["a", "b"])
@pytest.mark.parametrize("kind", [BeginJoining, Save])
def test_an_island_is_lost_meanwhile(island: str, kind: type[Any]) -> None:
    scene = Scene()
    scene.save()
    scene.run_until(kind)
    scene.world.lose(island)
    scene.controller.rebuilt(island)
    scene.world.run()
    assert [type(error) for error in scene.ended] == [Unavailable]
    ends = [end.parts for _, end in scene.told(EndJoining)]
    assert ends in ([], [None])
    assert not any(scene.controller.orders.pending(island) for island in "ab")


def test_who_was_to_commit_is_lost_after_all_parts_are_saved() -> None:
    scene = Scene()
    scene.save()
    scene.run_until(Save)
    for host in ("a/0", "a/1", "b/0"):
        scene.world.end(host, 0.0)
    scene.world.lose("a")
    scene.world.end("b/1", 0.0)
    scene.world.run()
    [error] = scene.ended
    assert isinstance(error, Unavailable)
    assert "nothing was saved" in error.message
    assert not scene.told(EndJoining)


def test_an_island_is_removed_meanwhile() -> None:
    scene = Scene()
    scene.save()
    scene.run_until(BeginJoining)
    scene.world.remove("b")
    scene.world.run()
    assert [type(error) for error in scene.ended] == [Unavailable]
    assert scene.told(EndJoining) == [("a/0", EndJoining("here.parts", None))]


@pytest.mark.parametrize("kind", [BeginJoining, Save])
def test_a_client_that_leaves_meanwhile_leaves_no_parts(kind: type[Any]) -> None:
    scene = Scene()
    scene.save()
    scene.run_until(kind)
    scene.controller.drop_client(scene.client)
    scene.world.run()
    assert len(scene.told(EndJoining)) == 1
    assert len(scene.controller.arrays.table) == 0


def test_all_islands_load_the_same_checkpoint() -> None:
    scene = Scene()
    scene.load("there", {"a": 1, "b": 2}, int)
    scene.world.run()
    arrays = ((0, (BIG,), "float32"), (2, (BIG,), "float32"))
    assert scene.told(Identify) == [("a/0", Identify("there", scene.tree(int), arrays))]
    assert {(host[0], load.identity, load.tree) for host, load in scene.told(Load)} == {
        ("a", "the first", scene.tree(int)),
        ("b", "the first", scene.tree(None)),
    }
    assert scene.heard == [("loaded as <class 'int'>",)]
    assert [error_of(scene.world, scene.client, handle) for handle in (1, 2)] == [None, None]


def test_where_there_is_no_checkpoint_no_island_has_arrays() -> None:
    scene = Scene()
    scene.load("there", {"a": 1, "b": 2})
    scene.run_until(Identify)
    scene.world.end("a/0", 1.0)
    scene.world.run()
    assert not scene.told(Load)
    for handle in (1, 2):
        assert isinstance(error_of(scene.world, scene.client, handle), InvalidInput)
    assert [type(heard) for heard in scene.heard] == [InvalidInput]


def test_an_island_that_is_lost_has_no_arrays_and_the_other_one_has() -> None:
    scene = Scene()
    scene.load("there", {"a": 1, "b": 2})
    scene.run_until(Load)
    scene.world.lose("b")
    scene.controller.rebuilt("b")
    scene.world.run()
    assert error_of(scene.world, scene.client, 1) is None
    assert isinstance(error_of(scene.world, scene.client, 2), Unavailable)


def test_arrays_on_different_hosts_of_an_island_are_parts_too() -> None:
    world = World(islands="a")
    client = world.controller.add_client("x")
    slices = [world.controller.grant(client, SliceRequest.of(2)) for _ in range(2)]
    two = Sharding((("rows", 2),), (("rows",),))
    wanted = [
        (leaf, number, Value(number, (4,), "float32", number, two)) for leaf, number in enumerate(slices)
    ]
    tree = StateTree.of_names("ab")
    world.controller.checkpoints.load(client, "there", tree, wanted)
    world.run()
    ended: list[WaystationError | None] = []
    saved = [(leaf, handle) for leaf, handle, _ in wanted]
    world.controller.checkpoints.save(client, "here", tree, saved, SaveManner(), ended.append)
    world.run()
    assert ended == [None]
    told = [(host, each) for host, message in world.told for each in message.instructions]
    saves = {host: each for host, each in told if isinstance(each, Save)}
    loads = {host: each for host, each in told if isinstance(each, Load)}
    for found in (saves, loads):
        assert {host: (each.processes, len(each.arrays)) for host, each in found.items()} == {
            "a/0": ((0,), 1),
            "a/1": ((1,), 1),
        }
    assert [each for _, each in told if isinstance(each, EndJoining)] == [EndJoining("here.parts", 2, (0, 1))]


@pytest.mark.parametrize("lost", [False, True])
def test_values_come_back_with_the_arrays_or_the_error_does(lost: bool) -> None:
    scene = Scene()
    scene.load("there", {"a": 1}, str)
    scene.run_until(Load)
    if lost:
        scene.world.lose("a")
    scene.world.run()
    (heard,) = scene.heard
    assert isinstance(heard, Unavailable) if lost else heard == ("loaded as <class 'str'>",)
    assert isinstance(error_of(scene.world, scene.client, 1), Unavailable) is lost


def test_a_load_to_a_slice_that_is_not_there_says_so() -> None:
    scene = Scene()
    scene.controller.release(scene.client, scene.slices[1])
    scene.load("there", {"a": 1, "b": 2}, str)
    assert [type(heard) for heard in scene.heard] == [NoSuchSlice]
    for handle in (1, 2):
        assert isinstance(error_of(scene.world, scene.client, handle), NoSuchSlice)


def test_without_arrays_nothing_is_saved_or_loaded() -> None:
    scene = Scene()
    tree = scene.tree("saved")
    with pytest.raises(InvalidInput, match="no arrays"):
        scene.controller.checkpoints.save(scene.client, "here", tree, [], SaveManner(), scene.ended.append)
    with pytest.raises(InvalidInput, match="no arrays"):
        scene.controller.checkpoints.load(scene.client, "here", tree, [])
