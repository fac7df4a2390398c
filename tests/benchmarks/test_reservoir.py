"""The reservoir of a session: given to a process that asks for it, and back when that has ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.reservoir import Held, Reservoir, end_use, use
from tests.support.agents import wait_until
from tests.support.long import only_long

ROOT = Path(__file__).resolve().parents[2]
NBYTES = 64 << 20
USER = f"""
from benchmarks import reservoir
reservoir.use({NBYTES})
print("mine", flush=True)
input()
"""


def user() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", USER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_memory_is_held_between_runs_and_not_during_them() -> None:
    with Reservoir():
        before = resident_bytes()
        for _ in range(2):
            with user() as process:
                assert process.stdout is not None
                assert process.stdout.readline() == b"mine\n"
                assert resident_bytes() < before + NBYTES // 2
                process.kill()
            wait_until(lambda: resident_bytes() > before + NBYTES // 2)
    assert resident_bytes() < before + NBYTES // 2


@pytest.mark.long
@only_long
def test_memory_is_given_as_it_is_used() -> None:
    """What others of the machine use counts as well, and is more than asked for sooner or later."""
    used: list[np.ndarray] = []
    with Reservoir(ahead_bytes=2 << 20):
        before = resident_bytes()
        assert use(NBYTES)

        def is_given() -> bool:
            used.append(np.ones(NBYTES // 8, np.uint8))
            return resident_bytes() - sum(part.nbytes for part in used) < before + NBYTES // 8

        wait_until(is_given)
    assert len(used) > 1, "not all at once"


def test_what_is_held_is_given_in_huge_pages() -> None:
    before = resident_bytes()
    held = Held(NBYTES)
    held.give(1)
    assert held.nbytes == NBYTES - (2 << 20)
    assert resident_bytes() < before + NBYTES
    held.give(2 * NBYTES)
    assert held.nbytes == 0
    assert resident_bytes() < before + NBYTES // 2
    held.close()


def test_who_lives_on_gives_it_back() -> None:
    with Reservoir():
        before = resident_bytes()
        use(NBYTES)
        end_use()
        wait_until(lambda: resident_bytes() > before + NBYTES // 2)


def test_a_session_ends_while_somebody_uses_it() -> None:
    with contextlib.ExitStack() as started:
        with Reservoir():
            process = started.enter_context(user())
            assert process.stdout is not None
            process.stdout.readline()
        process.kill()
    use(NBYTES)  # there is none


def test_the_processes_of_one_run_use_it_together() -> None:
    with Reservoir():
        before = resident_bytes()
        with user() as one, user() as other:
            for process in (one, other):
                assert process.stdout is not None
                assert process.stdout.readline() == b"mine\n", "neither waits for the other's end"
            one.kill()
            other.kill()
        wait_until(lambda: resident_bytes() > before + NBYTES)
