"""JSON values of the caller: what JSON would give back as something else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waystation
from waystation import errors, handlers, training

BESIDE_TEXT = [{1: "a", "1": "b"}, {None: 1}, {True: 1}, [({"b": {2.5: 1}},)]]
"""Values with keys of which JSON makes text; of the first two keys it makes one."""


@pytest.mark.parametrize("value", BESIDE_TEXT, ids=repr)
def test_keys_that_are_no_text_are_refused(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "c"
    with pytest.raises(errors.InvalidInput, match="custom_metadata must be a JSON value, with text as keys"):
        waystation.save(path, {"a": 1}, custom_metadata={"inside": value})
    with training.Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(errors.InvalidInput, match="metrics must be a JSON value, with text as keys"):
            checkpointer.save(1, {"a": 1}, metrics=value)
        assert not checkpointer.checkpoints
    with pytest.raises(errors.InvalidInput, match="custom_metadata"):
        training.Checkpointer(tmp_path / "run", custom_metadata={"inside": value})

    context = waystation.Context()
    registry = handlers.local_registry()
    registry.add(handlers.JsonHandler, checkpointable_name="config")
    context.checkpointables.registry = registry
    with (
        context,
        pytest.raises(errors.InvalidInput, match="JsonHandler saves must be a JSON value, with text"),
    ):
        waystation.save_checkpointables(path, {"config": value})
    assert not path.exists()


def test_metadata_that_change_during_a_save_are_saved_as_they_were(tmp_path: Path) -> None:
    path, custom_metadata = tmp_path / "c", {"losses": [1.0]}
    saving = waystation.save_async(path, {"a": np.zeros(1 << 20)}, custom_metadata=custom_metadata)
    custom_metadata["losses"].append(2.0)
    saving.result()
    assert waystation.metadata(path).custom_metadata == {"losses": [1.0]}
