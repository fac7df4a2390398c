"""`open`: what is there, reads of tensors and parts of them, against the package `safetensors`."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from tests.published import models
from tests.support import failing_calls

import waystation.safetensors
from waystation import _native, errors
from waystation.safetensors.headers import Header

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def every_dtype(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dtypes") / "model.safetensors"
    safetensors.torch.save_file(models.every_dtype(), path, {"format": "pt", "by": "a test"})
    return path


def test_what_is_there(every_dtype: Path) -> None:
    with waystation.safetensors.open(every_dtype) as ours, safetensors.safe_open(every_dtype, "pt") as theirs:
        assert set(ours) == set(ours.keys()) == set(theirs.keys())
        assert len(ours) == len(models.TORCH_DTYPES)
        assert "BF16" in ours
        assert "absent" not in ours
        assert ours.metadata() == theirs.metadata()
        assert ours.files == [str(every_dtype)]
        assert ours.shapes == dict.fromkeys(models.TORCH_DTYPES, (3, 4))
        assert ours.dtypes["BF16"] == "bfloat16"
        assert ours.dtypes["F8_E8M0"] == "float8_e8m0fnu"
        assert ours.nbytes == sum(tensor.nbytes for tensor in models.every_dtype().values())


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_tensors_of_every_dtype(every_dtype: Path, framework: Any) -> None:
    with jax.enable_x64(True), waystation.safetensors.open(every_dtype, framework=framework) as tensors:
        for name, expected in models.every_dtype().items():
            found = tensors.tensor(name)
            assert tuple(found.shape) == (3, 4)
            assert models.bits(found) == models.bits(expected), name
            if framework == "torch":
                assert found.dtype == expected.dtype
            else:
                assert str(found.dtype) == tensors.dtypes[name]


INDICES = st.integers(-4, 4) | st.slices(4).filter(lambda part: part.step in (None, 1)) | st.just(Ellipsis)


@given(
    index=INDICES | st.lists(INDICES, max_size=3).map(tuple), framework=st.sampled_from(["numpy", "torch"])
)
def test_parts_are_those_that_numpy_selects(every_dtype: Path, index: Any, framework: Any) -> None:
    whole = models.every_dtype()["I16"].numpy()
    tensors = waystation.safetensors.open(every_dtype, framework=framework)
    try:
        expected = whole[index]
    except IndexError:
        with pytest.raises(errors.InvalidInput):
            tensors.slice("I16")[index]
        return
    found = tensors.slice("I16")[index]
    assert tuple(found.shape) == expected.shape
    assert models.bits(found) == expected.tobytes()


@pytest.mark.parametrize("index", [slice(None, None, 2), 3, -4, None, "a", (0, 0, 0), (..., ...), 1.0])
def test_what_is_no_part(every_dtype: Path, index: Any) -> None:
    with pytest.raises(errors.InvalidInput):
        waystation.safetensors.open(every_dtype).slice("I16")[index]


def test_a_part_for_a_sharding(every_dtype: Path) -> None:
    mesh = jax.make_mesh((4,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    tensors = waystation.safetensors.open(every_dtype, framework="jax", device=sharding)
    found = tensors.slice("I32")[1]
    assert found.sharding == sharding
    assert models.bits(found) == models.bits(models.every_dtype()["I32"][1])


def test_names_that_are_not_there(every_dtype: Path) -> None:
    tensors = waystation.safetensors.open(every_dtype)
    for read in (tensors.tensor, tensors.slice):
        with pytest.raises(KeyError, match="there is no tensor 'absent'; there are 19: ") as caught:
            read("absent")
        assert isinstance(caught.value, errors.TensorNotFound)


def test_what_was_closed(every_dtype: Path) -> None:
    with waystation.safetensors.open(every_dtype) as tensors:
        kept = tensors.tensor("I8")
    with pytest.raises(errors.InvalidInput, match="closed"):
        tensors.tensor("I8")
    assert models.bits(kept) == models.bits(models.every_dtype()["I8"])
    tensors.close()


def test_small_reads_of_many_threads_start_no_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"t{number}": np.arange(number, number + 500) for number in range(200)}
    path = models.write_file(tmp_path / "model.safetensors", state)
    tensors = waystation.safetensors.open(path)
    monkeypatch.delattr(_native, "start_read")
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as readers:
        for name, found in zip(state, readers.map(tensors.tensor, state), strict=True):
            assert (found == state[name]).all()
            assert found.flags.writeable
    assert len(os.listdir("/proc/self/fd")) == before + 1
    tensors.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_model_of_many_files_holds_few_descriptors(tmp_path: Path) -> None:
    paths = [
        models.write_file(tmp_path / f"{number}.safetensors", {f"t{number}": np.arange(number, number + 5)})
        for number in range(100)
    ]
    before = len(os.listdir("/proc/self/fd"))
    with waystation.safetensors.open(paths) as tensors:
        for _ in range(2):
            for number in range(100):
                assert tensors.tensor(f"t{number}")[0] == number
        assert len(os.listdir("/proc/self/fd")) <= before + 64
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_handles_hold_few_descriptors(tmp_path: Path) -> None:
    path = models.write_file(tmp_path / "model.safetensors", {"a": np.arange(5), "b": np.arange(7)})
    before = len(os.listdir("/proc/self/fd"))
    opened = [waystation.safetensors.open(path) for _ in range(100)]
    for name in ("a", "b"):
        for tensors in opened:
            assert tensors.tensor(name)[4] == 4
        assert len(os.listdir("/proc/self/fd")) <= before + 64
    for tensors in opened:
        tensors.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_files_that_are_closed_while_threads_read_are_read_or_said_to_be_closed(tmp_path: Path) -> None:
    paths = [
        models.write_file(tmp_path / f"{number}.safetensors", {f"t{number}": np.full(5, number)})
        for number in range(40)
    ]

    all_held = threading.Barrier(5)

    def read_on(tensors: waystation.safetensors.Tensors) -> Exception:
        try:
            for turn in itertools.count():
                for number in range(40):
                    assert (tensors.tensor(f"t{number}") == number).all()
                if turn == 0:
                    all_held.wait(60)
        except errors.WaystationError as error:
            return error
        raise AssertionError("unreachable")

    with ThreadPoolExecutor(4) as readers:
        for _ in range(40):
            tensors = waystation.safetensors.open(paths)
            reads = [readers.submit(read_on, tensors) for _ in range(4)]
            all_held.wait(60)
            tensors.close()
            for read in reads:
                assert "the files were closed; open them again (path: " in str(read.result(60))


def test_small_reads_are_verified_where_there_are_checksums(tmp_path: Path) -> None:
    path = models.write_file(tmp_path / "model.safetensors", {"w": np.arange(500)})
    waystation.safetensors.write_checksums(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(errors.Corrupt):
        waystation.safetensors.open(path).tensor("w")
    context = waystation.Context()
    context.array.loading.verify = False
    with context:
        assert waystation.safetensors.open(path).tensor("w")[0] == 0


def test_small_tensors_of_a_file_are_read_though_another_file_is_not_what_was_summed(tmp_path: Path) -> None:
    paths = [models.write_file(tmp_path / f"{name}.safetensors", {name: np.arange(9)}) for name in "ab"]
    waystation.safetensors.write_checksums(paths)
    models.write_file(paths[1], {"b": np.arange(20)})
    tensors = waystation.safetensors.open(paths)
    assert (tensors.tensor("a") == np.arange(9)).all()
    with pytest.raises(errors.Corrupt, match="when it was summed") as caught:
        tensors.tensor("b")
    assert caught.value.context["path"] == str(paths[1])


def test_one_handle_verifies_as_the_context_says_at_each_read(tmp_path: Path) -> None:
    path = models.write_file(tmp_path / "model.safetensors", {"w": np.arange(500)})
    waystation.safetensors.write_checksums(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    tensors = waystation.safetensors.open(path)
    for verify in (None, False, True, False, None):
        context = waystation.Context()
        context.array.loading.verify = verify
        with context:
            for read in (lambda: tensors.tensor("w"), lambda: tensors.slice("w")[3:5]):
                if verify is False:
                    read()
                else:
                    with pytest.raises(errors.Corrupt):
                        read()


_REFUSED = """
import sys
from tests.support import failing_calls
from waystation import safetensors

tensors = safetensors.open(sys.argv[1])
failing_calls.fail("preadv2", int(sys.argv[2]))
assert tensors.tensor("w").tolist() == list(range(500))
"""


@pytest.mark.skipif(
    not failing_calls.SUPPORTED, reason="the filter of system calls is for x86-64 and AArch64 Linux"
)
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_small_tensors_are_read_where_a_sandbox_refuses_to_say_what_is_cached(
    tmp_path: Path, code: int
) -> None:
    path = models.write_file(tmp_path / "model.safetensors", {"w": np.arange(500)})
    subprocess.run([sys.executable, "-c", _REFUSED, str(path), str(code)], cwd=ROOT, check=True)


def test_settings_of_jax_are_those_at_each_read(tmp_path: Path) -> None:
    state = {"fits": np.arange(4), "wide": np.array([1 << 40]), "float": np.array([0.5])}
    path = models.write_file(tmp_path / "model.safetensors", state)
    for order in ((True, False, True), (False, True, False)):
        tensors = waystation.safetensors.open(path, framework="jax")
        for wide in order:
            with jax.enable_x64(wide):
                assert tensors.tensor("fits").dtype == (np.int64 if wide else np.int32)
                for name in ("wide", "float"):
                    if wide:
                        assert models.bits(tensors.tensor(name)) == state[name].tobytes()
                    else:
                        with pytest.raises(errors.InvalidInput, match="64-bit"):
                            tensors.tensor(name)
    for device in (*jax.devices()[:3], jax.devices()[0]):
        with jax.default_device(device):
            assert tensors.tensor("fits").devices() == {device}


def test_files_without_tensors_and_tensors_without_elements(tmp_path: Path) -> None:
    arrays = {"none": np.zeros((0, 3), np.float16), "scalar": np.array(2.5), "": np.arange(3)}
    path = models.write_file(tmp_path / "a.safetensors", arrays)
    for framework in ("numpy", "torch"):
        tensors = waystation.safetensors.open(path, framework=framework)  # type: ignore[arg-type]
        for name, expected in arrays.items():
            found = tensors.tensor(name)
            assert tuple(found.shape) == expected.shape
            assert models.bits(found) == expected.tobytes()
    (tmp_path / "b.safetensors").write_bytes(models.raw_file("{}"))
    empty = waystation.safetensors.open(tmp_path / "b.safetensors")
    assert (list(empty), empty.nbytes, empty.metadata()) == ([], 0, {})


def test_packed_floats_are_bytes_where_there_is_no_dtype_for_them(tmp_path: Path) -> None:
    packed = torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": packed}, path)
    found = {
        framework: waystation.safetensors.open(path, framework=framework).tensor("w")  # type: ignore[arg-type]
        for framework in ("torch", "numpy", "jax")
    }
    assert found["torch"].dtype == torch.float4_e2m1fn_x2
    assert found["numpy"].dtype == np.uint8
    assert found["jax"].dtype == np.uint8
    for array in found.values():
        assert tuple(array.shape) == (3, 4)
        assert models.bits(array) == models.bits(packed)
    unpacked = jax.lax.bitcast_convert_type(found["jax"], jax.numpy.float4_e2m1fn)
    assert unpacked.shape == (3, 4, 2)
    assert unpacked[0, 2].tolist() == [1.0, 0.0]  # of the byte 2, the lower half first


UNSUPPORTED = {
    "six bits": (models.entry("F6_E2M3", [4], 0, 3), 3, "F6_E2M3"),
    "half a byte along the last axis": (models.entry("F4", [2, 3], 0, 3), 3, "whole bytes"),
    "too many axes": (models.entry("U8", [1] * 65, 0, 1), 1, "no framework"),
    "an extent that nobody counts": (models.entry("U8", [0, 1 << 62], 0, 0), 0, "no framework"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_no_framework_has_is_refused_when_it_is_wanted(tmp_path: Path, case: str) -> None:
    described, data_bytes, reason = UNSUPPORTED[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(models.raw_file(json.dumps({"w": described}), data_bytes))
    tensors = waystation.safetensors.open(path)
    assert list(tensors) == ["w"]
    assert tensors.shapes["w"] == tuple(described["shape"])
    with pytest.raises(errors.Unsupported, match=reason) as caught:
        tensors.tensor("w")
    assert caught.value.context == {"tensor": "w", "path": str(path)}


def test_frameworks_and_devices_that_there_are_not(every_dtype: Path) -> None:
    for arguments in (
        {"framework": "tensorflow"},
        {"framework": "numpy", "device": "cuda"},
        {"framework": "torch", "device": "meta"},
        {"framework": "torch", "device": "nowhere"},
        {"framework": "torch", "device": 1.5},
        {"framework": "jax", "device": "nowhere"},
        {"framework": "jax", "device": 3},
    ):
        with pytest.raises(errors.InvalidInput):
            waystation.safetensors.open(every_dtype, **arguments)


@pytest.mark.parametrize("nbytes", [4, 1 << 20], ids=["small", "large"])
def test_a_file_that_is_removed_after_it_was_checked_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """As where another process replaces a model of several files."""
    path = models.write_file(tmp_path / "model.safetensors", {"a": np.ones(nbytes, np.uint8)})
    check = Header.check_unchanged

    def check_and_remove(self: Header) -> None:
        check(self)
        path.unlink(missing_ok=True)

    with waystation.safetensors.open(path) as tensors:
        monkeypatch.setattr(Header, "check_unchanged", check_and_remove)
        with pytest.raises(errors.Conflict, match="removed"):
            tensors.tensor("a")
