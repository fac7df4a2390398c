"""`waystation agent`: becomes the agent's program."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.agents import RUN, memory_directory

import waystation

SCRIPT = Path(sys.executable).parent / "waystation"
OPTIONS = ["--slots=3", "--data-bytes=1MiB", "--memory-cap-bytes=16MiB", f"--run-id={RUN}"]


def test_its_options_are_those_of_the_program(script) -> None:
    version = script("agent", "--version")
    assert (version.out, version.code) == (f"waystation-agent {waystation.__version__}\n", 0)
    for arguments in (["agent"], ["agent", "--help"], ["agent", "run", "--help"]):
        outcome = script(*arguments)
        assert outcome.code == 0
        assert "--memory-cap-bytes BYTES" in outcome.out
    wrong = script("agent", "run", "--wings=2")
    assert (wrong.code, wrong.out) == (2, "")
    assert "'--wings=2' is not an option here" in wrong.err


def test_it_becomes_the_program() -> None:
    with memory_directory() as directory:
        command = [SCRIPT, "agent", "run", *OPTIONS, f"--directory={directory}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as agent:
            assert agent.stdout is not None
            ready = json.loads(agent.stdout.readline())
            assert ready["status"]["process"] == agent.pid
            assert ready["socket"] == str(directory / "agent.sock")
            os.kill(agent.pid, signal.SIGTERM)
        assert agent.returncode == 0
        names = {path.name for path in directory.iterdir()}
        assert names == {"agent.sock", "lock", "slot-00000", "slot-00001", "slot-00002", "store"}
        subprocess.run([SCRIPT, "agent", "discard", f"--directory={directory}"], check=True)
        assert [path.name for path in directory.iterdir()] == ["lock"]


@pytest.mark.parametrize(
    "form", [["--directory", "{}"], ["--directory={}"], ["--allow-disk", "--directory={}"]]
)
@pytest.mark.share(3)
def test_without_a_store_nothing_is_discarded_and_nothing_made(form: list[str], script) -> None:
    with memory_directory() as parent:
        (parent / "empty").mkdir(mode=0o700)
        (parent / "discarded").mkdir(mode=0o700)
        (parent / "discarded" / "lock").touch(mode=0o600)
        before = sorted(parent.rglob("*"))
        for name in ("typo", "typo/deeper", "empty", "discarded"):
            directory = parent / name
            outcome = script("agent", "discard", *(part.format(directory) for part in form))
            expected = f"error: '{directory}' holds no store of an agent, so nothing was removed; "
            assert (outcome.code, outcome.out) == (1, "")
            assert outcome.err.startswith(expected)
            assert sorted(parent.rglob("*")) == before


def test_the_agent_says_what_is_wrong_with_another_call(script) -> None:
    with memory_directory() as parent:
        (parent / "file").touch()
        for arguments, message in (
            ([f"--directory={parent / 'file'}"], "name a directory itself"),
            ([f"--directory={parent / 'typo'}", "--wings=2"], "'--wings=2' is not an option here"),
            (["--directory"], "--directory wants a value"),
            ([], "--directory is missing"),
        ):
            outcome = script("agent", "discard", *arguments)
            assert (outcome.code, outcome.out) == (2, "")
            assert message in outcome.err
        assert [path.name for path in parent.iterdir()] == ["file"]


def test_what_to_install_is_said(tmp_path: Path) -> None:
    # An environment of its own, into which no agent has been installed.
    code = "import importlib.metadata, sysconfig; sysconfig.get_path = lambda name: '/nowhere'\n"
    code += "importlib.metadata.files = lambda name: None\n"
    code += "from waystation.cli import main; main()"
    environment = {**os.environ, "PATH": str(tmp_path)}
    environment.pop("WAYSTATION_AGENT", None)
    command = [sys.executable, "-c", code, "agent", "run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "install waystation again, or name the program in WAYSTATION_AGENT" in done.stderr
