"""`save`: what it writes, the package and tools of Hugging Face read; what it cannot, it refuses first."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from tests.published import models
from tests.support import disks

import waystation
from waystation import errors, storage
from waystation.frameworks.numpy_arrays import NumpyCodec
from waystation.safetensors import load, save


def test_every_dtype_of_torch(tmp_path: Path) -> None:
    packed = torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2)
    tensors = models.every_dtype() | {"F4": packed}
    assert save(tensors, tmp_path / "model") == [str(tmp_path / "model" / "model.safetensors")]
    theirs = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    ours = load(tmp_path / "model", framework="torch")
    assert theirs.keys() == ours.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for found in (theirs[name], ours[name]):
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert models.bits(found) == models.bits(tensor)


@pytest.mark.parametrize("state", [None, {"a": np.ones(2), "b": None}, {"a": np.ones(2), "b": 3}])
def test_what_is_no_array_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(errors.UnsupportedLeaf, match="these files hold arrays only") as caught:
        save(state, tmp_path / "model")
    assert caught.value.context.get("tensor") == (None if state is None else "b")
    assert not list(tmp_path.iterdir())


def test_arrays_that_lie_in_one_piece_are_described_by_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[Any] = []
    sources = NumpyCodec.sources

    def count(codec: NumpyCodec, leaves: Any) -> Any:
        described.extend(leaves)
        return sources(codec, leaves)

    monkeypatch.setattr(NumpyCodec, "sources", count)
    arrays = {f"{number}": np.full(16, number, np.float32) for number in range(100)}
    apart = np.arange(20).reshape(4, 5).T
    save({**arrays, "apart": apart, "none": np.ones((0, 3))}, tmp_path / "model")
    assert len(described) < 3
    assert any(leaf is apart for leaf in described)
    theirs = safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors")
    assert all(theirs[name].tobytes() == array.tobytes() for name, array in arrays.items())
    np.testing.assert_array_equal(theirs["apart"], apart)
    assert theirs["none"].shape == (0, 3)


def test_none_within_a_tree_stands_for_no_array(tmp_path: Path) -> None:
    save({"layers": [np.ones(2), None, {"bias": None}]}, tmp_path / "model")
    assert set(load(tmp_path / "model", framework="numpy")) == {"layers.0"}


def test_a_directory_that_may_not_be_written_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"a": np.ones(2)}, tmp_path / "model")

    def refuse(path: Any, *_: Any, **__: Any) -> None:
        raise errors.PermissionDenied(f"could not create '{path}'", path=str(path), errno=errno.EROFS)

    monkeypatch.setattr(storage, "make_directory", refuse)
    told = f"could not write to the directory '{tmp_path}/model': Read-only file system; give another place"
    with pytest.raises(errors.PermissionDenied, match=re.escape(told)) as caught:
        save({"a": np.ones(2)}, tmp_path / "model", overwrite=True)
    assert caught.value.context["path"] == f"{tmp_path}/model"


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "\x1b[2J"])
def test_an_error_can_be_printed_whatever_the_tensor_is_called(tmp_path: Path, name: str) -> None:
    with pytest.raises(errors.WaystationError) as caught:
        save({name: "text"}, tmp_path / "model")
    assert caught.value.context["tensor"] == name
    shown = str(caught.value)
    shown.encode()
    assert shown.isprintable()
    assert name.encode("unicode_escape").decode() in shown


NUMPY_DTYPES = st.sampled_from(models.NUMPY_DTYPES)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8).filter(
    lambda name: name != "__metadata__"
)


@given(
    described=st.dictionaries(NAMES, st.tuples(NUMPY_DTYPES, SHAPES), min_size=1, max_size=8),
    max_file_bytes=st.integers(1, 500),
)
def test_the_package_loads_what_is_saved(
    tmp_path_factory: pytest.TempPathFactory,
    described: dict[str, tuple[str, tuple[int, ...]]],
    max_file_bytes: int,
) -> None:
    directory = tmp_path_factory.mktemp("saved") / "model"
    arrays = {
        name: (np.arange(np.prod(shape, dtype=int)) % 2).astype(dtype).reshape(shape)
        for name, (dtype, shape) in described.items()
    }
    files = save(arrays, directory, max_file_bytes=max_file_bytes)
    theirs: dict[str, Any] = {}
    for file in files:
        if file.endswith(".safetensors"):
            theirs |= safetensors.numpy.load_file(file)
            with safetensors.safe_open(file, "np") as opened:
                assert opened.metadata() == {"format": "pt"}
    ours = load(directory, framework="numpy")
    assert ours.keys() == theirs.keys() == arrays.keys()
    for name, array in arrays.items():
        for found in (theirs[name], ours[name]):
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert found.tobytes() == array.tobytes()


def test_several_files_and_their_index(tmp_path: Path) -> None:
    arrays = models.numbers(7)
    files = save(arrays, tmp_path / "model", max_file_bytes=1024, metadata={"by": "a test"})
    names = [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert [Path(file).name for file in files] == [*names, "model.safetensors.index.json"]
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted(
        map(os.path.basename, files)
    )
    index = json.loads(Path(files[-1]).read_text())
    assert index["metadata"] == {"total_size": 7 * 512}
    assert {name: Path(file) for name, file in index["weight_map"].items()}.keys() == arrays.keys()
    with waystation.safetensors.open(tmp_path / "model") as tensors:
        assert tensors.metadata() == {"format": "pt", "by": "a test"}
        assert set(tensors) == arrays.keys()


def test_a_tree_a_file_name_and_strided_arrays(tmp_path: Path) -> None:
    base = np.arange(24.0).reshape(4, 6)
    state = {
        "numpy": {
            "transposed": base.T,
            "stepped": base[::2, ::-1],
            "big-endian": base.astype(">f8").astype("<f8"),
        },
        "list": [torch.arange(6).reshape(2, 3).t(), jnp.ones((2, 2), jnp.bfloat16)],
    }
    (file,) = save(state, tmp_path / "weights.safetensors")
    assert file == str(tmp_path / "weights.safetensors")
    found = safetensors.torch.load_file(file)
    assert found["numpy.transposed"].tolist() == base.T.tolist()
    assert found["numpy.stepped"].tolist() == base[::2, ::-1].tolist()
    assert found["list.0"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found["list.1"].dtype == torch.bfloat16
    tree = load(file, framework="numpy", nested=True)
    assert tree["numpy"].keys() == state["numpy"].keys()  # type: ignore[union-attr]


def test_sharded_arrays_are_written_whole(tmp_path: Path) -> None:
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    array = jax.device_put(values, NamedSharding(mesh, PartitionSpec("y", "x")))
    save({"w": array}, tmp_path / "model")
    found = safetensors.flax.load_file(tmp_path / "model" / "model.safetensors")
    assert np.array_equal(found["w"], values)


def test_elements_are_aligned(tmp_path: Path) -> None:
    arrays = {
        "a": np.ones(3, np.int8),
        "b": np.ones(3, np.float64),
        "c": np.ones(64, np.int8),
        "d": np.ones(5, np.int16),
    }
    (file,) = save(arrays, tmp_path / "model")
    tensors = waystation.safetensors.open(file).opened
    for name, _, _, begin, _ in tensors.tensors:
        assert begin % arrays[name].itemsize == 0
    assert tensors.headers[0].data_start % 4096 == 0


# ---- what is refused, and what stays -----------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"a": {"b": np.ones(1)}, "a.b": np.ones(1)}, "would both be 'a.b'"),
        (np.ones(3), "has no names"),
        ("model.safetensors", "give a dict of arrays first, then the path"),
        ({"a\0": np.ones(1)}, "no file can have"),
        ({"\ud800": np.ones(1)}, "no file can have"),
        ({"__metadata__": np.ones(1)}, "reserves"),
        ({"a": jax.ShapeDtypeStruct((3,), np.int8)}, "abstract"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, state: Any, reason: str) -> None:
    with pytest.raises(errors.InvalidInput, match=reason):
        save(state, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "array",
    [jnp.ones((3,), jnp.int4), np.ones(2, np.complex128), np.array(["text"]), jax.random.key(0)],
    ids=["int4", "complex128", "text", "key"],
)
def test_dtypes_that_the_format_lacks(tmp_path: Path, array: Any) -> None:
    with pytest.raises(errors.Unsupported, match="no dtype") as caught:
        save({"fine": np.ones(1), "w": array}, tmp_path / "model")
    assert caught.value.context["tensor"] == "w"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [{"max_file_bytes": 0}, {"max_file_bytes": 1.5}, {"metadata": {"a": 1}}, {"metadata": {1: "a"}}],
)
def test_arguments_that_are_wrong(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidInput):
        save({"a": np.ones(1)}, tmp_path / "model", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    save(models.numbers(4), tmp_path / "model", max_file_bytes=1024)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(errors.Conflict, match="exists already"):
        save(models.numbers(1), tmp_path / "model")
    assert load(tmp_path / "model", framework="numpy").keys() == models.numbers(4).keys()
    save(models.numbers(1), tmp_path / "model", overwrite=True)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert load(tmp_path / "model", framework="numpy").keys() == {"layers.0.weight"}


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with disks.mounted(tmp_path / "disk", "size=4m") as disk:
        save(models.numbers(2), disk / "model")
        with pytest.raises(errors.DiskFull) as caught:
            save({"w": np.ones(1 << 20)}, disk / "model", overwrite=True)
        assert caught.value.context["path"] == str(disk / "model")
        with pytest.raises(errors.DiskFull) as caught:
            save({"w": np.ones(1 << 20)}, disk / "one.safetensors")
        assert caught.value.context["path"] == str(disk / "one.safetensors")
        assert [path.name for path in disk.iterdir()] == ["model"]
        assert load(disk / "model", framework="numpy").keys() == models.numbers(2).keys()


def test_nothing_is_written_into_a_checkpoint(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"w": np.ones(1)})
    for path in (tmp_path / "checkpoint", tmp_path / "checkpoint" / "state"):
        with pytest.raises(errors.InvalidInput, match="checkpoint"):
            save({"w": np.ones(1)}, path, overwrite=True)
