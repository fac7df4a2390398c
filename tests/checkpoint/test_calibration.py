"""The first large save measures its file system and remembers; a small one never does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import waystation
from waystation import _native
from waystation.layouts.native import engine_job


def test_the_first_large_save_calibrates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAYSTATION_CACHE_DIR", str(tmp_path / "cache"))
    waystation.save(tmp_path / "small", {"x": np.arange(10)})
    assert not (tmp_path / "cache").exists()
    # Only the size from which a save counts as large is brought down to what a test can write.
    monkeypatch.setattr(engine_job, "CALIBRATE_BYTES", 1 << 20)
    waystation.save(tmp_path / "large", {"x": np.zeros(1 << 20, np.uint8)})
    remembered = _native.calibration(str(tmp_path))
    assert remembered is not None
    assert remembered["write"]["best"]["mode"] in ("direct-ring", "direct-threads", "buffered")
    (stored,) = (tmp_path / "cache").iterdir()
    written = stored.stat().st_mtime_ns
    waystation.save(tmp_path / "again", {"x": np.zeros(1 << 20, np.uint8)})
    assert stored.stat().st_mtime_ns == written
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["again", "cache", "large", "small"]
