"""What inventories of agents mean: which versions are whole, and in which order they are tried."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from waystation.memory.versions import (
    Stock,
    Version,
    Whole,
    candidates,
    offers,
    shard_name,
    take_stock,
)

SEQUENCE, OTHER = "0123456789abcdef", "f" * 16


def slot(
    version: tuple[int, int],
    process: int,
    count: int,
    *,
    state: str = "committed",
    sequence: str = SEQUENCE,
    digest: int | None = None,
) -> dict[str, Any]:
    """A slot as an agent tells of it."""
    return {
        "state": state,
        "shard": shard_name(sequence, process, count),
        "epoch": version[0],
        "step": version[1],
        "digest": 100 * version[1] + process if digest is None else digest,
    }


def whole(*entries: tuple[int, int, int]) -> list[Whole]:
    return [Whole(Version(epoch, step), count) for epoch, step, count in entries]


def test_a_version_is_whole_if_every_shard_is_there() -> None:
    stock = take_stock(
        SEQUENCE,
        [
            [slot((1, 3), 0, 2), slot((1, 4), 0, 2, state="sealed"), {"state": "free"}],
            [slot((1, 3), 1, 2), slot((1, 4), 1, 2), slot((1, 5), 1, 2, state="sealed")],
        ],
    )
    assert stock == Stock(whole((1, 4, 2), (1, 3, 2)), [], [Version(1, 5)])


def test_what_is_still_written_or_quarantined_is_not_there() -> None:
    for state in ("writing", "quarantined"):
        found = take_stock(SEQUENCE, [[slot((1, 3), 0, 2), slot((1, 3), 1, 2, state=state)]])
        lost = Version(1, 3) if state == "quarantined" else None
        assert found == Stock([], [Whole(Version(1, 3), 2, needs_disk=True)], [], lost)


def test_the_newest_damaged_version_is_lost_unless_something_newer_is_whole() -> None:
    older, newer = slot((1, 2), 0, 1), slot((2, 3), 0, 1)
    damaged = [slot((1, step), 0, 1, state="quarantined") for step in (3, 4)]
    nameless = {"state": "quarantined"}  # whose headers were damaged
    assert take_stock(SEQUENCE, [[older, *damaged, nameless]]).lost == Version(1, 4)
    assert take_stock(SEQUENCE, [[older, *damaged, newer]]).lost is None
    assert take_stock(OTHER, [[older, *damaged]]).lost is None


def test_shards_of_other_sequences_are_none_of_this() -> None:
    slots = [slot((1, 3), 0, 2), slot((1, 3), 1, 2, sequence=OTHER), slot((1, 9), 0, 1, sequence=OTHER)]
    assert take_stock(SEQUENCE, [slots]).whole == []
    assert take_stock(OTHER, [slots]).whole == whole((1, 9, 1))


def test_a_shard_of_another_name_is_no_reason_to_fail() -> None:
    odd = slot((1, 3), 0, 1) | {"shard": "model/layer-0"}
    assert take_stock(SEQUENCE, [[odd]]) == Stock([], [], [])


def test_copies_of_a_shard_that_differ_spoil_its_version() -> None:
    own, other = slot((1, 3), 0, 1), slot((1, 3), 0, 1, digest=7)
    assert take_stock(SEQUENCE, [[own], [other]]) == Stock([], [], [])
    assert take_stock(SEQUENCE, [[own], [own]]).whole == whole((1, 3, 1))


def test_shards_of_programs_of_unlike_size_make_no_version_together() -> None:
    assert take_stock(SEQUENCE, [[slot((1, 3), 0, 1), slot((1, 3), 1, 2)]]).whole == []


def test_the_newest_is_that_of_the_latest_epoch() -> None:
    found = take_stock(SEQUENCE, [[slot((1, 9), 0, 1), slot((2, 4), 0, 1), slot((2, 5), 0, 1)]])
    assert found.whole == whole((2, 5, 1), (2, 4, 1), (1, 9, 1))


def test_memory_is_tried_before_an_older_directory_and_not_before_a_newer_one() -> None:
    known = whole((2, 5, 1), (2, 4, 1), (1, 3, 1))
    assert candidates(known, None, None, []) == known
    assert candidates(known, None, 4, []) == whole((2, 5, 1), (2, 4, 1))
    assert candidates(known, None, 6, []) == []
    assert candidates(known, 3, None, []) == whole((1, 3, 1))
    assert candidates(known, 7, None, []) == []


def test_versions_in_doubt_come_last_and_after_the_disk() -> None:
    known = whole((2, 5, 1), (1, 5, 1))
    assert candidates(known, None, None, [Version(2, 5)]) == whole((1, 5, 1), (2, 5, 1))
    assert candidates(known, 5, None, [Version(2, 5)]) == whole((1, 5, 1), (2, 5, 1))
    assert candidates(known, None, 5, [Version(2, 5)]) == whole((1, 5, 1))
    both = [Version(2, 5), Version(1, 5)]
    assert candidates(known, None, None, both) == known
    assert candidates(known, None, 1, both) == []
    assert candidates(known, 5, 1, both) == known


_SLOTS = st.lists(
    st.builds(
        slot,
        st.tuples(st.integers(1, 2), st.integers(0, 3)),
        st.integers(0, 2),
        st.integers(1, 3),
        state=st.sampled_from(["writing", "sealed", "committed", "quarantined"]),
        sequence=st.sampled_from([SEQUENCE, OTHER]),
        digest=st.one_of(st.none(), st.just(1)),
    ),
    max_size=20,
)


@given(st.lists(_SLOTS, max_size=3))
def test_a_version_counts_only_with_one_copy_of_each_shard(inventories: list[list[dict[str, Any]]]) -> None:
    stock = take_stock(SEQUENCE, inventories)
    kept = [
        entry
        for slots in inventories
        for entry in slots
        if entry["state"] in ("sealed", "committed") and entry["shard"].startswith(SEQUENCE)
    ]
    for found in stock.whole:
        version = found.version
        own = [entry for entry in kept if (entry["epoch"], entry["step"]) == (version.epoch, version.step)]
        assert {entry["shard"] for entry in own} == set(found.shards(SEQUENCE))
        assert len({(entry["shard"], entry["digest"]) for entry in own}) == found.shard_count
    sealed = {Version(entry["epoch"], entry["step"]) for entry in kept if entry["state"] == "sealed"}
    committed = {Version(entry["epoch"], entry["step"]) for entry in kept if entry["state"] == "committed"}
    loadable = {found.version for found in stock.whole}
    assert set(stock.torn) == sealed - committed - loadable
    assert {found.version for found in stock.remains} <= committed - loadable
    assert all(found.needs_disk for found in stock.remains)


def standing(
    epoch: int,
    base: tuple[int, int, int] | None = None,
    commits: list[tuple[int, int]] | None = None,
    *,
    sequence: str = SEQUENCE,
) -> dict[str, Any]:
    """What an agent of several knows."""
    names = ("epoch", "step", "shard_count")
    told = None if base is None else dict(zip(names, base, strict=True)) | {"sequence": sequence}
    return {"epoch": epoch, "base": told, "commits": commits or []}


def test_agents_offer_what_an_epoch_began_from_and_what_they_have_committed() -> None:
    assert offers(SEQUENCE, [(standing(5, (3, 9, 2)), [])]) == whole((3, 9, 2))
    assert offers(SEQUENCE, [(standing(5), [])]) == []
    # The number of its shards is known by the names of any.
    told = [(standing(5, (3, 9, 2), [(5, 10)]), []), (standing(5, (3, 9, 2)), [slot((5, 10), 1, 4)])]
    assert offers(SEQUENCE, told) == whole((5, 10, 4)), "what is older than a commit is not kept"
    older = [(standing(5, (3, 9, 2), [(3, 9), (3, 8)]), [slot((3, 8), 0, 2), slot((3, 9), 0, 2)])]
    assert offers(SEQUENCE, older) == whole((3, 9, 2), (3, 8, 2))


def test_what_is_left_of_a_commit_needs_the_disk() -> None:
    slots = [slot((3, 9), 0, 2)]
    left = Whole(Version(3, 9), 2, needs_disk=True)
    assert offers(SEQUENCE, [(standing(5, None, [(3, 9)]), slots)]) == [left]
    both = [*slots, slot((3, 9), 1, 2)]
    assert offers(SEQUENCE, [(standing(5, None, [(3, 9)]), both)]) == whole((3, 9, 2))
    assert offers(SEQUENCE, [(standing(3, None, [(3, 9)]), slots)]) == whole((3, 9, 2)), "just committed"
    assert Whole.from_json(left.to_json()) == left


def test_agents_that_cannot_be_told_or_are_behind_offer_nothing() -> None:
    newer = standing(7, (3, 9, 2))
    assert offers(SEQUENCE, [({}, []), (newer, [])]) == whole((3, 9, 2))
    assert offers(SEQUENCE, [(standing(5, (3, 12, 2)), []), (newer, [])]) == whole((3, 9, 2))
    assert offers(SEQUENCE, [({}, []), ({}, [])]) == []


def test_another_sequence_is_never_offered() -> None:
    assert offers(SEQUENCE, [(standing(5, (3, 9, 2), sequence=OTHER), [])]) == []
    committed = standing(5, None, [(5, 1)])
    assert offers(SEQUENCE, [(committed, [slot((5, 1), 0, 2, sequence=OTHER)])]) == []
    assert offers(OTHER, [(committed, [slot((5, 1), 0, 2, sequence=OTHER)])]) == whole((5, 1, 2))


def test_what_agents_contradict_each_other_about_is_not_offered() -> None:
    told = [(standing(5, (3, 9, 2)), []), (standing(5, (3, 9, 4)), [])]
    assert offers(SEQUENCE, told) == []
    slots = [slot((5, 1), 0, 2), slot((5, 1), 0, 3)]
    assert offers(SEQUENCE, [(standing(5, None, [(5, 1)]), slots)]) == []
