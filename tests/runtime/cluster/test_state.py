"""Programs, and the state of one, on several islands of a real cluster, which take long to start."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.runtime.cluster.driving import run_client, visiting
from tests.support.long import amount

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="the runtime needs Python 3.12")


@pytest.fixture(scope="module")
def islands(address: str) -> Iterator[str]:
    """`lower` of two hosts, and `upper` of one; the address of their cluster."""
    with visiting(address, name="keeper") as cluster:
        with ThreadPoolExecutor(2) as pool:
            adding = [
                pool.submit(cluster.add_island, "lower", hosts=2, devices_per_host=2),
                pool.submit(cluster.add_island, "upper", devices_per_host=4),
            ]
            for each in adding:
                each.result()
        yield cluster.address


@pytest.mark.long
@pytest.mark.timeout(2_400)
def test_random_programs_over_two_islands_give_what_numpy_gives(islands: str) -> None:
    run_client("random_programs", islands, str(amount(40, 4_000)), str(random.randrange(10**6)))


@pytest.mark.timeout(900)
def test_state_on_several_islands(islands: str, tmp_path: Path) -> None:
    """The last of them: it kills a host and removes an island. In a process whose memory it limits."""
    run_client("state_on_a_cluster", islands, str(tmp_path))
