"""A client of a cluster: figure 2 over two islands."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.timeout(600)
def test_a_client_of_two_islands() -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "tests.runtime.client.on_a_cluster"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
