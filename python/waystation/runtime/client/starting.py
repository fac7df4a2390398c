"""Clients of the devices of this process."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping

import jax

from waystation._errors import InvalidInput, WrongType
from waystation.runtime.client.backend import Backend
from waystation.runtime.client.client import Client
from waystation.runtime.client.current import use_client
from waystation.runtime.client.local import LocalCluster
from waystation.runtime.client.pmap import accept_virtual_devices
from waystation.runtime.resources.requests import as_count

_numbers = itertools.count(1)
_FLAG = "xla_force_host_platform_device_count"


def start_local(islands: Mapping[str, int] | None, devices: int | None) -> Client:
    """See `waystation.runtime.local`."""
    if islands is not None and not isinstance(islands, Mapping):
        raise WrongType(
            f"islands must be a dict of device counts by name, such as {{'left': 4}}, not {islands!r:.60}; "
            "give devices=4 for one island"
        )
    wanted = dict(islands) if islands is not None else {"local": 0 if devices is None else devices}
    for name, count in wanted.items():
        if not isinstance(name, str):
            raise WrongType(f"the name of an island must be a string, not {name!r:.60}")
        wanted[name] = as_count(f"the number of devices of island '{name}'", count)
    if not wanted:
        raise InvalidInput("there has to be an island: runtime.local({'left': 4})")
    needed = sum(wanted.values())
    # Takes effect until JAX has looked for its devices; the program may have said it itself.
    if needed > 1 and _FLAG not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", max(needed, jax.config.jax_num_cpu_devices))
    if islands is None and devices is None:
        wanted = {"local": len(jax.devices())}
    number = next(_numbers)
    name = "local" if number == 1 else f"local-{number}"  # the clients of one process can be told apart
    return current(Client(Backend(LocalCluster(wanted).connect(name))))


def current(client: Client) -> Client:
    """Makes a client the one that is meant where none is named."""
    accept_virtual_devices()
    return use_client(client)
