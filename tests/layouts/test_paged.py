"""Tables that are read page by page: the same plans as of whole tables, and little of them read."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.layouts.plans import PATHS, Program, open_paged, partitions, with_checksums
from tests.layouts.test_runs import PROCESSES, program
from tests.support.long import only_long

import waystation
from waystation import grid
from waystation.errors import Corrupt, InvalidInput
from waystation.layouts.native import read, tables
from waystation.layouts.native.paged import PAGE_BYTES
from waystation.layouts.opened import Request

# Hypothesis reuses the directory of a test for all of its examples; they overwrite each other's files.
reusing_directory = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def all_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads read every table page by page."""
    monkeypatch.setitem(read.read_files.__kwdefaults__, "paged_from_bytes", 0)


@reusing_directory
@given(data=st.data())
def test_boxes_are_read_as_with_whole_tables(tmp_path: Path, data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 15), min_size=1, max_size=2)))
    boxes = data.draw(partitions(shape, most_cuts=200))
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(boxes), max_size=len(boxes)))
    partial = data.draw(st.booleans())
    written = [
        [(0, box) for box, owner in zip(boxes, owners, strict=True) if owner == process]
        for process in range(2 if partial else 3)
    ]
    whole = Program([shape], written)
    paged = whole.write(tmp_path, partial=partial)
    decoded = whole.merge(partial=partial)
    for box in [grid.whole(shape), *data.draw(st.lists(st.sampled_from(boxes), max_size=5))]:
        request = Request(0, [box])
        try:
            (expected,) = whole.read(decoded, [request])
        except InvalidInput:
            with pytest.raises(InvalidInput, match="local storage"):
                whole.read(paged, [request])
        else:
            assert np.array_equal(whole.read(paged, [request])[0], expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_runs_are_read_as_with_whole_tables(tmp_path: Path, transposed: bool) -> None:
    whole = program(transposed)
    paged = whole.write(tmp_path)
    requests = [Request(array, [grid.whole(source.shape)]) for array, source in enumerate(whole.sources)]
    for array, found in enumerate(whole.read(paged, requests)):
        assert np.array_equal(found, whole.values[array])


@pytest.mark.long
@only_long
def test_a_box_of_a_large_table_reads_a_few_pages(tmp_path: Path) -> None:
    count = 3000
    order = np.random.default_rng(0).permutation(count).tolist()
    # Rows in an order without runs, columns in boxes: the chunk table has 6,000 entries and as many boxes.
    written = [[(0, ((row, 0), (1, 2))), (1, ((0, 3 * row), (2, 2 + row % 2)))] for row in order]
    shapes = [(count, 2), (2, 3 * count)]
    holes = Program(shapes, written)
    paged = holes.write(tmp_path, partial=True)
    sizes = sum((tmp_path / name).stat().st_size for name in PATHS)
    found = holes.read(paged, [Request(0, [((1700, 0), (2, 2))]), Request(1, [((0, 5103), (2, 2))])])
    assert np.array_equal(found[0], holes.values[0][1700:1702])
    assert np.array_equal(found[1], holes.values[1][:, 5103:5105])
    assert sizes > 100 * PAGE_BYTES
    assert paged.page_bytes_read <= 25 * PAGE_BYTES
    before = paged.page_bytes_read
    holes.read(paged, [Request(0, [((1700, 0), (2, 2))])])
    assert paged.page_bytes_read == before


def test_a_section_behaves_like_the_array_of_its_entries(tmp_path: Path) -> None:
    whole = program()
    paged, decoded = whole.write(tmp_path), whole.merge()
    assert len(paged.files) == len(decoded.files) == PROCESSES
    for key in (7, slice(3, 60), slice(0, 0), slice(None), np.array([95, 0, 63]), "file_bytes"):
        assert open_paged(tmp_path).files[key].tobytes() == decoded.files[key].tobytes()
    assert paged.dims.tobytes() == decoded.dims.tobytes()
    assert (paged.arrays == decoded.arrays).all()
    assert bytes(paged.file_checksums(9)) == bytes(decoded.file_checksums(9))
    for beyond in (96, np.array([0, 96]), np.array([-1])):
        with pytest.raises(Corrupt, match="where there are 96"):
            paged.files[beyond]


@pytest.mark.parametrize("name", PATHS)
def test_damage_of_a_page_that_is_used_is_found(tmp_path: Path, name: str) -> None:
    whole = program()
    whole.write(tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[PAGE_BYTES + 5] ^= 1
    (tmp_path / name).write_bytes(content)

    def use_all() -> None:
        opened = open_paged(tmp_path)
        whole.read(opened, [Request(0, [grid.whole(whole.sources[0].shape)])])
        opened.file_checksums(0)

    with pytest.raises(Corrupt, match="does not match its checksum") as caught:
        use_all()
    assert caught.value.context["path"] == str(tmp_path / name)


def test_a_table_of_another_length_or_none_is_corrupt(tmp_path: Path) -> None:
    program().write(tmp_path)
    paths = [str(tmp_path / name) for name in PATHS]
    sizes = [(tmp_path / name).stat().st_size for name in PATHS]
    with pytest.raises(Corrupt, match="should have"):
        tables.open_paged((paths[0], paths[1], paths[2]), (sizes[0], sizes[1] + PAGE_BYTES, sizes[2]))
    (tmp_path / PATHS[0]).unlink()
    with pytest.raises(Corrupt, match="a committed file is missing"):
        tables.open_paged((paths[0], paths[1], paths[2]), (sizes[0], sizes[1], sizes[2]))


@pytest.mark.parametrize(
    ("field", "value"),
    [(4, 66), (16, 10**6), (24, 10**6), (24, 2**63), (32, 10**6), (40, 3), (40, 2**64 - 1)],
)
def test_array_entries_that_leave_their_sections_are_corrupt(tmp_path: Path, field: int, value: int) -> None:
    whole = program()
    whole.write(tmp_path)
    content = bytearray((tmp_path / "chunks.bin").read_bytes())
    struct.pack_into("<I" if field < 16 else "<Q", content, PAGE_BYTES + 48 + field, value)
    (tmp_path / "chunks.bin").write_bytes(with_checksums(bytes(content)))
    with pytest.raises(Corrupt, match="array 1 does not fit"):
        open_paged(tmp_path)


@pytest.mark.parametrize("value", [0, 1, 2**62, 2**64 - 1])
def test_a_number_of_runs_that_does_not_fit_is_corrupt(tmp_path: Path, value: int) -> None:
    whole = program()
    paged = whole.write(tmp_path)
    content = bytearray((tmp_path / "chunks.bin").read_bytes())
    dims = 1 + 1 + 1  # the pages of the header, the arrays and the chunks come first
    at = dims * PAGE_BYTES + 8 * (int(paged.arrays["first_dim"][0]) + 4)
    assert struct.unpack_from("<Q", content, at) == (7,)
    struct.pack_into("<Q", content, at, value)
    (tmp_path / "chunks.bin").write_bytes(with_checksums(bytes(content)))
    with pytest.raises(Corrupt, match="number of runs of array 0"):
        whole.read(open_paged(tmp_path), [Request(0, [((0, 0), (1, 1))])])


@pytest.mark.parametrize("mmap", [False, True])
def test_a_load_is_the_same(tmp_path: Path, all_paged: None, mmap: bool) -> None:
    state = {"a": np.arange(10_000.0), "b": [np.ones((3, 4), np.int8), np.zeros(0)], "c": 5}
    context = waystation.Context()
    context.array.saving.storage_options = waystation.StorageOptions(chunk_bytes=1 << 10)
    with context:
        waystation.save(tmp_path / "x", state)
    context.array.loading.mmap = mmap
    context.array.loading.verify = not mmap
    with context:
        loaded = waystation.load(tmp_path / "x")
        cast = waystation.load(tmp_path / "x", {**state, "a": np.zeros(10_000, np.float16)})
    assert np.array_equal(loaded["a"], state["a"])
    assert np.array_equal(loaded["b"][0], state["b"][0])
    assert loaded["c"] == 5
    assert np.array_equal(cast["a"], state["a"].astype(np.float16))


def test_damage_of_data_names_the_array(tmp_path: Path, all_paged: None) -> None:
    waystation.save(tmp_path / "x", {"a": np.arange(100_000), "b": np.ones(300_000)})
    (data,) = (tmp_path / "x" / "state").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(Corrupt) as caught:
        waystation.load(tmp_path / "x")
    assert caught.value.context["array"] in ("a", "b")


def test_metadata_files_survive_the_way_to_other_processes(tmp_path: Path) -> None:
    waystation.save(tmp_path / "x", {"a": np.arange(10)})
    record = read.open_checkpoint(str(tmp_path / "x"))
    directory, digest = record.checkpointables["state"]
    for limit, count in ((None, 4), (1 << 20, 4), (0, 1)):
        files = read.read_files(str(tmp_path / "x" / directory), digest, paged_from_bytes=limit)
        assert len(files.contents) == count
        assert read.MetadataFiles.unpack(files.pack()) == files
        opened = read.decode_checkpointable(files)
        assert opened.paths() == opened.paths([0])
