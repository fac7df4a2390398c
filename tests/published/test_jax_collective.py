"""Processes of a JAX program that load a model together: what fails in one is raised by all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.published import models, process_scenarios
from tests.support.programs import Raised, running


@pytest.fixture
def copies(tmp_path: Path) -> list[Path]:
    """A model of two files, three times."""
    models.write_set(tmp_path / "0", models.numbers(6, rows=12), 2)
    return [tmp_path / "0", *(shutil.copytree(tmp_path / "0", tmp_path / f"{copy}") for copy in (1, 2))]


def values(tmp_path: Path, scenario: Any, *arguments: Any, count: int = 3) -> list[Any]:
    with running(scenario, *arguments, count=count, framework="jax", directory=tmp_path) as programs:
        return programs.values()


@pytest.mark.parametrize("way", ["sharding", "function", "async"])
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_what_one_cannot_read_is_raised_by_all(
    tmp_path: Path, copies: list[Path], way: str, damage: str
) -> None:
    file = copies[1] / "model-00002-of-00002.safetensors"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    found = values(tmp_path, process_scenarios.load_copies, copies, way, {})
    assert [error.type for error in found] == ["Corrupt"] * 3
    assert [error.context.get("process") for error in found] == [1, None, 1]
    assert {error.context["path"] for error in found} == {str(file)}


def test_what_changes_while_it_is_read_is_raised_by_all(tmp_path: Path, copies: list[Path]) -> None:
    """Checksums tell so of one copy, once its headers are read and found in order."""
    from waystation.safetensors import write_checksums

    for copy in copies:
        write_checksums(copy)
    file = copies[2] / "model-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = values(tmp_path, process_scenarios.load_copies, copies, "function", {})
    assert [error.type for error in found] == ["Corrupt"] * 3
    assert [error.context.get("process") for error in found] == [2, 2, None]
    assert all(error.context["tensor"] for error in found)


def test_one_interrupted_before_it_reads_is_named_by_all_others(tmp_path: Path, copies: list[Path]) -> None:
    found = values(tmp_path, process_scenarios.interrupted_before_it_reads, copies[0], count=2)
    assert found == [(("Cancelled", 1), 6), ("interrupted", 6)]


def test_meshes_of_other_orders_are_refused(tmp_path: Path, copies: list[Path]) -> None:
    found = values(tmp_path, process_scenarios.load_in_another_order, copies[0], count=2)
    assert [error.type for error in found] == ["InvalidInput"] * 2


def test_the_same_from_every_copy(tmp_path: Path, copies: list[Path]) -> None:
    assert values(tmp_path, process_scenarios.load_copies, copies, "sharding", {}) == [6, 6, 6]


def test_other_tensors_in_one_process_are_refused_in_all(tmp_path: Path, copies: list[Path]) -> None:
    models.write_set(copies[2], models.numbers(5, rows=12), 2)
    found = values(tmp_path, process_scenarios.load_copies, copies, "function", {})
    assert [error.type for error in found] == ["InvalidInput"] * 3
    assert all("processes 0 and 2" in error.message for error in found)


def test_other_values_in_one_process_are_refused_in_all(tmp_path: Path, copies: list[Path]) -> None:
    state = models.numbers(6, rows=12)
    models.write_set(copies[1], {name: value + 1 for name, value in state.items()}, 2)
    found = values(tmp_path, process_scenarios.load_copies, copies, "sharding", {})
    assert [error.type for error in found] == ["InvalidInput"] * 3
    assert all("processes 0 and 1 load different models together" in error.message for error in found)


def test_alone_a_process_reports_only_to_itself(tmp_path: Path, copies: list[Path]) -> None:
    (copies[1] / "model-00002-of-00002.safetensors").unlink()
    found = values(tmp_path, process_scenarios.load_copies, copies, "sharding", {"together": False})
    assert found[0] == found[2] == 6
    assert isinstance(found[1], Raised)


def test_a_process_can_load_alone(tmp_path: Path) -> None:
    models.write_set(tmp_path / "model", models.numbers(4), 2)
    assert values(tmp_path, process_scenarios.load_alone, tmp_path / "model", count=2) == [0, 8]


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    models.write_set(tmp_path / "model", models.numbers(4), 2)
    with running(
        process_scenarios.load_late, tmp_path / "model", count=2, framework="jax", directory=tmp_path
    ) as programs:
        assert programs.report(0) == "done"
        programs.send(1, "go on")
        error, _ = programs.values()
    assert error.type == "Unavailable"
    assert "process 1" in error.message
    assert "load a published model" in error.message


@pytest.mark.parametrize(("count", "devices"), [(4, 1), (2, 2)])
@pytest.mark.parametrize("rows", [1 << 10, 1001])
@pytest.mark.share(4)
def test_short_parts_of_rows_are_read_by_one_and_resharded(
    tmp_path: Path, count: int, devices: int, rows: int
) -> None:
    """Columns of 512 bytes to 1 KiB, all of which lie close to those of others; bits of every kind arrive."""
    generator = np.random.default_rng(0)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        f"{dtype}.{number}": generator.integers(0, 256, rows * 4096, np.uint8).view(dtype).reshape(rows, -1)
        for number, dtype in enumerate(["float32", "float16", "int32", "uint8"])
    }
    arrays["small"] = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    index = models.write_set(tmp_path / "model", arrays, 2)
    file_bytes = sum(path.stat().st_size for path in index.parent.glob("*.safetensors"))
    found = values(tmp_path, process_scenarios.load_sharded, index.parent, devices, (None, "x"), count=count)
    small_bytes = (count - 1) * (64 << 10)  # which each process reads, with what is beside it
    assert sum(counted for counted, _, _ in found) <= 1.05 * file_bytes + small_bytes
    columns: dict[str, set[tuple[int, int]]] = {name: set() for name in arrays}
    for _, _, parts in found:
        for (name, ((first, last, _), (begin, end, _))), data in parts:
            assert (first, last) == (0, arrays[name].shape[0])
            assert data == arrays[name][:, begin:end].tobytes(), name
            columns[name].add((begin, end))
    assert all(len(own) == count * devices for own in columns.values())


@pytest.mark.parametrize(("count", "devices"), [(2, 2), (4, 1)])
@pytest.mark.share(2)
def test_statistics_tell_what_other_processes_sent(tmp_path: Path, count: int, devices: int) -> None:
    """Each reads a part of the rows, and gets as much of the columns: of that, its own rows are its share."""
    models.write_set(tmp_path / "model", {"w": np.ones((1024, 1024), np.float32)}, 1)
    found = values(tmp_path, process_scenarios.told_of_columns, tmp_path / "model", devices, count=count)
    for statistics, held in found:
        assert held == statistics.bytes_needed == (4 << 20) // count
        assert statistics.bytes_received == held - held // count
