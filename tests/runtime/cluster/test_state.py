"""The state of a program on several islands of a real cluster."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.runtime.cluster.driving import visiting

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="the runtime needs Python 3.12")


@pytest.mark.timeout(900)
def test_state_on_several_islands(address: str, tmp_path: Path) -> None:
    with visiting(address, name="keeper") as cluster:
        with ThreadPoolExecutor(2) as pool:
            adding = [
                pool.submit(cluster.add_island, "lower", hosts=2, devices_per_host=2),
                pool.submit(cluster.add_island, "upper", devices_per_host=4),
            ]
            for each in adding:
                each.result()
        # In a process of its own, which limits its memory.
        command = [sys.executable, "-m", "tests.runtime.client.state_on_a_cluster"]
        outcome = subprocess.run(
            [*command, cluster.address, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
