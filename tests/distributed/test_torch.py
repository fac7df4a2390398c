"""Torch programs: who writes what of tensors that all hold, and loads by other numbers of processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.distributed import torch_scenarios
from tests.support.programs import running

import waystation


def data_bytes(path: Path) -> list[int]:
    """Bytes of arrays that each process has written: the files without their headers."""
    found = []
    for file in sorted((path / "state").glob("p*.safetensors")):
        content = file.read_bytes()
        found.append(len(content) - 8 - int.from_bytes(content[:8], "little"))
    return found


def write(directory: Path, count: int, **saving: Any) -> list[int]:
    with running(
        torch_scenarios.shared_writing, saving, count=count, framework="torch", directory=directory
    ) as programs:
        assert programs.values() == [None] * count
    return data_bytes(directory / "checkpoint")


@pytest.mark.parametrize("count", [2, 4])
def test_what_all_hold_is_written_once_and_shared_out(tmp_path: Path, count: int) -> None:
    written = write(tmp_path, count)
    small = sum(1000 + number for number in range(40))
    assert sum(written) == (4 << 20) + small
    # The large tensor by slices, each small one whole by whoever has written least.
    for nbytes in written:
        assert abs(nbytes - (4 << 20) / count - small / count) < 1100


def test_sharing_can_be_limited_and_switched_off(tmp_path: Path) -> None:
    for name, saving in {
        "two": {"max_replicas_for_replica_parallel": 2},
        "slices": {"min_slice_bytes_for_replica_parallel": 2 << 20},
    }.items():
        (tmp_path / name).mkdir()
        written = write(tmp_path / name, 4, **saving)
        assert sum(nbytes > 2_000_000 for nbytes in written) == 2, name
    (tmp_path / "off").mkdir()
    written = write(tmp_path / "off", 4, use_replica_parallel=False)
    assert sum(nbytes > 4_000_000 for nbytes in written) == 1
    assert sum(written) > 4 << 20


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.share(3)
def test_load_by_another_number_of_processes(tmp_path: Path, count: int) -> None:
    (tmp_path / "checkpoints").mkdir()
    with running(
        torch_scenarios.save_until_killed,
        tmp_path / "checkpoints" / "3",
        count=3,
        framework="torch",
        directory=tmp_path,
    ) as programs:
        for index in range(3):
            assert programs.report(index) == "ready"
            programs.send(index, "go on")
        assert programs.values() == [None] * 3
    with running(
        torch_scenarios.load_elsewhere,
        tmp_path / "checkpoints" / "3",
        count=count,
        framework="torch",
        directory=tmp_path,
    ) as programs:
        assert programs.values() == [True] * count


def test_each_process_shares_what_is_unchanged_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()

    def save(count: int, step: int, earlier: int | None) -> Any:
        with running(
            torch_scenarios.save_beside, step, earlier, count=count, framework="torch", directory=tmp_path
        ) as programs:
            return programs.values()

    first, second = save(3, 1, None), save(3, 2, 1)
    assert [shared for shared, _ in first] == [0, 0, 0]
    for (shared, written), (_, whole) in zip(second, first, strict=True):
        assert shared > 0.9 * (whole - 13_000)
        assert written < 0.1 * whole
    # Another number of processes cuts arrays in another way: what is cut alike is shared, the rest is
    # written.
    save(2, 3, 2)
    shutil.rmtree(tmp_path / "checkpoints" / "1")
    for step in (2, 3):
        found = waystation.verify(tmp_path / "checkpoints" / str(step))
        assert not found.damages
        assert not found.strays


def test_concurrent_loads_make_their_meshes_in_one_order(tmp_path: Path) -> None:
    for function, expected in (
        (torch_scenarios.save_on_meshes, None),
        (torch_scenarios.load_at_once, [True] * len(torch_scenarios.MESHES)),
    ):
        with running(function, count=4, framework="torch", directory=tmp_path) as programs:
            assert programs.values() == [expected] * 4
