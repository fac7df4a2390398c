"""Every format version that was ever written is still read, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tests.checkpoint.test_round_trip import assert_same
from tests.golden.golden_state import CUSTOM_METADATA, state

import waystation

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


def test_its_data_file_opens_with_plain_safetensors() -> None:
    with safe_open(HERE / "format-1" / "state" / "p00000-000.safetensors", "np") as file:
        np.testing.assert_array_equal(file.get_tensor("aligned"), state()["aligned"])
        assert "every dtype.bfloat16" in file.keys()  # noqa: SIM118 (the handle is no mapping)


def test_what_is_written_today_is_the_same_bytes(tmp_path: Path) -> None:
    """A change of the bytes of version 1 is found here before a user finds it."""
    waystation.save(tmp_path / "checkpoint", state(), custom_metadata=CUSTOM_METADATA)
    golden = HERE / "format-1" / "state"
    for file in sorted(golden.iterdir()):
        assert (tmp_path / "checkpoint" / "state" / file.name).read_bytes() == file.read_bytes(), file.name
