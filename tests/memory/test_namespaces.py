"""The hosts that tests of the memory tier lose: what they share and do not share, what is left of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.memory import namespaces, proxies
from tests.memory.namespaces import Host, Network, network_of
from tests.support.agents import wait_until

pytestmark = pytest.mark.skipif(
    namespaces.why_forbidden() is not None, reason=f"{namespaces.why_forbidden()}"
)
# Answers with what it is told, until nobody says anything more.
ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 7)) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            while piece := connection.recv(1 << 16):
                connection.sendall(piece)
"""
# Says something to an address, and prints how many bytes of the answer are as they were said.
SAY = """
import socket, sys
said = bytes(range(256)) * (int(sys.argv[3]) // 256)
heard = bytearray()
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[4])) as connection:
        for place in range(0, len(said), 1 << 16):
            connection.sendall(said[place : place + (1 << 16)])
            while len(heard) < min(len(said), place + (1 << 16)):
                piece = connection.recv(1 << 16)
                if not piece:
                    raise EOFError
                heard += piece
    print(sum(one == other for one, other in zip(said, heard, strict=True)))
except (OSError, EOFError) as error:
    print(type(error).__name__)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with network_of(3) as network:
        yield network


def echo(host: Host) -> None:
    """Starts the program that answers."""
    command = [sys.executable, "-IS", "-c", ECHO, host.address]
    started = host.start(command, stdout=subprocess.PIPE, text=True)
    assert started.entered.stdout is not None
    with started.entered.stdout as said:
        assert said.readline() == "ready\n"


def say(host: Host, address: str, *, port: int = 7, nbytes: int = 256, timeout_s: float = 60) -> str:
    """Says something on one host to another, and tells how that went."""
    command = [sys.executable, "-IS", "-c", SAY, address, port, nbytes, timeout_s]
    return host.run(*command).strip()


def test_hosts_reach_each_other_and_share_no_memory(network: Network) -> None:
    first, second, _ = network.hosts
    echo(second)
    assert say(first, second.address, nbytes=1 << 20) == str(1 << 20)
    first.run("sh", "-c", "echo secret > /dev/shm/file")
    assert first.outside(Path("/dev/shm/file")).read_text() == "secret\n"
    assert second.run("ls", "/dev/shm") == ""
    assert not Path("/dev/shm/file").exists()
    assert "bridge" not in {name for _, name in socket.if_nameindex()}, "the machine itself has no part in it"


def test_a_lost_host_leaves_neither_processes_nor_memory(network: Network) -> None:
    first, second, _ = network.hosts
    echo(second)
    processes = [second.start(["sleep", "1000"]) for _ in range(3)]
    second.run("sh", "-c", "echo secret > /dev/shm/file")
    processes[0].signal(signal.SIGSTOP)
    second.lose()
    assert [process.wait() for process in processes] == [-signal.SIGKILL] * 3, (
        "the one that was stopped as well"
    )
    assert second.is_lost
    # The kernel removes the network after the last process has ended, and refuses connections until then.
    wait_until(lambda: say(first, second.address, timeout_s=0.5) == "TimeoutError")
    second.bring_up()
    assert second.run("ls", "/dev/shm") == ""
    assert say(first, second.address) == "ConnectionRefusedError", "it is there, and runs nothing"
    echo(second)
    assert say(first, second.address) == "256"
    assert second.losses == 1


def test_a_process_is_killed_alone(network: Network) -> None:
    host = network.hosts[0]
    doomed, other = host.start(["sleep", "1000"]), host.start(["sleep", "1000"])
    doomed.signal(signal.SIGSTOP)
    doomed.kill()
    assert doomed.wait() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        doomed.signal(signal.SIGTERM)
    assert other.entered.poll() is None


def test_a_cable_is_pulled(network: Network) -> None:
    first, second, third = network.hosts
    echo(second)
    second.unplug()
    assert say(first, second.address, timeout_s=0.5) == "TimeoutError"
    second.plug_in()
    assert say(third, second.address) == "256"


def test_what_goes_one_way_is_lost(network: Network) -> None:
    first, second, third = network.hosts
    for host in (first, second):
        echo(host)
    second.lose_what_goes_to(first)
    assert say(first, second.address, timeout_s=0.5) == "TimeoutError", "the answers are lost"
    assert say(third, second.address) == "256"
    assert say(second, third.address) == "ConnectionRefusedError", "what goes elsewhere arrives"
    second.find(first)
    assert say(first, second.address) == say(second, first.address) == "256"


def test_a_slow_link_carries_no_more_than_it_is_said_to(network: Network) -> None:
    first, second, _ = network.hosts
    echo(second)
    first.throttle(1 << 20)
    shown = first.inside.network("tc", "qdisc", "show", "dev", "eth0")
    assert "tbf" in shown
    assert "rate 8388" in shown.replace("Kbit", "")
    assert say(first, second.address, nbytes=1 << 18) == str(1 << 18)
    first.throttle(None)
    assert "tbf" not in first.inside.network("tc", "qdisc", "show", "dev", "eth0")
    assert first.sent_bytes() > 1 << 18


def test_a_proxy_corrupts_delays_and_cuts(network: Network) -> None:
    first, second, _ = network.hosts
    echo(second)
    with proxies.between(network, f"{second.address}:7", port=700, seed=1) as proxy:
        through = {"port": 700, "nbytes": 1 << 20}
        assert say(first, network.address, **through) == str(1 << 20)
        proxy.tell("corrupt 65536")
        wrong = (1 << 20) - int(say(first, network.address, **through))
        assert wrong == proxy.changed_bits > 4
        proxy.tell("cut")
        assert say(first, network.address, **through) == "ConnectionResetError"
        proxy.tell("hold")
        assert say(first, network.address, port=700, timeout_s=0.5) == "TimeoutError"
        proxy.tell("delay 0.01")
        assert say(first, network.address, port=700) == "256"
        proxy.tell("pass")
        assert say(first, network.address, **through) == str(1 << 20)
        assert proxy.changed_bits == wrong


def test_a_program_goes_on_within_a_host(network: Network) -> None:
    host = network.hosts[1]
    code = (
        "import os, sys; from tests.memory.namespaces import enter; enter(int(sys.argv[1]))\n"
        "open('/dev/shm/who', 'w').write(str(os.getpid())); print('inside', flush=True)\n"
        "if sys.argv[2] == 'exits': sys.exit(3)\n"
        "input()"
    )
    for ending, expected in (("exits", 3), ("killed", -signal.SIGKILL)):
        command = [sys.executable, "-c", code, str(host.inside.init), ending]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == "inside\n"
            inside = host.outside(Path("/dev/shm/who")).read_text()
            if ending == "killed":
                assert host.run("cat", f"/proc/{inside}/comm").startswith("python")
                host.lose()
            assert program.wait(60) == expected
    host.bring_up()
    command = [sys.executable, "-c", code, str(host.inside.init), "outer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "inside\n"
        inside = host.outside(Path("/dev/shm/who")).read_text()
        program.kill()
        program.wait()
    wait_until(lambda: not host.outside(Path(f"/proc/{inside}")).exists())


def test_nothing_outlives_a_test_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess; from tests.memory.namespaces import network_of\n"
        "with network_of(2) as network:\n"
        "    for host in network.hosts:\n"
        "        host.start(['sleep', '1000'])\n"
        "    inits = [network.switch.init, *(host.inside.init for host in network.hosts)]\n"
        "    print(*inits, *(host.start(['sleep', '999']).process for host in network.hosts), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == -signal.SIGKILL
    processes = [int(word) for word in done.stdout.split()]
    assert len(processes) == 5
    wait_until(lambda: not any(_runs(process) for process in processes))


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
