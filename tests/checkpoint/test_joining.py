"""Parts that are saved by programs of their own, and become one checkpoint in one act."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import waystation
from waystation.checkpoint.compare import compare
from waystation.checkpoint.joining import Joining, part_path
from waystation.errors import Conflict, NotFound

A, B = np.arange(1000.0), np.arange(7, dtype=np.int32)


def joined(path: Path, *, overwrite: bool = False, add: int = 0) -> None:
    joining = Joining(path, overwrite=overwrite)
    waystation.save(part_path(joining.directory, 0), {"model": {"a": A + add}})
    waystation.save(part_path(joining.directory, 1), {"model": {"b": B + add}, "c": B + add})
    joining.commit(2)


def check(path: Path, add: int = 0) -> None:
    loaded = waystation.load(path)
    np.testing.assert_array_equal(loaded["model"]["a"], A + add)
    np.testing.assert_array_equal(loaded["model"]["b"], B + add)
    np.testing.assert_array_equal(loaded["c"], B + add)
    assert sorted(loaded) == ["c", "model"]
    found = waystation.verify(path)
    assert (found.damages, found.strays) == ([], [])
    assert sorted(os.listdir(path)) == ["checkpoint.json", "state"]
    assert os.listdir(path.parent) == [path.name]


def test_parts_become_one_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    joined(path)
    check(path)
    with pytest.raises(Conflict, match="exists already"):
        Joining(path)
    joined(path, overwrite=True, add=1)
    check(path, add=1)


class Moments(NamedTuple):
    count: Any
    mean: Any


def test_parts_of_the_whole_structure_become_what_one_save_would_be(tmp_path: Path) -> None:
    def state(a: Any, b: Any, count: Any) -> Any:
        return {"model": [a, {"b": b}], "optimizer": (Moments(count, b), None, ()), "a.b": a, "a": {"b": 1}}

    joining = Joining(tmp_path / "joined")
    waystation.save(part_path(joining.directory, 0), state(A, False, False))
    waystation.save(part_path(joining.directory, 1), state(False, B, np.float32(3)))
    joining.commit(2, (0, 1, 1, 1, 0, 0))
    waystation.save(tmp_path / "saved", state(A, B, np.float32(3)))
    assert not compare(tmp_path / "joined", tmp_path / "saved").differences
    found, expected = (waystation.metadata(tmp_path / name).metadata for name in ("joined", "saved"))
    assert found == expected
    assert waystation.load(tmp_path / "joined")["a"] == {"b": 1}
    indices = [tmp_path / name / "state/model.safetensors.index.json" for name in ("joined", "saved")]
    labels = [sorted(json.loads(index.read_text())["weight_map"]) for index in indices]
    assert labels[0] == labels[1]
    assert not waystation.verify(tmp_path / "joined").damages


def test_parts_of_several_states_are_not_joined(tmp_path: Path) -> None:
    for others, owners in ((["a"], (0, 1)), (["a", "b"], (0, 1, 1))):
        joining = Joining(tmp_path / "whole")
        waystation.save(part_path(joining.directory, 0), {"a": A, "b": False})
        waystation.save(part_path(joining.directory, 1), dict.fromkeys(others, B))
        with pytest.raises(Conflict, match="not of one state"):
            joining.commit(2, owners)
        assert os.listdir(tmp_path) == []


def test_nothing_is_there_before(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    joining = Joining(path)
    waystation.save(part_path(joining.directory, 0), {"a": A})
    assert not path.exists()
    joining.discard()
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_joined_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    joined(path)
    joining = Joining(path, overwrite=True)
    for number in range(2):
        waystation.save(part_path(joining.directory, number), {"model": {"a": A}})
    with pytest.raises(Conflict):
        joining.commit(2)
    check(path)
    joining = Joining(path, overwrite=True)
    waystation.save(part_path(joining.directory, 0), {"a": A})
    with pytest.raises(NotFound):
        joining.commit(2)
    check(path)


def test_what_was_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    code = f"""
import os, signal, numpy, waystation
from waystation.checkpoint.joining import Joining, part_path
joining = Joining({str(path)!r})
waystation.save(part_path(joining.directory, 0), {{"a": numpy.arange(9)}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1
    assert not path.exists()
    joined(path)
    check(path)
