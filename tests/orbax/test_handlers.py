"""Checkpointables that handlers save pass between genuine Orbax and ours, in both directions."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from google.protobuf import struct_pb2
from tests.handlers.cases import InOrbaxLayout, careful, registry_of
from tests.handlers.examples import (
    AbstractCounter,
    Counter,
    CounterHandler,
    Iterator,
    OtherCounterHandler,
    SubdirectoryHandler,
)
from tests.orbax import oracle
from tests.orbax.oracle import v1

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    grain = pytest.importorskip("grain")

OCDBT, FILES = InOrbaxLayout(use_ocdbt=True), InOrbaxLayout(use_ocdbt=False)
DIRECTIONS: dict[str, tuple[Any, Any]] = {
    "orbax-to-ours": (v1, OCDBT),
    "ours-to-orbax": (OCDBT, v1),
    "ours-to-orbax-files": (FILES, v1),
    "ours-to-ours": (OCDBT, OCDBT),
}
directions = pytest.mark.parametrize(("saver", "loader"), DIRECTIONS.values(), ids=DIRECTIONS)
STATE = {"w": jnp.arange(6.0).reshape(2, 3), "step": 3}


def save(library: Any, path: Path, checkpointables: dict[str, Any], *, asynchronous: bool = False) -> None:
    """Saves, with the handlers that are in effect."""
    if asynchronous:
        library.save_checkpointables_async(path, checkpointables).result()
    else:
        library.save_checkpointables(path, checkpointables)


@directions
@pytest.mark.parametrize("asynchronous", [False, True])
def test_json(saver: Any, loader: Any, asynchronous: bool, tmp_path: Path) -> None:
    config = {"name": "gölden", "sizes": [1, 2.5, None, True], "nested": {"x": [{}]}}
    with registry_of(saver, config=saver.handlers.JsonHandler):
        save(saver, tmp_path / "c", {"config": config, "model": STATE}, asynchronous=asynchronous)
    loaded = loader.load_checkpointables(tmp_path / "c")
    assert loaded["config"] == config
    oracle.assert_same(loaded["model"], STATE)
    assert loader.load_checkpointables(tmp_path / "c", {"config": None}) == {"config": config}
    found = loader.checkpointables_metadata(tmp_path / "c").metadata
    assert found.keys() == {"config", "model"}
    assert found["config"] is None


@directions
def test_protocol_buffers(saver: Any, loader: Any, tmp_path: Path) -> None:
    message = struct_pb2.Struct()
    message.update({"name": "x", "sizes": [1, 2]})
    with careful(saver.Context()):
        save(saver, tmp_path / "c", {"message": message, "model": STATE})
    loaded = loader.load_checkpointables(tmp_path / "c", {"message": struct_pb2.Struct, "model": None})
    assert loaded["message"] == message
    oracle.assert_same(loaded["model"], STATE)


@directions
@pytest.mark.parametrize("handler", [CounterHandler, OtherCounterHandler, SubdirectoryHandler])
def test_a_handler_of_the_program_s_own(
    saver: Any, loader: Any, handler: type[CounterHandler], tmp_path: Path
) -> None:
    with registry_of(saver, handler):
        save(saver, tmp_path / "c", {"counter": Counter(5), "model": STATE})
    # The one that saved loads, whichever came last.
    others = [kind for kind in (CounterHandler, OtherCounterHandler) if kind is not handler]
    with registry_of(loader, handler, *others):
        assert loader.load_checkpointables(tmp_path / "c")["counter"] == Counter(5)
        if handler is CounterHandler:
            added = loader.load_checkpointables(tmp_path / "c", {"counter": AbstractCounter(2)})
            assert added == {"counter": Counter(7)}
        found = loader.checkpointables_metadata(tmp_path / "c").metadata
        assert found["counter"] == AbstractCounter()
    # Nobody here knows it; Orbax then tries to load it as a tree.
    with pytest.raises(ValueError, match=r"(?i)counter"):
        loader.load_checkpointables(tmp_path / "c", {"counter": AbstractCounter()})
    oracle.assert_same(loader.load_checkpointables(tmp_path / "c", {"model": None})["model"], STATE)


@directions
def test_what_saves_itself(saver: Any, loader: Any, tmp_path: Path) -> None:
    with careful(saver.Context()):
        save(saver, tmp_path / "c", {"dataset": Iterator(9), "model": STATE})
    fresh = Iterator()
    loaded = loader.load_checkpointables(tmp_path / "c", {"dataset": fresh, "model": None})
    assert (loaded["dataset"] is fresh, fresh.position) == (True, 9)
    with pytest.raises(ValueError, match=r"restore|itself"):
        loader.load_checkpointables(tmp_path / "c", {"dataset": None})


@directions
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_iterator_of_grain(saver: Any, loader: Any, asynchronous: bool, tmp_path: Path) -> None:
    def numbers() -> Any:
        return iter(grain.MapDataset.range(100).shuffle(seed=3).repeat().to_iter_dataset().batch(4))

    iterator, fresh = numbers(), numbers()
    for _ in range(5):
        next(iterator)
    with careful(saver.Context()):
        save(saver, tmp_path / "c", {"data": iterator, "model": STATE}, asynchronous=asynchronous)
    expected = next(iterator)
    loader.load_checkpointables(tmp_path / "c", {"data": fresh})
    np.testing.assert_array_equal(next(fresh), expected)


@directions
def test_each_remembers_handlers_by_the_names_of_orbax(saver: Any, loader: Any, tmp_path: Path) -> None:
    checkpointables = {"config": {"x": 1}, "data": Iterator(1), "counter": Counter(2), "model": STATE}
    names = []
    for library in (v1, saver):
        path = tmp_path / str(len(names))
        with registry_of(library, CounterHandler, config=library.handlers.JsonHandler):
            save(library, path, checkpointables)
        names.append(json.loads((path / "_CHECKPOINT_METADATA").read_text())["item_handlers"])
    assert names[0] == names[1]


class NamesakeHandler(CounterHandler):
    """Gives its file the name that the metadata of Orbax's trees have."""

    file = "_METADATA"


@pytest.mark.parametrize("library", [OCDBT, FILES], ids=["ocdbt", "files"])
def test_files_of_handlers_may_have_names_of_trees(library: Any, tmp_path: Path) -> None:
    with registry_of(library, NamesakeHandler):
        save(library, tmp_path / "c", {"counter": Counter(3), "model": STATE})
        loaded = library.load_checkpointables(tmp_path / "c")
    assert loaded["counter"] == Counter(3)
    oracle.assert_same(loaded["model"], STATE)
    oracle.assert_same(library.load_checkpointables(tmp_path / "c", {"model": None})["model"], STATE)
