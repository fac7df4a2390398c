"""A reader beside two processes that overwrite the checkpoint: every load gives one whole state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import waystation as ws
from waystation.errors import Corrupt

_BOUND_S = 120


def _state(number: int) -> dict[str, object]:
    return {
        "number": number,
        "large": np.full(200_000, number),
        "small": [np.full(1000, number) for _ in range(50)],
    }


_WRITER = """
import sys
import numpy as np
import waystation as ws

path, number, times = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
small = [np.full(1000, number) for _ in range(50)]
for _ in range(times):
    ws.save(path, {"number": number, "large": np.full(200_000, number), "small": small}, overwrite=True)
"""


def _check(state: dict[str, object]) -> None:
    number = state["number"]
    arrays = [state["large"], *state["small"]]  # type: ignore[misc]
    assert all((array == number).all() for array in arrays)


def test_no_load_beside_overwrites_is_refused_or_mixed(tmp_path: Path) -> None:
    path = tmp_path / "same"
    ws.save(path, _state(0))
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(path), str(number), "40"]) for number in (1, 2)
    ]
    try:
        while any(writer.poll() is None for writer in writers):
            _check(ws.load(path))
            assert ws.metadata(path).metadata["large"].shape == (200_000,)
            _check(ws.load_checkpointables(path)["state"])
        assert [writer.returncode for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(_BOUND_S)
    assert ws.load(path)["number"] in {1, 2}


def test_damage_of_a_checkpoint_that_stays_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    ws.save(path, _state(1))
    data = next((path / "state").glob("*.safetensors"))
    with data.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"damage")
    with pytest.raises(Corrupt):
        ws.load(path)
