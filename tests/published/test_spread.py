"""Models spread over several disks: what is written, what stands in the way, and how loads read it."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from tests.published import models, spread_walk
from tests.support import disks, system_calls
from tests.support.long import amount

import waystation.safetensors
from waystation import errors, storage
from waystation.layouts.native import read_job
from waystation.safetensors import load, save, spread, stream, verify_files, write_checksums
from waystation.safetensors import open as open_model
from waystation.safetensors.headers import read_headers
from waystation.safetensors.spread import SpreadModel, plan
from waystation.safetensors.spread_note import discard
from waystation.storage import attempts

ARRAYS = {f"w{number:02}": np.full((64, 256 + number % 3), number, np.float32) for number in range(12)}


def same(found: dict[str, Any], arrays: dict[str, Any] = ARRAYS) -> bool:
    return {name: np.asarray(array).tobytes() for name, array in found.items()} == {
        name: np.asarray(array).tobytes() for name, array in arrays.items()
    }


def everything(*directories: Path) -> list[str]:
    """All that is in directories, hidden things as well."""
    return sorted(str(path) for directory in directories for path in directory.rglob("*"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in one file, with what tools put beside one."""
    save(ARRAYS, tmp_path / "model", metadata={"license": "mit"})
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "pooling").mkdir()
    (tmp_path / "model" / "pooling" / "config.json").write_text("[]")
    return tmp_path / "model"


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[list[Path]]:
    """Folders that do not exist yet: one on the disk, one in memory, another on the disk."""
    with disks.in_memory() as elsewhere:
        yield [tmp_path / "first", elsewhere / "second", tmp_path / "third"]


# ---- what is written ---------------------------------------------------------------------------


def test_files_of_every_dtype_are_those_that_other_tools_read(tmp_path: Path, folders: list[Path]) -> None:
    tensors = models.every_dtype() | {"empty": torch.zeros(0, 3), "scalar": torch.tensor(7.0)}
    (tmp_path / "model").mkdir()
    safetensors.torch.save_file(
        tensors, tmp_path / "model" / "model.safetensors", {"format": "pt", "by": "me"}
    )
    done = spread(tmp_path / "model", folders)
    assert done.path == str(folders[0])
    index = json.loads((folders[0] / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == done.nbytes
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        own = safetensors.torch.load_file(folders[0] / name)
        assert {tensor for tensor, file in index["weight_map"].items() if file == name} == own.keys()
        with safetensors.safe_open(folders[0] / name, "pt") as file:
            assert file.metadata() == {"format": "pt", "by": "me"}
        found |= own
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert (
            found[name].reshape(-1).view(torch.uint8).tolist()
            == tensor.reshape(-1).view(torch.uint8).tolist()
        )
    assert waystation.safetensors.load(done.path, framework="torch").keys() == tensors.keys()


def test_transformers_loads_the_first_folder(tmp_path: Path, folders: list[Path]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "tie_word_embeddings": True}
    config = LlamaConfig(**shape, num_attention_heads=4, num_hidden_layers=2)
    before = LlamaForCausalLM(config)
    before.save_pretrained(tmp_path / "llama")
    done = spread(tmp_path / "llama", folders)
    assert set(done.carried) == {"config.json", "generation_config.json"}
    after = LlamaForCausalLM.from_pretrained(done.path)
    assert all(torch.equal(after.state_dict()[name], value) for name, value in before.state_dict().items())


def test_what_is_beside_the_model_comes_with_it(model: Path, folders: list[Path]) -> None:
    (model / "adapter.safetensors").write_bytes(safetensors.numpy.save({"a": np.ones(3)}))
    (model / ".cache").mkdir()
    (model / ".cache" / "lock").touch()
    with (model / "other.bin").open("wb") as file:
        file.truncate((64 << 20) + 1)
    os.mkfifo(model / "pipe")
    (model / "gone").symlink_to("nothing")
    done = spread(model, folders)
    assert done.carried == ["config.json", "pooling/config.json"]
    assert done.left_out == ["adapter.safetensors", "other.bin", "pipe"]
    assert (folders[0] / "pooling" / "config.json").read_text() == "[]"
    alone = spread(model / "model.safetensors", [folder.with_name(f"{folder.name}-2") for folder in folders])
    assert (alone.carried, alone.left_out) == ([], [])


def test_permissions_of_what_comes_with_it_stay(model: Path, folders: list[Path]) -> None:
    modes = {"config.json": 0o640, "pooling/config.json": 0o444, "run.sh": 0o755}
    (model / "run.sh").write_text("#!/bin/sh")
    for name, mode in modes.items():
        (model / name).chmod(mode)
    spread(model, folders)
    assert {name: (folders[0] / name).stat().st_mode & 0o7777 for name in modes} == modes


def test_text_and_sums_of_the_whole_model_stay(tmp_path: Path, folders: list[Path]) -> None:
    """Files of a model may say different things, and its index something of all."""
    source = tmp_path / "model"
    source.mkdir()
    texts = [{"part": "one"}, None, {"part": "two"}, {"part": "one"}]
    weight_map = {}
    for number, text in enumerate(texts, 1):
        name = f"model-{number:05}-of-00004.safetensors"
        own = {
            tensor: array for place, (tensor, array) in enumerate(ARRAYS.items()) if place % 4 == number - 1
        }
        safetensors.numpy.save_file(own, source / name, text)
        weight_map |= dict.fromkeys(own, name)
    metadata = {"total_size": 1, "total_parameters": 77}
    content = {"metadata": metadata, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(content))
    write_checksums(source)
    done = spread(source, folders, max_file_bytes=100_000)
    assert same(load(done.path, framework="numpy", verify=True))
    assert verify_files(done.path) == []
    index = json.loads((folders[0] / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": done.nbytes, "total_parameters": 77}
    for tensor, file in index["weight_map"].items():
        with safetensors.safe_open(folders[0] / file, "np") as opened:
            assert opened.metadata() == texts[int(weight_map[tensor][6:11]) - 1]
    assert all(Path(file.path).stat().st_size <= 100_000 + 4096 for file in done.files)


@pytest.mark.hypothesis
def test_every_disk_gets_about_the_same(tmp_path: Path) -> None:
    chance = random.Random(7)
    for _ in range(amount(8, 200)):
        sizes = [
            chance.choice([0, 1, 3, 4096, chance.randrange(1 << 16)]) for _ in range(chance.randrange(60))
        ]
        arrays = {f"t{number}": np.zeros(size, np.uint8) for number, size in enumerate(sizes)}
        safetensors.numpy.save_file(arrays, tmp_path / "m.safetensors")
        count, most = chance.randrange(2, 6), chance.choice([1, 5000, 1 << 40])
        files = plan(read_headers([str(tmp_path / "m.safetensors")]), count, most)
        held = [sum(file.tensor_bytes for file in files if file.folder == folder) for folder in range(count)]
        # Of the largest-first rule: never more than a third above the best there is.
        assert max(held) <= max(max(sizes, default=0), 4 / 3 * sum(sizes) / count + 1) * 4 / 3
        assert max(held) - min(held) <= max(sizes, default=0)
        assert sorted(tensor.label for file in files for tensor in file.tensors) == sorted(arrays)
        assert all(file.tensor_bytes <= most or len(file.tensors) == 1 for file in files)
        assert files[0].folder == 0
        used = {file.folder for file in files}
        assert {file.folder for file in files[: len(used)]} == used, "the first files are on all disks"


def test_a_model_of_one_tensor_and_one_of_none(tmp_path: Path, folders: list[Path]) -> None:
    for number, arrays in enumerate([{"w": np.ones(5)}, {}]):
        safetensors.numpy.save_file(arrays, tmp_path / f"{number}.safetensors", {"a": "b"})
        to = [folder.with_name(f"{folder.name}{number}") for folder in folders]
        done = spread(tmp_path / f"{number}.safetensors", to)
        assert [file.folder for file in done.files] == [str(to[0])]
        assert same(load(done.path, framework="numpy"), arrays)
        with safetensors.safe_open(to[0] / "model.safetensors", "np") as opened:
            assert opened.metadata() == {"a": "b"}
        assert not to[1].exists()


def test_links_outlive_a_move(model: Path, tmp_path: Path) -> None:
    for place in ("disk1", "disk2", "mount/disk1", "mount/disk2"):
        (tmp_path / place).mkdir(parents=True)
    done = spread(model, [tmp_path / "disk1" / "m", tmp_path / "disk2" / "m"])
    shutil.move(done.path, tmp_path / "moved")
    assert same(load(tmp_path / "moved", framework="numpy"))
    to = [tmp_path / "mount" / "disk1" / "m", tmp_path / "mount" / "disk2" / "m"]
    spread(model, to, relative_links=True)
    shutil.move(tmp_path / "mount", tmp_path / "elsewhere")
    assert same(load(tmp_path / "elsewhere" / "disk1" / "m", framework="numpy"))


# ---- loads read all disks ----------------------------------------------------------------------


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The folders that jobs of the engine read, in the order in which they begin."""
    seen: list[set[str]] = []
    start = read_job.start

    def started(read: Any, *more: Any, **keywords: Any) -> Any:
        seen.append({os.path.dirname(os.path.realpath(path)) for path, *_ in read})
        return start(read, *more, **keywords)

    monkeypatch.setattr(read_job, "start", started)
    return seen


READS: dict[str, Callable[[str], dict[str, Any]]] = {
    "load": lambda path: load(path, framework="numpy"),
    "cast": lambda path: load(path, framework="numpy", dtype="float64", memory_limit=8 << 20),
    "stream": lambda path: dict(stream(path, framework="numpy", memory_limit=8 << 20)),
}


@pytest.mark.parametrize("how", READS)
def test_every_disk_is_read_all_the_time(
    how: str, tmp_path: Path, folders: list[Path], jobs: list[set[str]]
) -> None:
    """Also by loads that read group after group, as the bound on memory wants it."""
    arrays = {f"w{number:02}": np.full(1 << 18, number, np.float32) for number in range(24)}
    save(arrays, tmp_path / "model")
    done = spread(tmp_path / "model", folders[:2])
    jobs.clear()
    found = READS[how](done.path)
    assert {name: int(array[0]) for name, array in found.items()} == {
        name: int(array[0]) for name, array in arrays.items()
    }
    assert len(jobs) >= (2 if how == "load" else 6)
    # What runs at a time is a pair of jobs, one for each disk.
    both = {str(folder) for folder in folders[:2]}
    pairs = [first | second for first, second in zip(jobs[::2], jobs[1::2], strict=True)]
    assert pairs == [both] * len(pairs)
    if how != "stream":
        assert list(found) == list(open_model(done.path)), "the order is that of the files, as ever"


@pytest.mark.parametrize("lost", ["the folder", "the file"])
def test_a_disk_that_is_missing(model: Path, folders: list[Path], lost: str) -> None:
    done = spread(model, folders)
    link = next(file.path for file in done.files if file.folder == str(folders[1]))
    target = Path(os.readlink(link))
    if lost == "the folder":
        shutil.move(folders[1], folders[1].with_name("unmounted"))
        with pytest.raises(errors.Unavailable, match="mount the disk") as caught:
            load(done.path, framework="numpy")
        assert str(folders[1]) in caught.value.message
        assert caught.value.context["path"] == link
        with pytest.raises(errors.Unavailable, match="mount the disk"):
            load(link, framework="numpy")
        shutil.move(folders[1].with_name("unmounted"), folders[1])
        assert same(load(done.path, framework="numpy"))
        return
    target.unlink()
    with pytest.raises(errors.Corrupt, match=r"a link to '.*second"):
        load(done.path, framework="numpy")
    with pytest.raises(errors.NotFound, match=r"a link to '.*second"):
        load(link, framework="numpy")


# ---- what stands in the way --------------------------------------------------------------------


def refused(kind: type[Exception], text: str, *arguments: Any, **keywords: Any) -> None:
    with pytest.raises(kind, match=text):
        spread(*arguments, **keywords)


def test_folders_that_cannot_be(model: Path, tmp_path: Path) -> None:
    before = everything(tmp_path)
    a, b = tmp_path / "a", tmp_path / "b"
    refused(errors.InvalidInput, "two folders or more", model, [a])
    refused(errors.InvalidInput, "given twice", model, [a, b, tmp_path / "x" / ".." / "a"])
    refused(errors.InvalidInput, "inside of", model, [a, a / "b"])
    refused(errors.InvalidInput, "inside of", model, [a / "b", a])
    refused(errors.InvalidInput, "model's directory", model, [model / "a", b])
    refused(errors.Conflict, "holds files already", model, [model, b])
    refused(errors.Conflict, "holds files already", model, [model, b], overwrite=True)
    refused(errors.Conflict, "no part of a model", model, [a, model])
    refused(errors.NotFound, "mount the disk", model, [a, tmp_path / "absent" / "b"])
    refused(errors.InvalidInput, "is not a directory", model, [a, model / "config.json"])
    refused(errors.InvalidInput, "is a URL", model, [a, "s3://bucket/b"])
    refused(errors.WrongType, "several folders", model, str(a))
    refused(errors.WrongType, "overwrite", model, [a, b], overwrite=1)
    refused(errors.InvalidInput, "max_file_bytes", model, [a, b], max_file_bytes=0)
    refused(errors.NotFound, "could not open", tmp_path / "absent", [a, b])
    assert everything(tmp_path) == before
    waystation.save(tmp_path / "checkpoint", {"w": np.ones(3)})
    refused(errors.InvalidInput, "checkpoint", model, [a, tmp_path / "checkpoint"])


def test_models_that_contradict_themselves_are_not_spread(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    models.write_set(source, ARRAYS, 3)
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["w00"] = content["weight_map"]["w11"]
    index.write_text(json.dumps(content))
    refused(errors.Corrupt, "says that it is in", source, [tmp_path / "a", tmp_path / "b"])
    files = [model / "model.safetensors", next(source.glob("*1-of*"))]
    refused(errors.Corrupt, "a tensor is in this file and in", files, [tmp_path / "a", tmp_path / "b"])
    assert not (tmp_path / "a").exists()


def test_too_little_room_is_told_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    with disks.mounted(tmp_path / "small", "size=1m") as small:
        refused(errors.DiskFull, "nothing was written", model, [tmp_path / "a", small / "b"])
        assert everything(small) == []
        # Two folders have to share the room of their disk.
    with disks.mounted(tmp_path / "shared", "size=2560k") as shared:
        refused(errors.DiskFull, "nothing was written", model, [shared / "a", shared / "b"])
        spread(model, [tmp_path / "a", shared / "b"])


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    save({f"w{number}": np.ones(1 << 20, np.float32) for number in range(16)}, tmp_path / "model")
    with disks.mounted(tmp_path / "disk", "size=40m") as disk:

        def fill(_done: int, _total: int) -> None:
            with (disk / "other").open("ab") as other:
                left = os.statvfs(disk).f_bavail * 4096
                os.posix_fallocate(other.fileno(), other.tell(), max(1, left - (1 << 20)))

        # The room that was found before the first byte is soon gone.
        with pytest.raises(errors.DiskFull) as caught:
            spread(tmp_path / "model", [tmp_path / "a", disk / "b"], on_progress=fill)
        assert caught.value.context["folder"] == str(disk / "b")
        assert everything(disk) == [str(disk / "other")]
        assert not (tmp_path / "a").exists()
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def staged(*directories: Path) -> list[Path]:
    return [path for directory in directories for path in directory.rglob("*.part")]


def test_what_a_disk_has_not_kept_is_found(model: Path, tmp_path: Path) -> None:
    def damage(done: int, total: int) -> None:
        if done == total // 2:
            for path in staged(tmp_path / "second"):
                with path.open("r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    file.write(b"\x55")

    before = everything(tmp_path)
    refused(
        errors.Corrupt, "has not kept", model, [tmp_path / "first", tmp_path / "second"], on_progress=damage
    )
    assert everything(tmp_path) == before


def test_damage_and_change_of_the_source(model: Path, tmp_path: Path) -> None:
    to = [tmp_path / "a", tmp_path / "b"]
    file = model / "model.safetensors"

    def change(done: int, total: int) -> None:
        os.utime(file, ns=(1, 1))

    refused(errors.Conflict, "changed while", model, to, on_progress=change)
    write_checksums(model)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    before = everything(tmp_path)
    refused(errors.Corrupt, "checksum", model, to)
    assert everything(tmp_path) == before


class Stop(BaseException):
    """As Ctrl-C raises one."""


@pytest.mark.parametrize("when", [0.2, 0.5, 0.9, 1.0])
def test_whoever_interrupts_leaves_nothing(model: Path, tmp_path: Path, when: float) -> None:
    def stop(done: int, total: int) -> None:
        if done >= when * total:
            raise Stop

    before = everything(tmp_path)
    with pytest.raises(Stop):
        spread(model, [tmp_path / "a", tmp_path / "b"], on_progress=stop)
    # The last call comes after the commit.
    assert (tmp_path / "a").exists() == (when == 1.0)
    if when < 1.0:
        assert everything(tmp_path) == before


# ---- overwriting -------------------------------------------------------------------------------


def other_model(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    arrays = {name: array + 100 for name, array in ARRAYS.items()}
    save(arrays, tmp_path / "other")
    return tmp_path / "other", arrays


def test_a_model_takes_the_place_of_another(model: Path, tmp_path: Path, folders: list[Path]) -> None:
    first = spread(model, folders)
    refused(errors.Conflict, "spread already", model, folders)
    other, arrays = other_model(tmp_path)
    write_checksums(folders[0])
    second = spread(other, folders[:2], overwrite=True)
    assert same(load(folders[0], framework="numpy"), arrays)
    assert list(folders[2].iterdir()) == [], (
        "the earlier files are gone, also from disks that are used no more"
    )
    assert len(list(folders[1].iterdir())) == 1
    assert sorted(path.name for path in folders[0].iterdir()) == sorted(
        [
            *(Path(file.path).name for file in second.files),
            "model.safetensors.index.json",
            "spread.waystation.json",
        ]
    )
    assert first.path == second.path
    # The model itself may be spread anew, over more disks.
    third = spread(folders[0], [*folders, tmp_path / "fourth"], overwrite=True)
    assert same(load(third.path, framework="numpy"), arrays)
    assert len(list(folders[1].iterdir())) == 1
    part = next(file.path for file in third.files if file.folder != third.path)
    refused(errors.InvalidInput, "is to be replaced", part, folders, overwrite=True)


def test_nothing_that_others_put_there_is_removed(model: Path, tmp_path: Path, folders: list[Path]) -> None:
    done = spread(model, folders)
    (folders[0] / "notes.txt").write_text("mine")
    refused(errors.Conflict, "notes.txt", model, folders, overwrite=True)
    (folders[0] / "notes.txt").unlink()
    # Somebody has put another file where one of the model was.
    target = Path(os.readlink(next(file.path for file in done.files if file.folder == str(folders[1]))))
    content = target.read_bytes()
    target.rename(target.with_name("kept"))
    target.write_bytes(content)
    refused(errors.Conflict, "no part of a model", model, folders, overwrite=True)
    spread(model, [folders[0], folders[2]], overwrite=True)
    assert sorted(path.name for path in folders[1].iterdir()) == ["kept", target.name]


@pytest.mark.parametrize("most", [1 << 30, 100_000])
def test_a_save_in_place_of_it_leaves_no_files_on_other_disks(
    model: Path, folders: list[Path], most: int
) -> None:
    spread(model, folders)
    with pytest.raises(errors.Conflict):
        save(ARRAYS, folders[0])
    arrays = {name: array + 1 for name, array in ARRAYS.items()}
    save(arrays, folders[0], overwrite=True, max_file_bytes=most)
    assert same(load(folders[0], framework="numpy"), arrays)
    assert everything(*folders[1:]) == []
    # What was saved there is a model of that folder, which another one may replace.
    save(ARRAYS, folders[0], overwrite=True)
    (folders[0] / "notes.txt").write_text("mine")
    refused(errors.Conflict, "notes.txt", model, folders, overwrite=True)
    (folders[0] / "notes.txt").unlink()
    refused(errors.Conflict, "spread already", model, folders)
    spread(model, folders, overwrite=True)
    assert same(load(folders[0], framework="numpy"))
    assert all(len(list(folder.iterdir())) == 1 for folder in folders[1:])


COPIES: dict[str, list[str]] = {"with its links": ["cp", "-a"], "with the files": ["cp", "-rL"]}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("then", ["save", "spread", "gc"])
def test_what_replaces_a_copy_leaves_the_original(
    model: Path, tmp_path: Path, folders: list[Path], how: str, then: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy has the note as well, which lists files that the original uses."""
    spread(model, folders)
    copy = tmp_path / "copies" / "first"
    copy.parent.mkdir()
    subprocess.run([*COPIES[how], folders[0], copy], check=True)
    other, arrays = other_model(tmp_path)
    if then == "save":
        save(arrays, copy, overwrite=True)
    elif then == "spread":
        refused(errors.Conflict, "no part of a model", other, [copy, *folders[1:]], overwrite=True)
        spread(other, [copy, tmp_path / "copies" / "second"], overwrite=True)
    else:
        # As a backup has it that was made while a process was spreading the model.
        stage = storage.names.export_stage("first.spread", attempts.new_attempt_id())
        copy.rename(copy.with_name(stage))
        discard(str(copy.with_name(stage)))
        assert everything(copy.parent) == []
    if then != "gc":
        assert same(load(copy, framework="numpy"), arrays)
    assert "were spread with it stay" in caplog.text
    assert same(load(folders[0], framework="numpy"))
    # The original itself, also where it has another name by now, takes its files along.
    folders[0].rename(tmp_path / "renamed")
    save(arrays, tmp_path / "renamed", overwrite=True)
    assert everything(*folders[1:]) == []


def test_what_others_put_into_a_directory_of_the_model_is_not_removed(
    model: Path, folders: list[Path]
) -> None:
    spread(model, folders)
    mine = folders[0] / "pooling" / "mine"
    mine.mkdir()
    (mine / "results.txt").write_text("mine")
    refused(errors.Conflict, "pooling/mine'", model, folders, overwrite=True)
    shutil.rmtree(mine)
    spread(model, folders, overwrite=True)


@pytest.mark.parametrize("then", ["save", "spread"])
def test_folders_that_moved_together_are_replaced_whole(model: Path, tmp_path: Path, then: str) -> None:
    for disk in ("disk1", "disk2"):
        (tmp_path / "mount" / disk).mkdir(parents=True)
    (tmp_path / "way").symlink_to(tmp_path / "mount")
    spread(model, [tmp_path / "way" / "disk1" / "m", tmp_path / "way" / "disk2" / "m"], relative_links=True)
    (tmp_path / "mount").rename(tmp_path / "elsewhere")
    to = [tmp_path / "elsewhere" / "disk1" / "m", tmp_path / "elsewhere" / "disk2" / "m"]
    other, arrays = other_model(tmp_path)
    if then == "save":
        save(arrays, to[0], overwrite=True)
        assert everything(to[1]) == []
    else:
        spread(other, to, overwrite=True)
        assert len(everything(to[1])) == 1
    assert same(load(to[0], framework="numpy"), arrays)


def test_a_save_beside_the_model_leaves_it_whole(model: Path, tmp_path: Path) -> None:
    """Also where a folder was given by a path with a link in it, and links are written without that."""
    (tmp_path / "disk1").mkdir()
    (tmp_path / "disk2").mkdir()
    (tmp_path / "way").symlink_to(tmp_path / "disk2")
    to = [tmp_path / "disk1" / "m", tmp_path / "way" / "m"]
    spread(model, to, relative_links=True)
    for _ in range(2):
        save({"a": np.ones(3)}, to[0] / "adapter.safetensors", overwrite=True)
    index = to[0] / "model.safetensors.index.json"
    assert same(load(index, framework="numpy"))
    refused(errors.Conflict, "adapter.safetensors", model, to, overwrite=True)


def test_a_folder_may_be_that_of_other_files(model: Path, folders: list[Path]) -> None:
    folders[0].mkdir()
    folders[1].mkdir()
    (folders[1] / "lost+found").mkdir()
    done = spread(model, folders)
    assert same(load(done.path, framework="numpy"))
    assert (folders[1] / "lost+found").is_dir()
    # A second model there would be in the way of nothing, but whose files are whose could not be told.
    other = [folders[0].with_name("other"), folders[1]]
    refused(errors.Conflict, "no part of a model", model, other)
    refused(errors.Conflict, "no part of a model", model, other, overwrite=True)


def test_a_first_folder_cannot_be_where_a_disk_is_mounted(model: Path, tmp_path: Path) -> None:
    with disks.mounted(tmp_path / "disk", "size=8m") as disk:
        refused(errors.InvalidInput, "give a folder in it", model, [disk, tmp_path / "b"])
        done: SpreadModel = spread(model, [tmp_path / "b", disk])
        assert same(load(done.path, framework="numpy"))
        assert done.on_one_disk == []


def test_folders_on_one_disk_are_told(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = spread(model, [tmp_path / "a", tmp_path / "b"])
    assert done.on_one_disk == [(str(tmp_path / "a"), str(tmp_path / "b"))]
    assert "are on one disk" in caplog.text


# ---- kills -------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.share(3)
@pytest.mark.skipif(
    not system_calls.SUPPORTED, reason="the tracer knows the system calls of x86-64 Linux only"
)
@pytest.mark.parametrize("scenario", spread_walk.SCENARIOS)
def test_killed_at_every_step(scenario: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.published.spread_walk", scenario, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kills"] >= 6
    assert {"mkdir", "create", "fsync", "symlink"} <= set(report["changes"])
    seen = {outcome.rpartition(" ")[2] for outcome in report["outcomes"]}
    assert seen == {"1" if scenario == "over" else "None", "2"}
