"""`memory.read_concurrent_bytes`: what comes back is the same, and the host memory for it is bounded.

The bound is measured in processes of their own (`load_peak.py`). No machine without another device has arrays
that leave host memory, so there the measured ones are those that cannot stay as they were read:
64-bit integers that JAX narrows, and long byte strings. That arrays for other devices take the same way is
tested with real arrays that are told not to stay where they are.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from tests.checkpoint import load_peak
from tests.checkpoint.save_peak import ARRAYS
from tests.support.long import amount, only_long
from tests.support.peaks import in_own_process

import waystation
from waystation import _native, errors
from waystation._options.in_effect import current_options
from waystation.checkpoint.loading import Loading
from waystation.frameworks import AbstractNumpy
from waystation.frameworks.jax_arrays import JaxCodec
from waystation.frameworks.torch_tensors import TorchCodec
from waystation.transfers import staging
from waystation.transfers.buffers import Region
from waystation.transfers.handle import Progress
from waystation.transfers.staging import Shares, bound_engine

MIB = 1 << 20
# What an interpreter and its libraries allocate beside: lists, tables of the checkpoint, threads' stacks.
SLACK_BYTES = 2 * MIB


def limited(limit_bytes: int) -> waystation.Context:
    context = waystation.Context()
    context.memory.read_concurrent_bytes = limit_bytes
    return context


# ---- measured ----------------------------------------------------------------------------------


def extra_bytes(path: Path, kind: str, limit_bytes: int | None) -> int:
    """The peak of resident memory during a load, beyond the result."""
    found: int = in_own_process(load_peak.extra_bytes, path, kind, limit_bytes, directory=path.parent)
    return found


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arrays of 4 MB, as many as saves are tried with."""
    path = tmp_path_factory.mktemp("many") / "checkpoint"
    values = np.arange(1 << 19).reshape(1024, 512)
    with jax.enable_x64(True):
        waystation.save(path, {f"array_{number}": jnp.asarray(values + number) for number in range(ARRAYS)})
    return path


@pytest.mark.long
@only_long
def test_many_arrays_of_4_mb_under_5_mib(many: Path) -> None:
    assert extra_bytes(many, "as_saved", 5 * MIB) < 5 * MIB + SLACK_BYTES
    assert extra_bytes(many, "as_saved", None) > ARRAYS * 3 * MIB


def test_casts_of_many_arrays_under_5_mib(many: Path) -> None:
    assert extra_bytes(many, "float32", 5 * MIB) < 5 * MIB + SLACK_BYTES
    assert extra_bytes(many, "float32", None) > 20 * MIB


@pytest.mark.parametrize("wanted", ["bfloat16", "float64", "float8_e4m3fn"])
@pytest.mark.share(3)
def test_the_cast_of_one_large_array_under_4_mib(tmp_path: Path, wanted: str) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": np.ones((2048, 4096), np.float32)})
    assert extra_bytes(tmp_path / "checkpoint", wanted, 4 * MIB) < 4 * MIB + SLACK_BYTES
    assert extra_bytes(tmp_path / "checkpoint", wanted, None) > 20 * MIB


def test_an_array_larger_than_the_bound_goes_in_pieces(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        waystation.save(tmp_path / "checkpoint", {"x": jnp.arange(4 * MIB).reshape(-1, 1024)})
    assert extra_bytes(tmp_path / "checkpoint", "as_saved", 4 * MIB) < 4 * MIB + SLACK_BYTES
    assert extra_bytes(tmp_path / "checkpoint", "as_saved", None) > 20 * MIB


def test_long_byte_strings_under_4_mib(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {str(number): bytes([number]) * 700_000 for number in range(50)})
    assert extra_bytes(tmp_path / "checkpoint", "as_saved", 4 * MIB) < 4 * MIB + SLACK_BYTES
    assert extra_bytes(tmp_path / "checkpoint", "as_saved", None) > 20 * MIB


# ---- the same arrays, whatever the bound -------------------------------------------------------


@pytest.fixture
def all_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of JAX and torch are told not to stay where they are read, as if all were on a GPU."""
    monkeypatch.setattr(JaxCodec, "stays_on_host", lambda self, target: False)
    monkeypatch.setattr(TorchCodec, "stays_on_host", lambda self, target: False)


@pytest.fixture
def tiny_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least bound is made small, so that small arrays make many groups; nothing is replaced."""
    monkeypatch.setattr(staging, "LEAST_BYTES", 32 << 10)


STAGED_DTYPES = ("bool", "int16", "int32", "bfloat16", "float32", "float8_e5m2", "int4", "complex64")


@st.composite
def wanted_arrays(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], Any]:
    """A NumPy array, and an abstract JAX array or tensor to load it as."""
    kept = draw(st.sampled_from(STAGED_DTYPES))
    rows, columns = draw(st.sampled_from([(8, 40), (64, 96), (16, 1000), (40, 513), (0, 8), (8, 1)]))
    dtype = np.dtype(getattr(ml_dtypes, kept, kept))
    values = (np.arange(rows * columns) % 5 + 1).astype(np.float32).reshape(rows, columns).astype(dtype)
    cast = (
        kept if kept in ("bool", "complex64") else draw(st.sampled_from([kept, kept, "float32", "bfloat16"]))
    )
    wanted = np.dtype(getattr(ml_dtypes, cast, cast))
    shape = (draw(st.sampled_from([rows, rows, 16, 80])), columns)
    if isinstance(getattr(torch, cast, None), torch.dtype) and cast != "int4" and draw(st.booleans()):
        return values, torch.empty(shape, dtype=getattr(torch, cast), device="meta", requires_grad=False)
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    shardings = [
        None,
        SingleDeviceSharding(jax.devices()[5]),
        NamedSharding(mesh, PartitionSpec()),
        NamedSharding(mesh, PartitionSpec("x")),
        NamedSharding(mesh, PartitionSpec(("x", "y"))),
    ]
    return values, jax.ShapeDtypeStruct(shape, wanted, sharding=draw(st.sampled_from(shardings)))


def expected_of(values: np.ndarray[Any, Any], shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    expected = np.zeros(shape, dtype)
    rows = min(len(values), shape[0])
    expected[:rows] = values[:rows].astype(dtype)
    return expected


@settings(max_examples=amount(60))
@given(arrays=st.lists(wanted_arrays(), min_size=1, max_size=5), limit=st.sampled_from([1, 100_000, 10**9]))
@pytest.mark.usefixtures("all_staged", "tiny_groups")
@pytest.mark.long
@only_long
def test_staged_arrays_are_those_of_an_unbounded_load(
    arrays: list[tuple[np.ndarray[Any, Any], Any]], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("staged") / "checkpoint"
    waystation.save(path, [values for values, _ in arrays])
    context = limited(limit)
    context.array.loading.enable_padding_and_truncation = True
    with context:
        loaded = waystation.load(path, [abstract for _, abstract in arrays])
    for found, (values, abstract) in zip(loaded, arrays, strict=True):
        if isinstance(found, torch.Tensor):
            assert found.dtype == abstract.dtype
            number = np.complex64 if found.is_complex() else np.float32
            plain = found.to(torch.complex64 if found.is_complex() else torch.float32).numpy()
            kept = str(abstract.dtype).removeprefix("torch.")
            wanted = np.dtype(getattr(ml_dtypes, kept, kept))
            np.testing.assert_array_equal(
                plain, expected_of(values, abstract.shape, wanted).astype(number), strict=True
            )
        else:
            np.testing.assert_array_equal(
                np.asarray(found), expected_of(values, abstract.shape, abstract.dtype), strict=True
            )
            if abstract.sharding is None:
                assert not found.committed
            else:
                assert found.sharding == abstract.sharding


@pytest.mark.parametrize("limit", [1, 3 * MIB, 1 << 40])
@pytest.mark.parametrize("writers", [True, False], ids=["pieces", "whole"])
@pytest.mark.usefixtures("all_staged", "tiny_groups")
def test_no_bound_makes_a_load_fail(
    tmp_path: Path, limit: int, writers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not writers:
        monkeypatch.setattr(JaxCodec, "open_in_pieces", lambda self, target: None)
        monkeypatch.setattr(TorchCodec, "open_in_pieces", lambda self, target: None)
    state = {
        "large": jnp.arange(100_000.0).reshape(100, 1000),
        "keys": jax.random.split(jax.random.key(0), 3000),
        "tensor": torch.arange(50_000).requires_grad_(False),
        "parameter": torch.ones(5000, requires_grad=True),
        "scalar": np.float32(3),
        "empty": jnp.zeros((0, 3)),
        "zero": jnp.float32(7),
        "bytes": b"x" * 100_000,
        "text": "é" * 50_000,
        "number": 5,
        "nothing": None,
    }
    waystation.save(tmp_path / "checkpoint", state)
    with limited(limit):
        loaded = waystation.load(tmp_path / "checkpoint")
    np.testing.assert_array_equal(loaded["large"], state["large"])
    np.testing.assert_array_equal(jax.random.key_data(loaded["keys"]), jax.random.key_data(state["keys"]))
    assert torch.equal(loaded["tensor"], state["tensor"])
    assert loaded["parameter"].requires_grad
    assert type(loaded["scalar"]) is np.float32
    assert loaded["empty"].shape == (0, 3)
    for name in ("scalar", "zero", "bytes", "text", "number", "nothing"):
        assert loaded[name] == state[name]


@pytest.mark.usefixtures("tiny_groups")
def test_what_does_not_fit_is_named_when_it_goes_in_pieces(tmp_path: Path) -> None:
    values = np.arange(100_000)
    values[77_777] = 1 << 40
    waystation.save(tmp_path / "checkpoint", {"outer": {"x": values}})
    abstract = {"outer": {"x": jax.ShapeDtypeStruct((100_000,), np.int64)}}
    with limited(1), pytest.raises(errors.InvalidInput, match="64-bit mode") as caught:
        waystation.load(tmp_path / "checkpoint", abstract)
    assert caught.value.context["array"] == "['outer']['x']"


@pytest.mark.usefixtures("tiny_groups")
def test_damage_is_found_in_every_group(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {str(number): "a" * 70_000 for number in range(20)})
    data = tmp_path / "checkpoint" / "state" / "p00000-000.safetensors"
    with open(data, "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\0")
    with limited(1), pytest.raises(errors.Corrupt):
        waystation.load(tmp_path / "checkpoint")


def test_the_header_of_a_file_is_verified_whatever_the_bound(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": np.ones(100)})
    with open(tmp_path / "checkpoint" / "state" / "p00000-000.safetensors", "r+b") as file:
        file.seek(3000)
        file.write(b"x")
    abstract = {"x": AbstractNumpy((100,), np.float32)}
    with limited(1), pytest.raises(errors.Corrupt):
        waystation.load(tmp_path / "checkpoint", abstract)


def test_a_bounded_load_runs_in_the_background(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": np.ones((256, 1024), np.float32)})
    with limited(1):
        loading = waystation.load_async(
            tmp_path / "checkpoint", {"x": AbstractNumpy((256, 1024), ml_dtypes.bfloat16)}
        )
    np.testing.assert_array_equal(loading.result()["x"].astype(np.float32), np.ones((256, 1024)))


class CancelsItself(Progress):
    """Cancels the load when its third job starts."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = 0

    def add(self, job: _native.Job) -> None:
        super().add(job)
        self.jobs += 1
        if self.jobs == 3:
            self.cancel()


@pytest.mark.usefixtures("tiny_groups")
def test_a_cancelled_load_reads_no_further_group(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    waystation.save(path, {"x": np.arange(1 << 20)})
    progress = CancelsItself()
    with limited(1):
        loading = Loading(str(path), ["AUTO"], current_options())
    with pytest.raises(errors.Cancelled):
        loading.run({"x": AbstractNumpy((1 << 20,), np.float32)}, progress)
    assert progress.jobs <= 4  # one more may have been on its way


# ---- shares ------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 45), st.booleans())
def test_shares_are_within_the_bound(limit: int, are_staged: bool) -> None:
    shares = Shares.of(limit, are_staged=are_staged)
    staged = 2 * shares.group_bytes if are_staged else 0
    assert staged + 2 * shares.cast_bytes + shares.engine_bytes <= max(limit, staging.LEAST_BYTES)
    assert min(shares.group_bytes, shares.cast_bytes, shares.engine_bytes) >= 256 << 10


@given(st.integers(512 << 10, 1 << 40), st.none() | st.integers(1, 1 << 30), st.none() | st.integers(1, 64))
def test_the_engine_stays_within_its_share(share: int, block_bytes: int | None, number: int | None) -> None:
    context = waystation.Context()
    context.engine.block_bytes, context.engine.depth, context.engine.threads = block_bytes, number, number
    engine = bound_engine(context._options.frozen(), share).engine
    if share >= 160 * MIB:
        assert (engine.block_bytes, engine.depth, engine.threads) == (block_bytes, number, number)
        return
    # The engine rounds blocks up to those of the checksums, and gives each worker a request to itself.
    assert engine.block_bytes is not None
    assert engine.depth is not None
    assert engine.threads is not None
    block = -(-engine.block_bytes // (256 << 10)) * (256 << 10)
    per_worker = -(-engine.depth // engine.threads)
    assert per_worker * engine.threads * block <= share


@given(st.lists(st.integers(0, 5000), max_size=20))
def test_a_region_places_buffers_apart(sizes: list[int]) -> None:
    region = Region(40_960)
    taken: list[tuple[int, int]] = []
    for half in (sizes[::2], sizes[1::2]):
        places, addresses = region.allocate(half)
        for nbytes, (slab, offset), address in zip(half, places, addresses.tolist(), strict=True):
            if nbytes:
                assert slab is not None
                assert slab.address + offset == address
                assert offset + nbytes <= slab.nbytes
                assert address % 256 == 0
                taken.append((address, address + nbytes))
            else:
                assert slab is None
    taken.sort()
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(taken))


def test_the_option_is_checked_when_it_is_set() -> None:
    context = waystation.Context()
    for wrong in (0, -1, 1.5, "5 MiB", True):
        with pytest.raises(errors.InvalidInput, match="read_concurrent_bytes"):
            context.memory.read_concurrent_bytes = wrong  # type: ignore[assignment]


_LITTLE_ROOM = """
import os, resource, sys
import numpy as np
import waystation
from waystation import errors, safetensors

big = {"w": np.zeros(1 << 28, np.uint8)}
path = sys.argv[1]
waystation.save(path + "/c", big)
safetensors.save(big, path + "/m.safetensors")
used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)
calls = {
    "c": lambda: waystation.load(path + "/c"),
    "m.safetensors": lambda: safetensors.load(path + "/m.safetensors", framework="numpy"),
    "d": lambda: waystation.save_async(path + "/d", big).result(),
}
for name, call in calls.items():
    try:
        call()
    except MemoryError as error:
        assert isinstance(error, errors.OutOfMemory) and isinstance(error, errors.Unavailable)
        assert error.context["path"] == f"{path}/{name}", error
        assert ("snapshot_bytes" if name == "d" else "load fewer arrays") in str(error), error
    else:
        raise AssertionError(name)
"""


def test_an_error_of_lacking_memory_says_for_what_and_what_to_do(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _LITTLE_ROOM, str(tmp_path)], check=True, timeout=300)
