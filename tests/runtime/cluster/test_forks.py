"""Children that a program of a cluster forks: they are refused at once, and the parent goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.runtime.cluster import forking
from tests.support.long import only_long


@pytest.mark.long
@only_long
def test_children_of_a_program_are_refused_and_its_own_calls_go_on(address: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", forking.__name__, address],
        check=False,
        capture_output=True,
        text=True,
        timeout=forking.CHILDREN * forking.BOUND_S,
    )
    assert ended.returncode == 0, ended.stderr
