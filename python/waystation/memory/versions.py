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
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

# As `AgentClient.inventory` has the slots of one host.
Slots: TypeAlias = Sequence[Mapping[str, Any]]

_SHARD = re.compile(r"(?P<sequence>[0-9a-f]{16})/(?P<process>[0-9]+)-of-(?P<count>[0-9]+)")
_KEPT = ("sealed", "committed")
_DAMAGED = "quarantined"


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
    """A version that can be loaded, if only together with the disk.

    Attributes:
        version: Which.
        shard_count: How many shards it has.
        needs_disk: Whether some of its shards have no copy in memory any more, so that it can be loaded only
            if the disk has what the same call has saved.
    """

    version: Version
    shard_count: int
    needs_disk: bool = False

    def shards(self, sequence: str) -> list[str]:
        """The names of its shards, in the order of the processes that saved them."""
        return [shard_name(sequence, process, self.shard_count) for process in range(self.shard_count)]

    def to_json(self) -> list[int]:
        """For the other processes."""
        return [self.version.epoch, self.version.step, self.shard_count, int(self.needs_disk)]

    @classmethod
    def from_json(cls, entry: Sequence[int]) -> Self:
        """What another process has sent."""
        epoch, step, shard_count, needs_disk = entry
        return cls(Version(epoch, step), shard_count, bool(needs_disk))


@dataclass(frozen=True, slots=True)
class Stock:
    """What memory holds of one sequence.

    Attributes:
        whole: The versions that can be loaded, the newest first.
        remains: Those that were whole once, and of which some shards are left.
        torn: Those of which something is sealed, but not all of it is there.
        lost: The newest one of which agents have found a shard damaged, if none that is whole is newer.
    """

    whole: list[Whole]
    remains: list[Whole]
    torn: list[Version]
    lost: Version | None = None


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
    committed: set[Version] = set()
    damaged: set[Version] = set()
    for slots in inventories:
        for slot in slots:
            named = _SHARD.fullmatch(slot["shard"]) if is_listed(slot) else None
            if named is None or named["sequence"] != sequence:
                continue
            version = Version(slot["epoch"], slot["step"])
            if slot["state"] == _DAMAGED:
                damaged.add(version)
                continue
            place = int(named["process"]), int(named["count"])
            digests.setdefault(version, {}).setdefault(place, set()).add(slot["digest"])
            (sealed if slot["state"] == "sealed" else committed).add(version)
    whole = [Whole(version, count) for version, found in digests.items() if (count := _count(found))]
    loadable = {entry.version for entry in whole}
    remains = [
        Whole(version, count, needs_disk=True)
        for version in committed - loadable
        if (count := _shard_count(digests[version]))
    ]
    torn = sorted(sealed - committed - loadable)
    lost = max(damaged, default=None)
    if lost is not None and any(version >= lost for version in loadable):
        lost = None
    return Stock(sorted(whole, reverse=True), sorted(remains, reverse=True), torn, lost)


def is_listed(slot: Mapping[str, Any]) -> bool:
    """Whether a slot says something to `take_stock`: it holds a shard, or the damaged remains of one."""
    return slot["state"] in _KEPT or (slot["state"] == _DAMAGED and "shard" in slot)


def _count(digests: Mapping[tuple[int, int], set[int]]) -> int:
    """The number of shards of a version, if it is whole; 0 if not."""
    count = _shard_count(digests)
    return count if {process for process, _ in digests} == set(range(count)) else 0


def _shard_count(digests: Mapping[tuple[int, int], set[int]]) -> int:
    """The number of shards that a version had, of which these are left; 0 if they contradict each other."""
    counts = {count for _, count in digests}
    if len(counts) != 1 or any(len(copies) != 1 for copies in digests.values()):
        return 0
    return counts.pop()


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
    seen: dict[Version, set[str]] = {}  # shards, by their names
    has_base = False
    for standing, slots in heard:
        commits.update(Version(*commit) for commit in standing["commits"])
        base = standing["base"]
        if base is not None and standing["epoch"] == newest_epoch:
            has_base = True
            known.setdefault(Version(base["epoch"], base["step"]), set()).add(
                (base["sequence"], base["shard_count"])
            )
        for slot in slots:
            if name := _SHARD.fullmatch(slot["shard"]):
                version = Version(slot["epoch"], slot["step"])
                named.setdefault(version, set()).add((name["sequence"], int(name["count"])))
                seen.setdefault(version, set()).add(slot["shard"])
    # What an epoch began from is not kept once something is committed that was saved since.
    known = {
        version: of
        for version, of in known.items()
        if all(version >= commit or commit.epoch < newest_epoch for commit in commits)
    }
    for version in commits & named.keys():
        known.setdefault(version, named[version])
    found = [
        Whole(version, count)
        for version, of in known.items()
        for named_sequence, count in of
        if len(of) == 1 and named_sequence == sequence
    ]

    def needs_disk(entry: Whole) -> bool:
        # Where an epoch began with nothing, agents keep what is left of the newest commit.
        is_sure = has_base or entry.version.epoch == newest_epoch
        return not is_sure and not seen[entry.version].issuperset(entry.shards(sequence))

    return sorted((replace(entry, needs_disk=needs_disk(entry)) for entry in found), reverse=True)


def candidates(
    whole: Sequence[Whole], step: int | None, newest_on_disk: int | None, doubted: Iterable[Version]
) -> list[Whole]:
    """The versions to try, in this order, before what is on the disk. Those in doubt come last, and only if
    the disk has nothing.

    Args:
        whole: Those that can be loaded.
        step: The step that is asked for; None for the newest.
        newest_on_disk: The step of the newest checkpoint there that may be loaded; None if there is none.
        doubted: Versions that programs began with in vain.
    """
    passed, newest_first = set(doubted), sorted(whole, reverse=True)
    trusted = [entry for entry in newest_first if entry.version not in passed]
    last = [entry for entry in newest_first if entry.version in passed]
    if step is not None:
        return [entry for entry in trusted + last if entry.version.step == step]
    if newest_on_disk is None:
        return trusted + last
    return [entry for entry in trusted if entry.version.step >= newest_on_disk]
