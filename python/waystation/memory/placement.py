"""Which hosts keep copies of whose shards: the plan that the agents follow, which they make themselves.

The strategy is that of GEMINI (Wang et al., SOSP 2023): hosts form groups of as many as there are copies, and
in a group everybody keeps the shards of all; fewer distinct sets of holders mean fewer combinations of losses
that take every copy of a shard. Hosts that are left over join the last group, which then is a *ring*: each
keeps its own shard and those of the members before it. Where hosts have failure domains (a rack, a power
feed), hosts are dealt to the groups so that the members of each are of different domains.

Invariants of a `Placement`: every shard has as many copies as were asked for, on different hosts, one of them
its owner's; every host holds that many shards, no more. What `place` promises of domains beyond that, for N
hosts and m copies:

- No domain has more than N // m hosts: the copies of every shard are in m different domains. Where one has
  more, no placement with the first invariant does that.
- m divides N: the number of domains that a shard is in, of the shard with the fewest and summed over all, is
  the greatest of all placements with that invariant, however uneven the domains are.
- N - ceil(N / m) or fewer hosts are in the largest domain: any one domain can be lost. Where more are, no
  placement with that invariant survives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from waystation import _native
from waystation._arguments import INTEGER, require_type
from waystation.errors import InvalidInput


@dataclass(frozen=True)
class Placement:
    """A plan of who keeps what.

    Attributes:
        copies: Of each shard, its owner's included.
        groups: The hosts, each in one group. Of a group of as many members as there are copies, everybody
            keeps the shards of all; in a larger one, a ring, a shard is kept by its owner and the next
            members.
        domains: The failure domain of each host; None if each host is its own.
    """

    copies: int
    groups: tuple[tuple[int, ...], ...]
    domains: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        members = [host for group in self.groups for host in group]
        if sorted(members) != list(range(len(members))) or not members:
            raise InvalidInput("every host from 0 on must be in one group, and in one only")
        if self.copies < 1 or any(len(group) < self.copies for group in self.groups):
            raise InvalidInput(f"{self.copies} copies need groups of at least one host and as many as copies")
        if self.domains is not None and len(self.domains) != len(members):
            raise InvalidInput(f"there are {len(members)} hosts, and domains of {len(self.domains)}")

    @cached_property
    def host_count(self) -> int:
        """The number of hosts."""
        return sum(map(len, self.groups))

    @cached_property
    def ring_count(self) -> int:
        """How many of the groups are rings."""
        return sum(len(group) > self.copies for group in self.groups)

    def holders(self, owner: int) -> tuple[int, ...]:
        """The hosts that keep the shard of a host: itself, then its peers."""
        return self._neighbours(owner, 1)

    def owners(self, holder: int) -> tuple[int, ...]:
        """The hosts whose shards a host keeps: itself, then the others."""
        return self._neighbours(holder, -1)

    def domain_of(self, host: int) -> str:
        """The failure domain of a host."""
        return str(host) if self.domains is None else self.domains[host]

    def domain_set(self, owner: int) -> frozenset[str]:
        """The domains in which the copies of a host's shard are."""
        return frozenset(map(self.domain_of, self.holders(owner)))

    @cached_property
    def least_domains(self) -> int:
        """The number of domains that every shard is at least in; any fewer can be lost."""
        return min(self._domain_counts)

    @cached_property
    def total_domains(self) -> int:
        """The numbers of domains that the shards are in, summed."""
        return sum(self._domain_counts)

    @cached_property
    def _domain_counts(self) -> list[int]:
        if self.domains is None:
            return [self.copies] * self.host_count
        return [len(self.domain_set(owner)) for owner in range(self.host_count)]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {
            host: (number, position)
            for number, group in enumerate(self.groups)
            for position, host in enumerate(group)
        }

    def _neighbours(self, host: int, direction: int) -> tuple[int, ...]:
        number, position = self._places[host]
        group = self.groups[number]
        return tuple(group[(position + direction * step) % len(group)] for step in range(self.copies))


def place(host_count: int, copies: int, domains: Sequence[str] | None = None) -> Placement:
    """Plans which hosts keep copies of whose shards.

    Hosts stay in their order, as GEMINI has it, unless other groups put the copies into more domains. What is
    left over joins one group if domains allow it, else as few as they allow.

    Args:
        host_count: How many hosts there are.
        copies: Of each shard, its owner's included.
        domains: The failure domain of each host; by default each host is its own.

    Raises:
        InvalidInput: There are fewer hosts than copies, no copies, or not one domain for each host.
    """
    require_type("host_count", host_count, INTEGER, "an integer")
    require_type("copies", copies, INTEGER, "an integer")
    require_type("domains", domains, (Sequence, type(None)), "a list of the domain of each host, or None")
    if not 1 <= copies <= host_count:
        raise InvalidInput(
            f"{copies} copies of each shard need as many hosts, and there are {host_count}; ask for 1 to "
            f"{host_count} copies, or for more hosts"
        )
    named = None if domains is None else tuple(domains)
    if named is not None and len(named) != host_count:
        raise InvalidInput(f"there are {host_count} hosts, and domains of {len(named)}")
    groups = _native.place_hosts(list(map(str, range(host_count))) if named is None else named, copies)
    return Placement(copies, tuple(map(tuple, groups)), named)
