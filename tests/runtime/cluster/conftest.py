"""One Ray for the stories that leave it as they find it: to start it takes ten seconds of CPU and more.

Each story has islands of names of its own, so that these are in their first epoch.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.runtime.cluster.driving import program


@pytest.fixture(scope="package")
def address() -> Iterator[str]:
    """Of a cluster without islands, which is that of a program in another process."""
    with program() as (_, said):
        yield said["address"]
