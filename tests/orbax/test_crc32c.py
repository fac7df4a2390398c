"""The checksums that chunks of zarr 3 have of their own: TensorStore and genuine Orbax are the other side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from tests.orbax import oracle, writing

import waystation
from waystation.errors import Corrupt, InvalidInput

WEIGHTS = np.random.default_rng(0).standard_normal((48, 40)).astype(np.float32)
STATE = {"w": WEIGHTS, "b": jnp.arange(7.0), "step": 3, "name": "run"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ocdbt": {"use_ocdbt": True},
    "ocdbt as it is": {"use_ocdbt": True, "use_compression": False},
    "files": {"use_ocdbt": False},
    "files as they are": {"use_ocdbt": False, "use_compression": False},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
CHAINS: dict[str, list[dict[str, Any]]] = {
    "as it is": [],
    "zstd": [{"name": "zstd", "configuration": {"level": 3}}],
}
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}


def codecs_of(path: Path) -> list[str]:
    """The codecs of the chunks of `w`, of shards those inside."""
    spec: dict[str, Any] = {"driver": "file", "path": f"{path}/state/"}
    if (path / "state" / "manifest.ocdbt").exists():
        spec = {"driver": "ocdbt", "base": spec}
    store = tensorstore.KvStore.open(spec).result()
    chain = json.loads(store["w/zarr.json"])["codecs"]
    if chain[0]["name"] == "sharding_indexed":
        chain = chain[0]["configuration"]["codecs"]
    return [codec["name"] for codec in chain]


def as_by_others(path: Path) -> Path:
    """Takes away what only Waystation knows of."""
    (path / ".waystation-checksums").unlink()
    (path / "orbax.checkpoint").write_bytes(b"")  # which says that the file was there
    return path


def data_files(path: Path) -> list[Path]:
    """The files with the chunks of `w`."""
    if (path / "state" / "w").is_dir():
        return [
            file for file in (path / "state" / "w").rglob("*") if file.is_file() and file.name != "zarr.json"
        ]
    return list((path / "state").glob("ocdbt.process_*/d/*"))


def flips(path: Path, count: int) -> list[tuple[Path, int, int]]:
    """Bits of the data, evenly spread."""
    files = data_files(path)
    total = sum(file.stat().st_size for file in files)
    found = []
    for number in range(count):
        at = number * total // count
        for file in files:
            if at < file.stat().st_size:
                found.append((file, at, number % 8))
                break
            at -= file.stat().st_size
    return found


def silent_flips(path: Path, count: int, load: Any) -> list[tuple[str, int]]:
    """Flipped bits with which a load gives other values."""
    found = []
    for file, at, bit in flips(path, count):
        before = file.read_bytes()
        content = bytearray(before)
        content[at] ^= 1 << bit
        file.write_bytes(content)
        try:
            loaded = load(path)
        except ValueError:  # what both libraries raise of damage
            loaded = None
        file.write_bytes(before)
        if loaded is not None and not np.array_equal(loaded["w"], WEIGHTS):
            found.append((file.name, at))
    return found


@pytest.mark.share(9)
@layouts
@pytest.mark.parametrize("chunk_bytes", [None, 500])
def test_what_is_written_is_verified_by_genuine_orbax_and_by_us(
    layout: dict[str, Any], chunk_bytes: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    writing.save(path, STATE, chunk_bytes=chunk_bytes, **layout)
    assert codecs_of(path)[-1] == "crc32c"
    oracle.assert_same(oracle.load(path), waystation.load(path))
    as_by_others(path)
    oracle.assert_same(waystation.load(path), oracle.load(path))
    assert silent_flips(path, 60, waystation.load) == []
    assert silent_flips(path, 12, oracle.load) == []


@layouts
def test_they_can_be_left_out(layout: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    writing.save(path, STATE, use_crc32c=False, **layout)
    assert "crc32c" not in codecs_of(path)
    oracle.assert_same(oracle.load(path), waystation.load(as_by_others(path)))


def test_zarr_2_has_none(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    writing.save(path, STATE, use_ocdbt=False, use_zarr3=False)
    assert json.loads((path / "state" / "w" / ".zarray").read_bytes())["compressor"]["id"] == "zstd"
    oracle.assert_same(oracle.load(path), waystation.load(path))


@pytest.mark.share(9)
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("is_sharded", [False, True], ids=["chunks", "shards"])
@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["files", "ocdbt"])
def test_what_tensorstore_has_written_is_verified(
    chain: list[dict[str, Any]], tmp_path: Path, *, is_sharded: bool, use_ocdbt: bool
) -> None:
    """An array of genuine Orbax's, written once more with the codec."""
    path = tmp_path / "checkpoint"
    oracle.save(path, {"w": WEIGHTS}, use_ocdbt=use_ocdbt)
    codecs = [LITTLE, *chain, CRC]
    if is_sharded:
        inner = {"chunk_shape": [8, 10], "codecs": codecs, "index_codecs": [LITTLE, CRC]}
        codecs = [{"name": "sharding_indexed", "configuration": inner}]
    kvstore: dict[str, Any] = {"driver": "file", "path": f"{path}/state/"}
    if use_ocdbt:
        kvstore = {"driver": "ocdbt", "base": kvstore}
    specification = {
        "driver": "zarr3",
        "kvstore": {**kvstore, "path": "w/"} if use_ocdbt else {**kvstore, "path": f"{path}/state/w/"},
        "metadata": {
            "shape": [48, 40],
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [24, 20]}},
            "codecs": codecs,
        },
    }
    tensorstore.open(specification, create=True, delete_existing=True).result().write(WEIGHTS).result()
    assert codecs_of(path)[-1] == "crc32c"
    assert np.array_equal(waystation.load(path)["w"], WEIGHTS)
    context = waystation.Context()
    context.array.loading.verify = True
    with context:
        assert np.array_equal(waystation.load(path)["w"], WEIGHTS)
    part = np.zeros((20, 40), np.float32)
    context.array.loading.enable_padding_and_truncation = True
    with context:
        assert np.array_equal(waystation.load(path, {"w": part})["w"], WEIGHTS[:20])
    assert silent_flips(path, 60, waystation.load) == []


def test_damage_names_the_array_and_its_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    writing.save(path, {"w": WEIGHTS, "x": WEIGHTS + 1}, use_ocdbt=False)
    (file,) = data_files(as_by_others(path))
    content = bytearray(file.read_bytes())
    content[50] ^= 1
    file.write_bytes(content)
    with pytest.raises(Corrupt, match="CRC-32C") as caught:
        waystation.load(path)
    assert (caught.value.context["array"], caught.value.context["path"]) == ("w", str(file))
    assert "chunk" not in caught.value.context


def test_a_load_that_is_told_not_to_verify_does_not(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    writing.save(path, STATE, use_ocdbt=False, use_compression=False)
    (file,) = data_files(path)
    content = bytearray(file.read_bytes())
    content[50] ^= 1
    file.write_bytes(content)
    context = waystation.Context()
    context.array.loading.verify = False
    with context:
        assert not np.array_equal(waystation.load(path)["w"], WEIGHTS)
        assert not np.array_equal(waystation.load(as_by_others(path))["w"], WEIGHTS)


def test_only_what_has_checksums_can_be_asked_to_be_verified(tmp_path: Path) -> None:
    context = waystation.Context()
    context.array.loading.verify = True
    for name, has_checksums in (("with", True), ("without", False)):
        path = tmp_path / name
        writing.save(path, STATE, use_ocdbt=True, use_crc32c=has_checksums)
        as_by_others(path)
        with context:
            if has_checksums:
                oracle.assert_same(waystation.load(path), oracle.load(path))
            else:
                with pytest.raises(InvalidInput, match="no checksums"):
                    waystation.load(path)


@layouts
def test_a_save_within_a_bound_of_memory_and_in_the_background(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    state = {"w": WEIGHTS.copy(), "t": np.asfortranarray(WEIGHTS), "k": jax.random.key(3)}
    context = writing.layout_of(layout, 700)
    context.memory.write_concurrent_bytes = 1 << 20
    with context:
        response = waystation.save_async(path, state)
        state["w"][:] = 0
        response.result()
    loaded = oracle.load(path)
    assert np.array_equal(loaded["w"], WEIGHTS)
    assert np.array_equal(loaded["t"], WEIGHTS)
    as_by_others(path)
    oracle.assert_same(waystation.load(path), loaded)
