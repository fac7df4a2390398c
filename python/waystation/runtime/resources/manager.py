"""The resource manager: grants slices of islands, and moves them when devices come and go.

A pure machine. What drives it: requests of clients (`grant`, `release`, `remap`, `suspend`, `resume`), and
news of the cluster (`add_host`, `remove_host`, `add_island`, `remove_island`, `release_client` on a client's
death). What it emits: a `SliceChanged` for each slice that was moved, suspended, left without devices or
released, in the order in which that happened; programs over a slice whose epoch has changed are lowered anew.

Invariants: a placed slice has only devices of hosts that are here, all of one island, no device twice; a
device of a one-to-one slice has no other slice; a call that raises has changed nothing. A host that is lost
takes its slices' data with it, so these are placed anew as if they were new; what is on other hosts stays
where it is. Slices that do not fit any more wait, and get devices before anything else happens, the oldest
that fits first: a large one can wait for long while smaller ones come and go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TypeAlias

from waystation._errors import InvalidInput, NotFound
from waystation.runtime.devices import DeviceId, Host, Island
from waystation.runtime.errors import NoSuchSlice, NotEnoughDevices, SliceNotPlaced
from waystation.runtime.resources.pool import DevicePool
from waystation.runtime.resources.requests import (
    Assignment,
    Placement,
    Slice,
    SliceChanged,
    SliceRequest,
    SliceState,
)

_Chosen: TypeAlias = tuple[Slice, str, tuple[DeviceId, ...]]  # with its island


class ResourceManager:
    """Devices of all islands, and the slices that clients have of them."""

    def __init__(self) -> None:
        self._pool = DevicePool()
        self._slices: dict[int, Slice] = {}
        self._next_number = 0

    # ---- what there is -------------------------------------------------------------------------

    @property
    def islands(self) -> tuple[Island, ...]:
        """All islands that have hosts, by name."""
        return self._pool.islands()

    @property
    def slices(self) -> tuple[Slice, ...]:
        """All slices, the oldest first."""
        return tuple(self._slices.values())

    def slice(self, number: int) -> Slice:
        """A slice as it is now.

        Raises:
            NoSuchSlice: There is none of that number.
        """
        found = self._slices.get(number)
        if found is None:
            raise NoSuchSlice(
                f"there is no slice {number}: it was released, or never granted; ask for another"
            )
        return found

    def is_waiting(self, number: int) -> bool:
        """Whether a slice waits for devices."""
        found = self._slices.get(number)
        return found is not None and found.state is SliceState.WAITING

    def placement(self, number: int) -> Placement:
        """Where a slice is now.

        Raises:
            NoSuchSlice: There is none of that number.
            SliceNotPlaced: It has no devices.
        """
        found = self.slice(number)
        if found.state is SliceState.SUSPENDED:
            raise SliceNotPlaced(
                f"slice {number} is suspended, and has no devices; resume client '{found.client}', and make "
                "the call again"
            )
        if found.state is SliceState.WAITING:
            free = self._pool.describe_free(found.request)
            raise SliceNotPlaced(f"slice {number} has lost devices and waits for {found.request}: {free}")
        return found.placement

    def users(self, device: DeviceId) -> frozenset[int]:
        """The slices that use a device."""
        return self._pool.users(device)

    # ---- what clients ask ----------------------------------------------------------------------

    def can_grant(self, request: SliceRequest) -> bool:
        """Whether an island has the devices for a slice free."""
        return self._pool.choose(request) is not None

    def grant(self, client: str, request: SliceRequest) -> Slice:
        """Grants a slice.

        Raises:
            NotEnoughDevices: No island has the devices free.
        """
        chosen = self._pool.choose(request)
        if chosen is None:
            raise self._not_enough(request)
        number = self._next_number
        self._next_number += 1
        self._slices[number] = Slice(number, client, request, SliceState.PLACED, Placement(1, *chosen))
        self._pool.take(number, chosen[1], request.assignment)
        return self._slices[number]

    def release(self, number: int) -> list[SliceChanged]:
        """Takes a slice back for good.

        Raises:
            NoSuchSlice: There is none of that number.
        """
        return self._release([self.slice(number)])

    def release_client(self, client: str) -> list[SliceChanged]:
        """Takes back all slices of a client that has died or is done."""
        return self._release(self._of_client(client))

    def remap(
        self, number: int, *, island: str | None = None, without_hosts: Collection[str] = ()
    ) -> list[SliceChanged]:
        """Moves a slice to other devices; it keeps some only if there are not enough others.

        Args:
            number: The slice.
            island: Where it has to go; None for wherever its request allows.
            without_hosts: Hosts that it has to leave.

        Raises:
            NoSuchSlice: There is none of that number.
            SliceNotPlaced: It has no devices to move from.
            InvalidInput: Its request binds it to another island.
            NotEnoughDevices: There are not enough devices to move to; it stays where it is.
        """
        before = self.placement(number)
        moved = self.slice(number)
        request = moved.request
        if island is not None:
            if request.island not in (None, island):
                raise InvalidInput(
                    f"slice {number} was asked for in island '{request.island}', and does not leave it for "
                    f"'{island}'; ask for a slice without island=…, which can move to any"
                )
            request = replace(request, island=island)
        self._pool.give_back(number, before.devices)
        chosen = self._pool.choose(request, without_hosts=without_hosts, rather_not=before.devices)
        if chosen is None:
            self._pool.take(number, before.devices, request.assignment)
            raise self._not_enough(request, without_hosts)
        changes = [self._placed(moved, *chosen)] if chosen[1] != before.devices else []
        self._pool.take(number, chosen[1], request.assignment)
        return changes + self._place_waiting()

    def suspend(self, client: str) -> list[SliceChanged]:
        """Takes the devices of all slices of a client until it is resumed."""
        changes = []
        for found in self._of_client(client):
            if found.state is not SliceState.SUSPENDED:
                self._pool.give_back(found.number, found.placement.devices)
                changes.append(self._changed(replace(found, state=SliceState.SUSPENDED)))
        return changes + self._place_waiting()

    def resume(self, client: str, without_hosts: Collection[str] = ()) -> list[SliceChanged]:
        """Gives all suspended slices of a client devices again: all of them, or none.

        Args:
            client: The client.
            without_hosts: Hosts that they are not to have devices of.

        Raises:
            NotEnoughDevices: They do not all fit; the client stays suspended.
        """
        chosen, lacking = self._take_for_suspended(client, without_hosts)
        if lacking is not None:
            error = self._not_enough(lacking, without_hosts)
            self._give_back(chosen)
            raise error
        return [self._placed(*entry) for entry in chosen]

    def lacking(self, client: str, without_hosts: Collection[str] = ()) -> SliceRequest | None:
        """What keeps a client from being resumed: the first slice that finds no devices; None if all do."""
        chosen, lacking = self._take_for_suspended(client, without_hosts)
        self._give_back(chosen)
        return lacking

    # ---- what happens to the cluster -----------------------------------------------------------

    def add_host(self, host: Host) -> list[SliceChanged]:
        """Adds the devices of a host.

        Raises:
            Conflict: There is a host of that name.
        """
        self._pool.add(host)
        return self._place_waiting()

    def add_island(self, island: Island) -> list[SliceChanged]:
        """Adds the devices of all hosts of an island at once.

        Raises:
            Conflict: There is a host of the name of one of them.
        """
        added: list[str] = []
        try:
            for host in island.hosts:
                self._pool.add(host)
                added.append(host.name)
        except BaseException:
            for name in added:
                self._pool.remove(name)
            raise
        return self._place_waiting()

    def remove_host(self, name: str) -> list[SliceChanged]:
        """Removes a host that has died or is to leave; its slices go elsewhere, or wait.

        Raises:
            NotFound: There is no such host.
        """
        return self._remove([name])

    def remove_island(self, name: str) -> list[SliceChanged]:
        """Removes all hosts of an island.

        Raises:
            NotFound: There is no such island.
        """
        hosts = [host.name for island in self.islands if island.name == name for host in island.hosts]
        if not hosts:
            known = [island.name for island in self.islands]
            raise NotFound(f"there is no island '{name}'; there are {known}")
        return self._remove(hosts)

    # ---- how ------------------------------------------------------------------------------------

    def _take_for_suspended(
        self, client: str, without_hosts: Collection[str]
    ) -> tuple[list[_Chosen], SliceRequest | None]:
        """Takes devices for the suspended slices of a client, up to the first that finds none."""
        chosen: list[_Chosen] = []
        for found in self._of_client(client):
            if found.state is not SliceState.SUSPENDED:
                continue
            choice = self._pool.choose(found.request, without_hosts=without_hosts)
            if choice is None:
                return chosen, found.request
            self._pool.take(found.number, choice[1], found.request.assignment)
            chosen.append((found, *choice))
        return chosen, None

    def _give_back(self, chosen: Iterable[_Chosen]) -> None:
        for found, _, devices in chosen:
            self._pool.give_back(found.number, devices)

    def _remove(self, hosts: Iterable[str]) -> list[SliceChanged]:
        lost = sorted({number for name in hosts for number in self._pool.remove(name)})
        for number in lost:
            self._pool.give_back(number, self._slices[number].placement.devices)
        changes = []
        for number in lost:
            found = self._slices[number]
            chosen = self._pool.choose(found.request)
            if chosen is None:
                changes.append(self._changed(replace(found, state=SliceState.WAITING)))
            else:
                self._pool.take(number, chosen[1], found.request.assignment)
                changes.append(self._placed(found, *chosen))
        return changes + self._place_waiting()

    def _release(self, slices: Iterable[Slice]) -> list[SliceChanged]:
        changes = []
        for found in slices:
            if found.state is SliceState.PLACED:
                self._pool.give_back(found.number, found.placement.devices)
            del self._slices[found.number]
            changes.append(SliceChanged(found, released=True))
        return changes + self._place_waiting()

    def _place_waiting(self) -> list[SliceChanged]:
        changes = []
        for found in self.slices:
            chosen = self._pool.choose(found.request) if found.state is SliceState.WAITING else None
            if chosen is not None:
                self._pool.take(found.number, chosen[1], found.request.assignment)
                changes.append(self._placed(found, *chosen))
        return changes

    def _placed(self, found: Slice, island: str, devices: tuple[DeviceId, ...]) -> SliceChanged:
        placement = Placement(found.placement.epoch + 1, island, devices)
        return self._changed(replace(found, state=SliceState.PLACED, placement=placement))

    def _changed(self, found: Slice) -> SliceChanged:
        self._slices[found.number] = found
        return SliceChanged(found)

    def _of_client(self, client: str) -> list[Slice]:
        return [found for found in self.slices if found.client == client]

    def _not_enough(self, request: SliceRequest, without_hosts: Collection[str] = ()) -> NotEnoughDevices:
        names = sorted(island.name for island in self._pool.islands())
        if request.island is not None and names and request.island not in names:
            shown = ", ".join(f"'{name}'" for name in names)
            return NotEnoughDevices(f"there is no island '{request.island}'; the islands are {shown}")
        left_out = f" without hosts {sorted(without_hosts)}" if without_hosts else ""
        free = self._pool.describe_free(request)
        is_shared = request.assignment is Assignment.SHARED
        share = "have those who hold them share them, too" if is_shared else "share them (shared=True)"
        return NotEnoughDevices(
            f"no island has {request}{left_out} free: {free}; ask for fewer, {share}, release or suspend "
            "slices, or add hosts"
        )
