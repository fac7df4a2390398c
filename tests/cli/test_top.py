"""Agents that are watched: their metrics, as Prometheus reads them, and `waystation top` with real ones."""

from __future__ import annotations

import http.client
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.memory import shards
from tests.support.agents import RUN, Agent, memory_directory, running_agent

from waystation import _native
from waystation.errors import Corrupt
from waystation.memory.exposition import samples_of

SCRIPT = Path(sys.executable).parent / "waystation"
HEADINGS = ["host", "slots", "memory", "processes", "epoch", "sealed", "committed", "lag", "sent", "received"]
HEADINGS += ["damaged", "recovery", "decide", "transfer"]


@pytest.fixture
def agent() -> Iterator[Agent]:
    with (
        memory_directory() as directory,
        running_agent(directory, options=["--versions=1"], metrics="127.0.0.1:0") as agent,
    ):
        yield agent


@pytest.fixture
def client(agent: Agent) -> _native.AgentClient:
    return _native.AgentClient(str(agent.directory))


def fetch(address: str, path: str = "/metrics", method: str = "GET") -> tuple[int, str, str]:
    """What an agent answers over HTTP: its status, the type of the text, and the text."""
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request(method, path)
    answer = connection.getresponse()
    with answer:
        found = (answer.status, answer.headers["Content-Type"], answer.read().decode())
    connection.close()
    return found


def numbers_of(text: str) -> dict[str, float]:
    """All samples of a text by name and labels, as the parser of Prometheus' own client reads them."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type in {"gauge", "counter", "summary"}, family.name
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            name = sample.name.removeprefix("waystation_agent_")
            assert name != sample.name, "every name says what it is of"
            key = f"{name}{{{labels}}}" if labels else name
            assert key not in found, key
            found[key] = sample.value
    return found


def test_prometheus_reads_the_metrics_of_an_agent(agent: Agent, client: _native.AgentClient) -> None:
    status, content_type, text = fetch(agent.ready["metrics"])
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    fresh = numbers_of(text)
    assert fresh["slots{state=free}"] == 4
    assert fresh["memory_cap_bytes"] == 1 << 30
    assert fresh["memory_bytes"] == 4 * fresh["slot_size_bytes"] > 16 << 20
    assert not any(name.startswith("newest_step") for name in fresh), "there is no version"
    for step in (10, 20):
        saved = shards.save(client, step)
        client.commit(shards.EPOCH, step)
    shards.save(client, 30)
    numbers = numbers_of(fetch(agent.ready["metrics"])[2])
    assert numbers["slots{state=committed}"] == numbers["versions{state=committed}"] == 1
    assert numbers["slots{state=sealed}"] == numbers["replication_lag_versions"] == 1
    assert numbers["newest_step{state=committed}"] == 20
    assert numbers["newest_step{state=sealed}"] == 30
    assert numbers["newest_epoch{state=sealed}"] == shards.EPOCH
    assert numbers["replication_lag_seconds"] > 0
    assert numbers["sealed_slots_total"] == 3
    assert numbers["committed_slots_total"] == numbers["commit_wait_seconds_count"] == 2
    assert numbers["commit_wait_seconds_sum"] > 0
    assert numbers["freed_slots_total"] == 1
    assert numbers["processes"] == 1
    (held,) = [slot for slot in client.inventory() if slot["slot"] == saved["slot"]]
    nbytes = held["contents_bytes"] + held["data_bytes"]
    assert numbers["slots_held_bytes{state=committed}"] == nbytes
    assert numbers["sealed_bytes_total"] == 3 * nbytes
    client.commit(shards.EPOCH, 30)
    numbers = numbers_of(client.metrics())
    assert (numbers["replication_lag_versions"], numbers["replication_lag_seconds"]) == (0, 0)


def test_damage_is_counted(agent: Agent, client: _native.AgentClient) -> None:
    shards.save(client, 10)
    client.commit(shards.EPOCH, 10)
    client.quarantine(shards.EPOCH, 10)
    numbers = numbers_of(client.metrics())
    assert (numbers["quarantined_slots_total"], numbers["slots{state=quarantined}"]) == (1, 1)
    assert numbers["verification_failures_total"] == 0
    shards.save(client, 20)
    path, file_bytes, _ = client.hold(shards.EPOCH, 20, "0/1").file
    agent.kill()
    with open(path, "r+b") as file:
        file.seek(file_bytes - 1)
        file.write(b"\xa5")
    agent.start()
    assert numbers_of(client.metrics())["verification_failures_total"] == 1


def test_nothing_else_is_served(agent: Agent) -> None:
    address = agent.ready["metrics"]
    assert fetch(address, "/")[0] == 404
    assert fetch(address, method="POST")[0] == 405
    assert fetch(address, method="HEAD")[2] == ""
    options = ["--slots=3", "--data-bytes=1MiB", "--memory-cap-bytes=16MiB", f"--run-id={RUN}"]
    with memory_directory() as directory:
        command = [SCRIPT, "agent", "run", *options, f"--directory={directory}", "--metrics", address]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot serve metrics" in done.stderr


def test_strangers_who_say_nothing_keep_nobody_out(agent: Agent) -> None:
    host, port = agent.ready["metrics"].split(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(8)]
    assert fetch(agent.ready["metrics"])[0] == 200  # once the first of them have had their time
    for stranger in strangers:
        stranger.close()


def test_the_whole_table(agent: Agent, client: _native.AgentClient, script) -> None:
    shards.save(client, 10)
    client.commit(shards.EPOCH, 10)
    outcome = script("top", "--once", "--directory", agent.directory)
    assert (outcome.err, outcome.code) == ("", 0)
    headings, row = (line.split() for line in outcome.out.splitlines())
    assert headings == HEADINGS
    memory = ["1/4", "17.0", "MiB", "1", "0", "10", "10", "0", "-", "-", "0", "-", "-", "-"]
    assert row == [str(agent.directory), *memory]


def test_all_agents_of_a_file_and_one_that_is_gone(tmp_path: Path, script, agent: Agent) -> None:
    with memory_directory() as directory, running_agent(directory, metrics="127.0.0.2:0") as other:
        port = int(other.ready["metrics"].split(":")[1])
        hosts = tmp_path / "hosts.json"
        named = [{"name": "alive", "address": "127.0.0.2:1"}, {"name": "gone", "address": "127.0.0.3:1"}]
        hosts.write_text(json.dumps(named))
        outcome = script("top", "--hosts", hosts, "--metrics-port", port, "--json")
        assert outcome.code == 1, "one does not answer"
        alive, gone = outcome.document["agents"]
        assert (alive["name"], alive["problem"], alive["numbers"]["slots"]["free"]) == ("alive", None, 4)
        assert alive["about"]["run"] == RUN
        assert (gone["name"], gone["numbers"]) == ("gone", {})
        assert f"no agent answers at 127.0.0.3:{port}" in gone["problem"]
        outcome = script("top", "--hosts", hosts, "--metrics-port", port, "--once")
        assert outcome.code == 1
        assert outcome.out.splitlines()[2].split() == ["gone", "silent"]
        both = script(
            "top", "--metrics", agent.ready["metrics"], "--metrics", other.ready["metrics"], "--json"
        )
        assert both.code == 0
        assert [view["numbers"]["slots"]["free"] for view in both.document["agents"]] == [4, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say which agents are meant"),
        (("--directory", "d", "--metrics", "a:1"), "give one of"),
        (("--metrics", "9464"), "is no address"),
        (("--hosts", "hosts"), "is not a list of hosts"),
        (("--hosts", "none"), "No such file"),
    ],
)
@pytest.mark.share(6)
def test_what_is_wrong_is_said(tmp_path: Path, script, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "hosts").write_text('{"name": "a"}')
    outcome = script("top", "--once", *arguments)
    assert (outcome.out, outcome.code) == ("", 2)
    assert message in outcome.err


def test_it_goes_on_until_its_output_is_closed(agent: Agent, client: _native.AgentClient) -> None:
    command = [SCRIPT, "top", "--directory", agent.directory, "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        assert top.stderr is not None
        assert top.stdout.readline().split() == HEADINGS
        shards.save(client, 10)
        assert any("10" in line.split() for line in iter(top.stdout.readline, ""))
        top.stdout.close()
        assert top.wait(60) == 141
        assert top.stderr.read() == ""


def test_ctrl_c_ends_it_on_a_terminal(agent: Agent) -> None:
    reader, terminal = pty.openpty()
    command = [SCRIPT, "top", "--directory", agent.directory, "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}
    with subprocess.Popen(
        command, stdout=terminal, stderr=subprocess.PIPE, env=environment, text=True
    ) as top:
        os.close(terminal)
        shown = ""
        while shown.count("committed") < 2:  # it has been drawn again
            shown += os.read(reader, 4096).decode(errors="replace")
        top.send_signal(signal.SIGINT)
        try:
            while os.read(reader, 4096):
                pass
        except OSError:
            pass  # how a terminal tells that nobody writes to it any more
        assert top.wait(60) == 0
        assert top.stderr is not None
        assert top.stderr.read() == ""
    os.close(reader)


def test_it_goes_on_when_an_agent_comes_back(agent: Agent) -> None:
    command = [SCRIPT, "top", "--metrics", agent.ready["metrics"], "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        agent.kill()
        assert any("silent" in line for line in iter(top.stdout.readline, ""))
        agent.start()
        assert any("0/4" in line for line in iter(top.stdout.readline, ""))
        top.kill()


def test_samples_are_read_as_they_are_specified() -> None:
    text = (
        "# HELP one Something.\n# TYPE one gauge\none 7\n\n"
        'two{state="a\\"b\\\\c\\nd",other="x}",} 0.25 1700000000\n three  18446744073709551615\nfour NaN\n'
    ).replace("\n three", "\nthree")
    one, two, three, four = samples_of(text)
    assert (one.name, one.labels, one.value) == ("one", {}, 7)
    assert (two.labels, two.value) == ({"state": 'a"b\\c\nd', "other": "x}"}, 0.25)
    assert three.value == (1 << 64) - 1
    assert four.value != four.value
    for wrong in ("one", "one{a=b} 1", 'one{a="b} 1', "1one 1", "one one"):
        with pytest.raises(Corrupt):
            list(samples_of(wrong))


@pytest.mark.parametrize("columns", [80, 130])
@pytest.mark.share(2)
def test_a_narrow_terminal_shows_all_columns_whole(
    agent: Agent, client: _native.AgentClient, columns: int
) -> None:
    shards.save(client, 10)
    reader, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": str(columns)}
    command = [SCRIPT, "top", "--once", "--directory", agent.directory]
    with subprocess.Popen(command, stdout=terminal, stderr=subprocess.DEVNULL, env=environment) as top:
        os.close(terminal)
        shown = b""
        try:
            while data := os.read(reader, 4096):
                shown += data
        except OSError:
            pass  # how a terminal tells that nobody writes to it any more
        assert top.wait(60) == 0
    os.close(reader)
    lines = shown.decode().replace("\r", "").splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in shown.decode()
    words = shown.decode().split()
    assert [heading for heading in HEADINGS if heading not in words] == []
    assert {"1/4", "MiB", "10"} <= set(words)
