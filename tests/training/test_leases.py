"""Leases: of readers and those who remove, one gives way; the dead count for nothing."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from waystation.layouts.native import signs_of_life
from waystation.layouts.native.attempts import new_attempt_id, owner_record
from waystation.training import leases
from waystation.training.leases import Leases


def lease_files(root: Path) -> list[str]:
    directory = root / leases.DIRECTORY
    return os.listdir(directory) if directory.exists() else []


def test_a_reader_shows_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs_of_life, "HEARTBEAT_S", 0.01)
    with Leases(tmp_path).hold("5"):
        (path,) = (tmp_path / leases.DIRECTORY).iterdir()
        os.utime(path, (0, 0))
        until = time.monotonic() + 60
        while path.stat().st_mtime == 0:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert lease_files(tmp_path) == []


def test_of_a_reader_and_a_collector_one_gives_way(tmp_path: Path) -> None:
    found = Leases(tmp_path)
    with found.hold("1") as may_read, found.condemned("1") as may_go, found.condemned("2") as other_may_go:
        assert (may_read, may_go, other_may_go) == (True, False, True)
    with found.condemned("1") as may_go, found.hold("1") as may_read, found.hold("10") as other:
        assert (may_go, may_read, other) == (True, False, True)
    assert lease_files(tmp_path) == []


def test_readers_and_collectors_never_both_go_on(tmp_path: Path) -> None:
    """Many of both at once, on one checkpoint: while a reader may read, no collector may remove."""
    found = Leases(tmp_path)
    reading: list[int] = []
    removing: list[int] = []
    wrong: list[str] = []

    def read() -> None:
        for _ in range(500):
            with found.hold("1") as may_read:
                if may_read:
                    reading.append(1)
                    if removing:
                        wrong.append("a reader began while it was being removed")
                    reading.pop()

    def remove() -> None:
        for _ in range(500):
            with found.condemned("1") as may_go:
                if may_go:
                    removing.append(1)
                    if reading:
                        wrong.append("it was removed while it was being read")
                    removing.pop()

    threads = [threading.Thread(target=target) for target in (read, read, remove)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_collector_that_was_killed_condemns_nothing(tmp_path: Path) -> None:
    (tmp_path / leases.DIRECTORY).mkdir()
    scope, _, rest = new_attempt_id().split("-", 2)
    dead = f"{scope}-{os.getpid()}-1-{rest.rpartition('-')[2]}"  # this process id, started at another time
    (tmp_path / leases.DIRECTORY / f"3.condemned-{dead}").write_text(json.dumps(owner_record()))
    with Leases(tmp_path).hold("3") as may_read:
        assert may_read
    assert lease_files(tmp_path) == []


def test_a_lease_that_is_being_written_counts(tmp_path: Path) -> None:
    (tmp_path / leases.DIRECTORY).mkdir()
    (tmp_path / leases.DIRECTORY / f"3.lease-{new_attempt_id()}").touch()
    assert Leases(tmp_path).is_held("3")


def test_a_listing_of_steps_meets_no_leases_once_nobody_reads(tmp_path: Path) -> None:
    held = Leases(tmp_path)
    with held.hold("3"), held.hold("4"):
        pass
    with held.condemned("3"):
        pass
    assert os.listdir(tmp_path) == []


def test_leases_that_come_and_go_at_once_are_all_put(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(name: str) -> list[bool]:
        own, seen = Leases(tmp_path), []
        for _ in range(200):
            with own.hold(name) as may_read:
                seen.append(may_read and own.is_held(name))
        return seen

    with ThreadPoolExecutor(4) as threads:
        for seen in threads.map(work, "1234"):
            assert all(seen)
    assert caplog.records == []
    assert os.listdir(tmp_path) == []
