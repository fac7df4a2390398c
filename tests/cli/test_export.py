"""`waystation export`: files that other programs open, or none at all."""

import json
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from tests.support.long import only_long

import waystation

from .conftest import SCRIPT


@pytest.fixture
def state() -> dict[str, Any]:
    random = np.random.default_rng(3)
    return {
        "layers": [
            {"w": random.standard_normal((257, 33)).astype(ml_dtypes.bfloat16), "b": np.arange(7.0)}
            for _ in range(3)
        ],
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(5, np.int16),
        "a/b.npy": np.array([True, False]),
        "step": 3,
        "text": "x" * 70_000,
    }


@pytest.fixture
def saved(tmp_path: Path, state: dict[str, Any]) -> Path:
    waystation.save(tmp_path / "checkpoint", state)
    return tmp_path / "checkpoint"


def arrays_of(state: dict[str, Any]) -> dict[str, np.ndarray]:
    found = {name: state[name] for name in ("empty", "scalar", "a/b.npy")}
    for number, layer in enumerate(state["layers"]):
        found |= {f"layers.{number}.{name}": value for name, value in layer.items()}
    return found


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert found[name].tobytes() == value.tobytes(), name


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_one_safetensors_file(saved: Path, state: dict[str, Any], tmp_path: Path, script) -> None:
    outcome = script("export", saved, "out")
    assert (outcome.out, outcome.code) == ("[DIR]/out/model.safetensors\n9 arrays, 49.9 KiB\n", 0)
    assert outcome.err == "note: left out 2 values that are no arrays: step, text\n"
    assert names_in(tmp_path / "out") == ["model.safetensors"]
    path = tmp_path / "out" / "model.safetensors"
    assert_same(safetensors.numpy.load_file(path), arrays_of(state))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for name, tensor in safetensors.torch.load_file(path).items():
        expected = arrays_of(state)[name]
        assert tensor.shape == expected.shape
        flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        assert bytes(flat.tolist()) == expected.tobytes()


def test_several_files_and_their_index(saved: Path, state: dict[str, Any], tmp_path: Path, script) -> None:
    outcome = script("export", saved, "out", "--max-shard-bytes", "20KB", "--json")
    files = [Path(name).name for name in outcome.document["files"]]
    assert files == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert names_in(tmp_path / "out") == sorted(files)
    index = json.loads((tmp_path / "out" / files[-1]).read_text())
    found = {}
    for name in files[:-1]:
        own = safetensors.numpy.load_file(tmp_path / "out" / name)
        assert sum(value.nbytes for value in own.values()) <= 20_000
        assert all(index["weight_map"][label] == name for label in own)
        found |= own
    assert_same(found, arrays_of(state))
    assert index["metadata"] == {"total_size": sum(value.nbytes for value in found.values())}
    assert index["weight_map"].keys() == found.keys()


def test_npz(saved: Path, state: dict[str, Any], tmp_path: Path, script) -> None:
    outcome = script("export", saved, "out.npz", "--cast", "bfloat16=float32")
    assert outcome.code == 0
    with np.load(tmp_path / "out.npz") as found:
        expected = {
            name: value.astype(np.float32) if value.dtype == ml_dtypes.bfloat16 else value
            for name, value in arrays_of(state).items()
        }
        # NumPy takes '.npy' off the ends of names when it lists them.
        assert_same({name + ".npy" * (name == "a/b"): found[name] for name in found.files}, expected)


@pytest.mark.long
@only_long
def test_an_array_larger_than_what_is_held_in_memory(tmp_path: Path, run) -> None:
    large = np.arange(11 << 20, dtype=np.float32).reshape(11, -1)
    waystation.save(tmp_path / "c", {"large": large, "small": np.arange(3)})
    assert run("export", tmp_path / "c", tmp_path / "one.safetensors").code == 0
    assert_same(
        safetensors.numpy.load_file(tmp_path / "one.safetensors"), {"large": large, "small": np.arange(3)}
    )
    assert run("export", tmp_path / "c", tmp_path / "two.npz", "--cast", "float32=float64").code == 0
    with np.load(tmp_path / "two.npz") as found:
        np.testing.assert_array_equal(found["large"], large.astype(np.float64))


def test_an_array_sharded_over_devices_comes_out_whole(checkpoint: Path, tmp_path: Path, run) -> None:
    outcome = run("export", checkpoint, tmp_path / "w.safetensors", "--select", r"^params\.w$")
    assert outcome.code == 0
    found = safetensors.numpy.load_file(tmp_path / "w.safetensors")
    expected = np.arange(64 * 32).astype(ml_dtypes.bfloat16).reshape(64, 32)
    assert_same(found, {"params.w": expected})


@pytest.mark.parametrize(
    ("value", "suffix", "offer"),
    [
        (np.ones(3, ml_dtypes.int4), "safetensors", "int4=int8"),
        (np.ones(3, complex), "safetensors", "complex128=complex64"),
        (np.ones(3, ">f4"), "safetensors", "numpy:>f4=float32"),
        (np.ones(3, ml_dtypes.bfloat16), "npz", "bfloat16=float32"),
        (np.ones(3, ml_dtypes.float8_e4m3fn), "npz", "float8_e4m3fn=float32"),
        (np.ones(3, ml_dtypes.uint4), "npz", "uint4=uint8"),
    ],
)
def test_a_dtype_that_the_format_lacks(
    value: np.ndarray, suffix: str, offer: str, tmp_path: Path, run
) -> None:
    waystation.save(tmp_path / "c", {"fine": np.zeros(1), "layer": {"odd": value}})
    output = tmp_path / f"out.{suffix}"
    outcome = run("export", tmp_path / "c", output)
    assert outcome.code == 2
    assert f"(--cast '{offer}')" in outcome.err
    assert "  array: layer.odd\n" in outcome.err
    assert not output.exists()
    assert run("export", tmp_path / "c", output, "--cast", offer).code == 0
    found = safetensors.numpy.load_file(output) if suffix == "safetensors" else dict(np.load(output))
    assert found["layer.odd"].tolist() == [1, 1, 1]
    assert found["layer.odd"].dtype == offer.rpartition("=")[2]


def test_the_words_of_a_key(tmp_path: Path, run) -> None:
    import jax

    keys = jax.random.split(jax.random.key(7), 3)
    waystation.save(tmp_path / "c", {"keys": keys})
    refused = run("export", tmp_path / "c", tmp_path / "k.npz")
    assert refused.code == 2
    assert "--cast 'key<threefry2x32>=uint32'" in refused.err
    assert run("export", tmp_path / "c", tmp_path / "k.npz", "--cast", "key<threefry2x32>=uint32").code == 0
    np.testing.assert_array_equal(np.load(tmp_path / "k.npz")["keys"], jax.random.key_data(keys))


def test_nothing_is_overwritten_unasked(saved: Path, tmp_path: Path, run) -> None:
    out = tmp_path / "out"
    assert run("export", saved, out, "--max-shard-bytes", "20KB").code == 0
    (out / "config.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    refused = run("export", saved, out, "--select", "^layers.0")
    assert refused.code == 2
    assert "model.safetensors.index.json' exists already" in refused.err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert run("export", saved, out, "--select", "^layers.0", "--overwrite").code == 0
    assert names_in(out) == ["config.json", "model.safetensors"]  # no part of the earlier export is left
    assert run("export", saved, out, "--overwrite", "--max-shard-bytes", "20KB").code == 0
    assert names_in(out) == sorted(before)


def test_an_archive_leaves_the_safetensors_files_beside_it_alone(saved: Path, tmp_path: Path, run) -> None:
    out = tmp_path / "out"
    assert run("export", saved, out, "--max-shard-bytes", "20KB").code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for _ in range(2):
        archive = ["--select", "^layers.0.b", "--overwrite"]
        assert run("export", saved, out / "model.npz", *archive).code == 0
        assert {path.name: path.read_bytes() for path in out.glob("*.[sj]*")} == before
    assert names_in(out) == sorted([*before, "model.npz"])


@pytest.mark.parametrize("exists", [False, True], ids=["new directory", "directory that is there"])
def test_a_failure_leaves_no_trace(exists: bool, saved: Path, tmp_path: Path, run, damage) -> None:
    out = tmp_path / "deep" / "out"
    if exists:
        out.mkdir(parents=True)
        (out / "model.safetensors").write_bytes(b"old")
    data = saved / "state" / "p00000-000.safetensors"
    damage(data, data.stat().st_size - 100_000)
    outcome = run("export", saved, out, "--overwrite")
    assert outcome.code == 2
    assert "checksum" in outcome.err
    if exists:
        assert names_in(out) == ["model.safetensors"]
        assert (out / "model.safetensors").read_bytes() == b"old"
    else:
        assert not out.exists()
        assert not any(path.name.startswith(".") for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("name", ["out.safetensors", "out.npz"])
@pytest.mark.share(2)
def test_a_disk_that_takes_no_more(name: str, tmp_path: Path) -> None:
    waystation.save(tmp_path / "c", {"first": np.arange(100.0), "large": np.ones((10, 1 << 20))})
    before = sorted(tmp_path.rglob("*"))
    # A limit on the size of files stands in for a full disk; writes fail in the same way.
    command = f"ulimit -f 40000; exec '{SCRIPT}' export '{tmp_path}/c' '{tmp_path}/{name}'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: could not write '")
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["run.v2", "there.pt"])
def test_a_directory_may_have_a_suffix(name: str, saved: Path, tmp_path: Path, run) -> None:
    (tmp_path / "there.pt").mkdir()
    assert run("export", saved, tmp_path / name).code == 0
    assert names_in(tmp_path / name) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["y.pt"], "y.pt' ends in .pt, which export does not write; name a directory for model.safetensors"),
        (["y.PTH", "--format", "safetensors"], "or a file that ends in .safetensors or .npz"),
        (["y.h5", "--overwrite"], "ends in .h5, which export does not write"),
        (["out.npz", "--format", "safetensors"], "ends in .npz, but safetensors is asked for"),
        (["out", "--format", "npz"], "does not end in .npz"),
        (["out", "--format", "hdf5"], "there is no format 'hdf5'"),
        (["out", "--select", "("], "is not a regular expression"),
        (["out", "--select", "nothing"], "is found in the name of no array; the first names are layers.0.w"),
        (["out", "--cast", "int4"], "write it like --cast float32=bfloat16"),
        (
            ["out", "--cast", "float64=foo"],
            "--cast float64=foo: 'foo' is no dtype; write a name of NumPy or ml_dtypes, such as float32,",
        ),
        (["out", "--cast", "float64=float23"], "'float23' is no dtype; write a name of NumPy or ml_dtypes"),
        (["out", "--cast", "float64=bfloat"], "such as bfloat16"),
        (["out", "--cast", "float64=numpy:foo"], "'numpy:foo' is no dtype"),
        (["out", "--cast", "uint64=int8"], "no array that is exported is of uint64; they are of bfloat16"),
        (["out", "--max-shard-bytes", "0"], "give at least 1"),
        (["out", "--max-shard-bytes", "many"], "is not a size"),
        (["checkpoint"], "is (in) a checkpoint"),
        (["checkpoint/state", "--overwrite"], "is (in) a checkpoint"),
        (["file"], "is not a directory"),
        (["file/out"], "file"),
        (["out", "--checkpointable", "other"], "has no checkpointable 'other'"),
    ],
)
def test_what_cannot_be_exported(
    arguments: list[str], message: str, saved: Path, tmp_path: Path, run
) -> None:
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    outcome = run("export", saved, tmp_path / arguments[0], *arguments[1:])
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert sorted(tmp_path.rglob("*")) == before
