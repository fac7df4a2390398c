"""Reads straight to devices against a simulated cuFile: what can go wrong with one, and what becomes of it.

The tests of `test_gpu_direct.py` run once more, in a process that finds the simulated libraries. Nothing here
was run on a GPU by that, nor is anything said of speed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import device_codec, simulated_driver
from tests.support.long import only_long

from waystation import _native

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def no_device() -> None:
    if _native.devices():
        pytest.skip("this machine has a CUDA device")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_driver.build_with_cufile(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of any alignment, in 24 MiB."""
    found = np.random.default_rng(0).integers(0, 256, (24, 1_000_003), np.uint8)
    tensors = {f"w{number:02}": ("U8", (1_000_003,), found[number].tobytes()) for number in range(24)}
    return device_codec.write_model(tmp_path_factory.mktemp("model") / "model.safetensors", tensors)


def run(library: Path, *arguments: str, **settings: int | Path) -> subprocess.CompletedProcess[str]:
    named = {f"CUFILE_{name}": value for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, *arguments],
        env=simulated_driver.environment(library, **named),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_files_are_read_straight_to_the_device(library: Path) -> None:
    module = str(FOLDER / "test_gpu_direct.py")
    done = run(library, "-m", "pytest", "-q", "-p", "no:cacheprovider", module)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].count("skipped") <= 1, done.stdout  # torch has no simulated GPU


PROGRAM = """
import json, os, sys
from pathlib import Path
from benchmarks.cuda_driver import CudaDriver
from tests.support import device_codec, simulated_driver
from waystation import _native
from waystation.safetensors.open_files import OpenFiles
from waystation.safetensors.sources import find

path = Path(sys.argv[1])
content = path.read_bytes()
opened = OpenFiles(find(path))
found, filling = device_codec.load(
    opened, CudaDriver(), threads=2, gpu_direct=True, read_mode="direct-threads"
)
nbytes = sum(len(data) for data, in found.values())
assert b"".join(found[number][0] for number in range(len(found))) == content[-nbytes:]
statistics = filling.reading.statistics
os.fstat(0)
print(json.dumps({
    "bytes": statistics.gpu_direct_bytes,
    "reasons": sorted(statistics.gpu_direct_reasons),
    "problem": _native.gpu_direct_problem(),
    "cufile": simulated_driver.cufile_statistics(),
}))
"""


def load(library: Path, model: Path, **settings: int) -> dict[str, Any]:
    """Loads the model, checks every byte, and returns how it was read."""
    done = run(library, "-c", PROGRAM, str(model), **settings)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_all_of_a_file_comes_so(library: Path, model: Path) -> None:
    found = load(library, model)
    assert found["problem"] is None
    assert found["reasons"] == []
    assert found["bytes"] >= 24 * 1_000_003
    # What was compared with a plain read came once more.
    assert found["bytes"] <= found["cufile"]["read_bytes"] <= found["bytes"] + (64 << 10)
    assert (found["cufile"]["files"], found["cufile"]["buffers"]) == (0, 0)


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"STATUS": 5010}, "the kernel module nvidia-fs failed (cuFile error 5010)"),
        ({"STATUS": 5999}, "cuFile did not open: (cuFile error 5999)"),
        ({"COMPATIBLE": 1}, "cuFile would copy through the memory of the host"),
    ],
)
def test_a_library_that_does_not_work_is_not_used(
    library: Path, model: Path, settings: dict[str, int], reason: str
) -> None:
    found = load(library, model, **settings)
    assert found["bytes"] == 0
    assert reason in found["problem"]
    assert found["reasons"] == [found["problem"]]


@pytest.mark.long
@only_long
def test_without_a_library_files_go_through_host_memory(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    driver_alone = simulated_driver.build(tmp_path_factory.mktemp("alone"))
    found = load(driver_alone, model)
    assert found["problem"].startswith("there is no cuFile library here")
    assert (found["bytes"], found["reasons"]) == (0, [found["problem"]])


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"REFUSING_FILES": 1}, "it does not support this file system"),
        ({"WRONG_READ": 0}, "differ from those of a plain read"),
        ({"FAILING_READ": 0}, "cuFile could not read the file: (cuFile error 5044)"),
    ],
)
def test_a_file_that_does_not_pass_its_proof_is_read_as_ever(
    library: Path, model: Path, settings: dict[str, int], reason: str
) -> None:
    found = load(library, model, **settings)
    assert found["problem"] is None
    assert found["bytes"] == 0
    (told,) = found["reasons"]
    assert reason in told


def test_a_read_that_fails_on_the_way_is_made_up_for(library: Path, model: Path) -> None:
    found = load(library, model, FAILING_READ=3)
    assert 0 < found["bytes"] < 24 * 1_000_003
    assert found["reasons"] == ["cuFile could not read the file: (cuFile error 5044)"]
    assert (found["cufile"]["files"], found["cufile"]["buffers"]) == (0, 0)


def test_a_short_read_is_continued(library: Path, model: Path) -> None:
    found = load(library, model, SHORT_READ=2)
    assert found["reasons"] == []
    assert found["bytes"] >= 24 * 1_000_003


def test_memory_that_is_not_registered_is_read_to_all_the_same(library: Path, model: Path) -> None:
    found = load(library, model, REFUSING_BUFFERS=1)
    assert found["reasons"] == []
    assert found["bytes"] >= 24 * 1_000_003


def test_standard_input_survives_a_library_that_closes_it(library: Path, model: Path) -> None:
    assert load(library, model, CLOSES_INPUT=1, STATUS=5001)["bytes"] == 0
