"""`waystation runtime status`: what is shown of a cluster. That it finds one is tested with real hosts."""

import subprocess
import sys
from pathlib import Path

import pytest

from waystation.cli.commands import runtime_status, runtime_top
from waystation.cli.output import Output
from waystation.errors import InvalidInput
from waystation.runtime.cluster import (
    ClusterStatus,
    HostStatus,
    IslandState,
    IslandStatus,
    OwnerStatus,
    connect,
)


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


def host(name: str, doing: str, ended: int = 12, sent_bytes: int = 0) -> HostStatus:
    devices = "TFRT_CPU_0", "TFRT_CPU_1"
    return HostStatus(name, "10.0.0.7", 4711, devices, doing, ended, 0.0, 2048, sent_bytes)


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
    owners = OwnerStatus("training", False, 4096, 3), OwnerStatus("base", True, 1024)
    status = ClusterStatus("10.0.0.7:6379", 1, (island("left", IslandState.READY),), owners)
    assert shown(status, capsys).endswith(
        "\narrays of  kind     bytes  in flight\ntraining   program  4096   3\nbase       shared   1024   -\n"
    )


def test_a_cluster_without_islands_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    status = ClusterStatus("10.0.0.7:6379", 1, ())
    assert shown(status, capsys) == "cluster 10.0.0.7:6379, 1 program\nno islands\n"


def test_top_shows_rates_programs_and_losses(capsys: pytest.CaptureFixture[str]) -> None:
    owners = (OwnerStatus("training", False, 4096, 3),)

    def look(moment_s: float, ended: int, sent_bytes: int) -> runtime_top.Look:
        left = island(
            "left", IslandState.READY, "host 'left/1' has died", host("left/0", "step", ended, sent_bytes)
        )
        return runtime_top.Look(moment_s, ClusterStatus("10.0.0.7:6379", 1, (left,), owners))

    runtime_top.show(Output(as_json=False), look(12.0, 30, 8192), look(10.0, 10, 4096))
    assert capsys.readouterr().out == (
        "cluster 10.0.0.7:6379\n"
        "\n"
        "island  state  hosts  devices  epoch  restarts  pending  labels\n"
        "left    ready  1      2 cpu    3      2 of 3    1        place=a\n"
        "\n"
        "host    process  done  arrays   sent       stalled  doing\n"
        "left/0  4711     10/s  2.0 KiB  2.0 KiB/s  -        step\n"
        "\n"
        "arrays of  kind     bytes  in flight\n"
        "training   program  4096   3\n"
        "island 'left' was lost last because host 'left/1' has died\n"
    )
    runtime_top.show(Output(as_json=False), look(10.0, 12, 0), None)
    assert "left/0  4711     12    2.0 KiB  0 B   -        step\n" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["status"], ["top", "--once"]])
@pytest.mark.share(2)
def test_without_ray_the_extra_is_named(arguments: list[str], tmp_path: Path) -> None:
    # An import of what is None in sys.modules fails as that of a module which is not installed.
    code = "import sys; sys.modules['ray'] = None\nfrom waystation.cli import main; main()"
    command = [sys.executable, "-c", code, "runtime", *arguments, "127.0.0.1:1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the runtime needs Ray and JAX 0.12 or later")
    assert done.stderr.endswith("): pip install 'flatbuffers>=24.3' 'jax>=0.12' 'ray>=2.60'\n")


def test_what_is_no_address_is_refused() -> None:
    pytest.importorskip("ray")
    with pytest.raises(InvalidInput, match="HOST:PORT"):
        connect("nonsense", hosts=0)
