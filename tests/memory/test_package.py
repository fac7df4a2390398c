"""The agent is a program of the package: of its release, and found wherever the package is installed."""

import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import waystation
from waystation.errors import NotFound
from waystation.memory import agent_program

ROOT = Path(__file__).parents[2]


def test_the_program_is_of_this_release() -> None:
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    done = subprocess.run([agent_program(), "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"waystation-agent {version}\n"
    assert version == waystation.__version__


def test_the_variable_comes_first_and_must_name_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "agent"
    program.write_text("#!/bin/sh\n")
    monkeypatch.setenv("WAYSTATION_AGENT", str(program))
    with pytest.raises(NotFound, match=re.escape(f"'{program}', which is not an executable file")):
        agent_program()
    program.chmod(0o755)
    assert agent_program() == program


def test_the_installed_program_comes_before_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WAYSTATION_AGENT", raising=False)
    other = tmp_path / "waystation-agent"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    # 'pip install --user' and '--target' put programs into other folders than that of this interpreter.
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    installed = agent_program()
    assert installed != other
    recorded = [
        Path(os.path.normpath(file.locate())) for file in importlib.metadata.files("waystation") or []
    ]
    assert installed in recorded


def test_without_it_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WAYSTATION_AGENT", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr("importlib.metadata.files", lambda name: None)
    with pytest.raises(NotFound, match="install waystation again, or name the program in WAYSTATION_AGENT"):
        agent_program()
    beside = tmp_path / "waystation-agent"
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)
    assert agent_program() == beside
