"""Which objects there are, whose they are, and when they end: counted by array, never by shard.

A pure machine of the controller. What drives it: clients (`create` with each dispatch, `retain`, `release`,
`publish`, `attach`, `withdraw`), the dispatch of runs (`use`) and their end (`finish_run`), and deaths
(`drop_client`, `fail_run`, `lose_devices`). What it emits: a `Collect` for each object whose bytes are to be
freed; it goes to the hosts of the object, each of which frees all its shards. A message about an object is
one message over 4 devices and over 2,048.

Invariants: an object has a reference of a client, a name, or a run that uses it, else it is gone; its bytes
are counted once, with its owner, or under its name as soon as it has one; when a client is dropped its bytes
are zero as soon as its runs are done, and what others refer to is theirs. A named object is never donated. An
object that is lost keeps its references, so that everybody who uses it is told why.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NewType

from waystation._errors import Conflict, InvalidInput
from waystation.runtime.devices import DeviceId
from waystation.runtime.errors import NameTaken, ObjectLost, ObjectNotFound
from waystation.runtime.scheduling import RunKey

Handle = NewType("Handle", int)


@dataclass(frozen=True, slots=True)
class Collect:
    """The bytes of an object are to be freed.

    Attributes:
        handle: The object.
        hosts: The hosts that have shards of it, by name.
    """

    handle: Handle
    hosts: tuple[str, ...]


@dataclass(slots=True)
class StoredObject:
    """An array in the memory of devices.

    Attributes:
        handle: Its identity, never given to another.
        owner: The client that its bytes are counted with, unless it has a name.
        label: A name for people.
        shard_bytes: Bytes on each device.
        devices: The devices that have a shard.
        run: The run that makes it, until that is done.
        references: How often each client refers to it.
        users: Runs that have been submitted, use it and are not done: a client may release what it has passed
            on.
        name: The name under which other clients find it.
        failure: Why it is lost; None while it is not.
    """

    handle: Handle
    owner: str
    label: str
    shard_bytes: int
    devices: tuple[DeviceId, ...]
    run: RunKey | None
    references: Counter[str] = field(default_factory=Counter)
    users: set[RunKey] = field(default_factory=set)
    name: str | None = None
    failure: str | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes on all devices; none once it is lost."""
        return 0 if self.failure is not None else self.shard_bytes * len(self.devices)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that have shards of it, by name."""
        return tuple(sorted({device.host for device in self.devices}))


class ObjectTable:
    """All objects of all clients."""

    def __init__(self) -> None:
        self._objects: dict[Handle, StoredObject] = {}
        self._names: dict[str, Handle] = {}
        self._of_run: defaultdict[RunKey, list[Handle]] = defaultdict(list)  # made or used by it
        self._ended: list[Handle] = []
        self._next = 0

    # ---- what there is -------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, handle: Handle) -> StoredObject:
        """An object that can be used, now or when its run is done.

        Raises:
            ObjectNotFound: It is gone.
            ObjectLost: Its bytes were lost.
        """
        found = self._find(handle)
        if found.failure is not None:
            raise ObjectLost(f"object {handle} '{found.label}' was lost: {found.failure}", object=handle)
        return found

    def has(self, handle: Handle) -> bool:
        """Whether there is such an object, lost or not."""
        return handle in self._objects

    def owner(self, handle: Handle) -> str:
        """The client that an object's bytes are counted with.

        Raises:
            ObjectNotFound: It is gone.
        """
        return self._find(handle).owner

    def made_by(self, run: RunKey) -> tuple[Handle, ...]:
        """The objects that a run is going to make."""
        there = [handle for handle in self._of_run.get(run, []) if handle in self._objects]
        return tuple(handle for handle in there if self._objects[handle].run == run)

    def take_ended(self) -> list[Handle]:
        """The objects that have ended since this was asked last, whatever became of their bytes."""
        ended, self._ended = self._ended, []
        return ended

    def client_bytes(self, client: str) -> int:
        """Bytes of a client's own objects on all devices."""
        return sum(
            each.total_bytes for each in self._objects.values() if (each.owner, each.name) == (client, None)
        )

    def named_bytes(self) -> dict[str, int]:
        """Bytes of each named object, whoever uses it."""
        return {name: self._objects[handle].total_bytes for name, handle in sorted(self._names.items())}

    def named(self) -> dict[str, Handle]:
        """The objects that have names."""
        return dict(self._names)

    # ---- what clients do -----------------------------------------------------------------------

    def create(
        self,
        client: str,
        *,
        shard_bytes: int,
        devices: tuple[DeviceId, ...],
        run: RunKey | None = None,
        label: str = "",
    ) -> Handle:
        """Adds an object, which the client refers to once.

        Args:
            client: Whose it is.
            shard_bytes: Bytes on each device.
            devices: The devices that have a shard.
            run: The run that is going to make it; None if it is there.
            label: A name for people.
        """
        handle = Handle(self._next)
        self._next += 1
        made = StoredObject(handle, client, label, shard_bytes, devices, run)
        made.references[client] = 1
        self._objects[handle] = made
        if run is not None:
            self._of_run[run].append(handle)
        return handle

    def use(self, handles: Iterable[Handle], run: RunKey) -> None:
        """A run is submitted that uses objects: they stay until it is done, whoever releases them.

        Raises:
            ObjectNotFound: One of them is gone.
            ObjectLost: The bytes of one were lost.
        """
        for found in [self.get(handle) for handle in handles]:
            found.users.add(run)
            self._of_run[run].append(found.handle)

    def retain(self, handle: Handle, client: str) -> None:
        """A client refers to an object once more.

        Raises:
            ObjectNotFound: It is gone.
        """
        self._find(handle).references[client] += 1

    def release(self, handle: Handle, client: str) -> list[Collect]:
        """A client refers to an object once less.

        Raises:
            ObjectNotFound: It is gone.
            InvalidInput: The client does not refer to it.
        """
        found = self._find(handle)
        if not found.references[client]:
            raise InvalidInput(
                f"client '{client}' does not refer to object {handle}: release each reference once"
            )
        found.references[client] -= 1
        return self._settle(found)

    def donate(self, handle: Handle, client: str) -> StoredObject:
        """A run takes over the bytes of an object, which ends here; nothing is to be collected.

        Raises:
            ObjectNotFound: It is gone.
            ObjectLost: Its bytes were lost.
            Conflict: It has a name, or another client refers to it.
        """
        found = self.get(handle)
        others = sorted(other for other, times in found.references.items() if times and other != client)
        if found.name is not None or others:
            users = (
                f"is shared as '{found.name}'"
                if found.name is not None
                else f"is used by client '{others[0]}'"
            )
            raise Conflict(f"object {handle} '{found.label}' cannot be donated: it {users}; copy it first")
        del self._objects[handle]
        self._ended.append(handle)
        return found

    def publish(self, handle: Handle, name: str) -> None:
        """Gives an object a name: it is read-only, shared by all who attach it, and outlives its client.

        Raises:
            ObjectNotFound: It is gone.
            ObjectLost: Its bytes were lost.
            InvalidInput: It has not been made yet, so others that wait for it could be ordered before it.
            NameTaken: There is another object of that name.
        """
        found = self.get(handle)
        if found.run is not None:
            raise InvalidInput(f"object {handle} cannot be shared as '{name}' before {found.run} has made it")
        if name in self._names or found.name is not None:
            taken = (
                f"object {self._names[name]} has it"
                if name in self._names
                else f"it is '{found.name}' already"
            )
            raise NameTaken(f"object {handle} cannot be shared as '{name}': {taken}; withdraw that first")
        self._names[name] = handle
        found.name = name

    def attach(self, name: str, client: str) -> Handle:
        """A client refers to the object of a name.

        Raises:
            ObjectNotFound: There is none.
        """
        if name not in self._names:
            raise ObjectNotFound(f"no object is shared as '{name}'; there are {sorted(self._names)}")
        handle = self._names[name]
        self.retain(handle, client)
        return handle

    def withdraw(self, name: str) -> list[Collect]:
        """Takes a name back; the object ends with the last reference to it.

        Raises:
            ObjectNotFound: There is no object of that name.
        """
        if name not in self._names:
            raise ObjectNotFound(f"no object is shared as '{name}'; there are {sorted(self._names)}")
        found = self._objects[self._names.pop(name)]
        found.name = None
        return self._settle(found)

    # ---- what happens --------------------------------------------------------------------------

    def finish_run(self, run: RunKey) -> list[Collect]:
        """The objects that a run makes are there, and it uses others no more."""
        return self._end_run(run)

    def fail_run(self, run: RunKey, why: str) -> list[Collect]:
        """A run has failed: what it was to make is lost.

        Args:
            run: The run.
            why: What went wrong, naming program, node and host.
        """
        made = [self._objects[handle] for handle in self._of_run[run] if handle in self._objects]
        lost = self._lose([found for found in made if found.run == run], why)
        return lost + self._end_run(run)

    def lose_devices(self, devices: frozenset[DeviceId], why: str) -> list[Collect]:
        """Devices have lost their memory: every object with a shard there is lost as a whole."""
        return self._lose([found for found in self._objects.values() if devices & set(found.devices)], why)

    def drop_client(self, client: str) -> list[Collect]:
        """A client has died: its references end. What another refers to becomes that one's."""
        collected = []
        for found in list(self._objects.values()):
            if found.references.pop(client, 0) or found.owner == client:
                collected += self._settle(found)
        return collected

    # ---- how ------------------------------------------------------------------------------------

    def _find(self, handle: Handle) -> StoredObject:
        found = self._objects.get(handle)
        if found is None:
            raise ObjectNotFound(
                f"there is no object {handle}: its last reference was released, or it was donated"
            )
        return found

    def _end_run(self, run: RunKey) -> list[Collect]:
        collected = []
        for handle in self._of_run.pop(run, []):
            found = self._objects.get(handle)
            if found is not None:
                found.users.discard(run)
                found.run = None if found.run == run else found.run
                collected += self._settle(found)
        return collected

    def _settle(self, found: StoredObject) -> list[Collect]:
        """Ends an object that nobody needs, or finds it another owner if its own does not refer to it."""
        if found.references[found.owner]:
            return []  # its owner holds it, whoever else does
        holders = sorted(client for client, times in found.references.items() if times)
        if not holders and found.name is None and not found.users and found.run is None:
            del self._objects[found.handle]
            self._ended.append(found.handle)
            return [Collect(found.handle, found.hosts)] if found.failure is None else []
        if holders and found.owner not in holders:
            found.owner = holders[0]
        return []

    def _lose(self, objects: list[StoredObject], why: str) -> list[Collect]:
        lost = [found for found in objects if found.failure is None]
        for found in lost:
            found.failure, found.run = why, None
        return [Collect(found.handle, found.hosts) for found in lost]
