"""Leases: of readers and those who remove, one gives way; the dead count for nothing."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from waystation.layouts.native.attempts import new_attempt_id, owner_record
from waystation.training import leases
from waystation.training.leases import Leases


def lease_files(root: Path) -> list[str]:
    return os.listdir(root / leases.DIRECTORY)


def test_a_reader_shows_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "HEARTBEAT_S", 0.01)
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
