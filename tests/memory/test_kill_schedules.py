"""Random kills: what is restored is a state of the uninterrupted run, and what was kept is not lost.

`make test` plays one schedule of each cluster, `make test-long` a hundred.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.memory import namespaces
from tests.memory.clusters import cluster_of
from tests.memory.histories import audit
from tests.memory.kill_schedules import Schedule
from tests.support.long import amount

pytestmark = pytest.mark.skipif(
    namespaces.why_forbidden() is not None, reason=f"{namespaces.why_forbidden()}"
)
COUNT = amount(1, 100)
FAULTS = 6


@pytest.mark.long
@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize(
    ("hosts", "trainers", "copies"),
    [(1, 1, 1), (2, 2, 2), (3, 3, 2), (5, 2, 2)],
    ids=["one-host", "two-hosts", "three-hosts", "five-hosts"],
)
@pytest.mark.share(4)
def test_what_was_kept_is_restored(tmp_path: Path, hosts: int, trainers: int, copies: int, seed: int) -> None:
    """The memory of a host outlives trainer and agent; of several hosts, also the loss of any one, and of two
    at once unless they had both copies of a shard. What is lost is said."""
    with cluster_of(hosts, tmp_path, copies=copies) as cluster:
        schedule = Schedule(cluster, trainers, tmp_path, seed)
        try:
            schedule.run(FAULTS)
            audit(seed, trainers, copies, schedule.history)
        except BaseException as error:
            error.add_note(f"seed {seed}, faults {schedule.faults}")
            raise
