"""Which versions were loaded to no avail, and how long a tier that fails is left alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from waystation.memory.records import MOST_DELETED, RESTORES_FILE, Restores
from waystation.memory.save_actions import RAREST, Pause
from waystation.memory.versions import Version

NEW, OLD = Version(3, 20), Version(3, 10)


def test_two_loads_without_progress_spend_a_version(tmp_path: Path) -> None:
    Restores(tmp_path).note(NEW)
    assert Restores(tmp_path).spent() == []
    Restores(tmp_path).note(NEW)
    assert Restores(tmp_path).spent() == [NEW]
    Restores(tmp_path).note(OLD)
    assert Restores(tmp_path).spent() == [NEW]


def test_progress_makes_up_for_it(tmp_path: Path) -> None:
    restores = Restores(tmp_path)
    restores.note(NEW)
    restores.forget()
    restores.note(NEW)
    assert restores.spent() == []
    restores.forget()
    restores.forget()
    assert list(tmp_path.iterdir()) == []


def test_what_is_deleted_stays_so_whatever_is_saved(tmp_path: Path) -> None:
    restores = Restores(tmp_path)
    restores.note(NEW)
    restores.note_deleted(OLD)
    assert (restores.deleted(), restores.spent()) == ([OLD], [])
    restores.note(NEW)
    assert (restores.deleted(), restores.spent()) == ([OLD], [NEW])
    restores.forget()
    assert (Restores(tmp_path).deleted(), restores.spent()) == ([OLD], [])
    for step in range(2 * MOST_DELETED):
        restores.note_deleted(Version(4, step))
    assert sorted(restores.deleted()) == [Version(4, MOST_DELETED + step) for step in range(MOST_DELETED)]


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b"[1]", b"[[1,2]]", b'[["a",2,3]]', b"null"])
def test_what_cannot_be_read_counts_for_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / RESTORES_FILE).write_bytes(content)
    restores = Restores(tmp_path)
    assert restores.spent() == []
    restores.note(NEW)
    restores.note(NEW)
    assert restores.spent() == [NEW]


def test_a_directory_that_is_gone_is_no_reason_to_fail(tmp_path: Path) -> None:
    restores = Restores(tmp_path / "gone")
    restores.note(NEW)
    assert restores.spent() == []


def tried(pause: Pause, count: int) -> list[int]:
    """The numbers, of so many saves that come to be due, of those that are not left out."""
    return [number for number in range(1, count + 1) if not pause.leaves_out()]


def test_each_failure_in_a_row_leaves_out_more_saves() -> None:
    for failures, every in enumerate([1, 1, 2, 4, 8, 16, 32, RAREST, RAREST, RAREST]):
        pause = Pause(failures)
        assert tried(pause, 4 * RAREST) == list(range(every, 4 * RAREST + 1, every))


def test_processes_that_have_seen_more_failures_try_no_other_saves() -> None:
    """Attempts of one whose agent had failed once more missed those of the others: no version was whole."""
    saves = [set(tried(Pause(failures), 4 * RAREST)) for failures in range(9)]
    assert all(rarer <= more_frequent for more_frequent, rarer in itertools.pairwise(saves))


def test_a_save_that_does_not_fail_ends_the_pause() -> None:
    pause = Pause()
    for _ in range(5):
        pause.failed()
    pause.succeeded()
    assert tried(pause, 3) == [1, 2, 3]
    pause.failed()
    assert tried(pause, 3) == [1, 2, 3]
