"""The order of the data is a function of seed and position, and covers the text once a pass."""

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest

from waystation_demo.data import LEAST_TEXT_BYTES, Windows, standard_library_text

TEXT = np.arange(10 * 7 + 3, dtype=np.uint8)


def test_batches_continue_where_the_position_says() -> None:
    whole = Windows(TEXT, 7, seed=3).batch(0, 40)
    for position in (0, 1, 9, 10, 11, 25):
        np.testing.assert_array_equal(Windows(TEXT, 7, seed=3).batch(position, 12), whole[position:][:12])


def test_each_pass_draws_every_window_once_in_its_own_order() -> None:
    windows = Windows(TEXT, 7, seed=3)
    first, second = windows.batch(0, 10), windows.batch(10, 10)
    assert not np.array_equal(first, second)
    for drawn in (first, second):
        np.testing.assert_array_equal(np.sort(drawn, axis=0).ravel(), TEXT[:70])


def test_seed_decides_the_order() -> None:
    assert not np.array_equal(Windows(TEXT, 7, seed=3).batch(0, 10), Windows(TEXT, 7, seed=4).batch(0, 10))


def test_text_is_this_interpreter_s_library() -> None:
    text = standard_library_text()
    assert len(text) >= LEAST_TEXT_BYTES
    assert Path(ast.__file__).read_bytes() in text.tobytes()
    assert inspect.getsource(np).encode() not in text.tobytes()


def test_library_without_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("pass\n")
    with pytest.raises(SystemExit, match="holds only 5 bytes"):
        standard_library_text(tmp_path)
