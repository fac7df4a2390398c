"""Which hosts keep copies of whose shards.

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

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

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
            f"{copies} copies of each shard cannot be kept by {host_count} hosts; ask for 1 to {host_count}"
        )
    named = None if domains is None else tuple(domains)
    in_order = Placement(copies, _consecutive_groups(host_count, copies), named)
    if named is None or in_order.least_domains == copies:
        return in_order
    dealt = [
        Placement(copies, _deal(named, sizes, copies), named) for sizes in _group_sizes(host_count, copies)
    ]
    # The first of the best: they begin with those that have the fewest different sets of holders.
    return max([in_order, *dealt], key=lambda found: (found.least_domains, found.total_domains))


def _consecutive_groups(host_count: int, copies: int) -> tuple[tuple[int, ...], ...]:
    last = (host_count // copies - 1) * copies
    groups = [tuple(range(first, first + copies)) for first in range(0, last, copies)]
    return (*groups, tuple(range(last, host_count)))


def _group_sizes(host_count: int, copies: int) -> Iterator[list[int]]:
    """Sizes of groups, rings last: what is left over is in one ring at first, then in more and more."""
    count, left_over = divmod(host_count, copies)
    for most in range(max(left_over, 1), 0, -1):
        extras = [most] * (left_over // most) + [left_over % most] * (left_over % most > 0)
        if len(extras) <= count:
            yield [copies] * (count - len(extras)) + [copies + extra for extra in sorted(extras)]


def _deal(domains: Sequence[str], sizes: Sequence[int], copies: int) -> tuple[tuple[int, ...], ...]:
    """Deals the hosts to groups of these sizes, one domain after the other, the largest first."""
    hosts_of: dict[str, list[int]] = {}
    for host, domain in enumerate(domains):
        hosts_of.setdefault(domain, []).append(host)
    table = _Table(sizes, copies)
    for hosts in sorted(hosts_of.values(), key=lambda hosts: (-len(hosts), hosts[0])):
        table.deal(hosts)
    return tuple(
        tuple(sorted(members)) if len(members) == copies else _arrange(members, domains)
        for members in table.groups
    )


class _Table:
    """Groups that are being filled.

    A host goes where it puts its domain into the most sets of holders that had none of it: the first of a
    domain into every group, then a second into each ring, where one cannot be in all sets. The others have no
    such use and go where most room is left, so that there is a place for each later domain in as many groups
    as can be. Among groups in which a host is of the same use, most room decides too: for domains of at most
    as many hosts as there are groups, that is Ryser's construction of a matrix of zeros and ones with given
    sums, which finds groups without repeated domains if there are any.

    Attributes:
        groups: The members so far, those of one domain side by side.
    """

    def __init__(self, sizes: Sequence[int], copies: int) -> None:
        self.groups: list[list[int]] = [[] for _ in sizes]
        self._room = list(sizes)
        self._rings = [number for number, size in enumerate(sizes) if size > copies]
        # By room, then by number. An entry whose room is no longer that of its group is passed over.
        self._roomiest = [(-size, number) for number, size in enumerate(sizes)]
        heapq.heapify(self._roomiest)

    def deal(self, hosts: Sequence[int]) -> None:
        """Deals the hosts of a domain."""
        waiting = iter(hosts)
        firsts = [self._take_roomiest() for _ in range(min(len(hosts), self._open_count()))]
        for number in firsts:
            self._put(next(waiting), number)
        left = len(hosts) - len(firsts)
        rings = sorted((ring for ring in self._rings if self._room[ring]), key=lambda ring: -self._room[ring])
        for number in rings[:left]:
            self._put(next(waiting), number)
        for host in waiting:
            self._put(host, self._take_roomiest())

    def _open_count(self) -> int:
        return sum(room > 0 for room in self._room)

    def _take_roomiest(self) -> int:
        while True:
            room, number = heapq.heappop(self._roomiest)
            if -room == self._room[number]:
                return number

    def _put(self, host: int, number: int) -> None:
        self.groups[number].append(host)
        self._room[number] -= 1
        if self._room[number]:
            heapq.heappush(self._roomiest, (-self._room[number], number))


def _arrange(members: Sequence[int], domains: Sequence[str]) -> tuple[int, ...]:
    """The order of a ring: a domain that has several of its members is met by every set of holders.

    A set of holders lacks fewer than half of the members, all neighbours. Members of one domain are put half
    a ring apart, or one place less, so never all of them among those.
    """
    size, half = len(members), len(members) // 2
    counts = Counter(domains[host] for host in members)
    # Sorting is stable, so members of one domain stay side by side.
    in_turn = sorted(members, key=lambda host: (-counts[domains[host]], domains[host]))
    ring = [0] * size
    for turn, host in enumerate(in_turn):
        place_in_ring = turn * half % size if size % 2 else turn // 2 + turn % 2 * half
        ring[place_in_ring] = host
    return tuple(ring)
