"""Every format version that was ever written is still read, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tests.checkpoint.test_round_trip import assert_same
from tests.golden.golden_state import CUSTOM_METADATA, checkpointables, state, with_handlers

import waystation
from waystation import errors
from waystation.layouts.native import names

HERE = Path(__file__).parent
VERSIONS = [1]


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_checkpoint(version: int) -> None:
    path = HERE / f"format-{version}"
    assert json.loads((path / "checkpoint.json").read_bytes())["record"]["format_version"] == version
    assert_same(waystation.load(path), state())
    assert waystation.metadata(path).custom_metadata == CUSTOM_METADATA
    found = waystation.checkpoint.verify(path)
    assert not found.damages
    assert not found.strays


@pytest.mark.parametrize("kind", ["files", "handled"])
@pytest.mark.parametrize("version", VERSIONS)
def test_golden_files_of_handlers(version: int, kind: str) -> None:
    path = HERE / f"format-{version}-{kind}"
    assert json.loads((path / "checkpoint.json").read_bytes())["record"]["format_version"] == version
    kinds = {
        name: json.loads(Path(names.checkpointable_record(str(path / name))).read_bytes())["record"]["kind"]
        for name in ("config", "notes", "state")
    }
    assert kinds == {"config": kind, "notes": kind, "state": "pytree"}
    expected = checkpointables()
    with with_handlers():
        loaded = waystation.load_checkpointables(path)
        assert set(waystation.checkpointables_metadata(path).metadata) == expected.keys()
    assert loaded["config"] == expected["config"]
    assert loaded["notes"].text == expected["notes"].text
    assert_same(loaded["state"], expected["state"])
    found = waystation.checkpoint.verify(path)
    assert not found.damages
    assert not found.strays


@pytest.mark.parametrize(("kind", "place"), [("files", "notes/files"), ("handled", "notes")])
def test_files_of_handlers_are_verified(tmp_path: Path, kind: str, place: str) -> None:
    path = shutil.copytree(HERE / f"format-1-{kind}", tmp_path / "checkpoint")
    file = path / place / "lines" / "1" / "ü 1.txt"
    file.write_text("zwolf", encoding="utf-8")
    with with_handlers(), pytest.raises(errors.Corrupt, match="ü 1"):
        waystation.load_checkpointables(path)


def test_its_data_file_opens_with_plain_safetensors() -> None:
    with safe_open(HERE / "format-1" / "state" / "p00000-000.safetensors", "np") as file:
        np.testing.assert_array_equal(file.get_tensor("aligned"), state()["aligned"])
        assert "every dtype.bfloat16" in file.keys()  # noqa: SIM118 (the handle is no mapping)


def test_what_is_written_today_is_the_same_bytes(tmp_path: Path) -> None:
    """A change of the bytes of version 1 is found here before a user finds it."""
    waystation.save(tmp_path / "checkpoint", state(), custom_metadata=CUSTOM_METADATA)
    require_same_files(tmp_path / "checkpoint" / "state", HERE / "format-1" / "state")
    with with_handlers():
        waystation.save_checkpointables(tmp_path / "files", checkpointables())
    for name in checkpointables():
        require_same_files(tmp_path / "files" / name, HERE / "format-1-handled" / name)


def require_same_files(found: Path, golden: Path) -> None:
    for file in sorted(golden.rglob("*")):
        if file.is_file():
            own = file.relative_to(golden)
            assert (found / own).read_bytes() == file.read_bytes(), own
