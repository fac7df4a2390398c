"""Connections of one program to a cluster share its connection to Ray, whichever is closed first."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from tests.runtime.cluster.driving import manager_of, visiting
from tests.support.long import only_long

from waystation.errors import Unavailable
from waystation.runtime.cluster import connect, connecting
from waystation.runtime.cluster.connecting import look

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="the runtime needs Python 3.12")


@pytest.mark.timeout(600)
@pytest.mark.long
@only_long
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
@pytest.mark.long
@only_long
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


@pytest.mark.timeout(600)
def test_a_manager_that_does_not_answer_is_not_waited_for_for_ever(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "_ENTER_TIMEOUT_S", 2.0)
    with visiting(address) as cluster:
        manager = manager_of(cluster)
        os.kill(manager, signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable, match="has not let this program in within 2 s"):
                connect(address)
        finally:
            os.kill(manager, signal.SIGCONT)
        assert cluster.status().clients >= 2  # it goes on
