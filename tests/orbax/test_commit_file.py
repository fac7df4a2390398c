"""`AtomicityMode.COMMIT_FILE`: each library reads what the other has saved, and nothing unfinished."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from orbax.checkpoint import v1 as oracle

import waystation
from waystation import errors

STATE = {"a": np.arange(6.0), "b": np.ones((2, 3), np.float32)}
COMMITTED = "commit_success.txt"


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind() -> Iterator[None]:
    """Collects the coroutines that Orbax leaves behind where it raises."""
    yield
    gc.collect()


def _with_commit_file(library: Any, call: Callable[[], Any], *, in_layout_of_orbax: bool = True) -> Any:
    context = library.Context()
    context.atomicity.mode = library.options.AtomicityMode.COMMIT_FILE
    if in_layout_of_orbax:
        context.array.saving.use_ocdbt = True
    with context:
        return call()


@pytest.mark.parametrize(
    ("writer", "reader"), [(waystation, oracle), (oracle, waystation)], ids=["ours", "theirs"]
)
def test_each_reads_what_the_other_has_saved(tmp_path: Path, writer: Any, reader: Any) -> None:
    path = tmp_path / "c"
    _with_commit_file(writer, lambda: writer.save(path, STATE))
    assert (path / COMMITTED).exists()
    loaded = _with_commit_file(reader, lambda: reader.load(path, STATE))
    for name, value in STATE.items():
        np.testing.assert_array_equal(loaded[name], value)


def test_what_lacks_the_file_has_not_ended(tmp_path: Path) -> None:
    path = tmp_path / "c"
    oracle.save(path, STATE)
    (path / COMMITTED).unlink()
    with pytest.raises(errors.InvalidLayoutError, match="COMMIT_FILE its save has not ended") as caught:
        _with_commit_file(waystation, lambda: waystation.load(path))
    assert COMMITTED in str(caught.value)
    with pytest.raises(ValueError, match="Could not recognize"):
        _with_commit_file(oracle, lambda: oracle.load(path))
    np.testing.assert_array_equal(waystation.load(path)["a"], STATE["a"])


def test_native_checkpoints_are_whole_without_it(tmp_path: Path) -> None:
    path = tmp_path / "c"
    _with_commit_file(waystation, lambda: waystation.save(path, STATE), in_layout_of_orbax=False)
    loaded = _with_commit_file(waystation, lambda: waystation.load(path), in_layout_of_orbax=False)
    np.testing.assert_array_equal(loaded["a"], STATE["a"])
