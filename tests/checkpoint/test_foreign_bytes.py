"""What was added to a checkpoint from outside: bytes after the end of its files, links to files elsewhere."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import failing_calls

import waystation as ws
from waystation.errors import Corrupt, NotFound, Unsupported


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    ws.save(path, {"a": np.arange(300_000), "b": np.ones(3)})
    return path


def _options(**loading: Any) -> ws.Context:
    context = ws.Context()
    for name, value in loading.items():
        setattr(context.array.loading, name, value)
    return context


def _files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("loading", [{}, {"verify": False}, {"mmap": True}], ids=repr)
def test_appended_bytes_are_noticed(saved: Path, loading: dict[str, Any]) -> None:
    for name in _files(saved):
        if name.endswith("index.json"):
            continue  # for other tools: no load reads it where it is not verified
        file = saved / name
        length = file.stat().st_size
        with file.open("ab") as opened:
            opened.write(b"more")
        with pytest.raises(Corrupt) as caught, _options(**loading):
            ws.load(saved)
        assert name in str(caught.value)
        assert any(damage.path == str(file) for damage in ws.verify(saved).damages)
        os.truncate(file, length)
    np.testing.assert_array_equal(ws.load(saved)["a"], np.arange(300_000))


def _move_out(file: Path) -> Path:
    """Puts a link in the place of a file."""
    elsewhere = file.parents[2] / f"moved-{file.name}"
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)
    return elsewhere


def test_links_out_of_a_checkpoint_are_refused_unless_they_are_allowed(saved: Path) -> None:
    for name in _files(saved):
        if "/" not in name or name.endswith("index.json"):
            continue
        copy = saved.parent / "copy"
        shutil.copytree(saved, copy)
        file = copy / name
        elsewhere = _move_out(file)
        for read, loading in ((ws.load, {}), (ws.load, {"mmap": True}), (ws.verify, {})):
            with pytest.raises(Unsupported, match="symbolic link") as caught, _options(**loading):
                read(copy)
            assert str(file) in str(caught.value)
        trusting = ws.Context()
        trusting.file.follow_links_out = True
        with trusting:
            np.testing.assert_array_equal(ws.load(copy)["a"], np.arange(300_000))
            assert not ws.verify(copy).damages
        shutil.rmtree(copy)
        elsewhere.unlink()


def test_a_directory_that_is_a_link_out_is_refused(saved: Path) -> None:
    elsewhere = saved.parent / "moved"
    shutil.move(saved / "state", elsewhere)
    (saved / "state").symlink_to(elsewhere)
    with pytest.raises(Unsupported, match="symbolic link"):
        ws.load(saved)


def test_links_inside_and_to_the_checkpoint_are_followed(saved: Path) -> None:
    data = next((saved / "state").glob("*.safetensors"))
    shutil.move(data, saved / "state" / "other")
    data.symlink_to("other")
    link = saved.parent / "latest"
    link.symlink_to(saved)
    np.testing.assert_array_equal(ws.load(link)["a"], np.arange(300_000))


@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_links_out_of_the_layouts_of_orbax_are_refused(tmp_path: Path, *, use_ocdbt: bool) -> None:
    context = ws.Context()
    context.array.saving.use_ocdbt = use_ocdbt
    path = tmp_path / "saved"
    with context:
        ws.save(path, {"a": np.arange(300_000)})
    files = [file for file in (path / "state").rglob("*") if file.is_file() and file.stat().st_size]
    refused = 0
    for file in files:
        elsewhere = tmp_path / "moved"
        shutil.move(file, elsewhere)
        file.symlink_to(elsewhere)
        try:
            loaded = ws.load(path)
        except Unsupported:
            refused += 1
        else:  # a file that no load reads
            np.testing.assert_array_equal(loaded["a"], np.arange(300_000))
        file.unlink()
        shutil.move(elsewhere, file)
    assert refused >= 2


_WITHOUT_OPENAT2 = """
import sys
import numpy as np
import waystation as ws
from tests.support import failing_calls

failing_calls.fail("openat2", int(sys.argv[2]))
loaded = ws.load(sys.argv[1])
assert (loaded["a"] == np.arange(300_000)).all()
assert not ws.verify(sys.argv[1]).damages
"""


@pytest.mark.share(6)
@pytest.mark.skipif(
    not failing_calls.SUPPORTED, reason="the filter of system calls is for x86-64 and AArch64 Linux"
)
@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL])
def test_loads_do_without_openat2(saved: Path, refusal: int) -> None:
    command = [sys.executable, "-c", _WITHOUT_OPENAT2, str(saved), str(refusal)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    _move_out(next((saved / "state").glob("*.safetensors")))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert "symbolic link" in done.stderr


@pytest.mark.parametrize("use_ocdbt", [None, False, True], ids=["native", "zarr2", "ocdbt"])
def test_a_link_to_nothing_is_an_entry_like_others(use_ocdbt: bool | None, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    context = ws.Context()
    context.array.saving.use_ocdbt = use_ocdbt
    with context:
        ws.save(path, {"a": np.arange(3)})
    (path / "note").symlink_to("nothing")
    np.testing.assert_array_equal(ws.load(path)["a"], np.arange(3))
    ws.metadata(path)
    ws.verify(path)


def test_a_link_to_nothing_in_the_place_of_the_record_is_told(saved: Path) -> None:
    (saved / "checkpoint.json").unlink()
    (saved / "checkpoint.json").symlink_to("nothing")
    for act in (ws.load, ws.metadata):
        with pytest.raises(NotFound, match=r"checkpoint\.json"):
            act(saved)
    assert any("checkpoint.json" in damage.path for damage in ws.verify(saved).damages)
