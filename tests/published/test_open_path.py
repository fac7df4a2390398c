"""The fuzzer of the open path: a short run finds nothing, and whatever it could find it would notice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.published.planted_findings import FIRST, HOW, WRONG

ROOT = Path(__file__).parents[2]


def report(*command: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found, done.stderr


def test_a_short_run_finds_nothing() -> None:
    code, found, told = report("fuzz.open_path", "--seed", "20261122", "--executions", "6000")
    assert (code, found["finding"], told) == (0, None, "")
    assert found["executions"] == 6000
    # A run whose files are all refused for their first byte, or all sound, would show nothing.
    assert sum(found["summary"].values()) > 6000
    for outcomes, least in (
        (("file accepted", "file refused"), 500),
        (("set accepted", "set refused", "not for NumPy", "read"), 20),
        (("files accepted", "files refused", "directory refused", "summed accepted", "checksums refused"), 5),
    ):
        for outcome in outcomes:
            assert found["summary"].get(outcome, 0) >= least, (outcome, found["summary"])


def test_an_execution_can_be_run_again(tmp_path: Path) -> None:
    arguments = ["--seed", "7", "--first", "123", "--executions", "1", "--keep"]
    kept = []
    for place in ("one", "other"):
        code, _, _ = report("fuzz.open_path", *arguments, str(tmp_path / place))
        assert code == 0
        kept.append((tmp_path / place / "single.safetensors").read_bytes())
    assert kept[0] == kept[1]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.share(5)
def test_what_goes_wrong_is_noticed(how: str) -> None:
    _, found, told = report("tests.published.planted_findings", how)
    if how == "nothing":
        assert (found["finding"], found["executions"], told) == (None, 2000, "")
        assert found["summary"]["run"] > 2000
        return
    expected = {
        "waits": f"execution {WRONG} took more than 2 s",
        "spins": f"execution {WRONG} took more than 2 s",
        "crashes": f"execution {WRONG} ended the process with -6",
        "is killed": f"execution {WRONG} ended the process with -9",
        "claims much": "MemoryError",
        "holds much": "bytes of memory",
        "fails": "KeyError: 'planted'",
        "exits": f"execution {WRONG} ended the process",
    }
    assert expected[how] in found["finding"]
    if how != "holds much":  # that is looked at after some more
        assert found["executions"] == WRONG + 1 - FIRST
