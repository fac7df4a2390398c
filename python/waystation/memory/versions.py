"""Versions: what the memory of all hosts holds of a sequence, and which of it is whole.

Pure: of inventories, as agents give them, to decisions. A *version* is what was saved at one step in one
epoch; it has as many shards as processes saved it. Invariants: a version counts as whole only if each of its
shards is sealed or committed somewhere, and no two copies of one differ; what belongs to another sequence is
never taken for this one's; versions are ordered by epoch, then by step, so that what a program saved after a
recovery is newer than what it went back from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

# As `AgentClient.inventory` has the slots of one host.
Slots: TypeAlias = Sequence[Mapping[str, Any]]

_SHARD = re.compile(r"(?P<sequence>[0-9a-f]{16})/(?P<process>[0-9]+)-of-(?P<count>[0-9]+)")
_KEPT = ("sealed", "committed")


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """What was saved at one step.

    Attributes:
        epoch: The epoch of the program that saved it.
        step: The step.
    """

    epoch: int
    step: int


@dataclass(frozen=True, slots=True, order=True)
class Whole:
    """A version that can be loaded.

    Attributes:
        version: Which.
        shard_count: How many shards it has.
    """

    version: Version
    shard_count: int

    def shards(self, sequence: str) -> list[str]:
        """The names of its shards, in the order of the processes that saved them."""
        return [shard_name(sequence, process, self.shard_count) for process in range(self.shard_count)]

    def to_json(self) -> list[int]:
        """For the other processes."""
        return [self.version.epoch, self.version.step, self.shard_count]

    @classmethod
    def from_json(cls, entry: Sequence[int]) -> Self:
        """What another process has sent."""
        epoch, step, shard_count = entry
        return cls(Version(epoch, step), shard_count)


@dataclass(frozen=True, slots=True)
class Stock:
    """What memory holds of one sequence.

    Attributes:
        whole: The versions that can be loaded, the newest first.
        torn: Those of which something is sealed, but not all of it is there.
    """

    whole: list[Whole]
    torn: list[Version]


def shard_name(sequence: str, process: int, process_count: int) -> str:
    """The name of the shard that a process saves.

    Args:
        sequence: 16 hexadecimal digits that tell the sequence from others.
        process: The process.
        process_count: How many save.
    """
    return f"{sequence}/{process}-of-{process_count}"


def take_stock(sequence: str, inventories: Iterable[Slots]) -> Stock:
    """What the slots of all hosts hold of a sequence."""
    digests: dict[Version, dict[tuple[int, int], set[int]]] = {}
    sealed: set[Version] = set()
    for slots in inventories:
        for slot in slots:
            named = _SHARD.fullmatch(slot["shard"]) if slot["state"] in _KEPT else None
            if named is None or named["sequence"] != sequence:
                continue
            version = Version(slot["epoch"], slot["step"])
            place = int(named["process"]), int(named["count"])
            digests.setdefault(version, {}).setdefault(place, set()).add(slot["digest"])
            if slot["state"] == "sealed":
                sealed.add(version)
    whole = [Whole(version, count) for version, found in digests.items() if (count := _count(found))]
    loadable = {entry.version for entry in whole}
    return Stock(sorted(whole, reverse=True), sorted(sealed - loadable))


def _count(digests: Mapping[tuple[int, int], set[int]]) -> int:
    """The number of shards of a version, if it is whole; 0 if not."""
    counts = {count for _, count in digests}
    if len(counts) != 1 or any(len(copies) != 1 for copies in digests.values()):
        return 0
    (count,) = counts
    return count if {process for process, _ in digests} == set(range(count)) else 0


def offers(sequence: str, told: Iterable[tuple[Mapping[str, Any], Slots]]) -> list[Whole]:
    """The versions of a sequence that the agents of several hosts offer, the newest first.

    Args:
        sequence: The sequence.
        told: What each agent knows: its `AgentClient.standing`, empty if it cannot be told, and slots that
            are sealed or committed. Those say how many shards a version has, since agents commit whatever is
            whole.
    """
    heard = [(standing, slots) for standing, slots in told if standing]
    newest_epoch = max((standing["epoch"] for standing, _ in heard), default=0)
    known: dict[
        Version, set[tuple[str, int]]
    ] = {}  # with the sequences and counts that they are said to have
    commits: set[Version] = set()
    named: dict[Version, set[tuple[str, int]]] = {}
    for standing, slots in heard:
        commits.update(Version(*commit) for commit in standing["commits"])
        base = standing["base"]
        if base is not None and standing["epoch"] == newest_epoch:
            known.setdefault(Version(base["epoch"], base["step"]), set()).add(
                (base["sequence"], base["shard_count"])
            )
        for slot in slots:
            if name := _SHARD.fullmatch(slot["shard"]):
                version = Version(slot["epoch"], slot["step"])
                named.setdefault(version, set()).add((name["sequence"], int(name["count"])))
    # What an epoch began from is not kept once something newer is committed.
    known = {version: of for version, of in known.items() if all(version >= commit for commit in commits)}
    for version in commits & named.keys():
        known.setdefault(version, named[version])
    found = [
        Whole(version, count)
        for version, of in known.items()
        for named_sequence, count in of
        if len(of) == 1 and named_sequence == sequence
    ]
    return sorted(found, reverse=True)


def candidates(
    whole: Sequence[Whole], step: int | None, newest_on_disk: int | None, spent: Iterable[Version]
) -> list[Whole]:
    """The versions to try, in this order, before what is on the disk.

    Args:
        whole: Those that can be loaded.
        step: The step that is asked for; None for the newest.
        newest_on_disk: The step of the newest checkpoint there that may be loaded; None if there is none.
        spent: Versions that are not to be tried any more.
    """
    passed = set(spent)
    found = [entry for entry in sorted(whole, reverse=True) if entry.version not in passed]
    if step is not None:
        return [entry for entry in found if entry.version.step == step]
    return [entry for entry in found if newest_on_disk is None or entry.version.step >= newest_on_disk]
