"""Leases: of readers and those who remove, one gives way; the dead count for nothing."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.leases import require_never_both

from waystation import storage
from waystation.layouts.native import commit, names
from waystation.storage import leases, signs_of_life
from waystation.storage.attempts import Attempt, new_attempt_id, owner_record
from waystation.storage.leases import Leases


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory of steps."""
    for step in ("1", "2", "3", "4", "5", "10"):
        (tmp_path / step).mkdir()
    return tmp_path


def marks_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*/.waystation-*"))


def test_a_reader_shows_signs_of_life(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs_of_life, "HEARTBEAT_S", 0.01)
    with Leases(root).hold("5"):
        (path,) = (root / "5").iterdir()
        os.utime(path, (0, 0))
        until = time.monotonic() + 60
        while path.stat().st_mtime == 0:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert marks_in(root) == []


def test_of_a_reader_and_a_collector_one_gives_way(root: Path) -> None:
    found = Leases(root)
    with found.hold("1") as may_read, found.condemned("1") as may_go, found.condemned("2") as other_may_go:
        assert (may_read, may_go, other_may_go) == (True, False, True)
    with found.condemned("1") as may_go, found.hold("1") as may_read, found.hold("10") as other:
        assert (may_go, may_read, other) == (True, False, True)
    assert marks_in(root) == []


def test_readers_and_collectors_never_both_go_on(root: Path) -> None:
    """Many of both at once, on one checkpoint: while a reader may read, no collector may remove."""
    require_never_both(Leases(root), rounds=500)


def test_a_collector_that_was_killed_condemns_nothing(root: Path) -> None:
    scope, _, rest = new_attempt_id().split("-", 2)
    dead = f"{scope}-{os.getpid()}-1-{rest.rpartition('-')[2]}"  # this process id, started at another time
    (root / "3" / f"{leases.CONDEMNED}{dead}").write_text(json.dumps(owner_record()))
    with Leases(root).hold("3") as may_read:
        assert may_read
    assert marks_in(root) == []


def test_a_lease_that_is_being_written_counts(root: Path) -> None:
    (root / "3" / f"{leases.LEASE}{new_attempt_id()}").touch()
    assert Leases(root).is_held("3")


def test_a_listing_of_steps_meets_no_leases(root: Path) -> None:
    before, held = sorted(root.iterdir()), Leases(root)
    with held.hold("3"), held.hold("4"), held.condemned("5"):
        assert sorted(root.iterdir()) == before
    assert marks_in(root) == []


def test_of_a_checkpoint_that_is_not_there_nothing_is_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for name in ("7", "file"):
        with Leases(tmp_path).hold(name), Leases(tmp_path).condemned(name) as may_go:
            assert may_go
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert caplog.records == []


def _swap(root: Path, name: str) -> Path:
    """Overwrites a checkpoint as saves do; returns where the old one is."""
    (root / name / names.RECORD).touch()
    attempt = Attempt(os.fspath(root / name))
    commit.swap(attempt)
    return Path(attempt.path)


def test_a_lease_outlives_an_overwrite(root: Path) -> None:
    held = Leases(root)
    with held.hold("3"):
        old = _swap(root, "3")
        assert not (root / "3" / names.RECORD).exists()
        assert held.is_held("3")
        shutil.rmtree(old)
        with held.condemned("3") as may_go:
            assert not may_go
        assert held.is_held("3")
        newer = _swap(root, "3")
        assert held.is_held("3")
    assert not held.is_held("3")
    assert not Leases(newer.parent).is_held(newer.name), "what was carried says that it is over"
    assert marks_in(root) == [], "what says so is removed by those who see it"


def test_readers_collectors_and_overwrites_at_once(root: Path) -> None:
    """What somebody may read, nobody may remove, whatever directory is at the path."""
    done = threading.Event()
    held = Leases(root)
    reading: list[int] = []
    removing: list[int] = []
    wrong: list[str] = []

    def read() -> int:
        while not done.is_set():
            with held.hold("1") as may_read:
                if may_read:
                    reading.append(1)
                    if removing:
                        wrong.append("a reader began while it was being removed")
                    reading.pop()
        return 1

    def remove() -> int:
        while not done.is_set():
            with held.condemned("1") as may_go:
                if may_go:
                    removing.append(1)
                    if reading:
                        wrong.append("it was removed while it was being read")
                    removing.pop()
        return 1

    with ThreadPoolExecutor(3) as threads:
        workers = [threads.submit(work) for work in (read, read, remove)]
        try:
            for _ in range(200):
                storage.remove_tree(os.fspath(_swap(root, "1")))
        finally:
            done.set()
        assert all(worker.result() for worker in workers)
    assert wrong == []
    assert not held.is_held("1")
    assert sorted(path.name for path in root.iterdir()) == sorted(["1", "2", "3", "4", "5", "10"])


def test_what_another_program_overwrites_is_not_collected(root: Path) -> None:
    held = Leases(root)
    attempt = Attempt(os.fspath(root / "3"))
    with held.condemned("3") as may_go, held.condemned("4") as other:
        assert (may_go, other) == (False, True)
    attempt.discard()
    with held.condemned("3") as may_go:
        assert may_go


def test_leases_that_come_and_go_at_once_are_all_put(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    def work(name: str) -> list[bool]:
        own, seen = Leases(root), []
        for _ in range(200):
            with own.hold(name) as may_read:
                seen.append(may_read and own.is_held(name))
        return seen

    with ThreadPoolExecutor(4) as threads:
        for seen in threads.map(work, "1234"):
            assert all(seen)
    assert caplog.records == []
    assert marks_in(root) == []
