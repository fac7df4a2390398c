"""The way from Python to the driver's calls, against a simulated driver: what it can show without a GPU.

The tests of this folder that need no framework run once more, in a process whose `libcuda.so.1` is the
simulated one; then copies are made to fail, and pinning to be refused. Nothing here was run on a GPU by that,
nor is anything said of speed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support import device_codec, simulated_driver
from tests.support.long import IS_LONG, only_long

from waystation import _native

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
MODULES = ["test_copies.py", "test_loads.py", "test_orbax_chunks.py", "test_streams.py"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if simulated_driver.statistics() is not None:
        pytest.skip("this is the process with the simulated driver")
    if _native.devices():
        pytest.skip("this machine has a CUDA device")
    return simulated_driver.build(tmp_path_factory.mktemp("driver"))


def run(library: Path, *arguments: str, **settings: int | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=simulated_driver.environment(library, **settings),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
@only_long
def test_what_needs_no_framework_passes(library: Path) -> None:
    modules = [str(FOLDER / module) for module in MODULES]
    modules.append(f"{FOLDER / 'test_unchanged.py'}::test_blocks_of_device_memory_are_compared")
    less = [] if IS_LONG else ["-k", "not large"]
    done = run(library, "-m", "pytest", "-q", "-p", "no:cacheprovider", *less, *modules)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout


PROGRAM = """
import sys
import numpy as np
from benchmarks.cuda_driver import CudaDriver
from tests.support import simulated_driver
from waystation import _native, errors

path, nbytes = sys.argv[1], 24 << 20
driver = CudaDriver()
with driver.device_memory(nbytes) as address:
    words = np.array([0, 0, nbytes, 0, address])
    regions = [(0, address, nbytes)]
    for attempt in range(2):
        size = {"block_bytes": 1 << 20, "threads": 2}
        job = _native.start_read([(path, nbytes, None)], words, None, device_memory=regions, **size)
        try:
            job.result()
            found = np.empty(nbytes, np.uint8)
            driver.copy_to_host(found.ctypes.data, address, nbytes)
            assert found.tobytes() == open(path, "rb").read()
            print("loaded")
        except errors.Unavailable as error:
            assert "copying from the host failed on CUDA device 0" in str(error), error
            print("failed")
    print(simulated_driver.statistics()["unpinned_copies"] > 0)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("data") / "file"
    found.write_bytes(bytes(range(256)) * (24 << 12))
    return found


@pytest.mark.parametrize("number", [0, 5, 23])
@pytest.mark.share(3)
def test_a_copy_that_fails_on_its_way_is_an_error_of_that_load_alone(
    library: Path, path: Path, number: int
) -> None:
    done = run(library, "-c", PROGRAM, str(path), FAILING_COPY=number)
    assert done.stdout.split() == ["failed", "loaded", "False"], done.stderr


def test_memory_that_cannot_be_pinned_is_copied_from_all_the_same(library: Path, path: Path) -> None:
    done = run(library, "-c", PROGRAM, str(path), REFUSING_PINS=1)
    assert done.stdout.split() == ["loaded", "loaded", "True"], done.stderr


STREAM = """
import sys
import time
from pathlib import Path
from benchmarks.cuda_driver import CudaDriver
from tests.support import device_codec
from waystation import errors
from waystation.safetensors.open_files import OpenFiles
from waystation.safetensors.sources import find

path, release = Path(sys.argv[1]), Path(sys.argv[2])
content = path.read_bytes()
coming = device_codec.stream(OpenFiles(find(path)), CudaDriver(), limit_bytes=16 << 20, threads=1)
for number, (label, data) in enumerate(coming):
    begin = len(content) - (24 - number << 20)
    assert label == f"w{number:02}" and data == content[begin : begin + (1 << 20)]
    if number == 3:
        if len(sys.argv) > 3:
            while not release.with_suffix(".held").exists():  # what is left is on its way
                time.sleep(0.01)
        print("four are here", flush=True)
        if len(sys.argv) > 3:
            break
        release.touch()
coming.close()
print("over")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 tensors of 1 MiB."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 1 << 20), np.uint8)
    tensors = {f"w{number:02}": ("U8", (1 << 20,), noise[number].tobytes()) for number in range(24)}
    return device_codec.write_model(tmp_path_factory.mktemp("model") / "model.safetensors", tensors)


def test_the_first_arrays_are_handed_out_while_later_ones_are_held(
    library: Path, model: Path, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    done = run(library, "-c", STREAM, str(model), str(release), HELD_COPY=12, RELEASE=release)
    assert done.stdout.split("\n") == ["four are here", "over", ""], done.stderr


def test_a_stream_that_is_left_early_waits_for_what_is_on_its_way(
    library: Path, model: Path, tmp_path: Path
) -> None:
    """The held copies write to memory that is given back afterwards."""
    release = tmp_path / "release"
    arguments = [sys.executable, "-c", STREAM, str(model), str(release), "leave"]
    environment = simulated_driver.environment(library, HELD_COPY=12, RELEASE=release)
    with subprocess.Popen(arguments, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "four are here\n"
        with pytest.raises(subprocess.TimeoutExpired):  # it has to wait: nothing else tells that it does
            program.wait(0.5)
        release.touch()
        assert program.stdout.read() == "over\n"
        assert program.wait() == 0


def test_arrays_before_one_whose_copy_fails_are_handed_out(
    library: Path, model: Path, tmp_path: Path
) -> None:
    done = run(library, "-c", STREAM, str(model), str(tmp_path / "release"), FAILING_COPY=12)
    assert done.returncode != 0
    assert done.stdout == "four are here\n"
    assert "copying from the host failed on CUDA device 0" in done.stderr
