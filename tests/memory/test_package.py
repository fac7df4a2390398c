"""The agent is a package of its own, of the same release as this one."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import waystation
from waystation.errors import NotFound
from waystation.memory import agent_program

ROOT = Path(__file__).parents[2]


def test_the_extra_names_the_same_release() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert project["optional-dependencies"]["memory"] == [f"waystation-agent=={version}"]
    assert version == waystation.__version__


def test_the_program_is_of_this_release() -> None:
    done = subprocess.run([agent_program(), "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"waystation-agent {waystation.__version__}\n"


def test_the_variable_comes_first_and_must_name_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "agent"
    program.write_text("#!/bin/sh\n")
    monkeypatch.setenv("WAYSTATION_AGENT", str(program))
    with pytest.raises(NotFound, match=re.escape(f"'{program}', where no program is")):
        agent_program()
    program.chmod(0o755)
    assert agent_program() == program


def test_without_it_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WAYSTATION_AGENT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(NotFound, match=r"pip install waystation\[memory\]"):
        agent_program()
    beside = tmp_path / "waystation-agent"
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)
    assert agent_program() == beside
