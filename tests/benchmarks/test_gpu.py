"""The benchmark of loads to GPU memory: what it says where there is no GPU, its limits, and its verdicts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import simulated_driver
from tests.support.long import only_long

from benchmarks import gpu, gpu_worker, states
from waystation import _native
from waystation.safetensors import load

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_device_nothing_is_measured() -> None:
    if _native.devices():
        pytest.skip("this machine has a CUDA device")
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "no CUDA device here: nothing measured" in done.stderr


def test_the_model_is_a_safetensors_file_with_the_bytes_of_its_leaves(tmp_path: Path) -> None:
    leaves = gpu_worker.leaves_of("llama", 2, quick=True)
    assert len(leaves) == 2 * len(states.describe("llama", quick=True))
    gpu_worker.write_model(tmp_path / "model.safetensors", leaves)
    loaded = load(tmp_path / "model.safetensors", framework="numpy")
    assert gpu_worker.differing(leaves, loaded) is None
    loaded["copies.1.norm"] = loaded["copies.1.norm"] + 1
    assert gpu_worker.differing(leaves, loaded) == "copies.1.norm"


@pytest.mark.long
@only_long
def test_every_way_of_reading_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(9 << 20) + b"end")
    for place in gpu_worker.READ_WAYS:
        found = gpu_worker.storage_seconds(path, place)
        assert found
        assert all(seconds > 0 for seconds in found.values())


def test_a_system_that_is_not_here_is_missing_with_its_reason(tmp_path: Path) -> None:
    if _native.devices():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(gpu_worker.NotMeasuredError, match="CUDA"):
        gpu_worker.run("waystation-torch", tmp_path / "file", "cached", [], check=True)


@pytest.mark.long
@only_long
def test_the_limits_are_measured_by_the_driver_itself(tmp_path: Path) -> None:
    if _native.devices():
        pytest.skip("this machine has a CUDA device")
    (tmp_path / "driver").mkdir()
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_worker", gpu_worker.BUS, str(path), "cached"],
        env=simulated_driver.environment(simulated_driver.build(tmp_path / "driver")),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"seconds"' in done.stdout


def figures_of(**seconds: float) -> gpu.Figures:
    figures = gpu.Figures(1000)
    for system, value in seconds.items():
        figures.add("tmpfs", system.replace("_", "-"), {"seconds": value})
    return figures


def test_targets_compare_with_the_lower_limit_and_with_safetensors() -> None:
    figures = figures_of(bus=1.0, storage=2.0, waystation_torch=2.1, safetensors_torch=12.0)
    share, times = gpu.verdicts(figures)
    assert (share.name, share.is_met) == ("torch tmpfs: share of the limit", True)
    assert share.reached == pytest.approx(2.0 / 2.1)
    assert (times.name, times.is_met) == ("torch tmpfs: times safetensors", True)
    slow = figures_of(bus=1.0, storage=0.5, waystation_jax=1.2, safetensors_jax=5.0)
    assert [verdict.is_met for verdict in gpu.verdicts(slow)] == [False, False]


def test_what_was_not_measured_is_not_judged() -> None:
    assert gpu.verdicts(figures_of(bus=1.0, storage=0.5)) == []
    (times,) = gpu.verdicts(figures_of(waystation_torch=1.0, safetensors_torch=5.0))
    assert times.name == "torch tmpfs: times safetensors"
    figures = gpu.Figures(1000)
    figures.add("cold", "fastsafetensors-torch", {"missing": "not installed"})
    assert figures.missing == {"fastsafetensors-torch": "not installed"}
    assert figures.speed("cold", "fastsafetensors-torch") is None
