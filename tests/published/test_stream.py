"""`stream`: all arrays in file order, in bounded memory, and nothing goes on once nobody wants more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.published import models
from tests.support.programs import HANG_S

from waystation import _native, errors
from waystation.frameworks.jax_arrays import JaxCodec
from waystation.frameworks.torch_tensors import TorchCodec
from waystation.safetensors import load, stream

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Small arrays, some of 256 KiB and two of 8 MiB, in three files."""
    arrays = models.numbers(40) | {
        f"large.{number}": np.full((256, 256), number, np.float32) for number in range(16)
    }
    arrays |= {f"huge.{number}": np.full((1 << 11, 1 << 10), number, np.float32) for number in range(2)}
    models.write_set(tmp_path / "model", arrays, 3)
    return tmp_path / "model"


@pytest.fixture
def all_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of JAX and torch are told not to stay where they are read, as if all were on a GPU."""
    monkeypatch.setattr(JaxCodec, "stays_on_host", lambda self, target: False)
    monkeypatch.setattr(TorchCodec, "stays_on_host", lambda self, target: False)


def check(model: Path, framework: Any, **options: Any) -> None:
    whole = load(model, framework="numpy")
    seen = []
    for name, array in stream(model, framework=framework, **options):
        assert models.bits(array) == whole[name].tobytes(), name
        seen.append(name)
    assert seen == list(whole)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("memory_limit", [None, 1, 4 * MIB])
def test_every_array_in_order(model: Path, framework: Any, memory_limit: int | None) -> None:
    check(model, framework, memory_limit=memory_limit)


@pytest.mark.usefixtures("all_staged")
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("memory_limit", [None, 1, 4 * MIB])
def test_arrays_that_do_not_stay_in_host_memory(
    model: Path, framework: Any, memory_limit: int | None
) -> None:
    check(model, framework, memory_limit=memory_limit)


def test_choices(model: Path) -> None:
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    found = dict(
        stream(
            model,
            framework="jax",
            sharding=sharding,
            dtype="bfloat16",
            select="large",
            rename=lambda name: name.upper(),
        )
    )
    assert set(found) == {f"LARGE.{number}" for number in range(16)}
    assert all(array.sharding == sharding and array.dtype == "bfloat16" for array in found.values())
    assert float(found["LARGE.7"].max()) == 7


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1", reason="the system promises all memory"
)
def test_memory_that_lacks_is_told_of_as_by_a_load(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    nbytes = 1 << 43
    path.write_bytes(models.raw_file(json.dumps({"w": models.entry("U8", [nbytes], 0, nbytes)})))
    os.truncate(path, path.stat().st_size + nbytes)  # none of it on the disk
    with pytest.raises(errors.OutOfMemory, match=r"to load '.*'; load fewer arrays") as caught:
        list(stream(path, framework="numpy"))
    assert caught.value.context["path"] == str(path)


def test_what_is_wrong_with_the_call_is_raised_by_it(model: Path) -> None:
    with pytest.raises(errors.InvalidInput):
        stream(model, framework="jax", select="absent")


def test_memory_is_bounded_and_arrays_are_the_callers_alone(model: Path) -> None:
    """Of 20 MiB at most those that are held, and what may be read ahead, exist at a time."""
    _native.trim_arena()
    before = _native.arena_statistics()["live_bytes"]
    most = 0
    for _name, array in stream(model, framework="numpy", memory_limit=4 * MIB):
        most = max(most, _native.arena_statistics()["live_bytes"] - before - array.nbytes)
        del array
    assert most <= 4 * MIB
    assert _native.arena_statistics()["live_bytes"] <= before


def test_large_arrays_are_read_ahead_where_there_is_room(tmp_path: Path) -> None:
    """Each takes more than a quarter of the limit, and two more than half of it."""
    arrays = {f"w{number}": np.full((3, MIB // 4), number, np.float32) for number in range(5)}
    path = models.write_file(tmp_path / "model.safetensors", arrays)
    _native.trim_arena()
    before = _native.arena_statistics()["live_bytes"]
    coming = stream(path, framework="numpy", memory_limit=8 * MIB)
    for number in range(5):
        array = next(coming)[1]
        expected = 3 * MIB * (2 if number < 4 else 1)
        until = time.monotonic() + HANG_S
        while _native.arena_statistics()["live_bytes"] - before < expected:
            assert time.monotonic() < until, "the next array is not read ahead"
        assert _native.arena_statistics()["live_bytes"] - before <= expected + MIB
        assert array.tobytes() == arrays[f"w{number}"].tobytes()
        del array
    coming.close()


def test_closing_stops_it(model: Path) -> None:
    arrays = stream(model, framework="numpy", memory_limit=4 * MIB)
    name, first = next(arrays)
    arrays.close()
    assert not [thread for thread in threading.enumerate() if "read ahead" in thread.name]
    assert first.tobytes() == load(model, framework="numpy", select=[name])[name].tobytes()


def test_a_file_that_changes_on_the_way(model: Path) -> None:
    arrays = stream(model, framework="numpy", memory_limit=1)
    next(arrays)
    last = sorted(model.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(errors.Conflict, match="changed while it was in use: it had") as caught:
        for _ in arrays:
            pass
    assert caught.value.context["path"] == str(last)


_KEPT = """
import sys

import jax
from waystation.safetensors import stream

jax.devices()
kept = stream(sys.argv[1], framework="jax", memory_limit=1 << 20)
next(kept)
"""


def test_a_stream_that_a_program_keeps_to_its_end_says_nothing(tmp_path: Path) -> None:
    """With JAX, half of the modules are empty when the stream is dropped."""
    models.write_file(
        tmp_path / "model.safetensors", {f"{n}": np.ones(1 << 18, np.float32) for n in range(8)}
    )
    command = [sys.executable, "-c", _KEPT, str(tmp_path / "model.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Exception" not in done.stderr
    assert "Traceback" not in done.stderr
