"""Errors of hosts and islands, which say more than their kind."""

from __future__ import annotations

from waystation._errors import InvalidInput, NotFound, Unavailable


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
