"""Errors of the runtime that say more than their kind."""

from __future__ import annotations

from waystation._errors import Conflict, InvalidInput, NotFound, Unavailable


class NotEnoughDevices(Unavailable):
    """No island has free devices for a slice; the message says what is free."""


class NoSuchSlice(NotFound):
    """There is no slice of that number, or it has been released."""


class SliceNotPlaced(Unavailable):
    """A slice has no physical devices now: it is suspended, or waits for devices."""


class InvalidProgram(InvalidInput):
    """A program breaks a rule of its form; the context has `program` and `node`."""


class ObjectNotFound(NotFound):
    """There is no object of that handle or name, or it has been freed."""


class ObjectLost(Unavailable):
    """An object's bytes were lost; the message names program, node and host."""


class NameTaken(Conflict):
    """Another object has been published under that name."""


class DeviceMemoryExceeded(Unavailable):
    """A program can never have the memory that it needs; the message says who holds what."""


class TracedValueRead(InvalidInput, TypeError):
    """The elements of a value were asked for while its program is traced, when it has none."""


class HostLost(Unavailable):
    """A host died or was stuck, and its island with it.

    The context has `program` and `computation` (where a call was lost), `island`, `host`, `device`, `epoch`
    and `process_id`. The island is built anew, in the next epoch, unless it was too often.
    """


class IslandFailed(Unavailable):
    """An island could not be built, or was lost more often than it may be rebuilt."""


class NoSuchIsland(NotFound):
    """The cluster has no island of that name."""


class BufferNotFound(NotFound):
    """A host has no buffer of that handle: it was never made, was freed, or an earlier epoch of the island
    had it."""


class FunctionNotFound(NotFound):
    """A function was not registered at a host before it was to be called."""


class ComputationFailed(InvalidInput, RuntimeError):
    """A function could not be compiled or called; JAX's own words are in the message."""
