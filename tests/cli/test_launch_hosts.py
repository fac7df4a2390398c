"""`waystation launch --hosts`: the places of processes among all, and what hosts are emulated with."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.ports import claimed_ports

from waystation.errors import InvalidInput
from waystation_launch.hosts import SECRET_FILE, ListedHost, emulated, index_of, prepare, read_hosts
from waystation_launch.world import World

SCRIPT = str(Path(sys.executable).parent / "waystation")
HANG_S = 120
LISTED = [
    {"name": "a", "address": "10.0.0.1:7700", "domain": "rack1"},
    {"name": "b", "address": "[fe80::2]:7700"},
]


def listed(directory: Path, content: Any = LISTED) -> Path:
    path = directory / "hosts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_list_of_hosts(tmp_path: Path) -> None:
    hosts = read_hosts(listed(tmp_path))
    assert hosts == [ListedHost("a", "10.0.0.1:7700", "rack1"), ListedHost("b", "[fe80::2]:7700", "b")]
    assert [host.machine for host in hosts] == ["10.0.0.1", "fe80::2"]
    assert index_of(hosts, "b", tmp_path) == 1
    with pytest.raises(InvalidInput, match=r"'c' is no host .* has: a, b"):
        index_of(hosts, "c", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a list of hosts"),
        ([], "is not a list of hosts"),
        ({"name": "a"}, "is not a list of hosts"),
        ([{"name": "a"}], "is not a list of hosts"),
        ([{"name": "a", "address": 7700}], "is not a list of hosts"),
        ([LISTED[0], LISTED[0]], "two hosts of the same name"),
    ],
)
def test_what_is_no_list_of_hosts(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_hosts(listed(tmp_path, content))


def test_processes_are_numbered_host_by_host() -> None:
    world = World(3, 2, [1], "10.0.0.1", 29501, 29500)
    assert world.first_index == 2
    told = world.environments({"HOME": "/root"}, jax=True, torch=True)
    assert [entry["WAYSTATION_PROCESS_INDEX"] for entry in told] == ["2", "3"]
    assert told[1] == {
        "HOME": "/root",
        "PYTHONUNBUFFERED": "1",
        "WAYSTATION_PROCESS_COUNT": "6",
        "WAYSTATION_PROCESS_INDEX": "3",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:29501",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "6",
        "RANK": "3",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
    }
    all_hosts = World(3, 2, range(3), "127.0.0.2", 1, 2).environments({}, jax=False, torch=True)
    assert [entry["RANK"] for entry in all_hosts] == list("012345")
    assert "JAX_COORDINATOR_ADDRESS" not in all_hosts[0]


def test_a_program_over_hosts_needs_no_agents(tmp_path: Path) -> None:
    listed(tmp_path, [{"name": name, "address": f"127.0.0.{index}:1"} for index, name in enumerate("ab", 2)])
    show = "import os; print(os.environ['RANK'], os.environ['MASTER_ADDR'], os.environ['WORLD_SIZE'])"
    with claimed_ports(1) as (port,):
        hosts = ["--hosts", "hosts.json", "-n", "2", "--json", "--port", str(port - 2)]
        launches = [
            subprocess.Popen(
                [SCRIPT, "launch", *hosts, "--host", host, "--", sys.executable, "-c", show],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in "ab"
        ]
        try:
            said = [launch.communicate(timeout=HANG_S) for launch in launches]
        finally:
            for launch in launches:
                launch.kill()
    for index, (output, errors) in enumerate(said):
        assert launches[index].returncode == 0, errors
        shown = sorted(line for line in errors.splitlines() if line.startswith("["))
        assert shown == [f"[{rank}] {rank} 127.0.0.2 4" for rank in (2 * index, 2 * index + 1)]
        report = json.loads(output)
        assert (report["agents"], report["recoveries"], len(report["starts"])) == ([], [], 1)


def test_hosts_are_emulated_with_addresses_and_a_secret_of_their_own(tmp_path: Path) -> None:
    directory = tmp_path / "agents"
    hosts = emulated(directory, 3)
    assert not directory.exists()
    prepare(directory, hosts)
    assert [host.name for host in hosts] == ["host-0", "host-1", "host-2"]
    assert [host.machine for host in hosts] == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    assert len({host.domain for host in hosts}) == 3
    secret = directory / SECRET_FILE
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    before = secret.read_text()
    assert len(before) == 64
    assert emulated(directory, 3) == hosts, "agents of an earlier launch are still there"
    prepare(directory, hosts)
    assert secret.read_text() == before
    with pytest.raises(InvalidInput, match="is that of 3 hosts"):
        emulated(directory, 2)
    for count in (0, 1, 65):
        with pytest.raises(InvalidInput, match="between 2 and 64"):
            emulated(tmp_path / "none", count)


@pytest.mark.share(12)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "a"], "give that as --hosts FILE"),
        (["--tls-key", "key"], "give that as --hosts FILE"),
        (
            ["--hosts", "hosts.json", "--host", "b", "--agent", "d", "--secret-file", "s", "--tls-key", "k"],
            "all three",
        ),
        (["--hosts", "3"], "such as --agent /dev/shm/agents"),
        (["--hosts", "3", "--host", "a", "--agent", "agents"], "give the number alone"),
        (["--hosts", "hosts.json", "--agent", "agents"], "has the hosts a, b"),
        (["--hosts", "none.json", "--agent", "agents"], "none.json"),
        (
            ["--hosts", "hosts.json", "--host", "c", "--secret-file", "secret", "--agent", "agents"],
            "'c' is no host of",
        ),
        (
            ["--hosts", "hosts.json", "--host", "b", "--secret-file", "s", "--agent", "d", "--copies", "3"],
            "there are 2; give 2 or fewer",
        ),
        (["--hosts", "3", "--agent", "agents", "--copies", "4"], "there are 3; give 3 or fewer"),
        (["--hosts", "3", "--agent", "agents"], "--agent-memory 8GiB"),
        (["--hosts", "3", "--agent", "agents", "--agent-memory", "2MiB"], "too little for 6 slots"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    listed(tmp_path)
    done = subprocess.run(
        [SCRIPT, "launch", *arguments, "--", sys.executable, "-c", "print('never')"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "never" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["hosts.json"]
