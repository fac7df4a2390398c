"""`verify` of data files that were cut: which arrays have lost bytes, and what is whole."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import waystation

STATE = {f"w{number}": np.full(90_000, number, np.float64) for number in range(4)}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    waystation.save(tmp_path / "checkpoint", STATE)
    (path,) = (tmp_path / "checkpoint" / "state").glob("*.safetensors")
    return path


@pytest.mark.parametrize(
    ("left", "lost"),
    [
        (0, ["w0", "w1", "w2", "w3"]),
        (500_000, ["w0", "w1", "w2", "w3"]),
        (1_000_000, ["w1", "w2", "w3"]),
        (2_600_000, ["w3"]),
    ],
)
def test_what_is_cut_off_names_its_arrays(left: int, lost: list[str], data: Path) -> None:
    nbytes = data.stat().st_size
    os.truncate(data, left)
    (damage,) = waystation.verify(data.parents[1]).damages
    assert damage.problem == f"has {left} bytes where {nbytes} were written"
    assert list(damage.arrays) == lost


def test_a_missing_file_names_its_arrays(data: Path) -> None:
    data.unlink()
    (damage,) = waystation.verify(data.parents[1]).damages
    assert (damage.problem, list(damage.arrays)) == ("is missing", list(STATE))


def test_other_damage_in_what_is_left_is_found_too(data: Path) -> None:
    content = bytearray(data.read_bytes()[:1_000_000])
    content[300_000] ^= 1
    data.write_bytes(content)
    cut, flipped = waystation.verify(data.parents[1]).damages
    assert list(cut.arrays) == ["w1", "w2", "w3"]
    assert flipped.problem.startswith("bytes 262144 to 524288: ")
    assert list(flipped.arrays) == ["w0"]
