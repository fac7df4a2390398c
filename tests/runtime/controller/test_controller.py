"""The controller in worlds of modelled hosts: programs end, whatever is lost and whoever dies."""

from __future__ import annotations

import contextlib
import pickle

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.runtime.controller.world import ROWS, WHOLE, World, error_of, pipeline, step, value

from waystation.errors import InvalidInput, Unavailable, WaystationError
from waystation.runtime.controller import (
    Dispatch,
    MemoryLimits,
    Work,
)
from waystation.runtime.errors import DeviceMemoryExceeded, ObjectNotFound
from waystation.runtime.host_options import SaveManner
from waystation.runtime.ir import Arg, Compute, Program, Result, Sharding, SliceShape, Value, prepare
from waystation.runtime.messages import Done, Message, Run, Save, Spill
from waystation.runtime.resources import SliceRequest
from waystation.runtime.state_trees import StateTree


def test_a_run_is_one_message_to_each_host_and_its_list_is_sent_once() -> None:
    world = World()
    client, slices = world.client("x")
    made = world.put(client, *slices)
    for _ in range(3):
        made = world.call(client, step(), slices, made)
    world.carry_out()
    assert [sorted(effect.lists) for effect in world.preparing] == [["a/0", "a/1"]]
    world.run()
    assert [len(world.begun[f"a/{index}"]) for index in range(2)] == [4, 4]
    assert world.begun["a/0"] == world.begun["a/1"]
    assert error_of(world, client, made) is None


def test_what_uses_an_array_that_failed_fails_alike_and_does_not_run() -> None:
    world = World()
    client, slices = world.client("x")
    argument = world.put(client, *slices)
    failed = world.call(client, step(), slices, argument)
    while not world.lines["a/0"] or not isinstance(world.lines["a/0"][0][2].instructions[0], Run):
        assert world.step()
    world.run(fails=1.0)
    after = world.call(client, step(), slices, failed)
    world.run()
    for handle in (failed, after):
        error = error_of(world, client, handle)
        assert isinstance(error, InvalidInput)
        assert error.context["program"] == "step"
        assert error.context["computation"] == "step"
        assert error.context["host"] in {"a/0", "a/1"}


def test_the_error_of_the_host_that_failed_counts_and_not_what_its_peers_say() -> None:
    world = World()
    client, slices = world.client("x", "a", "b")
    argument = world.put(client, slices[0])
    world.run()
    made = world.call(client, pipeline(), slices, argument)
    world.carry_out()
    while world.preparing:
        world.prepare()
        world.carry_out()
    heard = Unavailable("it is broken there", peer="a/0")
    for host, error in (("b/0", heard), ("a/0", InvalidInput("it is broken")), ("b/1", heard)):
        island, epoch, message = world.lines[host].pop(0)
        world.controller.orders.done(island, epoch, host, Done(message.work, 0.001, error))
    world.run()
    found = error_of(world, client, made)
    assert isinstance(found, InvalidInput)
    assert found.context["host"] == "a/0"
    assert {host for effect in world.abandoned for host in effect.hosts} == {"a/0", "a/1", "b/0", "b/1"}


def test_what_cannot_be_compiled_fails_and_so_does_what_has_been_asked_meanwhile() -> None:
    world = World()
    client, slices = world.client("x")
    argument = world.put(client, *slices)
    made = world.call(client, step(), slices, argument)
    after = world.call(client, step(donates=True), slices, made)
    ended: list[Work] = []
    world.controller.works.get(client, after, ended.append)
    world.carry_out()
    for effect in world.preparing:
        world.controller.orders.prepared(effect.number, InvalidInput("cannot be compiled"))
    world.preparing.clear()
    world.run()
    assert isinstance(error_of(world, client, after), InvalidInput)
    assert [type(work.error) for work in ended] == [InvalidInput]
    assert [len(world.begun[f"a/{index}"]) for index in range(2)] == [1, 1]


def test_subgraphs_of_a_dynamic_program_follow_each_other_and_nothing_comes_between() -> None:
    world = World(islands="a")
    client, slices = world.client("x")
    nodes = (
        Arg("x", value(0)),
        Compute("first", "f0", 0, (0,), (ROWS,), (value(1),), (), True),
        Compute("second", "f1", 0, (1,), (ROWS,), (value(2),)),
        Result((2,)),
    )
    program = prepare(Program("dynamic", (SliceShape(0, (4,)),), nodes))
    argument = world.put(client, *slices)
    made = world.call(client, program, slices, argument)
    last = world.call(client, step(), slices, made)
    world.run()
    assert error_of(world, client, last) is None
    assert len(world.begun["a/0"]) == 4
    assert world.begun["a/0"] == world.begun["a/1"]
    world.controller.drop_client(client)
    assert len(world.controller.arrays.table) == 0


def test_a_loss_fails_what_was_under_way_on_all_islands_and_others_go_on() -> None:
    world = World()
    client, slices = world.client("x", "a", "b")
    other, of_other = world.client("y", "b")
    argument = world.put(client, slices[0])
    spanning = world.call(client, pipeline(), slices, argument)
    untouched = world.call(other, step(), of_other, world.put(other, *of_other))
    while not world.lines["b/0"] or len(world.preparing) > 0:
        assert world.step()
    world.lose("a")
    world.run()
    for handle in (argument, spanning):
        assert isinstance(error_of(world, client, handle), Unavailable)
    assert error_of(world, other, untouched) is None
    assert world.controller.is_waiting(slices)
    world.controller.rebuilt("a")
    again = world.call(client, pipeline(), slices, world.put(client, slices[0]))
    world.run()
    assert error_of(world, client, again) is None


def test_an_island_with_the_name_of_one_that_is_gone_takes_up_its_order() -> None:
    world = World()
    client, slices = world.client("x", "a", "b")
    arrays = [world.call(client, pipeline(), slices, world.put(client, slices[0])) for _ in range(3)]
    while not world.lines["b/0"]:
        assert world.step()
    late = world.lines["a/0"] or world.lines["a/1"]
    stale = [(island, epoch, message.work) for island, epoch, message in late]
    world.remove("a")
    world.add("a")
    for island, epoch, work in stale:  # of the hosts that are gone
        world.controller.orders.done(island, epoch, "a/0", Done(work, 0.001, None))
    arrays.append(world.call(client, step(), slices[:1], world.put(client, slices[0])))
    arrays.append(world.call(client, pipeline(), slices, world.put(client, slices[0])))
    world.run()
    assert not any(world.controller.orders.pending(island) for island in "ab")
    errors = [error_of(world, client, handle) for handle in arrays]
    assert all(isinstance(error, Unavailable) for error in errors[:3])
    assert errors[3:] == [None, None]


def test_a_donated_array_ends_with_the_run() -> None:
    world = World()
    client, slices = world.client("x")
    argument = world.put(client, *slices)
    world.call(client, step(donates=True), slices, argument)
    assert isinstance(error_of(world, client, argument), ObjectNotFound)
    world.run()
    assert world.controller.arrays.table.client_bytes(client) == 16


def test_an_array_follows_its_slice() -> None:
    world = World()
    client = world.controller.add_client("x")
    (number,) = [world.controller.grant(client, SliceRequest.of(4))]
    argument = world.put(client, number)
    first = world.controller.placement(number).island
    world.controller.remap(client, number, None, ())
    assert world.controller.placement(number).island != first
    made = world.call(client, step(), [number], argument)
    world.run()
    assert error_of(world, client, made) is None
    assert set(world.begun) == {"a/0", "a/1", "b/0", "b/1"}


def test_shared_arrays_are_counted_once_and_outlive_their_client() -> None:
    world = World()
    client, slices = world.client("x")
    base = world.put(client, *slices)
    world.run()
    table = world.controller.arrays.table
    world.controller.share(world.controller.hold(client, base), "base")
    other = world.controller.add_client("y")
    found = world.controller.arrays.attach(other, "base", 7)
    assert (table.client_bytes(client), table.client_bytes(other)) == (0, 0)
    assert table.named_bytes() == {"base": 16}
    world.controller.drop_client(client)
    made = world.call(other, step(), [found.value.slice], 7)
    world.run()
    assert error_of(world, other, made) is None
    world.controller.drop_client(other)
    assert table.named_bytes() == {"base": 16}
    world.controller.withdraw("base")
    assert len(table) == 0
    assert not world.controller.resources.slices


def test_what_does_not_fit_is_spilled_or_waits_and_is_refused_in_the_end() -> None:
    world = World(limits=MemoryLimits(device_bytes=8, spill_bytes=16))
    client, slices = world.client("x")
    arrays = [world.put(client, *slices) for _ in range(4)]
    told: list[Message] = []
    while world.step():
        told += [line[0][2] for line in world.lines.values() if line]
    assert any(isinstance(each, Spill) for message in told for each in message.instructions)
    assert [error_of(world, client, handle) for handle in arrays] == [None] * 4
    assert world.controller.orders.memory_bytes("a", "a/0") == (16, 16)
    too_much = [world.put(client, *slices) for _ in range(3)]
    world.run()
    stall = world.stalled[0]
    world.controller.orders.give_up(stall.island, stall.work)
    world.run()
    errors = [error_of(world, client, handle) for handle in too_much]
    assert any(isinstance(error, DeviceMemoryExceeded) for error in errors)
    world.controller.free(client, arrays)
    world.run()
    assert error_of(world, client, world.put(client, *slices)) is None


def test_what_is_not_stalled_any_more_is_not_given_up() -> None:
    """One host had no memory until a client freed some; on the other one only what runs has to end."""
    world = World(limits=MemoryLimits(device_bytes=8))
    client = world.controller.add_client("x")
    grant = world.controller.grant
    halves = [grant(client, SliceRequest.of(2, island="a", shared=True)) for _ in range(2)]  # a host each
    whole = grant(client, SliceRequest.of(4, island="a", shared=True))
    pairs = Sharding((("rows", 2),), (("rows",),))
    first = world.put(client, halves[0], pairs)
    world.run()
    second = world.put(client, halves[1], pairs)  # its host is at it
    world.carry_out()
    waiting = world.put(client, whole)
    world.carry_out()
    (stall,) = world.stalled
    world.controller.free(client, [first])
    world.controller.orders.give_up(stall.island, stall.work)
    world.run()
    assert error_of(world, client, waiting) is None
    assert len(world.stalled) == 2  # since the second array has come to stay
    world.controller.free(client, [second])
    world.run()
    assert world.controller.arrays.is_made(world.controller.arrays.handle(client, waiting))
    assert error_of(world, client, waiting) is None


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_fails_on_one_island_waits_no_longer_for_memory_on_another(*, is_lost: bool) -> None:
    world = World(limits=MemoryLimits(device_bytes=64))
    client, slices = world.client("x", "a", "b")
    given = world.put(client, slices[0])
    for _ in range(4):  # all the memory of the other island
        world.put(client, slices[1], WHOLE)
    world.run()
    made = world.call(client, pipeline(), slices, given)
    world.carry_out()
    while world.preparing:
        world.prepare()
        world.carry_out()
    assert {stall.island for stall in world.stalled} == {"b"}
    if is_lost:
        world.lose("a")
    else:
        world.end("a/0", fails=1)
        world.run()
    assert error_of(world, client, made) is not None


def test_a_request_that_waits_for_memory_holds_up_its_own_client_only() -> None:
    """Each array takes 4 bytes on each device, of 12; the holder has 8, and a step of the other takes 8."""
    world = World(limits=MemoryLimits(device_bytes=12))
    holder, on = world.client("holder")
    other, also = world.client("other")
    held = [world.put(holder, *on) for _ in range(2)]
    given = world.put(other, *also)
    world.run()
    waiting = [world.put(other, *also) for _ in range(20)]  # more than schedulers let be in flight
    world.run()
    assert {stall.island for stall in world.stalled} == {"a"}
    arrays = world.controller.arrays

    def is_made(client: str, handle: int) -> bool:
        return arrays.is_made(arrays.handle(client, handle))

    world.controller.free(holder, held[:1])
    world.run()
    assert [is_made(other, handle) for handle in waiting] == [True] + [False] * 19
    # Donates its memory, so there is room for as many of these as the holder likes.
    last = held[1]
    for _ in range(200):
        last = world.call(holder, step(donates=True), on, last)
    world.run()
    assert is_made(holder, last)
    assert error_of(world, holder, last) is None
    assert not is_made(other, waiting[1])
    world.controller.free(other, [given, waiting[0]])
    world.controller.free(holder, [last])
    world.run()
    assert [is_made(other, handle) for handle in waiting[1:5]] == [True, True, True, False]


def test_what_can_never_fit_fails_at_once_behind_one_that_waits() -> None:
    world = World(limits=MemoryLimits(device_bytes=8))
    holder, on = world.client("holder")
    other, also = world.client("other")
    third, too = world.client("third")
    for _ in range(2):
        world.put(holder, *on)
    world.run()
    waiting = world.put(other, *also)
    world.run()
    world.next += 1
    big = Value(world.next, (64,), "float32", too[0], ROWS)
    world.controller.works.put(third, big.number, np.zeros(64, np.float32), big)
    world.run()
    error = error_of(world, third, big.number)
    assert isinstance(error, DeviceMemoryExceeded)
    assert "needs 64 bytes on device a/0:0 of 8" in error.message
    assert error_of(world, other, waiting) is None


def test_no_element_of_a_saved_array_is_in_a_message() -> None:
    world = World()
    client, slices = world.client("x")
    big = Value(1, (1 << 20,), "float32", slices[0], ROWS)
    world.controller.checkpoints.load(client, "there", StateTree.of_names("w"), [(0, 1, big)])
    ended: list[WaystationError | None] = []
    world.run()
    world.controller.checkpoints.save(
        client, "here", StateTree.of_names("w"), [(0, 1)], SaveManner(), ended.append
    )
    world.carry_out()
    messages = [message for line in world.lines.values() for _, _, message in line]
    assert [type(each) for message in messages for each in message.instructions] == [Save, Save]
    assert sum(len(pickle.dumps(message)) for message in messages) < 4096
    world.run()
    assert ended == [None]


CALLS = st.lists(
    st.tuples(
        st.sampled_from("xy"),
        st.sampled_from(
            ["step", "step", "donate", "pipeline", "put", "get", "free", "save", "lose", "replace", "drop"]
        ),
    ),
    max_size=30,
)


class Story:
    """What two clients do, and what befalls them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clients = {name: world.client(name, "a", "b") for name in "xy"}
        self.arrays: dict[str, list[int]] = {name: [] for name in self.clients}
        self.asked = self.answered = 0

    def tell(self, name: str, what: str) -> None:
        if name not in self.clients:
            return
        client, slices = self.clients[name]
        if what == "lose":
            self.world.lose("a")
            self.world.controller.rebuilt("a")
        elif what == "replace":
            self.world.remove("a")
            self.world.add("a")
        elif what == "drop":
            self.world.controller.drop_client(client)
            del self.clients[name]
        elif what == "put" or not self.arrays[name]:
            self.arrays[name].append(self.world.put(client, slices[0]))
        else:
            getattr(self, what)(client, slices, self.arrays[name])

    def free(self, client: str, slices: list[int], arrays: list[int]) -> None:
        self.world.controller.free(client, [arrays.pop()])

    def get(self, client: str, slices: list[int], arrays: list[int]) -> None:
        with contextlib.suppress(WaystationError):
            self.world.controller.works.get(client, arrays[-1], self.answer)
            self.asked += 1

    def save(self, client: str, slices: list[int], arrays: list[int]) -> None:
        there = self.world.put(client, slices[1])
        tree, both = StateTree.of_names(["here", "there"]), [(0, arrays[-1]), (1, there)]
        with contextlib.suppress(WaystationError):
            self.world.controller.checkpoints.save(
                client, "saved", tree, both, SaveManner(overwrite=True), self.answer
            )
            self.asked += 1
        self.world.controller.free(client, [there])

    def answer(self, outcome: Work | WaystationError | None) -> None:
        self.answered += 1

    def donate(self, client: str, slices: list[int], arrays: list[int]) -> None:
        arrays[-1] = self.world.call(client, step(donates=True), slices[:1], arrays[-1])

    def step(self, client: str, slices: list[int], arrays: list[int]) -> None:
        arrays.append(self.world.call(client, step(), slices[:1], arrays[-1]))

    def pipeline(self, client: str, slices: list[int], arrays: list[int]) -> None:
        self.world.call(client, pipeline(), slices, arrays[-1])


# A work begins in the moment in which its island is lost.
@example(calls=[("x", "step")] * 4 + [("x", "lose")], seed=71, fails=0.0)
@given(calls=CALLS, seed=st.integers(0, 1 << 32), fails=st.sampled_from([0.0, 0.0, 0.2]))
def test_everything_ends_and_nothing_is_left(calls: list[tuple[str, str]], seed: int, fails: float) -> None:
    world = World(seed)
    story = Story(world)
    for name, what in calls:
        story.tell(name, what)
        for _ in range(world.chance.randrange(4)):
            world.step(fails)
    world.run(fails)
    assert story.answered == story.asked
    assert not any(world.controller.orders.pending(island) for island in "ab")
    for name, (client, _) in story.clients.items():
        for handle in story.arrays[name]:
            assert world.controller.arrays.is_made(world.controller.arrays.handle(client, handle))
    for client, _ in story.clients.values():
        world.controller.drop_client(client)
    world.run()
    assert len(world.controller.arrays.table) == 0
    assert not world.controller.resources.slices


def test_a_name_is_one_client_s_at_a_time() -> None:
    world = World()
    world.client("x")
    with pytest.raises(WaystationError, match="connected as 'x' already"):
        world.controller.add_client("x")
    world.controller.drop_client("x")
    assert world.controller.add_client("x") == "x (2)"
    assert world.controller.add_client("x (2)") == "x (2) (2)"
    world.controller.drop_client("x (2)")
    assert world.controller.add_client("x") == "x (3)"


@pytest.mark.parametrize("name", ["", "x" * 201, "\u00e4" * 101, "two\nlines", "\ud800"])
def test_what_is_no_name_is_refused_and_counts_nobody_in(name: str) -> None:
    world = World()
    with pytest.raises(InvalidInput, match="1 to 200 bytes"):
        world.controller.add_client(name)
    assert len(world.controller.clients) == 0


def test_a_program_can_be_compiled_before_it_runs() -> None:
    world = World()
    client, slices = world.client("x")
    argument = world.put(client, *slices)
    world.run()
    told: list[WaystationError | None] = []
    fingerprint = world.controller.install(client, step(), Dispatch.PARALLEL)
    for _ in range(2):  # the hosts are asked once
        world.controller.prepare(client, fingerprint, slices, told.append)
    world.carry_out()
    assert len(world.preparing) == 1
    assert told == []
    world.run()
    assert told == [None, None]
    made = world.call(client, step(), slices, argument)
    world.run()
    assert error_of(world, client, made) is None
    world.controller.prepare(client, fingerprint, slices, told.append)
    assert told == [None] * 3
    world.lose("a")
    with pytest.raises(WaystationError):
        world.controller.prepare(client, fingerprint, slices, told.append)
