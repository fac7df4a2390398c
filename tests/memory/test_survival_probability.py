"""Odds of losses, against counting every choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation.errors import InvalidInput
from waystation.memory import (
    Odds,
    Placement,
    domain_recovery_odds,
    grouped_recovery_bound,
    place,
    recovery_probability,
    survival_probability,
)


def pure_ring(hosts: int, copies: int) -> Placement:
    return Placement(copies, (tuple(range(hosts)),))


def counted(placement: Placement) -> list[Fraction]:
    """The probability for each number of lost hosts, by going through every choice of them."""
    hosts = placement.host_count
    choices = np.arange(1 << hosts, dtype=np.uint32)
    harmless = np.ones(len(choices), bool)
    for owner in range(hosts):
        holders = np.uint32(sum(1 << holder for holder in placement.holders(owner)))
        harmless &= choices & holders != holders
    counts = np.bincount(np.bitwise_count(choices[harmless]), minlength=hosts + 1)
    return [Fraction(int(count), math.comb(hosts, lost)) for lost, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("hosts", "copies", "lost", "mixed", "ring", "formula"),
    [
        (16, 2, 2, 0.9333, 0.8667, 0.9333),
        (16, 2, 3, 0.8000, 0.6286, 0.8000),
        (16, 2, 4, 0.6154, 0.3626, 0.6000),
        (16, 4, 5, 0.9890, 0.9597, 0.9890),
        (5, 2, 2, 0.6000, 0.5000, None),
        (7, 3, 3, 0.8571, 0.8000, None),
    ],
)
def test_known_odds(
    hosts: int, copies: int, lost: int, mixed: float, ring: float, formula: float | None
) -> None:
    assert float(recovery_probability(place(hosts, copies), lost)) == pytest.approx(mixed, abs=5e-5)
    assert float(recovery_probability(pure_ring(hosts, copies), lost)) == pytest.approx(ring, abs=5e-5)
    if formula is not None:
        assert float(grouped_recovery_bound(hosts, copies, lost)) == pytest.approx(formula, abs=5e-5)


@pytest.mark.parametrize("hosts", range(1, 17))
def test_every_choice_of_lost_hosts(hosts: int) -> None:
    for copies in range(1, hosts + 1):
        for placement in (place(hosts, copies), pure_ring(hosts, copies)):
            found = [recovery_probability(placement, lost) for lost in range(hosts + 1)]
            assert found == counted(placement)


def test_groups_of_many_sizes() -> None:
    placement = Placement(2, ((3, 7), (0, 2, 4), (1, 5, 6, 8, 9), (11, 10)))
    assert [recovery_probability(placement, lost) for lost in range(13)] == counted(placement)


@pytest.mark.parametrize("hosts", range(1, 17))
def test_the_formula_is_a_bound_and_exact_below_twice_the_copies(hosts: int) -> None:
    for copies in (copies for copies in range(1, hosts + 1) if hosts % copies == 0):
        placement = place(hosts, copies)
        for lost in range(hosts + 1):
            bound, exact = grouped_recovery_bound(hosts, copies, lost), recovery_probability(placement, lost)
            assert bound <= exact
            if lost < 2 * copies:
                assert bound == exact


@pytest.mark.parametrize("hosts", range(2, 17))
def test_rings_are_near_the_best_there_is(hosts: int) -> None:
    """Each host is in a set of holders, so there are at least N / m of them; as many losses as copies harm if
    they are one."""
    for copies in range(2, hosts + 1):
        choices = math.comb(hosts, copies)
        best = 1 - Fraction(-(-hosts // copies), choices)
        found = recovery_probability(place(hosts, copies), copies)
        assert best - Fraction(2 * copies - 3, choices) <= found <= best
        if hosts % copies == 0:
            assert found == best


def test_large_jobs_are_counted_exactly() -> None:
    hosts, lost = 10_000, 3
    assert recovery_probability(place(hosts, 2), lost) == grouped_recovery_bound(hosts, 2, lost)
    assert 0 < recovery_probability(place(9_999, 3), 50) < 1


def counted_domains(placement: Placement, lost: int) -> Fraction:
    domains = sorted({placement.domain_of(host) for host in range(placement.host_count)})
    fatal = [placement.domain_set(owner) for owner in range(placement.host_count)]
    choices = [set(choice) for choice in combinations(domains, lost)]
    return Fraction(sum(not any(each <= choice for each in fatal) for choice in choices), len(choices))


@given(st.lists(st.sampled_from("abcdefg"), min_size=2, max_size=24), st.integers(1, 4), st.data())
def test_every_choice_of_lost_domains(domains: Sequence[str], copies: int, data: st.DataObject) -> None:
    placement = place(len(domains), min(copies, len(domains)), domains)
    lost = data.draw(st.integers(0, len(set(domains))))
    exact = counted_domains(placement, lost)
    assert domain_recovery_odds(placement, lost) == Odds(exact, is_exact=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survival_probability, "_COUNTED_CHOICES", 0)
        bound = domain_recovery_odds(placement, lost)
    assert bound.probability <= exact
    if bound.is_exact:
        assert bound.probability == exact
    assert bound.is_exact or lost > placement.least_domains


def test_hosts_that_are_their_own_domains() -> None:
    placement = place(9, 3)
    named = place(9, 3, [f"host {number}" for number in range(9)])
    for lost in range(10):
        found = domain_recovery_odds(placement, lost)
        assert found == Odds(recovery_probability(placement, lost), is_exact=True)
        assert found == domain_recovery_odds(named, lost)


def test_many_domains_have_a_bound() -> None:
    placement = place(4_000, 2, [f"rack {host // 10}" for host in range(4_000)])
    assert [domain_recovery_odds(placement, lost).is_exact for lost in (1, 2, 4)] == [True, True, False]
    assert domain_recovery_odds(placement, 1).probability == 1
    assert domain_recovery_odds(placement, 400).probability == 0


def test_what_cannot_be_asked() -> None:
    with pytest.raises(InvalidInput, match="5 hosts cannot be lost: there are 4"):
        recovery_probability(place(4, 2), 5)
    with pytest.raises(InvalidInput, match="-1 hosts cannot be lost"):
        grouped_recovery_bound(4, 2, -1)
    with pytest.raises(InvalidInput, match="5 are not divisible"):
        grouped_recovery_bound(5, 2, 2)
    with pytest.raises(InvalidInput, match="3 domains cannot be lost: there are 2"):
        domain_recovery_odds(place(4, 2, ["a", "a", "b", "b"]), 3)
