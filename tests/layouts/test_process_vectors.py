"""Who is dead, by the cases that the agent is held to as well."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from waystation import _processes

VECTORS = json.loads(
    (Path(__file__).parents[2] / "crates/waystation-agent/tests/vectors/processes.json").read_text()
)
BEYOND_ALL = 1 << 23  # no process has such an id


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of processes of our own making."""
    here = VECTORS["here"]
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text(here["boot"] + "\n")
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to(f"pid:[{here['namespace']}]")
    (tmp_path / "self/stat").write_text(f"{os.getpid()} (tests)")
    monkeypatch.setattr(_processes, "_PROC", str(tmp_path))
    # What this process has asked for before is not to be answered from memory.
    monkeypatch.setattr(_processes, "boot_id", _processes.boot_id.__wrapped__)
    return tmp_path


@pytest.mark.parametrize("case", VECTORS["cases"], ids=[case["what"] for case in VECTORS["cases"]])
def test_processes_are_judged_as_the_agent_judges_them(case: dict[str, Any], proc: Path) -> None:
    process_id = os.getpid() if case["exists"] else BEYOND_ALL
    own = proc / str(process_id)
    if case["stat"] is not None:
        own.mkdir()
        (own / "stat").write_text(case["stat"].replace("{process}", str(process_id)))
    for task in range(case["tasks"] or 0):
        (own / "task" / str(task)).mkdir(parents=True)
    writer = case["writer"]
    system = f"{_processes.host_name()} {writer['boot']} pid:[{writer['namespace']}]"
    if system != _processes.system():
        # Of another system: nobody asks the table of this one.
        assert case["life"] == ("dead" if writer["boot"] != VECTORS["here"]["boot"] else "unknown")
        return
    assert _processes.may_run(process_id, str(writer["start"])) == (case["life"] != "dead")
