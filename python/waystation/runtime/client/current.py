"""The client that is meant where none is named, as in figure 2 of the Pathways paper."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from waystation._errors import InvalidInput
from waystation.runtime.client.slices import DeviceSet

if TYPE_CHECKING:
    from waystation.runtime.client.client import Client

_current: list[weakref.ref[Client]] = []


def use_client(client: Client) -> Client:
    """Makes a client the one that is meant; those before it are meant again when it is gone or closed."""
    _current.append(weakref.ref(client))
    return client


def current_client() -> Client:
    """The client that is meant.

    Raises:
        InvalidInput: There is none.
    """
    while _current:
        client = _current[-1]()
        if client is not None and not client.is_closed:
            return client
        _current.pop()
    raise InvalidInput(
        "there is no client: start one with runtime.local(devices=8), or with start_client() of a cluster"
    )


def make_virtual_device_set() -> DeviceSet:
    """A set of slices of the client that is meant."""
    return current_client().make_virtual_device_set()
