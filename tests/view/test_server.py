"""The server of the window: who is let in, and that its documents are those of the commands."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import s3
from tests.support.long import only_long
from tests.support.programs import HANG_S
from typer.testing import CliRunner

import waystation
from waystation.cli.application import application
from waystation.errors import InvalidInput, NotFound, Unavailable
from waystation.training import Checkpointer
from waystation.transfers import statistics as transfers
from waystation.view import server

from . import sparse
from .conftest import Client, Open

SCRIPT = Path(sys.executable).parent / "waystation"


def printed(*arguments: object) -> object:
    """The document that a command prints."""
    done = CliRunner().invoke(application, [*map(str, arguments), "--json"])
    return json.loads(done.stdout)


# ---- who is let in -----------------------------------------------------------------------------


def test_only_the_token_opens_the_window(runs: Path, window: Open) -> None:
    client = window(runs)
    assert len(client.token) >= 32
    assert b"<!doctype html>" in client.get(f"/{client.token}/").body
    inside = ("", "main.js", "style.css", "api/sources", "api/verify?source=0&name=step_1", "absent")
    for name in inside:
        for wrong in ("", client.token[:-1], client.token + "a", client.token.swapcase(), "%00"):
            answer = client.get(f"/{wrong}/{name}")
            assert answer.status == 403, (wrong, name)
            assert b"waystation view" in answer.body
            assert client.token.encode() not in answer.body
    assert window(runs).token != client.token


def test_other_hosts_origins_and_methods_are_refused(runs: Path, window: Open) -> None:
    client = window(runs)
    path = client.path("sources")
    for host in (
        "evil.example",
        "evil.example:" + str(client.port),
        "127.0.0.1",
        "127.0.0.1:1",
        "0.0.0.0",
        "",
    ):
        assert client.get(path, headers={"Host": host}).status == 421, host
    for origin in (
        "http://evil.example",
        "null",
        "https://127.0.0.1",
        f"http://127.0.0.1:{client.port}.evil",
    ):
        assert client.get(path, headers={"Origin": origin}).status == 403, origin
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert client.get(path, method).status == 405
    for name in ("127.0.0.1", "localhost"):
        host = f"{name}:{client.port}"
        assert client.get(path, headers={"Host": host, "Origin": f"http://{host}"}).status == 200


def test_it_listens_on_the_loopback_interface_alone() -> None:
    listener = server.listen(0)
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(Unavailable, match="another program listens at port"):
            server.listen(listener.getsockname()[1])


def test_every_answer_tells_the_browser_to_trust_nothing_else(runs: Path, window: Open) -> None:
    client = window(runs)
    for path in (
        f"/{client.token}/",
        f"/{client.token}/main.js",
        client.path("ls"),
        client.path("top"),
        "/x",
    ):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert not any(name.startswith("access-control") for name in headers)


def test_the_page_fetches_nothing_from_elsewhere_and_writes_no_markup() -> None:
    for path in server.ASSETS.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|@import", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), (
            path.name
        )


def test_names_lead_nowhere_but_into_what_is_shown(runs: Path, tmp_path: Path, window: Open) -> None:
    waystation.save(tmp_path / "secret", {"a": 1})
    client = window(runs, runs / "step_1")
    for name in ("../secret", "..", ".", "/etc", "step_1/state", "a\0b"):
        assert client.ask("inspect", source=0, name=name)["error"]["kind"] == "InvalidInput", name
    assert client.ask("inspect", source=1, name="step_2")["error"]["kind"] == "InvalidInput"
    for number in (2, "x", "-1", 10**13):
        assert client.ask("inspect", source=number)["error"]["kind"] in ("NotFound", "InvalidInput")


# ---- documents ---------------------------------------------------------------------------------


def test_documents_are_those_of_the_commands(runs: Path, window: Open) -> None:
    client = window(runs)
    assert client.ask("ls", source=0) == printed("ls", runs)
    whole = printed("inspect", runs / "step_1")
    seen = client.ask("inspect", source=0, name="step_1")
    leaves = whole["checkpointables"]["state"]["leaves"]  # type: ignore[index]
    asked = [
        client.ask("leaf", opened=seen["opened"], checkpointable="state", leaf=number)["leaf"]
        for number in range(len(leaves))
    ]
    assert asked == leaves
    seen["document"]["checkpointables"]["state"]["leaves"] = asked
    assert seen["document"] == whole
    assert client.result("verify", source=0, name="step_1") == printed("verify", runs / "step_1")
    found = client.result("diff", source=0, name="step_1", other_source=0, other_name="step_2")
    assert found == printed("diff", runs / "step_1", runs / "step_2")
    (values,) = [each["values"] for each in found["differences"] if each["values"]]
    assert (values["norm"], values["max_absolute"], values["differing"]) == (5.0, 4.0, 2)


def test_handlers_files_and_orbax_are_shown(tmp_path: Path, window: Open) -> None:
    state = {"a": np.arange(10.0), "b": np.ones((4, 4), np.int8)}
    with waystation.Context(checkpoint_layout=waystation.options.CheckpointLayout.ORBAX):
        waystation.save(tmp_path / "orbax", state)
    waystation.save_checkpointables(tmp_path / "several", {"weights": state, "notes": {"text": "a"}})
    client = window(tmp_path / "orbax", tmp_path / "several")
    for source, path in enumerate(("orbax", "several")):
        seen = client.ask("inspect", source=source)
        whole = printed("inspect", tmp_path / path)
        assert seen["document"]["checkpointables"].keys() == whole["checkpointables"].keys()  # type: ignore[index]
    seen = client.ask("inspect", source=0)
    found = client.result("statistics", opened=seen["opened"], checkpointable="state", leaf=0)
    assert (found["minimum"], found["maximum"], found["mean"]) == (0.0, 9.0, 4.5)


def test_errors_say_what_the_command_line_says(runs: Path, window: Open) -> None:
    client = window(runs)
    absent = client.get(client.path("inspect", source=0, name="step_3"))
    assert absent.status == 404
    assert absent.document == printed("inspect", runs / "step_3")
    (runs / "step_1" / "state" / "tree.json").write_bytes(b"{}")
    damaged = client.get(client.path("inspect", source=0, name="step_1"))
    assert damaged.status == 422
    assert damaged.document == printed("inspect", runs / "step_1")
    assert client.result("diff", source=0, name="step_1", other_source=0, other_name="x")["error"]["kind"]
    assert client.ask("top")["error"]["kind"] == "NotFound"
    with pytest.raises(NotFound, match="nothing is at"):
        server.source_at(str(runs / "absent"))
    with pytest.raises(InvalidInput, match="published model"):
        server.source_at(str(runs / "model.safetensors"))


def test_damage_is_found_with_progress(runs: Path, window: Open) -> None:
    data = runs / "step_1" / "state" / "p00000-000.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    client = window(runs)
    first, *_, last = client.get(client.path("verify", source=0, name="step_1")).lines
    assert first == {"progress": [0, 0]}
    (outcome,) = last["result"]["checkpoints"]
    assert not outcome["intact"]
    assert last["result"] == printed("verify", runs / "step_1")


def test_what_was_opened_stays_the_version_that_it_was(runs: Path, window: Open) -> None:
    client = window(runs)
    seen = client.ask("inspect", source=0, name="step_1")
    waystation.save(runs / "step_1", {"other": 1}, overwrite=True)
    rows = client.ask("rows", opened=seen["opened"], checkpointable="state")
    assert rows["names"] == ["(root)", "params", "w", "b", "step"]
    for _ in range(5):
        client.ask("inspect", source=0, name="step_2")
    closed = client.ask("rows", opened=seen["opened"], checkpointable="state")["error"]
    assert "reload the page" in closed["message"]


def test_a_tree_comes_in_pages(tmp_path: Path, window: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_ROWS", 100)
    waystation.save(tmp_path / "c", {f"layer{number}": {"w": number} for number in range(120)})
    client = window(tmp_path / "c")
    opened = client.ask("inspect", source=0)["opened"]
    names: list[str] = []
    while len(names) < 241:
        page = client.ask("rows", opened=opened, checkpointable="state", begin=len(names))
        assert page["total"] == 241
        assert 0 < len(page["names"]) <= 100
        names += page["names"]
    assert names[:4] == ["(root)", "layer0", "w", "layer1"]
    assert client.ask("rows", opened=opened, checkpointable="state", begin=10**9)["names"] == []


def test_logs_say_who_waited(runs: Path, tmp_path: Path, window: Open) -> None:
    saves = [
        transfers.SaveStatistics(str(runs / "step_1"), 100, 0.25, 0.5, 0.75, 1.0, 8),
        transfers.SaveStatistics("s3://bucket/it's/2", 7, 0.125, 0.5, 0.5, 2.0),
    ]
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers._log, "info", lambda text, *values: lines.append(text % values))
        for save in saves:
            save.log()
    log = tmp_path / "trainer.log"
    log.write_text(
        "\n".join(["starting", *(f"2026-11-27 INFO waystation: {line}" for line in lines), "saved 'x'"])
    )
    client = window(log)
    assert client.ask("log", source=0)["saves"] == [
        {
            "path": save.path,
            "bytes_written": save.bytes_written,
            "blocked_s": save.blocked_s,
            "written_s": save.written_s,
            "synced_s": save.synced_s,
            "duration_s": save.duration_s,
            "bytes_shared": save.bytes_shared,
        }
        for save in saves
    ]


def test_logs_say_what_a_checkpointer_waited_for(tmp_path: Path, window: Open) -> None:
    log = tmp_path / "trainer.log"
    handler = logging.FileHandler(log)
    logger = logging.getLogger("waystation")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(1, {"a": 1})
            checkpointer.save(2, {"a": 2})
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        handler.close()
    client = window(tmp_path / "run", log)
    listed, told = client.ask("ls", source=0), client.ask("log", source=1)
    assert [save["path"] for save in told["saves"]] == [step["path"] for step in listed["checkpoints"]]
    assert [(call["step"], call["directory"]) for call in told["calls"]] == [
        (step["step"], listed["directory"]) for step in listed["checkpoints"]
    ]
    assert all(0 <= call["waited_s"] <= call["blocking_s"] for call in told["calls"])


def test_work_ends_when_the_page_goes_away(runs: Path, window: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BaseException] = []

    def verify(_: object, _path: str, on_progress: server.OnProgress) -> server.Document:
        deadline = time.monotonic() + HANG_S
        try:
            while time.monotonic() < deadline:
                on_progress(1, 2)
                time.sleep(0.01)
        except BaseException as error:
            told.append(error)
            raise
        return {}

    monkeypatch.setattr("waystation.cli.commands.view.Commands.verify", verify)
    client = window(runs)
    with socket.create_connection(("127.0.0.1", client.port), timeout=HANG_S) as connection:
        path = client.path("verify", source=0, name="step_1")
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n\r\n".encode())
        seen = b""
        while b'"progress": [1, 2]' not in seen:
            seen += connection.recv(1 << 16)
        assert not told
    deadline = time.monotonic() + HANG_S
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [type(error).__name__ for error in told] == ["Cancelled"]


def test_work_whose_page_went_away_counts_until_it_has_ended(
    runs: Path, window: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, most, may_end = 0, 0, threading.Event()
    lock = threading.Lock()

    def verify(_: object, _path: str, on_progress: server.OnProgress) -> server.Document:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        may_end.wait(HANG_S)  # without a report of progress
        with lock:
            now -= 1
        return {}

    monkeypatch.setattr("waystation.cli.commands.view.Commands.verify", verify)
    client = window(runs)
    path = client.path("verify", source=0, name="step_1")
    for _ in range(3 * server._MOST_LONG):
        with socket.create_connection(("127.0.0.1", client.port), timeout=HANG_S) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n\r\n".encode())
            assert connection.recv(1 << 16)
    assert client.ask("sources")["watches"] is False, "what takes short goes on"
    assert most == server._MOST_LONG
    may_end.set()
    assert client.result("verify", source=0, name="step_1") == {}


def test_connections_without_a_request_neither_pile_up_nor_keep_a_page_out(runs: Path, window: Open) -> None:
    client = window(runs)
    with contextlib.ExitStack() as held:
        for _ in range(4 * server._MOST_CONNECTIONS):  # half a request each, and no token
            connection = socket.create_connection(("127.0.0.1", client.port), timeout=HANG_S)
            held.enter_context(connection)
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        assert client.ask("sources")["watches"] is False
        established = f" 0100007F:{client.port:04X} 0100007F:"
        lines = Path("/proc/net/tcp").read_text().splitlines()
        served = [line for line in lines if established in line and line.split()[3] == "01"]
        assert len(served) <= server._MOST_CONNECTIONS


# ---- the program -------------------------------------------------------------------------------


def started(
    *arguments: object, within: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[str], Client]:
    process = subprocess.Popen(
        [*within, SCRIPT, "view", "--json", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    assert process.stdout is not None
    text = ""
    while not text.endswith("}\n"):
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        text += line
    return process, Client(json.loads(text)["url"])


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """How a window ends by Ctrl-C, and what it has printed besides its address."""
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=HANG_S)
    return process.returncode, out, errors


def read_bytes(process: int) -> int:
    """What a process has asked the system to read."""
    found = dict(line.split(": ") for line in Path(f"/proc/{process}/io").read_text().splitlines())
    return int(found["rchar"]) + int(found["read_bytes"])


def test_the_program_opens_a_huge_checkpoint_at_once_and_ends_by_ctrl_c(tmp_path: Path) -> None:
    nbytes = sparse.write(tmp_path / "huge", [(20_000, 20_000)] * 63)
    assert nbytes > 100e9
    process, client = started(tmp_path / "huge")
    try:
        client.get(f"/{client.token}/")
        client.ask("sources")
        before = read_bytes(process.pid)
        begun_s = time.monotonic()
        seen = client.ask("inspect", source=0)
        rows = client.ask("rows", opened=seen["opened"], checkpointable="state")
        took_s = time.monotonic() - begun_s
        read = read_bytes(process.pid) - before
        assert seen["document"]["checkpointables"]["state"]["array_bytes"] == 63 * 20_000**2 * 4
        assert rows["total"] == 63 * 2 + 3
        assert read <= 5e6, f"{read} bytes read"
        # One second is what people are promised; this machine may be busy with other tests.
        assert took_s <= (1.0 if os.environ.get("WAYSTATION_TEST_LONG") else 5.0), f"{took_s} s"
        found = client.result("statistics", opened=seen["opened"], checkpointable="state", leaf=7)
        assert found["bytes_read"] <= server.LIMIT_BYTES
        assert found["zeros"] == found["examined"] > 1e6
    finally:
        outcome = ended(process)
    assert outcome == (0, "", "")


# Root reads everything, unless it gives that up.
LIKE_OTHERS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


def test_what_this_user_cannot_read_is_told_where_it_is_shown(runs: Path, tmp_path: Path) -> None:
    """Directories of others stand beside checkpoints, such as `lost+found` in a file system of its own."""
    (runs / "lost+found").mkdir()
    waystation.save(runs / "step_3", {"a": 1})
    waystation.save(tmp_path / "other" / "step_1", {"a": 1})
    log = tmp_path / "trainer.log"
    log.touch()
    closed = [runs / "lost+found", runs / "step_3" / "state", tmp_path / "other", log]
    for path in closed:
        path.chmod(0)
    process, client = started(runs, tmp_path / "other", log, within=LIKE_OTHERS)
    try:
        assert [source["kind"] for source in client.ask("sources")["sources"]] == ["run", "closed", "log"]
        listed = client.ask("ls", source=0)
        assert [step["problem"] for step in listed["checkpoints"]][:2] == [None, None]
        assert "Permission denied" in listed["checkpoints"][2]["problem"]
        (unreadable,) = listed["unreadable"]
        assert unreadable == {
            "path": str(runs / "lost+found"),
            "problem": "could not open: Permission denied",
        }
        assert client.result("verify", source=0, name="step_1")["checkpoints"][0]["intact"]
        refused = [
            client.ask("inspect", source=0, name="step_3"),
            client.result("verify", source=0, name="step_3"),
            client.ask("ls", source=1),
            client.ask("look", source=1),
            client.ask("log", source=2),
        ]
        for answer in refused:
            assert answer["error"]["kind"] in ("InvalidInput", "NotFound"), answer
        assert all("Permission denied" in refused[number]["error"]["message"] for number in (0, 1, 3, 4))
        (tmp_path / "other").chmod(0o755)
        assert client.ask("look", source=1) == {"source": 1, "kind": "run"}
        assert [step["name"] for step in client.ask("ls", source=1)["checkpoints"]] == ["step_1"]
    finally:
        outcome = ended(process)
        for path in closed:
            path.chmod(0o755)
    assert outcome == (0, "", "")


def test_a_window_on_nothing_that_can_be_read_does_not_open(runs: Path) -> None:
    runs.chmod(0)
    command = [*LIKE_OTHERS, str(SCRIPT), "view", str(runs), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    runs.chmod(0o755)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["kind"] == "InvalidInput"
    assert "Permission denied" in done.stderr
    assert str(runs) in done.stderr
    assert "report this" not in done.stderr


# ---- object stores -----------------------------------------------------------------------------


def test_a_run_in_a_store_is_shown_by_ranged_reads() -> None:
    place = s3.bucket()
    weights = np.arange(5_000_000, dtype=np.float32).reshape(50, 100_000)
    with place.context():
        waystation.save(f"{place.location}/run/1", {"w": weights, "b": np.zeros(3), "step": 1})
        weights[0, 0] = 7.0
        waystation.save(f"{place.location}/run/2", {"w": weights, "b": np.zeros(3), "step": 1})
    with s3.proxy(place.endpoint) as between:
        settings = {name.upper(): value for name, value in place.settings(between.endpoint).items()}
        process, client = started(f"{place.location}/run", environment=settings)
        answers: list[bytes] = [client.get(client.path("sources")).body]

        def result(what: str, /, **values: object) -> Any:
            answers.append(client.get(client.path(what, **values)).body)
            *_, last = map(json.loads, answers[-1].splitlines())
            return last.get("result", last)

        try:
            with place.context():
                assert result("ls", source=0) == printed("ls", f"{place.location}/run")
            seen = result("inspect", source=0, name="1")
            opened = {"opened": seen["opened"], "checkpointable": "state"}
            assert seen["document"]["path"] == f"{place.location}/run/1"
            assert result("rows", **opened)["names"] == ["(root)", "w", "b", "step"]
            before = between.sent_bytes
            found = result("statistics", **opened, leaf=0)
            assert between.sent_bytes - before < server.LIMIT_BYTES + (1 << 20) < weights.nbytes
            assert 0 < found["examined"] < found["elements"] == 5_000_000
            assert found["histogram"]["counts"]
            found = result("statistics", **opened, leaf=0, all=1)
            assert (found["examined"], found["maximum"]) == (5_000_000, 4_999_999)
            assert result("verify", source=0, name="1")["checkpoints"][0]["intact"]
            assert json.loads(answers[-1].splitlines()[0]) == {"progress": [0, 0]}
            compared = result("diff", source=0, name="1", other_source=0, other_name="2")
            (values,) = [each["values"] for each in compared["differences"]]
            assert (values["differing"], values["max_absolute"]) == (1, 7.0)
            for name in ("3", "..", "1/state"):
                assert result("inspect", source=0, name=name)["error"]["kind"] in ("NotFound", "InvalidInput")
        finally:
            outcome = ended(process)
    assert outcome == (0, "", "")
    for secret in (s3.ACCESS_KEY, s3.SECRET_KEY):
        assert all(secret.encode() not in answer for answer in answers)


def test_a_store_that_refuses_or_has_gone_is_told_in_the_page(runs: Path) -> None:
    place = s3.bucket()
    with place.context():
        waystation.save(f"{place.location}/run/1", {"a": np.ones(3)})
    fate = [s3.PASS]
    with s3.proxy(place.endpoint, lambda _: fate[0]) as between:
        settings = {name.upper(): value for name, value in place.settings(between.endpoint).items()}
        location = f"{place.location}/run"
        process, client = started(location, runs, "--storage", "deadline_s=1", environment=settings)
        try:
            assert len(client.ask("ls", source=0)["checkpoints"]) == 1
            opened = client.ask("inspect", source=0, name="1")["opened"]
            for what, kind in ((s3.FORBID, "InvalidInput"), (s3.REFUSE, "Unavailable")):
                fate[0] = what
                told = [
                    client.ask("ls", source=0),
                    client.ask("inspect", source=0, name="1"),
                    client.result("verify", source=0, name="1"),
                    client.result("statistics", opened=opened, checkpointable="state", leaf=0),
                ]
                assert [answer["error"]["kind"] for answer in told] == [kind] * len(told), told
                assert all(s3.SECRET_KEY not in json.dumps(answer) for answer in told)
            assert len(client.ask("ls", source=1)["checkpoints"]) == 2, "what is elsewhere is shown on"
        finally:
            outcome = ended(process)
    assert outcome == (0, "", "")


def test_a_port_that_is_taken_is_an_error_of_its_own(runs: Path) -> None:
    with server.listen(0) as listener:
        port = listener.getsockname()[1]
        done = CliRunner().invoke(application, ["view", str(runs), "--port", str(port), "--json"])
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["kind"] == "Unavailable"
    assert f"port {port}" in done.stderr


def test_without_its_packages_the_command_says_what_to_install(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(application, ["view", str(runs)])
    assert done.exit_code == 2
    assert "packages that are not installed" in done.stderr
    assert "starlette" in done.stderr


@pytest.mark.long
@only_long
def test_a_hundred_thousand_leaves_are_sent_in_seconds(tmp_path: Path, window: Open) -> None:
    waystation.save(tmp_path / "c", {f"block{n // 100}/{n}": np.float32(n) for n in range(100_000)})
    client = window(tmp_path / "c")
    begun_s = time.monotonic()
    opened = client.ask("inspect", source=0)["opened"]
    count, total = 0, 1
    while count < total:
        page = client.ask("rows", opened=opened, checkpointable="state", begin=count)
        count, total = count + len(page["names"]), page["total"]
    assert total == 100_001
    assert time.monotonic() - begun_s < 20
    leaf = client.ask("leaf", opened=opened, checkpointable="state", leaf=99_999)["leaf"]
    assert leaf["path"] == "['block999/99999']"


def test_a_request_that_is_no_http_disturbs_nobody(runs: Path, window: Open) -> None:
    client = window(runs)
    with socket.create_connection(("127.0.0.1", client.port), timeout=HANG_S) as connection:
        connection.sendall(b"\x16\x03\x01" + bytes(100) + b"\r\n\r\n")
        connection.recv(1 << 16)
    assert client.ask("sources")["watches"] is False
