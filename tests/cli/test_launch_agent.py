"""`waystation launch --agent`: the agent is there before and after the program; what dies starts again."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.agents import end_agent, memory_directory, wait_until

from waystation import _native
from waystation.errors import InvalidInput, Unavailable
from waystation_launch.host_agent import HostAgent, bytes_of

SCRIPT = str(Path(sys.executable).parent / "waystation")
HANG_S = 120

TRAIN = """
import os
import signal
import sys
from pathlib import Path

import numpy as np

from waystation.memory import MemoryTier
from waystation.training import Checkpointer
from waystation.training.save_decision_policies import SpecificStepsPolicy

killed = Path("killed")
with Checkpointer("run", save_decision_policy=SpecificStepsPolicy(()), memory=MemoryTier()) as checkpointer:
    state = {"weights": np.zeros(1000), "step": 0}
    if checkpointer.latest is not None:
        state = checkpointer.load()
        print("resumed", state["step"], flush=True)
    while state["step"] < 20:
        state["step"] += 1
        state["weights"] += state["step"]
        checkpointer.save_async(state["step"], state)
        checkpointer.wait()
        times = killed.read_text().count("x") if killed.exists() else 0
        if state["step"] == 6 + 4 * times and times < 2:
            killed.write_text("x" * (times + 1))
            os.kill(os.getpid(), signal.SIGKILL)
    assert (state["weights"] == 20 * 21 // 2).all()
    print("done", flush=True)
"""


@pytest.fixture
def store() -> Iterator[Path]:
    """The directory of an agent, which ends with the test."""
    with memory_directory() as directory:
        store = directory / "agent"
        try:
            yield store
        finally:
            end_agent(store)


def agent_of(store: Path) -> int:
    """The process that serves a directory."""
    return int(_native.AgentClient(str(store), timeout_s=HANG_S).status()["process"])


def launch(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, "launch", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def options_of(store: Path, memory: str = "64MiB") -> list[str]:
    return ["--agent", str(store), "--agent-memory", memory]


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_program_that_dies_goes_on_from_memory(store: Path, tmp_path: Path) -> None:
    command = [*options_of(store), "--restarts", "3", "--json", "--", sys.executable, "-c", TRAIN]
    done = launch(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("[0]")]
    assert said == ["[0] resumed 6", "[0] resumed 10", "[0] done"]
    assert done.stderr.count("is started again") == 2
    report = document(done)
    assert report["restarts"] == 2
    assert report["agent"] == {"directory": str(store), "pid": agent_of(store)}, "it is still there"
    phases = ["detect", "start", "decide", "transfer", "restore", "first step"]
    assert [(found["step"], list(found["phases_s"])) for found in report["recoveries"]] == [
        (6, phases),
        (10, phases),
    ]
    for start, found in zip(report["starts"], report["recoveries"], strict=False):
        assert (start["failed_at_s"], start["ended_at_s"]) == (found["failed_at_s"], found["ended_at_s"])
        assert min(found["phases_s"].values()) >= 0
    assert report["starts"][-1]["failed_at_s"] is None
    assert "went on from step 6 in memory: detect" in done.stderr
    again = launch(tmp_path, "--agent", str(store), "--json", "--", sys.executable, "-c", TRAIN)
    assert "[0] resumed 20" in again.stderr
    assert document(again)["agent"] == report["agent"]
    assert document(again)["recoveries"] == [], "it has come to no further step"


def test_restarts_are_bounded(store: Path, tmp_path: Path) -> None:
    done = launch(
        tmp_path, *options_of(store), "--restarts", "1", "--json", "--", sys.executable, "-c", TRAIN
    )
    assert done.returncode == 1
    assert (document(done)["restarts"], document(done)["first_failure"]) == (1, 0)
    assert "[0] resumed 6" in done.stderr
    assert "[0] resumed 10" not in done.stderr


def test_an_agent_that_dies_is_started_again(store: Path, tmp_path: Path) -> None:
    code = "import sys, time\nprint('here', flush=True)\ntime.sleep(600)"
    with launched(tmp_path, *options_of(store), "--restarts", "2", "--", sys.executable, "-c", code):
        before = agent_of(store)
        kept = _native.AgentClient(str(store)).status()["store"]
        for _ in range(2):
            kill(before)
            wait_until(lambda gone=before: agent_of(store) != gone)  # type: ignore[misc]
            before = agent_of(store)
            assert _native.AgentClient(str(store)).status()["store"] == kept
        kill(before)
        with pytest.raises(Unavailable):
            _native.AgentClient(str(store), timeout_s=0.5)


def test_an_agent_whose_memory_is_lost_is_started_anew(store: Path, tmp_path: Path) -> None:
    code = "import sys, time\nprint('here', flush=True)\ntime.sleep(600)"
    with launched(
        tmp_path, *options_of(store), "--restarts", "1", "--", sys.executable, "-c", code
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before, kept = agent_of(store), _native.AgentClient(str(store)).status()["store"]
        end = os.pidfd_open(before)
        shutil.rmtree(store.rename(store.with_name("gone")))
        wait_until(lambda: _has_ended(end))
        os.close(end)
        assert agent_of(store) != before
        assert _native.AgentClient(str(store)).status()["store"] != kept


@pytest.mark.parametrize("is_there_already", [False, True])
def test_memory_that_is_lost_before_it_is_first_asked_for_is_missed(
    store: Path, is_there_already: bool
) -> None:
    agents = []
    for _ in range(1 + is_there_already):
        agents.append(HostAgent(store, "64MiB", 2, 1, restarts=0, tell=lambda _: None))
        agents[-1].start()
    process = agents[0].process_id
    assert process is not None
    shutil.rmtree(store)
    try:
        assert agents[-1].is_lost
    finally:
        kill(process)
        agents[0].restart()  # it may not, and takes note of the end


def test_the_agent_outlives_a_launcher_that_is_killed(store: Path, tmp_path: Path) -> None:
    code = "import time\ntime.sleep(600)"
    with launched(tmp_path, *options_of(store), "--", sys.executable, "-c", code) as process:
        served_by = agent_of(store)
        process.kill()
        process.wait(HANG_S)
    assert agent_of(store) == served_by


def test_a_running_agent_keeps_its_memory_and_the_launch_says_so(store: Path, tmp_path: Path) -> None:
    program = "--", sys.executable, "-c", "pass"
    first = launch(tmp_path, *options_of(store), *program)
    same = launch(tmp_path, *options_of(store), *program)
    more = launch(tmp_path, "--agent", str(store), "--agent-memory", "1GiB", *program)
    assert [done.returncode for done in (first, same, more)] == [0, 0, 0], more.stderr
    assert ["keeps its memory" in done.stderr for done in (first, same, more)] == [False, False, True]
    assert f"end that agent first (pid {agent_of(store)})" in more.stderr


def test_a_second_launch_is_refused_while_the_first_one_lives(store: Path, tmp_path: Path) -> None:
    code = "import time\nprint('here', flush=True)\ntime.sleep(600)"
    brief = "--agent", str(store), "--", sys.executable, "-c", "print('there')"
    with launched(tmp_path, *options_of(store), "--", sys.executable, "-c", code) as first:
        assert first.stdout is not None
        assert "here" in first.stdout.readline()
        done = launch(tmp_path, *brief)
        assert done.returncode == 2
        assert f"the launch with process id {first.pid} uses the agent in '{store}'" in done.stderr
        assert "there" not in done.stdout
    done = launch(tmp_path, *brief)  # that one was killed
    assert (done.returncode, "there" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agent-memory", "1GiB"], "give its directory, such as --agent /dev/shm/agent"),
        (["--agent", "{store}"], "--agent-memory 8GiB"),
        (["--agent", "{store}", "--agent-memory", "much"], "'much' is no number of bytes"),
        (["--agent", "{store}", "--agent-memory", "2MiB"], "too little for 3 slots"),
        (["--agent", "{store}/a/b", "--agent-memory", "64MiB"], "'{store}/a/b"),
    ],
)
@pytest.mark.share(2)
def test_what_makes_no_sense_is_refused(
    store: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    filled = [argument.format(store=store) for argument in arguments]
    done = launch(tmp_path, *filled, "--", sys.executable, "-c", "print('never')")
    assert done.returncode == 2
    assert message.format(store=store) in done.stderr
    assert done.stderr.startswith("error: ")
    assert "never" not in done.stdout


def test_more_memory_than_there_is_is_refused_with_the_agents_own_words(store: Path, tmp_path: Path) -> None:
    done = launch(tmp_path, *options_of(store, "900TiB"), "--", sys.executable, "-c", "print('never')")
    assert done.returncode == 2
    assert f"'{store}.log'" in done.stderr


@pytest.mark.parametrize(
    ("text", "expected"), [("4096", 4096), ("2KiB", 2048), ("3 GiB", 3 << 30), ("1TiB", 1 << 40)]
)
def test_numbers_of_bytes(text: str, expected: int) -> None:
    assert bytes_of(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5GiB", "8GB"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(InvalidInput, match="no number of bytes"):
        bytes_of(text)


@contextlib.contextmanager
def launched(directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A launch that goes on meanwhile."""
    process = subprocess.Popen(
        [SCRIPT, "launch", *arguments],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def kill(process: int) -> None:
    """Kills it, and returns when it is dead."""
    end = os.pidfd_open(process)
    try:
        signal.pidfd_send_signal(end, signal.SIGKILL)
        until = time.monotonic() + HANG_S
        while not _has_ended(end):
            assert time.monotonic() < until
    finally:
        os.close(end)


def _has_ended(end: int) -> bool:
    return bool(select.select([end], [], [], 0.1)[0])
