"""Which files are meant: directories, indexes, numbered sets, caches of Hugging Face."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.published import models

import waystation
import waystation.safetensors
from waystation import errors
from waystation.safetensors import headers

REVISION = "0123456789abcdef0123456789abcdef01234567"


def names(files: Any) -> set[str]:
    return set(waystation.safetensors.open(files))


def test_a_file_several_files_a_directory_an_index(tmp_path: Path) -> None:
    arrays = models.numbers(5)
    index = models.write_set(tmp_path / "set", arrays, 3)
    files = sorted((tmp_path / "set").glob("*.safetensors"))
    for given in (tmp_path / "set", str(tmp_path / "set"), index, files, tuple(map(str, files))):
        tensors = waystation.safetensors.open(given)
        assert tensors.files == list(map(str, files))
        assert {name: tensors.tensor(name).tobytes() for name in tensors} == {
            name: array.tobytes() for name, array in arrays.items()
        }
    assert names(files[0]) == {"layers.0.weight", "layers.3.weight"}
    index.unlink()
    assert names(tmp_path / "set") == arrays.keys()


def test_a_whole_file_comes_before_an_index(tmp_path: Path) -> None:
    models.write_set(tmp_path, models.numbers(3), 2)
    models.write_file(tmp_path / "model.safetensors", {"whole": np.ones(1)})
    assert names(tmp_path) == {"whole"}


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path: Path) -> None:
    models.write_set(tmp_path, models.numbers(3), 2)
    models.write_file(tmp_path / "consolidated.safetensors", {"layers.0.weight": np.ones(1)})
    assert names(tmp_path) == models.numbers(3).keys()


def test_one_index_of_another_name(tmp_path: Path) -> None:
    index = models.write_set(tmp_path, models.numbers(3), 2)
    index.rename(tmp_path / "diffusion.safetensors.index.json")
    assert names(tmp_path) == models.numbers(3).keys()
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(errors.InvalidInput, match="several indexes"):
        names(tmp_path)


@pytest.mark.parametrize("with_reference", [True, False])
def test_a_cache_of_hugging_face(tmp_path: Path, with_reference: bool) -> None:
    """Files are links to blobs that are named by their digest."""
    model = tmp_path / "models--a--b"
    snapshot = model / "snapshots" / REVISION
    models.write_set(snapshot, models.numbers(4), 2)
    (model / "blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        blob = model / "blobs" / f"{number:064x}"
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, snapshot))
    if with_reference:
        (model / "snapshots" / REVISION[::-1]).mkdir()
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(REVISION)
    for given in (model, snapshot, snapshot / "model.safetensors.index.json"):
        loaded = waystation.safetensors.load(given, framework="numpy")
        assert {name: array.tobytes() for name, array in loaded.items()} == {
            name: array.tobytes() for name, array in models.numbers(4).items()
        }
    if with_reference:
        (model / "refs" / "main").unlink()
        with pytest.raises(errors.InvalidInput, match="2 revisions"):
            names(model)


@pytest.mark.parametrize("held", [[REVISION], [REVISION, "0" * 40], []])
def test_a_revision_that_is_not_in_the_cache(tmp_path: Path, held: list[str]) -> None:
    (tmp_path / "snapshots").mkdir()
    for revision in held:
        models.write_set(tmp_path / "snapshots" / revision, models.numbers(4), 2)
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "main").write_text("5" * 40)
    with pytest.raises(errors.NotFound, match=f"revision {'5' * 40}") as caught:
        names(tmp_path)
    assert all(f"snapshots/{revision}" in str(caught.value) for revision in held)


@pytest.mark.parametrize("way", ["directory", "index", "files"])
def test_a_link_that_is_moved_while_headers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for version in (0, 1):
        numbers = {name: array + version for name, array in models.numbers(4).items()}
        models.write_set(tmp_path / str(version), numbers, 2)
    link = tmp_path / "link"
    link.symlink_to("0")
    moves = itertools.count(1)
    before = headers._read_from

    def move_and_read(*arguments: Any) -> Any:
        move = next(moves)
        (tmp_path / f"next-{move}").symlink_to(str(move % 2))
        (tmp_path / f"next-{move}").replace(link)
        return before(*arguments)

    given: Any = {
        "directory": link,
        "index": link / "model.safetensors.index.json",
        "files": sorted(link.glob("*.safetensors")),
    }[way]
    monkeypatch.setattr(headers, "_read_from", move_and_read)
    loaded = waystation.safetensors.load(given, framework="numpy")
    assert next(moves) == 3
    assert {name: array.tobytes() for name, array in loaded.items()} == {
        name: array.tobytes() for name, array in models.numbers(4).items()
    }


def test_our_own_checkpoints(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"a": {"b": np.arange(6.0)}, "c": np.ones((2, 3), np.int8)})
    loaded = waystation.safetensors.load(tmp_path / "checkpoint" / "state", framework="numpy")
    assert {name: array.tolist() for name, array in loaded.items()} == {
        "a.b": [0, 1, 2, 3, 4, 5],
        "c": [[1, 1, 1], [1, 1, 1]],
    }
    with pytest.raises(errors.NotFound, match=rf"a checkpoint; waystation\.load\('{tmp_path}/checkpoint'\)"):
        waystation.safetensors.load(tmp_path / "checkpoint", framework="numpy")


# ---- what is refused ---------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    for given in (tmp_path, tmp_path / "absent", tmp_path / "absent.safetensors", tmp_path / "absent.json"):
        with pytest.raises(FileNotFoundError) as caught:
            names(given)
        assert isinstance(caught.value, errors.NotFound)


@pytest.mark.parametrize("given", [[], "", "a\0b", 3, [3], None, "ftp://host/model", b"model"])
def test_what_is_no_path(given: Any) -> None:
    with pytest.raises(errors.InvalidInput):
        names(given)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(errors.InvalidInput, match=r"is a pipe, .* regular file"):
        names(tmp_path)
    os.mkfifo(tmp_path / "index.json")
    with pytest.raises(errors.Corrupt, match="regular file"):
        names(tmp_path / "index.json")
    (tmp_path / "directory.safetensors").mkdir()
    with pytest.raises(errors.NotFound):
        names(tmp_path / "directory.safetensors")
    with pytest.raises(errors.InvalidInput, match=r"is a directory, .* regular file"):
        names([tmp_path / "directory.safetensors"])


def test_a_file_of_a_set_is_missing(tmp_path: Path) -> None:
    index = models.write_set(tmp_path, models.numbers(5), 4)
    for number in (2, 3):
        (tmp_path / f"model-{number:05}-of-00004.safetensors").unlink()
    with pytest.raises(errors.Corrupt, match=r"2 of 4 files .* 'model-00002-of-00004.safetensors'"):
        names(tmp_path)
    index.unlink()
    with pytest.raises(errors.Corrupt, match=r"2 of 4 files are there, 'model-00002-of-00004.safetensors'"):
        names(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in "ab":
        models.write_file(tmp_path / f"{name}.safetensors", {"w": np.ones(2), name: np.ones(1)})
    with pytest.raises(errors.Corrupt, match=r"is in this file and in '.*a\.safetensors'") as caught:
        names(tmp_path)
    assert caught.value.context == {"path": str(tmp_path / "b.safetensors"), "tensor": "w"}
    with pytest.raises(errors.InvalidInput, match="twice"):
        names([tmp_path / "a.safetensors", tmp_path / "a.safetensors"])


def test_the_index_names_a_tensor_that_its_file_lacks(tmp_path: Path) -> None:
    index = models.write_set(tmp_path, models.numbers(2), 2)
    weight_map = json.loads(index.read_text())["weight_map"]
    models.write_index(tmp_path, weight_map | {"more": "model-00002-of-00002.safetensors"})
    with pytest.raises(errors.Corrupt, match="1 of 3 tensors") as caught:
        names(tmp_path)
    assert caught.value.context["tensor"] == "more"
    assert caught.value.context["path"] == str(tmp_path / "model-00002-of-00002.safetensors")


def test_the_index_does_not_name_a_tensor_of_its_file(tmp_path: Path) -> None:
    index = models.write_set(tmp_path, models.numbers(3), 2)
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map["layers.2.weight"]
    models.write_index(tmp_path, weight_map)
    with pytest.raises(errors.Corrupt, match="does not name it") as caught:
        names(tmp_path)
    assert caught.value.context["tensor"] == "layers.2.weight"
    assert names(sorted(tmp_path.glob("*.safetensors"))) == models.numbers(3).keys()


def test_the_index_says_that_a_tensor_is_in_another_file(tmp_path: Path) -> None:
    index = models.write_set(tmp_path, models.numbers(4), 2)
    weight_map = json.loads(index.read_text())["weight_map"]
    models.write_index(tmp_path, weight_map | {"layers.0.weight": "model-00002-of-00002.safetensors"})
    with pytest.raises(errors.Corrupt, match="says that it is in 'model-00002"):
        names(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", "", "a\0.safetensors"),
        *("..\\model.safetensors", "model.bin", "\ud800.safetensors", 3, None, ["a"]),
    ],
)
def test_the_index_leads_elsewhere(tmp_path: Path, name: Any) -> None:
    models.write_file(tmp_path.parent / "model.safetensors", {"w": np.ones(1)})
    models.write_index(tmp_path, {"w": name})
    with pytest.raises(errors.Corrupt, match=r"as a file|lone surrogate|expected a string") as caught:
        names(tmp_path)
    assert caught.value.context["tensor"] == "w"
    assert caught.value.context["path"] == str(tmp_path / "model.safetensors.index.json")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "expected a JSON object, found the end"),
        (b"{", "expected a string, found the end"),
        (b"\xff", "not valid UTF-8"),
        (b"[" * 100_000, "expected a JSON object"),
        (b'{"metadata":' + b"[" * 100_000, "more than 64 deep"),
        (b'{"metadata":NaN}', "expected a value"),
        ('{"weight_map":{}}'.encode("utf-16"), "UTF-8"),
        (b"[]", "expected a JSON object"),
        (b"{}", "no object"),
        (b'{"weight_map":[]}', "expected an object"),
        (b'{"weight_map":{}}', "no tensor"),
        (b'{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}', 'the key "a" twice'),
        (b'{"weight_map":{"a":"x.safetensors"},"weight_map":{}}', 'the key "weight_map" twice'),
        (b'{"weight_map":{"a":"x.safetensors"}}', "1 of 1 files .* missing: 'x.safetensors'"),
    ],
)
def test_indexes_that_are_malformed(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(errors.Corrupt, match=reason):
        names(tmp_path)


def test_the_name_of_a_model_in_several_files_leads_to_its_index(tmp_path: Path) -> None:
    state = {name: np.ones(4, np.float32) for name in "ab"}
    path = tmp_path / "x.safetensors"
    waystation.safetensors.save(state, path, max_file_bytes=16)
    for load in (waystation.safetensors.load, waystation.safetensors.stream):
        with pytest.raises(errors.NotFound, match=r"x\.safetensors\.index\.json' is the index"):
            load(path, framework="numpy")
    with pytest.raises(errors.NotFound, match="index"):
        waystation.safetensors.open([path])
    assert set(waystation.safetensors.load(f"{path}.index.json", framework="numpy")) == set("ab")
