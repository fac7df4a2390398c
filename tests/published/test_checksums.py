"""Checksums of published files: damage is found by loads and by whoever looks, and named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.published import models
from tests.support.peaks import begin_peak, status

import waystation
import waystation.safetensors
from waystation import _native, errors
from waystation.safetensors import load, stream, verify_files, write_checksums

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two files of two arrays of 1 MiB each."""
    arrays = {f"w{number}": np.full((512, 512), number, np.float32) for number in range(4)}
    models.write_set(tmp_path / "model", arrays, 2)
    return tmp_path / "model"


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


def test_a_sound_model(model: Path) -> None:
    progress: list[tuple[int, int]] = []
    (written,) = write_checksums(model, on_progress=lambda *now: progress.append(now))
    assert written == str(model / "checksums.waystation.json")
    total = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert progress[-1] == (total, total)
    assert verify_files(model) == []
    for verify in (None, True, False):
        assert float(load(model, framework="numpy", verify=verify)["w3"].max()) == 3


READS: dict[str, Any] = {
    "load": lambda model: load(model, framework="torch"),
    "stream": lambda model: dict(stream(model, framework="jax")),
    "tensor": lambda model: waystation.safetensors.open(model).tensor("w2"),
    "a part": lambda model: waystation.safetensors.open(model).slice("w2")[-1:],
    "shards": lambda model: load(
        model,
        framework="jax",
        sharding=NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x")),
        select=["w2"],
    ),
    "mapped but verified": lambda model: load(model, framework="numpy", mmap=True, verify=True),
}


@pytest.mark.parametrize("case", READS)
def test_damage_is_found_by_every_read(model: Path, case: str) -> None:
    write_checksums(model)
    first = model / "model-00001-of-00002.safetensors"
    flip(first, -1)
    with pytest.raises(errors.Corrupt, match="checksum of a block differs") as caught:
        READS[case](model)
    assert caught.value.context["path"] == str(first)
    assert caught.value.context["tensor"] == "w2"
    assert load(model, framework="numpy", verify=False)["w2"][-1, -1] != 2
    assert float(load(model, framework="numpy", select=["w1", "w3"])["w3"].max()) == 3


def test_damage_is_named(model: Path) -> None:
    write_checksums(model)
    flip(model / "model-00001-of-00002.safetensors", -1)
    (damage,) = verify_files(model)
    assert damage.path == str(model / "model-00001-of-00002.safetensors")
    assert damage.tensors == ("w2",)
    assert damage.problem.startswith("1 of 9 blocks differ")
    os.truncate(model / "model-00002-of-00002.safetensors", 1)
    damages = {os.path.basename(damage.path): damage.problem for damage in verify_files(model)}
    assert sorted(damages) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert damages["model-00002-of-00002.safetensors"].startswith("1 bytes are there")


def test_a_file_of_another_length(model: Path) -> None:
    write_checksums(model)
    path = models.write_file(model / "model-00001-of-00002.safetensors", {"w0": np.ones(3), "w2": np.ones(3)})
    with pytest.raises(errors.Corrupt, match="when it was summed"):
        load(model, framework="numpy")
    (damage,) = verify_files(model)
    assert (damage.path, damage.tensors) == (str(path), ())
    assert "bytes are there" in damage.problem


@pytest.mark.parametrize("by", ["numbers", "index", "names"])
@pytest.mark.parametrize("damage", ["cut off", "removed"])
def test_a_file_that_is_cut_off_or_missing_is_damage(tmp_path: Path, by: str, damage: str) -> None:
    path = tmp_path / "model"
    arrays = {f"w{number}": np.full((512, 512), number, np.float32) for number in range(4)}
    waystation.safetensors.save(arrays, path, max_file_bytes=2 * MIB)
    if by != "index":
        (path / "model.safetensors.index.json").unlink()
    if by == "names":
        for number, file in enumerate(sorted(path.iterdir())):
            file.rename(path / f"{'ab'[number]}.safetensors")
    write_checksums(path)
    file = sorted(path.glob("*.safetensors"))[1]
    if damage == "removed":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size - 8)
    (found,) = verify_files(path)
    assert found.path == str(file)
    if damage == "removed":
        assert found.problem == "is missing"
        assert found.tensors == (("w2", "w3") if by == "index" else ())
    else:
        assert "were summed" in found.problem
        assert found.tensors == ("w3",)
    assert [each.path for each in verify_files(file)] == [str(file)]


def test_a_model_of_one_file_that_is_missing(tmp_path: Path) -> None:
    waystation.safetensors.save({"a": np.ones(3)}, tmp_path / "model")
    write_checksums(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (found,) = verify_files(tmp_path / "model")
    assert found.problem == "is missing"


def test_an_index_that_is_damaged_beside_whole_files(model: Path) -> None:
    write_checksums(model)
    index = model / "model.safetensors.index.json"
    index.write_text("{")
    assert [each.path for each in verify_files(model)] == [str(index)]


def test_files_that_an_overwrite_removes_are_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "model"
    arrays = {"a": np.ones(100), "b": np.ones(100)}
    waystation.safetensors.save(arrays, path, max_file_bytes=900)
    write_checksums(path)
    waystation.safetensors.save(arrays, path, overwrite=True)
    (path / "model.safetensors").rename(path / "other.safetensors")
    write_checksums(path)
    assert verify_files(path) == []


def test_files_without_checksums(model: Path) -> None:
    for check in (verify_files, lambda path: load(path, framework="numpy", verify=True)):
        with pytest.raises(errors.InvalidInput, match="no checksums"):
            check(model)
    context = waystation.Context()
    context.array.loading.verify = True
    with context, pytest.raises(errors.InvalidInput, match=r"verify=False, or array\.loading\.verify"):
        load(model, framework="numpy")
    first, second = sorted(model.glob("*.safetensors"))
    write_checksums(first)
    assert verify_files(first) == []
    with pytest.raises(errors.InvalidInput, match="no checksums") as caught:
        verify_files(model)
    assert caught.value.context["path"] == str(second)
    write_checksums(second)
    assert verify_files(model) == [], "what is known of other files stays"


def test_checksums_that_are_damaged_themselves(model: Path) -> None:
    (path,) = map(Path, write_checksums(model))
    content = path.read_bytes()
    flip(path, len(content) // 2)
    with pytest.raises(errors.Corrupt) as caught:
        load(model, framework="numpy")
    assert caught.value.context["path"] == str(path)
    path.write_bytes(content[:20])
    with pytest.raises(errors.Corrupt):
        verify_files(model)


HOSTILE: dict[str, tuple[bytes, type[errors.WaystationError], str]] = {
    "deep": (b"[" * (1 << 20), errors.Corrupt, "expected a JSON object"),
    "no files": (b'{"version":1,"block_bytes":262144}', errors.Corrupt, "no object 'files'"),
    "a number twice": (b'{"version":1,"version":1}', errors.Corrupt, "twice"),
    "too few": (
        b'{"version":1,"block_bytes":262144,"files":{"model.safetensors":{"nbytes":1,"crc64":""}}}',
        errors.Corrupt,
        "does not fit its length",
    ),
    "newer": (b'{"version":2,"files":7}', errors.Unsupported, "update waystation"),
    "other blocks": (b'{"version":1,"block_bytes":4096,"files":{}}', errors.Unsupported, "update waystation"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_checksums_that_are_hostile(model: Path, what: str) -> None:
    body, error, reason = HOSTILE[what]
    path = model / "checksums.waystation.json"
    path.write_bytes(_native.seal_json(body))
    with pytest.raises(error, match=reason) as caught:
        load(model, framework="numpy")
    assert caught.value.context["path"] == str(path)


def test_checksums_that_are_a_link_to_themselves(model: Path) -> None:
    path = model / "checksums.waystation.json"
    path.symlink_to(path)
    with pytest.raises(errors.InvalidInput, match="symbolic links") as caught:
        load(model, framework="numpy")
    assert caught.value.context["path"] == str(path)


def test_checksums_take_no_more_memory_than_a_few_times_their_size(model: Path) -> None:
    """What `json` makes of empty lists takes thirty times what they take in the file."""
    path = model / "checksums.waystation.json"
    body = b'{"version":1,"block_bytes":262144,"files":{},"x":[' + b"[]," * (5 << 20) + b"[]]}"
    path.write_bytes(_native.seal_json(body))
    before = begin_peak()
    with pytest.raises(errors.InvalidInput, match="no checksums"):
        load(model, framework="numpy", verify=True)
    assert status("VmHWM") - before < 3 * len(body) + (32 << 20)


def test_files_that_are_links(tmp_path: Path, model: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for path in model.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    (written,) = write_checksums(tmp_path / "snapshot")
    assert Path(written).parent == tmp_path / "snapshot"
    assert verify_files(tmp_path / "snapshot") == []
    assert not (model / "checksums.waystation.json").exists()


def test_a_checkpoint_is_not_summed(tmp_path: Path) -> None:
    waystation.save(tmp_path / "c", {"a": np.zeros(3)})
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for path in (tmp_path / "c" / "state", next(tmp_path.rglob("*.safetensors"))):
        with pytest.raises(errors.InvalidInput, match=r"a checkpoint, which has checksums of its own"):
            write_checksums(path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
