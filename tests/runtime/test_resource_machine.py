"""Random lives of a cluster: whatever happens, no device is granted twice and no slice is on a dead one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.long import amount

from waystation.runtime import Host, Island, ResourceManager, SliceRequest
from waystation.runtime.errors import NotEnoughDevices
from waystation.runtime.resources import Assignment, SliceState

CLIENTS = st.sampled_from(["alice", "bob", "carol"])
ISLANDS = st.sampled_from(["a", "b", "c"])


class Cluster(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.manager = ResourceManager()
        self.hosts: dict[str, Host] = {}
        self.added = 0
        self.epochs: dict[int, int] = {}

    @rule(island=ISLANDS, devices=st.integers(1, 4))
    def add_host(self, island: str, devices: int) -> None:
        self.added += 1
        host = Host(f"host{self.added}", island, devices)
        self.hosts[host.name] = host
        self.manager.add_host(host)

    @precondition(lambda self: self.hosts)
    @rule(data=st.data())
    def lose_host(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.hosts)))
        del self.hosts[name]
        self.manager.remove_host(name)

    @precondition(lambda self: self.hosts)
    @rule(data=st.data())
    def lose_island(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([island.name for island in self.manager.islands]))
        self.hosts = {key: host for key, host in self.hosts.items() if host.island != name}
        self.manager.remove_island(name)

    @rule(client=CLIENTS, devices=st.integers(1, 6), island=st.none() | ISLANDS, shared=st.booleans())
    def grant(self, client: str, devices: int, island: str | None, shared: bool) -> None:
        request = SliceRequest.of(devices, island=island, shared=shared)
        loads = self.loads()
        try:
            granted = self.manager.grant(client, request)
        except NotEnoughDevices:
            return
        chosen = granted.placement.devices
        others = [
            load
            for device, load in loads.items()
            if self.hosts[device.host].island == granted.placement.island
            and device not in chosen
            and not (shared and self.is_exclusive(device))
        ]
        assert max(loads[device] for device in chosen) <= min(others, default=len(loads) + 99)

    @precondition(lambda self: self.manager.slices)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.manager.release(data.draw(st.sampled_from(self.manager.slices)).number)

    @precondition(lambda self: any(found.state is SliceState.PLACED for found in self.manager.slices))
    @rule(data=st.data())
    def remap(self, data: st.DataObject) -> None:
        placed = [found for found in self.manager.slices if found.state is SliceState.PLACED]
        without = data.draw(st.sets(st.sampled_from(sorted(self.hosts))))
        moved = data.draw(st.sampled_from(placed))
        try:
            self.manager.remap(moved.number, without_hosts=without)
        except NotEnoughDevices:
            assert self.manager.slice(moved.number) == moved
        else:
            assert not without & set(self.manager.placement(moved.number).hosts)

    @rule(client=CLIENTS)
    def suspend(self, client: str) -> None:
        self.manager.suspend(client)
        for found in self.manager.slices:
            assert found.client != client or found.state is SliceState.SUSPENDED

    @rule(client=CLIENTS)
    def resume(self, client: str) -> None:
        before = self.manager.slices
        try:
            self.manager.resume(client)
        except NotEnoughDevices:
            assert self.manager.slices == before

    @rule(client=CLIENTS)
    def lose_client(self, client: str) -> None:
        self.manager.release_client(client)
        assert all(found.client != client for found in self.manager.slices)

    def loads(self) -> dict:
        devices = [device for host in self.hosts.values() for device in host.devices]
        return {device: len(self.manager.users(device)) for device in devices}

    def is_exclusive(self, device) -> bool:
        users = map(self.manager.slice, self.manager.users(device))
        return any(found.request.assignment is Assignment.ONE_TO_ONE for found in users)

    @invariant()
    def placements_are_what_they_must_be(self) -> None:
        used: dict = {}
        for found in self.manager.slices:
            if found.state is not SliceState.PLACED:
                continue
            devices = found.placement.devices
            assert len(set(devices)) == len(devices) == found.request.devices
            for device in devices:
                host = self.hosts[device.host]
                assert device.index < host.device_count
                assert host.island == found.placement.island
                assert found.request.island in (None, host.island)
                used.setdefault(device, []).append(found)
        for device, users in used.items():
            assert {user.number for user in users} == self.manager.users(device)
            exclusive = [user for user in users if user.request.assignment is Assignment.ONE_TO_ONE]
            assert not exclusive or len(users) == 1
        assert sum(map(len, used.values())) == sum(self.loads().values())

    @invariant()
    def epochs_only_grow(self) -> None:
        for found in self.manager.slices:
            assert found.placement.epoch >= self.epochs.get(found.number, 1)
            self.epochs[found.number] = found.placement.epoch

    @invariant()
    def nothing_waits_that_would_fit(self) -> None:
        for found in self.manager.slices:
            if found.state is SliceState.WAITING:
                for island in self.manager.islands:
                    free = [
                        device
                        for device in island.devices
                        if not self.manager.users(device)
                        or (found.request.assignment is Assignment.SHARED and not self.is_exclusive(device))
                    ]
                    fits = found.request.island in (None, island.name)
                    assert not fits or len(free) < found.request.devices


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=amount(60), stateful_step_count=30)


@given(
    hosts=st.integers(1, 5),
    devices=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=30),
)
def test_shared_slices_differ_by_one_at_most_in_how_many_a_device_has(
    hosts: int, devices: int, sizes: list[int]
) -> None:
    manager = ResourceManager()
    manager.add_island(Island("a", tuple(Host(f"h{number}", "a", devices) for number in range(hosts))))
    for size in sizes:
        if size <= hosts * devices:
            manager.grant("x", SliceRequest.of(size, shared=True))
        loads = [len(manager.users(device)) for device in manager.islands[0].devices]
        assert max(loads) - min(loads) <= 1
