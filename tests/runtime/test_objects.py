"""Objects by handle: references, names, deaths, and what a run is going to take."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.long import amount

from waystation.errors import Conflict, InvalidInput
from waystation.runtime.devices import DeviceId
from waystation.runtime.errors import NameTaken, ObjectLost, ObjectNotFound
from waystation.runtime.ir import lower, parse, prepare
from waystation.runtime.objects import Collect, ObjectTable, footprint
from waystation.runtime.resources import Placement
from waystation.runtime.scheduling import RunKey


def devices(count: int, host: str = "h") -> tuple[DeviceId, ...]:
    return tuple(DeviceId(f"{host}{at // 4}", at % 4) for at in range(count))


def test_the_last_reference_collects_with_one_message_however_many_shards() -> None:
    table = ObjectTable()
    for count in (4, 2048):
        handle = table.create("x", shard_bytes=8, devices=devices(count))
        table.retain(handle, "x")
        assert table.client_bytes("x") == 8 * count
        assert table.release(handle, "x") == []
        (collect,) = table.release(handle, "x")
        assert collect == Collect(handle, tuple(sorted({device.host for device in devices(count)})))
        with pytest.raises(ObjectNotFound, match="last reference was released"):
            table.get(handle)
    assert len(table) == 0


def test_a_dead_client_has_no_bytes_and_others_keep_theirs() -> None:
    table = ObjectTable()
    own = [table.create("x", shard_bytes=1, devices=devices(4)) for _ in range(3)]
    other = table.create("y", shard_bytes=1, devices=devices(4))
    table.retain(own[1], "y")
    table.publish(own[2], "base")
    assert table.client_bytes("x") == 8
    assert [each.handle for each in table.drop_client("x")] == [own[0]]
    assert (table.client_bytes("x"), table.client_bytes("y")) == (0, 8)
    assert table.named_bytes() == {"base": 4}
    assert {each.handle for each in table.drop_client("y")} == {own[1], other}
    assert [each.handle for each in table.withdraw("base")] == [own[2]]
    assert len(table) == 0


def test_a_named_object_is_counted_once_and_outlives_who_uses_it() -> None:
    table = ObjectTable()
    base = table.create("x", shard_bytes=100, devices=devices(2), label="weights")
    table.publish(base, "base")
    for client in ("tune1", "tune2"):
        assert table.attach("base", client) == base
    assert [table.client_bytes(client) for client in ("x", "tune1", "tune2")] == [0, 0, 0]
    assert table.named_bytes() == {"base": 200}
    with pytest.raises(Conflict, match="is shared as 'base'; copy it first"):
        table.donate(base, "x")
    assert table.drop_client("tune1") == table.drop_client("x") == []
    assert table.withdraw("base") == []
    assert table.client_bytes("tune2") == 200
    assert table.drop_client("tune2") == [Collect(base, ("h0",))]


def test_names_are_given_once_and_to_what_is_there() -> None:
    table = ObjectTable()
    first, second = (table.create("x", shard_bytes=1, devices=devices(1)) for _ in range(2))
    made = table.create("x", shard_bytes=1, devices=devices(1), run=RunKey("x", 7))
    table.publish(first, "base")
    with pytest.raises(NameTaken, match="object 0 has it"):
        table.publish(second, "base")
    with pytest.raises(NameTaken, match="it is 'base' already"):
        table.publish(first, "other")
    with pytest.raises(InvalidInput, match="before RunKey"):
        table.publish(made, "new")
    table.finish_run(RunKey("x", 7))
    table.publish(made, "new")
    for call in (lambda: table.attach("none", "y"), lambda: table.withdraw("none")):
        with pytest.raises(ObjectNotFound, match=r"shared as 'none'; there are \['base', 'new'\]"):
            call()


def test_what_is_donated_ends_without_a_message() -> None:
    table = ObjectTable()
    handle = table.create("x", shard_bytes=1, devices=devices(1))
    table.retain(handle, "y")
    with pytest.raises(Conflict, match="is used by client 'y'"):
        table.donate(handle, "x")
    table.release(handle, "y")
    assert table.donate(handle, "x").handle == handle
    with pytest.raises(ObjectNotFound, match="or it was donated"):
        table.release(handle, "x")


def test_a_reference_is_released_once() -> None:
    table = ObjectTable()
    handle = table.create("x", shard_bytes=1, devices=devices(1))
    with pytest.raises(InvalidInput, match="client 'y' does not refer to object 0"):
        table.release(handle, "y")


def test_what_is_lost_says_why() -> None:
    table = ObjectTable()
    made = table.create("x", shard_bytes=1, devices=devices(4), run=RunKey("x", 1), label="loss")
    there = table.create("x", shard_bytes=1, devices=devices(8), label="state")
    safe = table.create("x", shard_bytes=1, devices=devices(4, "g"))
    why = "program 'step', node 3 (compute 'f'), host 'h0': killed"
    assert table.fail_run(RunKey("x", 1), why) == [Collect(made, ("h0",))]
    assert table.lose_devices(frozenset({DeviceId("h1", 0)}), "host 'h1' died") == [
        Collect(there, ("h0", "h1"))
    ]
    with pytest.raises(ObjectLost, match=r"object 0 'loss' was lost: program 'step', node 3"):
        table.get(made)
    with pytest.raises(ObjectLost, match="host 'h1' died"):
        table.publish(there, "base")
    assert table.client_bytes("x") == 4
    assert table.release(made, "x") == table.release(there, "x") == []
    assert table.get(safe).total_bytes == 4


def test_what_a_run_uses_or_makes_stays_until_it_is_done() -> None:
    table = ObjectTable()
    used = table.create("x", shard_bytes=1, devices=devices(1))
    run = RunKey("x", 1)
    table.use([used], run)
    made = table.create("x", shard_bytes=1, devices=devices(1), run=run)
    assert table.release(used, "x") == table.release(made, "x") == []
    assert table.client_bytes("x") == 2
    assert [each.handle for each in table.finish_run(run)] == [used, made]
    assert table.finish_run(run) == []
    donated = table.create("x", shard_bytes=1, devices=devices(1))
    table.use([donated], run)
    table.donate(donated, "x")
    assert table.finish_run(run) == []
    lost = table.create("x", shard_bytes=1, devices=devices(1))
    table.lose_devices(frozenset(devices(1)), "host 'h0' died")
    with pytest.raises(ObjectLost):
        table.use([lost], run)


class Clients(RuleBasedStateMachine):
    """The table against a plain record of who refers to what."""

    CLIENTS = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.table = ObjectTable()
        self.references: dict[int, list[str]] = {}
        self.names: dict[str, int] = {}
        self.runs: dict[RunKey, list[int]] = {}
        self.submitted = 0

    def check(self, collected: list[Collect]) -> None:
        """What is collected is what nobody refers to, each once."""
        needed = {*self.names.values(), *(handle for used in self.runs.values() for handle in used)}
        ended = {each for each, users in self.references.items() if not users and each not in needed}
        assert {each.handle for each in collected} == ended
        assert len(collected) == len(ended)
        for handle in ended:
            del self.references[handle]

    @rule(client=CLIENTS)
    def create(self, client: str) -> None:
        handle = self.table.create(client, shard_bytes=10, devices=devices(2))
        self.references[handle] = [client]

    @precondition(lambda self: self.references)
    @rule(client=CLIENTS, data=st.data())
    def retain(self, client: str, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.references)))
        self.table.retain(handle, client)
        self.references[handle].append(client)

    @precondition(lambda self: any(self.references.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from([each for each, users in self.references.items() if users]))
        client = data.draw(st.sampled_from(self.references[handle]))
        self.references[handle].remove(client)
        self.check(self.table.release(handle, client))

    @precondition(lambda self: set(self.references) - set(self.names.values()))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(set(self.references) - set(self.names.values()))))
        self.table.publish(handle, f"name{handle}")
        self.names[f"name{handle}"] = handle

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        del self.names[name]
        self.check(self.table.withdraw(name))

    @precondition(lambda self: self.references)
    @rule(client=CLIENTS, data=st.data())
    def use(self, client: str, data: st.DataObject) -> None:
        self.submitted += 1
        run = RunKey(client, self.submitted)
        self.runs[run] = data.draw(st.lists(st.sampled_from(sorted(self.references)), unique=True))
        self.table.use(self.runs[run], run)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), failed=st.booleans())
    def end_run(self, data: st.DataObject, failed: bool) -> None:
        run = data.draw(st.sampled_from(sorted(self.runs)))
        del self.runs[run]
        self.check(self.table.fail_run(run, "killed") if failed else self.table.finish_run(run))

    @rule(client=CLIENTS)
    def die(self, client: str) -> None:
        for handle, users in self.references.items():
            self.references[handle] = [user for user in users if user != client]
        self.check(self.table.drop_client(client))
        in_use = {handle for used in self.runs.values() for handle in used}
        assert in_use or self.table.client_bytes(client) == 0

    @invariant()
    def bytes_are_counted_once(self) -> None:
        counted = sum(map(self.table.client_bytes, "abc")) + sum(self.table.named_bytes().values())
        assert counted == 20 * len(self.references) == 20 * len(self.table)
        for name, handle in self.names.items():
            assert self.table.get(handle).name == name


TestClients = Clients.TestCase
TestClients.settings = settings(max_examples=amount(40), stateful_step_count=30)


def test_a_footprint_is_what_a_program_takes_at_a_time() -> None:
    program = parse(
        """program "p" {
          slice @0 [2]
          sharding #0 = [x=2] (x)
          sharding #1 = [x=2] ()
          %0 = arg "state" : float32[8] @0 #0
          %1 = arg "batch" : float32[8] @0 #0
          %2 = compute "widen" "w" @0 (%1 #1) : float32[64] @0 #0
          %3 = compute "update" "u" @0 (%0 #0, %2 #0) donates (0) : float32[8] @0 #0
          result (%3)
        }"""
    )
    low = lower(prepare(program), {0: Placement(1, "i", (DeviceId("a", 1), DeviceId("b", 0)))})
    taken = {part.host: footprint(low, part) for part in low.hosts}
    # The copy of the batch (32 bytes) and its widening (128) at once; the copy is freed before the update.
    assert {host: found.peak for host, found in taken.items()} == {"a": {1: 160}, "b": {0: 160}}
    assert taken["a"].outputs == {3: {1: 16}}
    assert taken["a"].consumed == {0}
