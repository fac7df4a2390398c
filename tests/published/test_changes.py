"""Files that change while they are in use: an error that says so, and never bytes of two versions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.published import models

import waystation.safetensors
from waystation import _native, errors
from waystation.safetensors import load, load_async, sources


@pytest.fixture
def path(tmp_path: Path) -> Path:
    # Of this the engine reads the whole, and the thread of the caller a few rows.
    return models.write_file(tmp_path / "model.safetensors", {"w": np.arange(1 << 19, dtype=np.float32)})


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def write_into(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")


def replace(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    os.replace(other, path)


def remove(path: Path) -> None:
    path.unlink()


def replace_linked(path: Path) -> None:
    path.with_name("link").unlink(missing_ok=True)
    link(path)
    replace(path)


def replace_moved(path: Path) -> None:
    path.rename(path.with_name("earlier"))
    shutil.copy2(path.with_name("earlier"), path)


def remove_linked(path: Path) -> None:
    link(path)
    remove(path)


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "shorter": (shorten, "it had .* bytes, and has"),
    "longer": (lengthen, "it had .* bytes, and has"),
    "written": (write_into, "written to"),
    "replaced": (replace, "another file has taken its place"),
    "removed": (remove, "removed"),
    "replaced, and linked elsewhere": (replace_linked, "another file has taken its place"),
    "replaced, and moved elsewhere": (replace_moved, "another file has taken its place"),
    "removed, and linked elsewhere": (remove_linked, "removed"),
}


def later(path: Path) -> None:
    """Makes the file old enough for any change to have another time, however coarse the clock of files is."""
    os.utime(path, ns=(0, 0))


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("was_read", [False, True])
def test_changed_after_it_was_opened(path: Path, case: str, framework: Any, was_read: bool) -> None:
    change, reason = CHANGES[case]
    later(path)
    tensors = waystation.safetensors.open(path, framework=framework)
    if was_read:
        tensors.slice("w")[3:5]
    change(path)
    for read in (
        lambda: tensors.tensor("w"),
        lambda: tensors.slice("w")[3:5],
        lambda: load(tensors, framework=framework),
        lambda: load(tensors, framework=framework, mmap=True),
        lambda: load_async(tensors, framework=framework).result(),
    ):
        with pytest.raises(errors.Conflict, match=reason) as caught:
            read()
        assert caught.value.context["path"] == str(path)


def link(path: Path) -> None:
    os.link(path, path.with_name("link"))


def unlink(path: Path) -> None:
    path.with_name("link").unlink(missing_ok=True)
    link(path)
    path.with_name("link").unlink()


def permit(path: Path) -> None:
    path.chmod(0o444)


@pytest.mark.parametrize("change", [link, unlink, permit])
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_another_link_and_other_permissions_change_no_content(
    path: Path, change: Callable[[Path], None], framework: Any
) -> None:
    expected = waystation.safetensors.load(path, framework="numpy")["w"]
    tensors = waystation.safetensors.open(path, framework=framework)
    tensors.slice("w")[3:5]
    change(path)
    for read in (
        lambda: tensors.tensor("w"),
        lambda: load(tensors, framework=framework)["w"],
        lambda: load(tensors, framework=framework, mmap=True)["w"],
    ):
        np.testing.assert_array_equal(np.asarray(read()), expected)
    np.testing.assert_array_equal(np.asarray(tensors.slice("w")[3:5]), expected[3:5])


@pytest.mark.parametrize("change", [link, unlink, permit])
def test_a_link_that_is_made_while_a_file_is_read(
    path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = waystation.safetensors.load(path, framework="numpy")["w"]
    start = _native.start_read

    def start_and_change(*arguments: Any, **keywords: Any) -> Any:
        job = start(*arguments, **keywords)
        change(path)
        return job

    monkeypatch.setattr(_native, "start_read", start_and_change)
    np.testing.assert_array_equal(load(path, framework="numpy")["w"], expected)


@pytest.mark.parametrize("case", CHANGES)
def test_changed_while_it_is_read(path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file changes after the engine was given it, and before its job is asked for the result."""
    change, reason = CHANGES[case]
    later(path)
    start = _native.start_read

    def start_and_change(*arguments: Any, **keywords: Any) -> Any:
        job = start(*arguments, **keywords)
        change(path)
        return job

    monkeypatch.setattr(_native, "start_read", start_and_change)
    with pytest.raises(errors.Conflict, match=reason):
        load(path, framework="numpy")


@pytest.mark.parametrize("case", CHANGES)
def test_who_reads_one_tensor_of_what_changed_is_told_which(path: Path, case: str) -> None:
    change, reason = CHANGES[case]
    later(path)
    with waystation.safetensors.open(path, framework="numpy") as tensors:
        change(path)
        for read in (lambda: tensors.tensor("w"), lambda: tensors.slice("w")[:2]):
            with pytest.raises(errors.Conflict, match=reason) as caught:
                read()
            assert caught.value.context["tensor"] == "w"


def test_a_change_between_loads_is_none(path: Path) -> None:
    before = load(path, framework="numpy")["w"]
    write_into(path)
    after = load(path, framework="numpy")["w"]
    assert before[-1] == (1 << 19) - 1
    assert after[-1:].tobytes() == b"abcd"


def saved(directory: Path, value: int) -> None:
    """Two files and their index, of a model of which every element is the value."""
    arrays = {name: np.full(64, value, np.float32) for name in ("a", "b")}
    waystation.safetensors.save(arrays, directory, max_file_bytes=256, overwrite=True)


@pytest.mark.parametrize("is_read_first", [True, False])
def test_a_model_that_is_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_read_first: bool
) -> None:
    """The new one is opened: its files, and none of the earlier one."""
    saved(tmp_path, 1)
    read_headers = sources.read_headers

    def read_and_replace(paths: Sequence[str]) -> Any:
        monkeypatch.setattr(sources, "read_headers", read_headers)
        headers = read_headers(paths) if is_read_first else None
        saved(tmp_path, 2)
        return headers or read_headers(paths)

    monkeypatch.setattr(sources, "read_headers", read_and_replace)
    loaded = load(tmp_path, framework="numpy")
    assert {name: set(array.tolist()) for name, array in loaded.items()} == {"a": {2.0}, "b": {2.0}}


_SAVER = """
import sys
import numpy as np
from waystation import safetensors

for value in range(1, 40):
    arrays = {f"{number}": np.full(20_000, value) for number in range(20)}
    safetensors.save(arrays, sys.argv[1], max_file_bytes=int(sys.argv[2]), overwrite=True)
"""


@pytest.mark.share(6)
@pytest.mark.parametrize("max_file_bytes", [1 << 30, 500_000])
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_loads_beside_saves_give_one_model(
    tmp_path: Path, max_file_bytes: int, *, is_asynchronous: bool
) -> None:
    """In a process of its own, models are saved to one place; every load gives all of one of them."""
    arrays = {f"{number}": np.full(20_000, 0) for number in range(20)}
    waystation.safetensors.save(arrays, tmp_path / "model", max_file_bytes=max_file_bytes)
    command = [sys.executable, "-c", _SAVER, str(tmp_path / "model"), str(max_file_bytes)]
    saver = subprocess.Popen(command)
    try:
        while saver.poll() is None:
            if is_asynchronous:
                loaded = load_async(tmp_path / "model", framework="numpy").result()
            else:
                loaded = load(tmp_path / "model", framework="numpy")
            assert len({value for array in loaded.values() for value in (array.min(), array.max())}) == 1
        assert saver.returncode == 0
    finally:
        saver.kill()
        saver.wait()


def test_a_model_that_is_replaced_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1)
    read_headers = sources.read_headers

    def read_and_replace(paths: Sequence[str]) -> Any:
        headers = read_headers(paths)
        saved(tmp_path, 2)
        return headers

    monkeypatch.setattr(sources, "read_headers", read_and_replace)
    with pytest.raises(errors.Conflict, match="again and again"):
        waystation.safetensors.open(tmp_path)


def test_no_permission_and_no_room_for_a_name(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidInput):
        load(tmp_path / ("x" * 300), framework="numpy")
