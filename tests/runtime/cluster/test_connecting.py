"""Connections of one program to a cluster share its connection to Ray, whichever is closed first."""

from __future__ import annotations

import sys

import pytest
from tests.runtime.cluster.driving import visiting

from waystation.errors import Unavailable
from waystation.runtime.cluster import connect
from waystation.runtime.cluster.connecting import look

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="the runtime needs Python 3.12")


@pytest.mark.timeout(600)
def test_the_last_cluster_to_close_ends_the_connection_to_ray(address: str) -> None:
    import ray

    first = connect(address, name="before")
    with visiting(address, name="after") as second:
        first.close()
        assert look(address).clients == 2  # and the program that the cluster belongs to
        second.add_island("of the second")
        assert list(second.islands) == ["of the second"]
        assert ray.is_initialized()
    assert not ray.is_initialized()
    assert look(address).clients == 1


@pytest.mark.timeout(600)
def test_a_cluster_whose_connection_to_ray_the_program_has_ended_says_so(address: str) -> None:
    import ray

    first = connect(address)
    ray.shutdown()
    second = connect(address)
    with pytest.raises(Unavailable, match="Connect again"):
        first.status()
    first.close()
    assert second.status().clients >= 2
    ray.shutdown()
    second.close()
    assert not ray.is_initialized()  # nothing was started in order to leave
