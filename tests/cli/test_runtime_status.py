"""`waystation runtime status`: what is shown of a cluster. That it finds one is tested with real hosts."""

import pytest

from waystation.cli.commands import runtime_status
from waystation.cli.output import Output
from waystation.runtime.cluster import ClusterStatus, HostStatus, IslandState, IslandStatus, OwnerStatus


def island(name: str, state: IslandState, last_loss: str = "", *hosts: HostStatus) -> IslandStatus:
    return IslandStatus(
        name=name,
        state=state,
        epoch=3,
        restarts=2,
        max_restarts=3,
        kind="cpu",
        devices_per_host=2,
        labels=(("place", "a"),),
        pending=1,
        last_loss=last_loss,
        hosts=hosts,
    )


def host(name: str, doing: str) -> HostStatus:
    return HostStatus(name, "10.0.0.7", 4711, ("TFRT_CPU_0", "TFRT_CPU_1"), doing, 12, 0.0)


def shown(status: ClusterStatus, capsys: pytest.CaptureFixture[str]) -> str:
    runtime_status.show(Output(as_json=False), status)
    return capsys.readouterr().out


def test_islands_and_hosts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    loss = "host 'right/0' has died"
    islands = (
        island("left", IslandState.READY, "", host("left/0", "step"), host("left/1", "")),
        island("right", IslandState.REBUILDING, loss),
    )
    assert shown(ClusterStatus("10.0.0.7:6379", 2, islands), capsys) == (
        "cluster 10.0.0.7:6379, 2 programs\n"
        "\n"
        "island  state       hosts  devices  epoch  restarts  pending  labels\n"
        "left    ready       2      4 cpu    3      2 of 3    1        place=a\n"
        "right   rebuilding  0      0 cpu    3      2 of 3    1        place=a\n"
        "\n"
        "host    address   process  devices                 ended  doing\n"
        "left/0  10.0.0.7  4711     TFRT_CPU_0, TFRT_CPU_1  12     step\n"
        "left/1  10.0.0.7  4711     TFRT_CPU_0, TFRT_CPU_1  12     -\n"
        "island 'right' was lost last because host 'right/0' has died\n"
    )


def test_whose_arrays_take_how_much_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    owners = OwnerStatus("training", False, 4096), OwnerStatus("base", True, 1024)
    status = ClusterStatus("10.0.0.7:6379", 1, (island("left", IslandState.READY),), owners)
    assert shown(status, capsys).endswith(
        "\narrays of  kind     bytes\ntraining   program  4096\nbase       shared   1024\n"
    )


def test_a_cluster_without_islands_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    status = ClusterStatus("10.0.0.7:6379", 1, ())
    assert shown(status, capsys) == "cluster 10.0.0.7:6379, 1 program\nno islands\n"
