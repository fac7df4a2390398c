"""The odds that every shard still has a copy after some hosts, or some failure domains, were lost at once.

Which ones are lost is equally likely for every choice of as many. Host losses are counted exactly, for any
placement, in whole numbers: groups share no copies, so the harmless choices are the coefficients of a product
with one factor for each group. Domains overlap in many groups; choices of them are counted one by one as long
as there are not too many, and beyond that a lower bound is given and named as such.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from waystation._arguments import INTEGER, require_type
from waystation.errors import InvalidInput
from waystation.memory.placement import Placement

_COUNTED_CHOICES = 250_000
_COUNTED_DOMAINS = 64


@dataclass(frozen=True, slots=True)
class Odds:
    """A probability, or what it is at least.

    Attributes:
        probability: That every shard still has a copy.
        is_exact: Whether it is exactly that; otherwise it is at least that.
    """

    probability: Fraction
    is_exact: bool


def recovery_probability(placement: Placement, lost_hosts: int) -> Fraction:
    """The probability that the loss of so many hosts at once leaves a copy of every shard; exact.

    Raises:
        InvalidInput: There are not so many hosts.
    """
    require_type("placement", placement, Placement, "a Placement (memory.place makes one)")
    _check_count(lost_hosts, placement.host_count, "hosts")
    if lost_hosts < placement.copies:
        return Fraction(1)
    harmless = [1]
    for size, count in Counter(map(len, placement.groups)).items():
        of_group = [_harmless_losses(size, placement.copies, lost) for lost in range(size + 1)]
        harmless = _product(harmless, _power(of_group, count, lost_hosts), lost_hosts)
    found = harmless[lost_hosts] if lost_hosts < len(harmless) else 0
    return Fraction(found, math.comb(placement.host_count, lost_hosts))


def grouped_recovery_bound(host_count: int, copies: int, lost_hosts: int) -> Fraction:
    """What GEMINI says of hosts in groups: the probability of `recovery_probability` is at least this.

    It is exactly this while fewer than twice as many hosts are lost as there are copies.

    Raises:
        InvalidInput: The copies do not divide the hosts: the formula does not hold for rings.
    """
    require_type("copies", copies, INTEGER, "an integer")
    _check_count(lost_hosts, host_count, "hosts")
    if copies < 1 or host_count % copies:
        raise InvalidInput(
            f"the formula needs hosts in groups of {copies}, and {host_count} are not divisible by that; "
            "count with recovery_probability"
        )
    if lost_hosts < copies:
        return Fraction(1)
    lost_with_a_group = math.comb(host_count - copies, lost_hosts - copies)
    harmful = Fraction(host_count // copies * lost_with_a_group, math.comb(host_count, lost_hosts))
    return max(Fraction(0), 1 - harmful)


def domain_recovery_odds(placement: Placement, lost_domains: int) -> Odds:
    """The odds that the loss of so many whole domains at once leaves a copy of every shard.

    Raises:
        InvalidInput: There are not so many domains.
    """
    require_type("placement", placement, Placement, "a Placement (memory.place makes one)")
    numbers: dict[str, int] = {}
    for host in range(placement.host_count):
        numbers.setdefault(placement.domain_of(host), len(numbers))
    _check_count(lost_domains, len(numbers), "domains")
    if lost_domains < placement.least_domains:
        return Odds(Fraction(1), is_exact=True)
    if placement.domains is None:  # each host its own
        return Odds(recovery_probability(placement, lost_domains), is_exact=True)
    fatal = {
        frozenset(numbers[domain] for domain in placement.domain_set(owner))
        for owner in range(placement.host_count)
    }
    choices = math.comb(len(numbers), lost_domains)
    if (
        lost_domains > placement.least_domains
        and choices <= _COUNTED_CHOICES
        and lost_domains <= _COUNTED_DOMAINS
    ):
        return Odds(Fraction(_count_harmless(fatal, len(numbers), lost_domains), choices), is_exact=True)
    harmful = sum(
        math.comb(len(numbers) - len(domains), lost_domains - len(domains))
        for domains in fatal
        if len(domains) <= lost_domains
    )
    # Of as many as the fewest domains of a shard, a choice is fatal only if it is one of those sets.
    is_exact = lost_domains == placement.least_domains
    return Odds(max(Fraction(0), 1 - Fraction(harmful, choices)), is_exact)


def _check_count(lost: int, there: int, noun: str) -> None:
    require_type("host_count", there, INTEGER, "an integer")
    require_type(f"lost_{noun}", lost, INTEGER, "an integer")
    if not 0 <= lost <= there:
        raise InvalidInput(f"{lost} {noun} cannot be lost: there are {there}")


def _harmless_losses(size: int, copies: int, lost: int) -> int:
    """In how many ways so many members of a group can be lost, but never `copies` neighbours in its ring.

    Between the members that are left, going round, there are gaps of fewer than `copies`. A choice with a
    marked member is one of `size` places and a sequence of gaps; each choice has as many marks as members
    left.
    """
    left = size - lost
    if left == 0:
        return 0
    sequences = sum(
        (-1 if long % 2 else 1) * math.comb(left, long) * math.comb(lost - long * copies + left - 1, left - 1)
        for long in range(lost // copies + 1)
        if long <= left
    )
    return size * sequences // left


def _product(first: list[int], second: list[int], most: int) -> list[int]:
    """The product of two polynomials, up to the power `most`."""
    found = [0] * (min(most, len(first) + len(second) - 2) + 1)
    for power, factor in enumerate(first):
        for other, coefficient in enumerate(second[: max(0, len(found) - power)]):
            found[power + other] += factor * coefficient
    return found


def _power(polynomial: list[int], exponent: int, most: int) -> list[int]:
    found = [1]
    while exponent:
        if exponent & 1:
            found = _product(found, polynomial, most)
        polynomial = _product(polynomial, polynomial, most)
        exponent >>= 1
    return found


def _count_harmless(fatal: Iterable[frozenset[int]], domain_count: int, lost_domains: int) -> int:
    """How many choices of domains contain none of the fatal sets."""
    ending_with: list[list[int]] = [[] for _ in range(domain_count)]
    for domains in fatal:
        ending_with[max(domains)].append(sum(1 << domain for domain in domains))

    def grow(chosen: int, first: int, left: int) -> int:
        if left == 0:
            return 1
        found = 0
        for domain in range(first, domain_count - left + 1):
            grown = chosen | 1 << domain
            if not any(mask & grown == mask for mask in ending_with[domain]):
                found += grow(grown, domain + 1, left - 1)
        return found

    return grow(0, 0, lost_domains)
