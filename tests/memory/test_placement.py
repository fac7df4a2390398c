"""Plans of who keeps what: GEMINI's groups and rings, and what is promised of failure domains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation.errors import InvalidInput
from waystation.memory import Placement, place


def sizes_of_domains(host_count: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """Every way to divide hosts into domains, largest first."""
    if host_count == 0:
        yield ()
        return
    for first in range(min(host_count, most or host_count), 0, -1):
        for others in sizes_of_domains(host_count - first, first):
            yield (first, *others)


def in_blocks(sizes: Sequence[int]) -> list[str]:
    return [f"domain{number}" for number, size in enumerate(sizes) for _ in range(size)]


def check_copies(placement: Placement) -> None:
    """Every shard has its copies, on different hosts, and no host keeps more shards than that."""
    kept: Counter[int] = Counter()
    for owner in range(placement.host_count):
        holders = placement.holders(owner)
        assert holders[0] == owner
        assert len(set(holders)) == placement.copies
        kept.update(holders)
        for holder in holders:
            assert owner in placement.owners(holder)
    assert set(kept.values()) == {placement.copies}


def check_promises(placement: Placement, sizes: Sequence[int]) -> None:
    """What the module says of domains of these sizes."""
    hosts, copies = sum(sizes), placement.copies
    most_in_all = sum(min(hosts, copies * size) for size in sizes)
    if max(sizes) <= hosts // copies:
        assert placement.least_domains == copies
    else:
        assert placement.least_domains < copies
    if hosts % copies == 0:
        assert placement.total_domains == most_in_all
        assert placement.least_domains == most_in_all // hosts
    if copies > 1:
        assert (placement.least_domains > 1) == (max(sizes) <= hosts - -(-hosts // copies))


def all_placements(host_count: int, copies: int) -> Iterator[list[tuple[int, ...]]]:
    """Every way to keep each shard on its owner and others such that no host keeps more than `copies`."""

    def extend(owner: int, kept: list[int], chosen: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        if owner == host_count:
            yield chosen
            return
        others = [host for host in range(host_count) if host != owner and kept[host] < copies]
        for peers in combinations(others, copies - 1):
            grown = [count + (host in peers) for host, count in enumerate(kept)]
            yield from extend(owner + 1, grown, [*chosen, (owner, *peers)])

    yield from extend(0, [1] * host_count, [])


def test_groups_as_gemini_has_them() -> None:
    assert place(16, 2).groups == tuple((host, host + 1) for host in range(0, 16, 2))
    assert place(16, 4).groups == tuple(tuple(range(host, host + 4)) for host in range(0, 16, 4))
    assert place(5, 2).groups == ((0, 1), (2, 3, 4))
    mixed = place(7, 3)
    assert mixed.groups == ((0, 1, 2), (3, 4, 5, 6))
    assert [mixed.holders(host) for host in (1, 3, 6)] == [(1, 2, 0), (3, 4, 5), (6, 3, 4)]
    assert mixed.owners(3) == (3, 6, 5)
    assert (mixed.ring_count, place(8, 4).ring_count) == (1, 0)


def test_every_number_of_hosts_and_copies() -> None:
    for hosts in range(1, 17):
        for copies in range(1, hosts + 1):
            placement = place(hosts, copies)
            check_copies(placement)
            assert placement.ring_count == (hosts % copies > 0)


@pytest.mark.parametrize(("hosts", "copies"), [(4, 2), (5, 2), (6, 2), (4, 3), (5, 3), (4, 4)])
def test_no_placement_puts_copies_into_more_domains(hosts: int, copies: int) -> None:
    for sizes in sizes_of_domains(hosts):
        domains = in_blocks(sizes)
        counts = [
            [len({domains[holder] for holder in holders}) for holders in placement]
            for placement in all_placements(hosts, copies)
        ]
        found = place(hosts, copies, domains)
        assert found.least_domains == max(map(min, counts)), sizes
        assert found.total_domains == max(map(sum, counts)), sizes


@pytest.mark.parametrize("hosts", range(2, 15))
def test_all_sizes_of_domains(hosts: int) -> None:
    for sizes in sizes_of_domains(hosts):
        for copies in range(1, min(hosts, 6) + 1):
            placement = place(hosts, copies, in_blocks(sizes))
            check_copies(placement)
            check_promises(placement, sizes)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=90), st.integers(1, 7))
def test_uneven_domains_in_any_order(numbers: list[int], copies: int) -> None:
    copies = min(copies, len(numbers))
    domains = [f"rack {number}" for number in numbers]
    placement = place(len(domains), copies, domains)
    check_copies(placement)
    check_promises(placement, [*Counter(domains).values()])
    assert place(len(domains), copies, domains) == placement


def test_hosts_stay_in_order_where_that_is_as_good() -> None:
    alternating = [f"rack {host % 2}" for host in range(8)]
    assert place(8, 2, alternating).groups == place(8, 2).groups
    own = [str(host) for host in range(9)]
    assert place(9, 4, own).groups == place(9, 4).groups


def test_what_is_left_over_joins_as_few_groups_as_domains_allow() -> None:
    # A ring of five needs five domains; with four, two rings of four have no domain twice.
    placement = place(8, 3, in_blocks([2, 2, 2, 2]))
    assert sorted(map(len, placement.groups)) == [4, 4]
    assert placement.least_domains == 3
    assert sorted(map(len, place(8, 3, in_blocks([2, 2, 2, 1, 1])).groups)) == [3, 5]


def test_ten_thousand_hosts_in_racks() -> None:
    placement = place(10_000, 3, [f"rack {host // 40}" for host in range(10_000)])
    assert placement.least_domains == 3
    assert sorted(set(map(len, placement.groups))) == [3, 4]


@pytest.mark.parametrize(("hosts", "copies"), [(3, 4), (3, 0), (0, 1), (0, 0)])
def test_what_cannot_be_kept(hosts: int, copies: int) -> None:
    with pytest.raises(InvalidInput, match=f"{copies} copies of each shard need as many hosts"):
        place(hosts, copies)


def test_wrong_plans_are_refused() -> None:
    with pytest.raises(InvalidInput, match="there are 3 hosts, and domains of 2"):
        place(3, 2, ["a", "b"])
    with pytest.raises(InvalidInput, match="in one group, and in one only"):
        Placement(2, ((0, 1), (1, 2)))
    with pytest.raises(InvalidInput, match="in one group, and in one only"):
        Placement(1, ())
    with pytest.raises(InvalidInput, match="3 copies need groups"):
        Placement(3, ((0, 1),))
