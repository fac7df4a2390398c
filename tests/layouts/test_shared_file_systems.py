"""In a file system that several machines may share, only an owner or a lease that has run out decides.

Copies of a virtual machine have the name, the boot and the namespaces of each other: the process that one of
them does not see may run on another. A real FUSE file system is one that may be shared.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support import lossy_mount, system_calls

import waystation as ws
from waystation import errors
from waystation.layouts.native import commit
from waystation.storage import attempts, names, signs_of_life
from waystation.storage.leases import LEASE, Leases

NEVER_S, AT_ONCE_S = 1e9, -1.0

_LEAVES_AN_ATTEMPT = """
import os, signal, sys
from waystation.storage.attempts import Attempt
attempt = Attempt(sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    with lossy_mount.mounted(tmp_path / "shared", "no file has such a name") as place:
        yield place


def leave_attempt(target: Path) -> Path:
    """What a process leaves that is killed while it saves."""
    ended = subprocess.run([sys.executable, "-c", _LEAVES_AN_ATTEMPT, str(target)], check=False)
    assert ended.returncode < 0
    (left,) = attempts.leftovers(str(target.parent), target.name)
    return Path(left.path)


def is_dead(target: Path) -> bool:
    (found,) = attempts.leftovers(str(target.parent), target.name)
    assert not found.is_running
    return found.dead


def test_which_file_systems_may_be_shared(tmp_path: Path, shared: Path) -> None:
    assert signs_of_life.is_shared(str(shared))
    assert signs_of_life.is_shared(str(tmp_path / "nowhere"))  # which cannot be told
    assert not signs_of_life.is_shared("/dev/shm")
    assert not signs_of_life.is_shared(str(tmp_path))


def test_a_killed_process_is_dead_there_once_its_lease_has_run_out(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shared / "state"
    left = leave_attempt(target)
    monkeypatch.setattr(signs_of_life, "EXPIRES_S", NEVER_S)
    assert not is_dead(target)
    ws.save(target, {"a": np.arange(3)})
    assert left.is_dir()  # it may be that of a copy of this machine
    monkeypatch.setattr(signs_of_life, "EXPIRES_S", AT_ONCE_S)
    assert is_dead(target)
    ws.save(target, {"a": np.arange(3)}, overwrite=True)
    assert not left.exists()


def test_the_process_table_decides_where_nobody_else_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signs_of_life, "EXPIRES_S", NEVER_S)
    leave_attempt(tmp_path / "state")
    assert is_dead(tmp_path / "state")


@pytest.mark.parametrize("is_renewed", [True, False])
def test_an_attempt_of_another_machine_runs_out_if_it_is_renewed_at_all(
    shared: Path, monkeypatch: pytest.MonkeyPatch, is_renewed: bool
) -> None:
    target = shared / "state"
    other = shared / names.attempt("state", "0" * 12 + "-17-4242-deadbeef")
    other.mkdir()
    record = {**attempts.owner_record(), "host": "another", "boot_id": "another"}
    if not is_renewed:
        del record["token"]  # of a release that did not renew what it was writing
    (other / names.OWNER).write_text(json.dumps(record))
    monkeypatch.setattr(signs_of_life, "EXPIRES_S", NEVER_S)
    assert not is_dead(target)
    monkeypatch.setattr(signs_of_life, "EXPIRES_S", AT_ONCE_S)
    assert is_dead(target) == is_renewed


@pytest.mark.parametrize("is_this_machine", [True, False])
def test_what_another_boot_left_on_a_disk_of_this_machine(tmp_path: Path, is_this_machine: bool) -> None:
    """It may be of a machine to which this one gives its disk, and which is alive."""
    target = tmp_path / "state"
    other = tmp_path / names.attempt("state", "0" * 12 + "-17-4242-deadbeef")
    other.mkdir()
    record = {**attempts.owner_record(), "boot_id": "another"}
    if not is_this_machine:
        record["host"] = "a client"
    (other / names.OWNER).write_text(json.dumps(record))
    assert is_dead(target) == is_this_machine
    long_ago = time.time() - 2 * signs_of_life.EXPIRES_S
    os.utime(other / names.OWNER, (long_ago, long_ago))
    assert is_dead(target)


def test_one_s_own_attempt_is_never_dead(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = attempts.Attempt(str(shared / "state"))
    monkeypatch.setattr(signs_of_life, "EXPIRES_S", AT_ONCE_S)
    (found,) = attempts.leftovers(str(shared), "state")
    assert not found.dead
    assert found.is_running
    attempt.discard()
    assert not list(shared.iterdir())


def test_an_attempt_is_renewed_until_it_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[str] = []
    ended: list[str] = []
    monkeypatch.setattr(signs_of_life.HEARTBEAT, "begin", lambda held, _touch: renewed.append(held))
    monkeypatch.setattr(signs_of_life.HEARTBEAT, "end", ended.append)
    attempt = attempts.Attempt(str(tmp_path / "state"))
    record = os.path.join(attempt.path, names.OWNER)
    assert (renewed, ended) == ([record], [])
    attempt.seal()
    attempt.discard()
    assert ended == [record]
    forgotten = attempts.Attempt(str(tmp_path / "other"))
    record = os.path.join(forgotten.path, names.OWNER)
    del forgotten  # which nobody has ended
    assert ended[1:] == [record]


def test_a_lease_of_a_process_that_is_not_seen_here_holds_there(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
import os, signal
from pathlib import Path
from waystation.storage.leases import Leases
with Leases(Path({str(shared)!r})).hold("5"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    (shared / "5").mkdir()
    subprocess.run([sys.executable, "-c", script], check=False)
    monkeypatch.setattr(signs_of_life, "EXPIRES_S", NEVER_S)
    assert Leases(shared).is_held("5")
    monkeypatch.setattr(signs_of_life, "EXPIRES_S", AT_ONCE_S)
    assert not Leases(shared).is_held("5")


def test_a_clock_that_is_ahead_of_the_file_system_ends_no_lease(tmp_path: Path) -> None:
    behind_s = int(2 * signs_of_life.EXPIRES_S)
    elsewhere = "0" * 12 + "-17-4242-deadbeef"
    record = json.dumps({**attempts.owner_record(), "host": "another", "boot_id": "another"})
    with lossy_mount.mounted(tmp_path / "shared", "no file has such a name", behind_s=behind_s) as shared:
        for name in ("5", "6"):
            (shared / name).mkdir()
        (shared / "5" / f"{LEASE}{elsewhere}").write_text(record)
        overwriting = shared / names.attempt("6", elsewhere)
        overwriting.mkdir()
        (overwriting / names.OWNER).write_text(record)
        leases = Leases(shared)
        assert leases.is_held("5")
        with leases.condemned("6") as may_be_removed:
            assert not may_be_removed
        assert not is_dead(shared / "6")


@pytest.mark.skipif(not system_calls.SUPPORTED, reason="needs ptrace on x86-64 Linux")
def test_what_is_removed_halfway_is_never_committed(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped until its lease ran out goes on after another was killed while it removed
    the attempt."""
    monkeypatch.setattr(signs_of_life, "EXPIRES_S", AT_ONCE_S)
    outcomes = set()
    for step in itertools.count():
        attempt = attempts.Attempt(str(shared / f"{step}"))
        attempt.id = "0" * 12 + "-17-4242-deadbeef"  # of a process that is not seen from here
        elsewhere = shared / names.attempt(f"{step}", attempt.id)
        os.rename(attempt.path, elsewhere)
        attempt.path = str(elsewhere)
        for name in ("a", "b"):
            (elsewhere / name).write_text(name)
        remove = functools.partial(attempts.remove_dead, str(shared), f"{step}")
        killed, _ = system_calls.run(remove, step)  # type: ignore[arg-type]
        attempt.seal()
        try:
            commit.publish_new(attempt)
        except errors.NotFound:
            outcomes.add("lost")
        else:
            outcomes.add("committed")
            assert {"a", "b"} <= set(os.listdir(attempt.target))  # and perhaps what told the time
        if not killed:
            break
    assert outcomes == {"lost", "committed"}
