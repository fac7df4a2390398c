"""Every system that `make bench` compares really saves and loads the same bytes, in a process of its own.

The worker compares names, shapes, dtypes and every byte of what was loaded with what was saved, so a
system that is fast because it does less fails here.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.systems import SYSTEMS
from benchmarks.systems.limit import Way, check_pages, in_parallel
from benchmarks.worker import Request
from tests.support.benchmark_processes import measured

from benchmarks import measure, states

ROOT = Path(__file__).resolve().parents[2]
PURE = [name for name in SYSTEMS if name != "limit"]


def request(
    directory: Path, system: str, operation: str, way: str = "default", state: str = "tiny"
) -> Request:
    return Request(
        system=system,
        operation=operation,
        way=way,
        state=state,
        path=str(directory / "checkpoint"),
        scratch=str(directory / "scratch"),
        output=str(directory / "outcome.json"),
        quick=True,
        verify_all=True,
    )


def work(*requests: Request) -> list[dict[str, Any]]:
    """Lets one process measure all in turn; skips where a library is not installed."""
    outcomes = measured("benchmarks.worker", requests, Path(requests[0].output).parent)
    for outcome in outcomes:
        if outcome["status"] == "missing":
            pytest.skip(outcome["reason"])
        assert outcome["status"] == "ok", outcome.get("traceback", outcome)
    return outcomes


@pytest.mark.parametrize("name", [name for name in PURE if SYSTEMS[name].save_ways])
@pytest.mark.share(9)
def test_what_a_system_saves_it_loads_byte_for_byte(name: str, tmp_path: Path) -> None:
    loads = [request(tmp_path, name, "load-warm", way) for way in SYSTEMS[name].load_ways]
    saved, *loaded = work(request(tmp_path, name, "save"), *loads)
    assert saved["disk_bytes"] > 0
    assert [entry["arrays"] for entry in loaded] == [saved["arrays"]] * len(loads)


@pytest.mark.share(9)
@pytest.mark.parametrize("name", [name for name in PURE if SYSTEMS[name].saves_async])
def test_an_asynchronous_save_is_whole_when_it_has_been_waited_for(name: str, tmp_path: Path) -> None:
    saved, _ = work(
        request(tmp_path, name, "save-async", state="small"),
        request(tmp_path, name, "load-warm", SYSTEMS[name].load_ways[0], state="small"),
    )
    assert saved["seconds"]["blocking"] <= saved["seconds"]["durable"]


@pytest.mark.share(12)
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in PURE if not SYSTEMS[name].save_ways for way in SYSTEMS[name].load_ways],
)
def test_what_cannot_save_loads_what_its_writer_saved(name: str, way: str, tmp_path: Path) -> None:
    work(request(tmp_path, SYSTEMS[name].writer, "save"), request(tmp_path, name, "load-warm", way))


PUBLISHERS = [name for name in PURE if not SYSTEMS[name].load_ways]
READERS = [name for name in PURE if SYSTEMS[name].stream_ways]


@pytest.mark.share(3)
@pytest.mark.parametrize("name", READERS)
def test_a_stream_hands_over_every_array_and_the_first_of_them_first(name: str, tmp_path: Path) -> None:
    ways = SYSTEMS[name].stream_ways
    _, *streamed = work(
        request(tmp_path, "published-in-files", "save", state="small"),
        *(request(tmp_path, name, "stream-warm", way, state="small") for way in ways),
    )
    assert all(outcome["seconds"]["first"] <= outcome["seconds"]["loaded"] for outcome in streamed)


@pytest.mark.share(4)
@pytest.mark.parametrize("publisher", PUBLISHERS)
def test_what_is_published_in_any_form_is_loaded_in_every_framework(publisher: str, tmp_path: Path) -> None:
    state = "minilm" if publisher == "published-original" else "small"
    loads = [
        request(tmp_path, name, "load-warm", way, state=state)
        for name in ("waystation-safetensors-jax", "waystation-safetensors-torch", "safetensors-jax")
        for way in SYSTEMS[name].load_ways
    ]
    work(request(tmp_path, publisher, "save", state=state), *loads)


def test_files_are_of_about_equal_size_and_the_index_knows_them(tmp_path: Path) -> None:
    work(request(tmp_path, "published-in-files", "save", state="small"))
    files = sorted((tmp_path / "checkpoint").glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert min(sizes) > 0.8 * max(sizes)
    index = json.loads((tmp_path / "checkpoint" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_size"] == states.total_bytes(states.describe("small", quick=True))


def test_what_is_published_aligned_begins_at_multiples_of_64(tmp_path: Path) -> None:
    work(request(tmp_path, "published-aligned", "save", state="llama"))
    content = (tmp_path / "checkpoint" / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    begins = [
        8 + header_bytes + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    assert not [begin for begin in begins if begin % 64]


def test_what_is_in_the_page_cache_is_counted_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "written").write_bytes(os.urandom(10 * measure.PAGE_BYTES + 1))
    with (tmp_path / "never read").open("wb") as file:
        file.truncate(10 * measure.PAGE_BYTES)
    (tmp_path / "empty").touch()
    assert [measure.cached_bytes(tmp_path) for _ in range(2)] == [11 * measure.PAGE_BYTES] * 2


def test_the_raw_loops_move_every_page(tmp_path: Path) -> None:
    limit = SYSTEMS["limit"]
    save = next(way for way in limit.save_ways if way.startswith("threads buffered"))
    loads = [way for way in limit.load_ways if way.startswith("threads buffered")]
    work(
        request(tmp_path, "limit", "save", save, "llama"),
        *(request(tmp_path, "limit", "load-warm", way, "llama") for way in loads),
    )


def test_wrong_bytes_are_noticed(tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch")
    work(request(tmp_path, "safetensors-torch", "save", state="small"))
    file = tmp_path / "checkpoint" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(AssertionError, match=r"loaded wrong bytes: array .* differs"):
        work(request(tmp_path, "safetensors-torch", "load-warm", "mmap", state="small"))


def test_a_library_that_is_not_installed_is_reported_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "safetensors.py").write_text("raise ModuleNotFoundError(\"No module named 'safetensors'\")\n")
    text = request(tmp_path, "safetensors-torch", "save").to_json()
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv[1:] = [{text!r}]; "
    code += "from benchmarks.processes import answer; from benchmarks.worker import Request, run; "
    code += "answer(Request, run)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["status"] == "missing"
    assert "safetensors" in outcome["reason"]


def test_states_are_as_their_names_say() -> None:
    model = states.describe("llama")
    assert len(model) == 146
    assert 2.0e9 < states.total_bytes(model) < 2.5e9
    small = states.describe("small")
    assert len(small) == 4000
    assert {leaf.nbytes for leaf in small} == {1024, 2048, 3072, 4096}
    assert [leaf.nbytes for leaf in states.describe("one")] == [1 << 30]


def test_bytes_depend_on_the_name_alone() -> None:
    first, second = states.Leaf("a", (1000,), "bfloat16"), states.Leaf("b", (1000,), "bfloat16")
    assert (states.expected(first) == states.expected(first)).all()
    assert (states.expected(first) != states.expected(second)).any()


def test_a_page_out_of_place_is_noticed() -> None:
    pages = np.zeros((3, 512), np.uint64)
    pages[:, 0] = [0, 2, 1]
    assert not check_pages(pages.reshape(-1).view(np.uint8))
    pages[:, 0] = [0, 1, 2]
    assert check_pages(pages.reshape(-1).view(np.uint8))


def test_the_parts_of_the_raw_loops_cover_everything_once() -> None:
    for workers in (1, 2, 3, 4):
        parts: list[tuple[int, int]] = []
        in_parallel(workers, 10 * 4096, lambda begin, end, parts=parts: parts.append((begin, end)))
        ordered = sorted(parts)
        assert ordered[0][0] == 0
        assert ordered[-1][1] == 10 * 4096
        assert all(left[1] == right[0] for left, right in itertools.pairwise(ordered))


def test_ways_have_names_of_their_own() -> None:
    limit = SYSTEMS["limit"]
    assert len(set(limit.save_ways)) == len(limit.save_ways)
    assert len(set(limit.load_ways)) == len(limit.load_ways)
    assert Way("ring", True, 1 << 20, depth=4).name == "ring direct 1 MiB x1 depth 4"
