"""A checkpoint of two states and the files of a handler, and places of others."""

from pathlib import Path

import pytest
from tests.handlers.examples import Counter, SubdirectoryHandler
from tests.handlers.states import state, with_handlers
from tests.support.places import directory

import waystation

__all__ = ["directory", "saved"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    with with_handlers(SubdirectoryHandler):
        waystation.save_checkpointables(path, {"a": state(1), "b": state(2), "counter": Counter(3)})
    return path
