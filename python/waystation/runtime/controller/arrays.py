"""The arrays of clients: what their handles stand for, where these are, and why they are not.

A client names its arrays by handles of its own; here each becomes an object of the `ObjectTable`, which
counts who refers to it. An array lies where its slice was when it was made; when the slice has moved since,
the controller brings it there before it is used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from waystation._errors import InvalidInput, WaystationError
from waystation.runtime.devices import DeviceId
from waystation.runtime.errors import ObjectNotFound, SliceNotPlaced
from waystation.runtime.ir import Value
from waystation.runtime.objects import BytesByDevice, Collect, Handle, ObjectTable
from waystation.runtime.resources import Placement
from waystation.runtime.scheduling import RunKey

# More than there are works between the failure of a run and the end of what uses its results.
_MOST_FAILURES = 10_000


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of a client.

    Attributes:
        handle: The object.
        value: Its shape, dtype and sharding; its slice is the one that it was made on.
        placement: Where that was.
        program: The program that makes it, for people.
        run: The run that makes it.
        suspended: What it was saved as, if it was taken off its devices; see `suspensions`.
    """

    handle: Handle
    value: Value
    placement: Placement
    program: str
    run: RunKey
    suspended: object | None = None

    def on(self, host: str) -> BytesByDevice:
        """Its bytes on each device of a host."""
        return {
            device.index: self.value.shard_bytes for device in self.placement.devices if device.host == host
        }

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that have shards of it."""
        return self.placement.hosts


class Arrays:
    """Arrays of all clients.

    Attributes:
        table: Who refers to which object.
    """

    def __init__(self) -> None:
        self.table: ObjectTable = ObjectTable()
        self._handles: dict[str, dict[int, Handle]] = {}
        self._stored: dict[Handle, StoredArray] = {}
        self._errors: dict[Handle, WaystationError] = {}
        self._failures: dict[RunKey, WaystationError] = {}  # of the last runs that have failed
        self._left: list[object] = []  # suspended states, once for each array that is not in them any more

    def add_client(self, client: str) -> None:
        """A client is there."""
        self._handles[client] = {}

    def drop_client(self, client: str) -> list[Collect]:
        """A client is gone."""
        self._handles.pop(client, None)
        return self.forget(self.table.drop_client(client))

    def create(
        self, client: str, own: int | None, value: Value, placement: Placement, run: RunKey, program: str
    ) -> StoredArray:
        """An array that a run is going to make.

        Args:
            client: Whose it is.
            own: The client's handle; None if it has none.
            value: How it lies on its slice.
            placement: Where that is.
            run: The run.
            program: Its program, for people.

        Raises:
            InvalidInput: The client has used that handle before.
        """
        if own is not None and own in self._handles[client]:
            raise InvalidInput(f"client '{client}' has an array {own} already; give each a handle of its own")
        handle = self.table.create(
            client, shard_bytes=value.shard_bytes, devices=placement.devices, run=run, label=program
        )
        made = self._stored[handle] = StoredArray(handle, value, placement, program, run)
        if own is not None:
            self._handles[client][own] = handle
        return made

    def fail(self, client: str, own: int, error: WaystationError, run: RunKey) -> None:
        """An array that will never be made."""
        if own in self._handles.get(client, {own: None}):
            return
        handle = self.table.create(client, shard_bytes=0, devices=(), run=run)
        self._handles[client][own] = handle
        self.fail_run(run, error)

    def handle(self, client: str, own: int) -> Handle:
        """The object of a client's handle.

        Raises:
            ObjectNotFound: There is none.
        """
        found = self._handles[client].get(own)
        if found is None:
            raise ObjectNotFound(
                f"client '{client}' has no array {own}: it was never made, was freed, or was donated to a "
                "program"
            )
        return found

    def get(self, client: str, own: int) -> StoredArray:
        """An array that is there, or is going to be.

        Raises:
            ObjectNotFound: There is none.
            WaystationError: Why it is not there.
        """
        handle = self.handle(client, own)
        if handle in self._errors:
            raise copy.copy(self._errors[handle])
        return self._stored[handle]

    def check(self, client: str, own: int) -> None:
        """Raises why an array is not there, if it is not."""
        handle = self.handle(client, own)
        if handle in self._errors:
            raise copy.copy(self._errors[handle])

    def of_client(self, client: str) -> dict[int, StoredArray]:
        """The arrays of a client, by its own handles; those that will never be made are left out."""
        owns = self._handles.get(client, {})
        return {own: self._stored[handle] for own, handle in owns.items() if handle in self._stored}

    def suspend(self, client: str, own: int, suspended: object) -> list[Collect]:
        """An array is saved, and has no devices any more."""
        before = self._stored[self._handles[client][own]]
        handle = self.table.create(client, shard_bytes=0, devices=(), label=before.program)
        placement = replace(before.placement, devices=())
        after = self._stored[handle] = replace(
            before, handle=handle, placement=placement, suspended=suspended
        )
        return self.replace(client, own, after)

    def take_left_states(self) -> list[object]:
        """The suspended state of each array that has ended, or come back, since this was asked last."""
        left, self._left = self._left, []
        return left

    def is_made(self, handle: Handle) -> bool:
        """Whether nothing is to be waited for; raises nothing."""
        return handle in self._errors or self.table.get(handle).run is None

    def error(self, handle: Handle) -> WaystationError | None:
        """Why an object is not there."""
        return self._errors.get(handle)

    def failure_of(self, run: RunKey) -> WaystationError | None:
        """Why a run has failed; None if it has not, or long ago."""
        return self._failures.get(run)

    def replace(self, client: str, own: int, by: StoredArray) -> list[Collect]:
        """A client's handle stands for another object from now on."""
        before = self._handles[client][own]
        self._handles[client][own] = by.handle
        return self.forget(self.table.release(before, client))

    def donate(self, client: str, own: int) -> StoredArray:
        """A run takes an array over.

        Raises:
            Conflict: Others use it.
        """
        handle = self.handle(client, own)
        self.table.donate(handle, client)
        del self._handles[client][own]
        return self._stored.pop(handle)

    def free(self, client: str, handles: Iterable[int]) -> list[Collect]:
        """A client gives arrays up; those that it does not have are passed over."""
        collected: list[Collect] = []
        for own in handles:
            handle = self._handles[client].pop(own, None)
            if handle is not None:
                collected += self.table.release(handle, client)
        return self.forget(collected)

    def attach(self, client: str, name: str, own: int) -> StoredArray:
        """A client refers to a shared array.

        Raises:
            ObjectNotFound: There is none of that name.
        """
        handle = self.table.attach(name, client)
        self._handles[client][own] = handle
        return self._stored[handle]

    def finish_run(self, run: RunKey) -> list[Collect]:
        """What a run makes is there."""
        return self.forget(self.table.finish_run(run))

    def fail_run(self, run: RunKey, error: WaystationError) -> list[Collect]:
        """What a run was to make will not be there."""
        while len(self._failures) >= _MOST_FAILURES:
            del self._failures[next(iter(self._failures))]
        self._failures[run] = error
        made = self.table.made_by(run)
        collected = self.table.fail_run(run, error.message)
        self._errors.update(dict.fromkeys(made, error))
        return self.forget(collected)

    def lose_devices(
        self, devices: Iterable[DeviceId], why: str, error_of: Callable[[str], WaystationError]
    ) -> None:
        """Devices have lost their memory.

        Args:
            devices: Which.
            why: What has happened.
            error_of: The error of an array, from its program.
        """
        lost = frozenset(devices)
        for handle, stored in self._stored.items():
            if handle not in self._errors and lost & set(stored.placement.devices):
                self._errors[handle] = error_of(stored.program)
        self.forget(self.table.lose_devices(lost, why))

    def forget(self, collected: list[Collect]) -> list[Collect]:
        """Drops what is said of objects that are no more; returns those that hosts are to free."""
        for handle in self.table.take_ended():
            gone = self._stored.pop(handle, None)
            self._errors.pop(handle, None)
            if gone is not None and gone.suspended is not None:
                self._left.append(gone.suspended)
        return collected

    def end(self, arrays: Iterable[StoredArray]) -> None:
        """Forgets what a run has made for itself; hosts have freed it, or are told otherwise."""
        for each in arrays:
            if self.table.has(each.handle) and self.error(each.handle) is None:
                self.table.donate(each.handle, self.table.owner(each.handle))
            elif self.table.has(each.handle):
                self.table.release(each.handle, self.table.owner(each.handle))
        self.forget([])

    def slices_of_names(self) -> frozenset[int]:
        """The slices on which shared arrays lie: these stay when their clients leave."""
        return frozenset(
            self._stored[handle].value.slice
            for handle in self.table.named().values()
            if handle in self._stored
        )


def require_placed(stored: StoredArray, own: int, client: str) -> StoredArray:
    """An array that hosts have.

    Raises:
        SliceNotPlaced: It is in suspended state.
    """
    if stored.suspended is not None:
        raise SliceNotPlaced(
            f"array {own} is on slice {stored.value.slice}, which is suspended; resume client '{client}' "
            "to read or use it"
        )
    return stored
