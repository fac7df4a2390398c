"""`waystation verify`: all damage, and where."""

import json
from pathlib import Path

import numpy as np
import pytest

import waystation
from waystation import _native


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "step_1"
    waystation.save(path, {"a": np.arange(1 << 18, dtype=np.float32), "b": np.arange(4096, dtype=np.int8)})
    return path


def test_intact(saved: Path, script) -> None:
    outcome = script("verify", saved)
    assert (outcome.out, outcome.err, outcome.code) == (
        "[DIR]/runs/step_1: intact (1.0 MiB in 1 file verified)\n",
        "",
        0,
    )


def test_damage_names_file_and_arrays(saved: Path, run, damage) -> None:
    data = saved / "state" / "p00000-000.safetensors"
    damage(data, 4096 + 300_000)
    damage(data, data.stat().st_size - 1)
    outcome = run("verify", saved)
    lines = outcome.out.splitlines()
    assert outcome.code == 1
    assert lines[0] == "[DIR]/runs/step_1: 2 damages (1.0 MiB in 1 file read)"
    assert lines[2].startswith("  state/p00000-000.safetensors  bytes 262144 to 524288: ")
    assert lines[2].endswith("  a")
    assert lines[3].endswith("  a, b")


def test_json_lists_damage_and_strays(saved: Path, script, damage) -> None:
    damage(saved / "state" / "tree.json", 100)
    (saved / "notes.txt").write_text("mine")
    outcome = script("verify", saved, "--json")
    (found,) = outcome.document["checkpoints"]
    assert outcome.code == 1
    assert found["intact"] is False
    assert [damage["path"] for damage in found["damages"]] == ["[DIR]/runs/step_1/state/tree.json"]
    assert found["strays"] == ["[DIR]/runs/step_1/notes.txt"]


def test_all_verifies_each_and_one_damage_is_enough(saved: Path, run, damage) -> None:
    waystation.save(saved.parent / "step_2", {"c": 1})
    assert run("verify", "--all", saved.parent).code == 0
    damage(saved / "checkpoint.json", 50)
    outcome = run("verify", "--all", saved.parent)
    assert outcome.code == 1
    assert "[DIR]/runs/step_1: 1 damage" in outcome.out
    assert "[DIR]/runs/step_2: intact" in outcome.out


def test_nothing_to_verify(tmp_path: Path, run) -> None:
    assert run("verify", tmp_path / "absent").code == 2
    assert run("verify", "--all", tmp_path).code == 2
    assert run("verify", "--all", tmp_path / "absent").code == 2


def test_a_newer_format_is_no_damage(saved: Path, run) -> None:
    record = saved / "checkpoint.json"
    body = json.loads(record.read_bytes())["record"] | {"format_version": 2}
    record.write_bytes(_native.seal_json(json.dumps(body).encode()))
    outcome = run("verify", saved)
    assert (outcome.code, outcome.out) == (2, "")
    assert "version 2" in outcome.err
