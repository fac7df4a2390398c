"""A gang: the hosts of one epoch of an island. All of them are built, or none; all of them end together.

Building, and what can fail: the actors are placed where the island has its places; each says which process it
is; the first finds an address for the coordination service of their world; all join it. Whichever of that
fails, the hosts are killed, and it is tried again with others: also when another process has taken the
address meanwhile.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from waystation._errors import Unavailable
from waystation.runtime.cluster.status import PLACE, IslandRequest
from waystation.runtime.control.credentials import Role, issue, key_between_hosts
from waystation.runtime.control.listener import End
from waystation.runtime.control.listener import Listener as Connections
from waystation.runtime.errors import IslandFailed
from waystation.runtime.hosts.answers import unwrap
from waystation.runtime.hosts.host import CONTROL, Description
from waystation.runtime.hosts.world import Process, World, name_in

ATTEMPTS = 3
PLACEMENT_TIMEOUT_S = 60.0
_CALLS_AT_ONCE = 1000
_CONTROL_CALLS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Member:
    """A host of a gang.

    Attributes:
        name: Its name.
        actor: Its actor.
        description: What it says of itself; None until it has.
        end: Its connection; None until it has one.
    """

    name: str
    actor: Any
    description: Description | None = None
    end: End | None = None

    def control(self, method: str) -> Any:
        """Calls a method that is to answer whatever the host is doing."""
        return getattr(self.actor, method).options(concurrency_group=CONTROL).remote()

    @property
    def process_id(self) -> int:
        """Its process; 0 if it is not known."""
        return 0 if self.description is None else self.description.process.process_id

    @property
    def devices(self) -> tuple[str, ...]:
        """Its devices."""
        return () if self.description is None else self.description.devices


def resources_of(request: IslandRequest) -> dict[str, float]:
    """What Ray reserves for a host."""
    place = PLACE if ray.cluster_resources().get(PLACE) else "CPU"
    taken: dict[str, float] = {place: 1}
    if request.kind == "gpu":
        taken["GPU"] = request.devices_per_host
    return taken


async def reserve(request: IslandRequest, timeout_s: float = PLACEMENT_TIMEOUT_S) -> PlacementGroup:
    """Places for the hosts of an island, on different machines where that is possible.

    Raises:
        Unavailable: The cluster has no room.
    """
    taken = resources_of(request)
    group = placement_group([dict(taken)] * request.hosts, strategy="SPREAD", name=request.name)
    if await asyncio.to_thread(group.wait, timeout_s):
        return group
    ray.util.remove_placement_group(group)
    each = ", ".join(f"{count:g} {name}" for name, count in taken.items())
    free = ray.available_resources()
    left = ", ".join(f"{free.get(name, 0):g} {name}" for name in taken)
    raise Unavailable(
        f"there is no room for island '{request.name}': each of its {request.hosts} hosts takes {each}, and "
        f"the cluster has {left} left; remove an island, or add machines"
    )


async def build(
    request: IslandRequest, epoch: int, group: PlacementGroup, connections: Connections, secret: bytes
) -> list[Member]:
    """The hosts of an epoch.

    Args:
        request: The island.
        epoch: The epoch.
        group: Places for the hosts.
        connections: Where they connect to.
        secret: Of the cluster.

    Raises:
        IslandFailed: They could not be built, however often it was tried.
    """
    failed: Exception | None = None
    for attempt in range(ATTEMPTS):
        members = [_member(request, epoch, attempt, group, index) for index in range(request.hosts)]
        try:
            return await _assemble(request, members, epoch, attempt, connections, secret)
        except Exception as error:
            failed = error
            # Who has not said which process it is has no devices yet, and ends when it is told.
            end(members)
    raise IslandFailed(
        f"island '{request.name}' could not be built in {ATTEMPTS} attempts; in the last one: {failed}",
        island=request.name,
    ) from failed


def end(members: Iterable[Member]) -> None:
    """Kills hosts, also those that are stopped or hang."""
    here = ray.get_runtime_context().get_node_id()
    for member in members:
        ray.kill(member.actor)
        if member.description is None:
            continue
        if member.description.node == here:
            member.description.process.kill()
        else:
            where = NodeAffinitySchedulingStrategy(member.description.node, soft=True)
            there = ray.remote(_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
            there.remote(member.description.process)


def _kill(process: Process) -> None:
    process.kill()


def _member(request: IslandRequest, epoch: int, attempt: int, group: PlacementGroup, index: int) -> Member:
    module, _, name = request.host_class.partition(":")
    host_class = getattr(importlib.import_module(module), name)
    actor_class = ray.remote(concurrency_groups={CONTROL: _CONTROL_CALLS_AT_ONCE})(host_class)
    taken = resources_of(request)
    again = f", attempt {attempt + 1}" if attempt else ""
    actor = actor_class.options(
        # Ray does not give a name again at once, so each epoch has its own.
        name=f"{request.host_name(index)}, epoch {epoch}{again}",
        num_cpus=taken.get("CPU", 0),
        num_gpus=taken.get("GPU", 0),
        resources={PLACE: taken[PLACE]} if PLACE in taken else None,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        max_concurrency=_CALLS_AT_ONCE,
        max_restarts=0,
    ).remote(request.host_name(index), epoch)
    return Member(request.host_name(index), actor)


async def _assemble(
    request: IslandRequest,
    members: list[Member],
    epoch: int,
    attempt: int,
    connections: Connections,
    secret: bytes,
) -> list[Member]:
    descriptions = await _all(member.actor.describe.remote() for member in members)
    # In place, so that whoever ends these knows their processes.
    members[:] = [
        replace(member, description=description)
        for member, description in zip(members, descriptions, strict=True)
    ]
    coordinator = ""
    if len(members) > 1:
        coordinator = (await _all([members[0].actor.free_address.remote(attempt)]))[0]
    joined = await _all(
        member.actor.join.remote(
            World(
                coordinator,
                index,
                len(members),
                request.devices_per_host,
                request.kind,
                key_between_hosts(secret),
                connections.address,
                issue(secret, Role.HOST, name_in(epoch, member.name)),
            )
        )
        for index, member in enumerate(members)
    )
    return [
        replace(
            member,
            description=replace(description, devices=devices, transport=transport),
            end=connections.end(name_in(epoch, member.name)),
        )
        for member, description, (devices, transport) in zip(members, descriptions, joined, strict=True)
    ]


async def _all(references: Iterable[Awaitable[Any]]) -> list[Any]:
    """What all have answered; raises as soon as one has failed."""

    async def value(reference: Awaitable[Any]) -> Any:
        return unwrap(await reference)

    return list(await asyncio.gather(*map(value, references)))
