"""Commands and checkpoints of several checkpointables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.handlers.examples import Iterator

import waystation

HANDLER = "waystation.checkpoint.handlers.simple.StatefulCheckpointableHandler"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints" / "step_1"
    waystation.save_checkpointables(
        path, {"model": {"x": np.arange(8.0)}, "optimizer": {"m": np.zeros(3)}, "dataset": Iterator(3)}
    )
    return path


def test_inspect(saved: Path, run: Any) -> None:
    document = run("inspect", saved, "--json").document
    assert list(document["checkpointables"]) == ["dataset", "model", "optimizer"]
    assert document["checkpointables"]["dataset"] == {
        "handler": HANDLER,
        "processes": 1,
        "files": 1,
        "file_bytes": 1,
        "paths": ["position.txt"],
    }
    shown = run("inspect", saved).out
    assert "dataset: 1 B in 1 file" in shown
    assert f"saved by {HANDLER}" in shown
    assert "position.txt" in shown
    alone = run("inspect", saved, "--checkpointable", "dataset").out
    assert "position.txt" in alone
    assert "not shown" in alone


def test_ls(saved: Path, run: Any) -> None:
    (entry,) = run("ls", saved.parent, "--json").document["checkpoints"]
    assert (entry["arrays"], entry["problem"]) == (2, None)


def test_verify(saved: Path, run: Any) -> None:
    assert "intact" in run("verify", saved).out
    file = saved / "dataset" / "position.txt"
    file.write_text("4")
    outcome = run("verify", saved, "--json")
    assert outcome.code == 1
    found = outcome.document["checkpoints"][0]
    assert [damage["path"] for damage in found["damages"]] == [
        "[DIR]/checkpoints/step_1/dataset/position.txt"
    ]


def test_diff(saved: Path, run: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    waystation.save_checkpointables(
        other, {"model": {"x": np.arange(8.0)}, "optimizer": Iterator(1), "dataset": Iterator(4)}
    )
    found = run("diff", saved, other, "--json").document["differences"]
    assert [(entry["checkpointable"], entry["key_path"], entry["kind"]) for entry in found] == [
        ("dataset", "position.txt", "value"),
        ("optimizer", "", "leaf"),
    ]
    assert found[1]["second"] == f"files of {HANDLER}"
    same = run("diff", saved, other, "--structure-only", "--json").document["differences"]
    assert [entry["checkpointable"] for entry in same] == ["optimizer"]


def test_export(saved: Path, run: Any, tmp_path: Path) -> None:
    assert run("export", saved, tmp_path / "a", "--json").document["arrays"] == 1  # the first state by name
    run("export", saved, tmp_path / "b", "--checkpointable", "optimizer")
    failed = run("export", saved, tmp_path / "c", "--checkpointable", "dataset")
    assert failed.code != 0
    assert "is no state" in failed.err
