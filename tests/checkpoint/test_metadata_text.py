"""What metadata show when they are printed: the tree in lines, never kilobytes in one."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

import waystation


def test_printed_metadata_are_a_tree_in_lines(tmp_path: Path) -> None:
    path = tmp_path / "c"
    waystation.save(path, {"a": np.zeros((3, 4)), "b": [jnp.zeros(2), None, 1.5], "c": "x" * 200})
    found = waystation.metadata(path)
    assert repr(found) == f"<CheckpointMetadata: '{path}' (state), 4 leaves>"
    first, *lines = str(found).splitlines()
    assert first == f"CheckpointMetadata: '{path}' (state), 4 leaves"
    assert lines[0] == "  ['a']: float64 (3, 4)"
    assert lines[1].startswith("  ['b'][0]: float32 (2,)")
    assert lines[2:] == ["  ['b'][2]: 1.5", "  ['c']: '" + "x" * 59]
    assert (
        str(waystation.checkpointables_metadata(path)).splitlines()[1] == "  ['state']['a']: float64 (3, 4)"
    )


def test_many_leaves_are_cut_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "c"
    waystation.save(path, [np.zeros(1)] * 80)
    lines = str(waystation.metadata(path)).splitlines()
    assert len(lines) == 52
    assert lines[-1] == f"  … and 30 more; 'waystation inspect {path}' shows all"
