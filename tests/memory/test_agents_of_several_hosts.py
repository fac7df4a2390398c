"""Agents of several hosts as they are, on hosts that are lost, stopped, cut off, slowed down and lied to.

Trainers are played by the test, which saves shards through the agents from outside of their hosts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.memory import namespaces, shards
from tests.memory.clusters import Cluster, cluster_of
from tests.memory.shards import assert_equal
from tests.support.agents import wait_until

from waystation import _native, errors

pytestmark = pytest.mark.skipif(
    namespaces.why_forbidden() is not None, reason=f"{namespaces.why_forbidden()}"
)
HOSTS = 3
SEQUENCE = "00000000000000aa"


class Program:
    """A program with a trainer on each host, as its agents see it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._token = time.time_ns()
        names = [agent.host.name for agent in cluster.agents]
        client = cluster.agents[0].client()
        client.begin(self._token, SEQUENCE, names)
        wait_until(lambda: all(self._is_training(index) for index in range(len(names))))

    def _is_training(self, index: int) -> bool:
        try:
            standing = self.standing(index)
        except errors.WaystationError:  # it is not there at the moment
            return False
        return bool(standing["is_training"]) and standing["program"] == self._token

    def standing(self, index: int) -> dict[str, Any]:
        """How things stand, as the agent of a host says."""
        return self._cluster.agents[index].client().standing()

    def save(self, step: int) -> int:
        """Saves a step on every host; returns the epoch that took it."""
        wait_until(lambda: self._try_to_save(step))
        return int(self.standing(0)["epoch"])

    def _try_to_save(self, step: int) -> bool:
        """Saves, unless agents are about to agree on something else."""
        standings = [self.standing(index) for index in range(HOSTS)]
        epochs = {standing["epoch"] for standing in standings}
        if len(epochs) > 1 or not all(standing["is_open"] for standing in standings):
            return False
        (epoch,) = epochs
        for index, agent in enumerate(self._cluster.agents):
            try:
                _save(agent.client(), epoch, step, index)
            except errors.Conflict:
                pass  # it has it already
            except (errors.Fenced, errors.Unavailable, errors.Cancelled):
                return False
        return True

    def await_commit(self, step: int) -> None:
        """Waits until all agents know that a step is committed."""
        wait_until(
            lambda: all(
                step in [committed for _, committed in self.standing(index)["commits"]]
                for index in range(HOSTS)
            )
        )

    def assert_begun_with(self, step: int) -> None:
        """Every host can be given every shard of the step that the program has begun with, to the bit."""
        base = self.standing(0)["base"]
        assert base is not None
        assert (base["step"], base["shard_count"], base["sequence"]) == (step, HOSTS, SEQUENCE)
        for index, agent in enumerate(self._cluster.agents):
            assert self.standing(index)["base"] == base
            for shard in range(HOSTS):
                held = agent.client().bring(base["epoch"], step, _name(shard))
                assert_equal(shards.read(held), _arrays(step, shard))
                held.release()


def _name(shard: int) -> str:
    return f"{SEQUENCE}/{shard}-of-{HOSTS}"


def _arrays(step: int, shard: int) -> shards.Arrays:
    random = np.random.default_rng([step, shard])
    return {"weights": random.standard_normal((300, 1001)).astype(np.float32)}


def _save(client: _native.AgentClient, epoch: int, step: int, shard: int) -> None:
    job = shards.start_save(client, step, _arrays(step, shard), epoch, _name(shard))
    job.result()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_of(HOSTS, tmp_path, copies=2) as cluster:
        yield cluster


def test_a_host_is_lost_and_another_takes_its_place(cluster: Cluster) -> None:
    program = Program(cluster)
    program.save(1)
    program.await_commit(1)
    for victim in range(HOSTS):
        cluster.lose_host(victim)
        program = Program(cluster)
        program.assert_begun_with(1 + victim)
        program.save(2 + victim)
        program.await_commit(2 + victim)


def test_the_controller_is_killed(cluster: Cluster) -> None:
    program = Program(cluster)
    for step in (1, 2, 3):
        program.save(step)
        program.await_commit(step)
        victim = cluster.controller()
        cluster.agents[victim].kill()
        wait_until(lambda of=victim: cluster.controller() not in (of, None))
        cluster.agents[victim].start()
    Program(cluster).assert_begun_with(3)


def test_an_agent_is_stopped_and_goes_on(cluster: Cluster) -> None:
    program = Program(cluster)
    program.save(1)
    program.await_commit(1)
    for victim in range(HOSTS):
        cluster.agents[victim].stop()
        others = [index for index in range(HOSTS) if index != victim]
        before = program.standing(others[0])["epoch"]
        wait_until(
            lambda of=others, than=before: all(program.standing(index)["epoch"] > than for index in of)
        )
        cluster.agents[victim].go_on()
        program.save(2 + victim)
        program.await_commit(2 + victim)


def test_links_are_cut_and_slow(cluster: Cluster) -> None:
    program = Program(cluster)
    program.save(1)
    program.await_commit(1)
    first, second, third = (agent.host for agent in cluster.agents)
    second.unplug()
    time.sleep(0.5)
    second.plug_in()
    program.save(2)
    program.await_commit(2)
    third.lose_what_goes_to(first)
    time.sleep(0.5)
    third.find(first)
    first.throttle(4 << 20)
    program.save(3)
    program.await_commit(3)
    first.throttle(None)
    Program(cluster).assert_begun_with(3)


def test_a_proxy_corrupts_what_goes_between_agents(tmp_path: Path) -> None:
    with cluster_of(HOSTS, tmp_path, copies=2, through_proxies=True) as cluster:
        program = Program(cluster)
        program.save(1)
        program.await_commit(1)
        for proxy in cluster.proxies:
            proxy.tell("corrupt 400000")
        program.save(2)
        wait_until(lambda: sum(proxy.changed_bits for proxy in cluster.proxies) > 5)
        for proxy in cluster.proxies:
            proxy.tell("cut")
        for proxy in cluster.proxies:
            proxy.tell("pass")
        program.save(3)
        program.await_commit(3)
        Program(cluster).assert_begun_with(3)
