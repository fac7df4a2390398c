"""Every format version that was ever written is still read, bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import waystation
from tests.checkpoint.test_round_trip import assert_same
from tests.golden.make import CUSTOM_METADATA, HERE, state

VERSIONS = [1]


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_checkpoint(version: int) -> None:
    path = HERE / f"format-{version}"
    assert json.loads((path / "checkpoint.json").read_bytes())["record"]["format_version"] == version
    assert_same(waystation.load(path), state())
    assert waystation.metadata(path).custom_metadata == CUSTOM_METADATA
    found = waystation.checkpoint.verify(path)
    assert not found.damages and not found.strays


def test_its_data_file_opens_with_plain_safetensors() -> None:
    tensors = load_file(HERE / "format-1" / "state" / "p00000-000.safetensors")
    np.testing.assert_array_equal(tensors["aligned"], state()["aligned"])


def test_what_is_written_today_is_the_same_bytes(tmp_path: object) -> None:
    """A change of the bytes of version 1 is found here before a user finds it."""
    path = HERE.parent / "golden" / "format-1" / "state"
    waystation.save(f"{tmp_path}/checkpoint", state(), custom_metadata=CUSTOM_METADATA)
    for file in sorted(path.iterdir()):
        with open(f"{tmp_path}/checkpoint/state/{file.name}", "rb") as written:
            assert written.read() == file.read_bytes(), file.name
