"""Programs of several real processes save and restore by version 0, each library what the other has saved."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as theirs
import pytest
from tests.support.programs import running
from tests.version0 import process_scenarios
from tests.version0.process_scenarios import values

import waystation
import waystation.compat.orbax as ours


@pytest.mark.parametrize(
    ("saver", "restorer", "layout"),
    [
        ("ours", "ours", "orbax"),
        ("ours", "theirs", "orbax"),
        ("theirs", "ours", "orbax"),
        ("ours", "ours", "native"),
    ],
)
@pytest.mark.share(4)
def test_a_manager_of_two_processes(tmp_path: Path, saver: str, restorer: str, layout: str) -> None:
    root, arguments = tmp_path / "run", {"count": 2, "framework": "jax", "directory": tmp_path}
    with running(process_scenarios.save, saver, root, layout, **arguments) as programs:
        first, second = programs.values()
    assert first == second == ([[0], [0, 1], [1, 2], [1, 2]], 1, [1, 2])
    assert (root / "1" / "reader").is_dir() or layout == "native"
    with running(process_scenarios.restore, restorer, root, **arguments) as programs:
        found = programs.values()
    for index, (wrong, config, reader, step, metadata) in enumerate(found):
        assert wrong == []
        assert (config, reader, step, metadata) == ({"step": 1}, {"position": 10 + index}, 1, {"run": 5})
    if saver == "ours":
        assert waystation.verify(root / "1").damages == []


@pytest.mark.parametrize("saver", ["ours", "theirs"])
def test_checkpointers_of_two_processes(tmp_path: Path, saver: str) -> None:
    arguments = {"count": 2, "framework": "jax", "directory": tmp_path}
    with running(process_scenarios.save_tree, saver, tmp_path, **arguments) as programs:
        assert programs.values() == [None, None]
    abstract = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in values().items()}
    devices = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=devices)
        for name, leaf in abstract.items()
    }
    for library in (ours, theirs):
        with library.StandardCheckpointer() as checkpointer:
            _assert_state(checkpointer.restore(tmp_path / "standard", {**abstract, "step": 0}), 1)
            _assert_state(checkpointer.restore(tmp_path / "files", {**abstract, "step": 0}), 2)
        args = library.args
        placed = library.ArrayRestoreArgs(sharding=devices)
        with library.Checkpointer(library.CompositeCheckpointHandler()) as checkpointer:
            found = checkpointer.restore(
                tmp_path / "several",
                args=args.Composite(array=args.ArrayRestore(restore_args=placed), config=args.JsonRestore()),
            )
        np.testing.assert_array_equal(found.array, values()["rows"] + 3)
        assert found.config == {"a": 1}


def _assert_state(found: dict[str, object], step: int) -> None:
    assert found["step"] == step
    for name, value in values().items():
        np.testing.assert_array_equal(found[name], value + step)  # type: ignore[arg-type]
