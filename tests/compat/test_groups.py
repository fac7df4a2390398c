"""fastsafetensors' classes in groups of several real processes, tensor by tensor beside the genuine ones."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.compat import group_scenarios
from tests.support.long import only_long
from tests.support.programs import running

COUNTS = [1, 2, 4]
SHAPES = {"a": (8, 12), "b": (4, 8), "c": (16,), "d": (8, 4, 4), "e": (), "f": (4, 12), "g": (0, 4)}
# All backends send these; fastsafetensors sends no others over gloo.
DTYPES = [torch.float32, torch.float16, torch.int64, torch.uint8, torch.float32]


def write(directory: Path, dtypes: list[torch.dtype] = DTYPES, files: int = 5) -> Path:
    """A model in several files."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    for number in range(files):
        state = {
            f"{number}.{name}": torch.randint(0, 100, shape, generator=generator).to(
                dtypes[number % len(dtypes)]
            )
            for name, shape in SHAPES.items()
        }
        save_file(state, directory / f"model-{number}.safetensors", {"format": "pt"})
    return directory


def values(tmp_path: Path, count: int, scenario: Any, *arguments: Any) -> list[Any]:
    with running(scenario, *arguments, count=count, framework="torch", directory=tmp_path) as programs:
        return programs.values()


def assert_alike(found: list[Any]) -> None:
    for rank, pair in enumerate(found):
        assert isinstance(pair, tuple), pair
        assert pair[1] == pair[0], f"process {rank}"


@pytest.mark.parametrize("count", COUNTS)
def test_whole_tensors(tmp_path: Path, count: int) -> None:
    model = write(tmp_path / "model")
    found = values(tmp_path, count, group_scenarios.tensors, model)
    assert_alike(found)
    assert all(pair[1] == found[0][1] for pair in found)


@pytest.mark.parametrize("count", COUNTS)
def test_blocks(tmp_path: Path, count: int) -> None:
    model = write(tmp_path / "model")
    axes = {"0.a": 0, "1.a": 1, "2.b": 0, "3.c": 0, "4.d": 2, "0.d": 1, "1.e": -1, "2.f": -1}
    assert_alike(values(tmp_path, count, group_scenarios.blocks, model, axes))


@pytest.mark.parametrize("count", COUNTS)
def test_joined_blocks(tmp_path: Path, count: int) -> None:
    model = write(tmp_path / "model")
    groups = [["0.a", "0.f"], ["0.a"], ["4.a", "0.f", "0.a"]]
    assert_alike(values(tmp_path, count, group_scenarios.joined, model, groups))


@pytest.mark.parametrize("count", COUNTS)
def test_tensors_for_one_process(tmp_path: Path, count: int) -> None:
    model = write(tmp_path / "model")
    assert_alike(values(tmp_path, count, group_scenarios.pushed, model, ["0.a", "3.c", "4.d"]))


STREAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one at a time": {"queue_size": -1},
    "deep": {"queue_size": 2},
    "alone": {"broadcast_run_bytes": 0},
    "in parts": {"max_batch_bytes": 1024},
    "within a budget": {"device_memory_budget": 1 << 16, "max_batch_bytes": 2048},
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.share(3)
def test_streams(tmp_path: Path, count: int) -> None:
    model = write(tmp_path / "model")
    assert_alike(values(tmp_path, count, group_scenarios.streamed, model, STREAMS))


@pytest.mark.parametrize("count", COUNTS)
def test_the_weights_of_an_inference_server(tmp_path: Path, count: int) -> None:
    model = write(tmp_path / "model")
    assert_alike(values(tmp_path, count, group_scenarios.served, model))


def test_blocks_that_do_not_divide_evenly(tmp_path: Path) -> None:
    dtypes = [torch.float8_e4m3fn, torch.bfloat16, torch.uint16]
    model = write(tmp_path / "model", dtypes)
    from safetensors.torch import load_file

    for name, axis in (("0.f", 1), ("1.d", 2), ("2.b", 0)):
        whole = load_file(model / f"model-{name[0]}.safetensors")[name]
        step = -(-whole.shape[axis] // 3)
        starts = [min(rank * step, whole.shape[axis]) for rank in range(4)]
        expected = [
            group_scenarios.digest(whole.narrow(axis, begin, end - begin))
            for begin, end in itertools.pairwise(starts)
        ]
        assert values(tmp_path, 3, group_scenarios.uneven, model, name, axis) == expected


@pytest.mark.long
@only_long
def test_process_0_may_leave_before_the_others_have_their_parts(tmp_path: Path) -> None:
    assert values(tmp_path, 3, group_scenarios.left_early, 64 << 20) == [True] * 3


def test_a_file_that_one_process_cannot_read_fails_in_all(tmp_path: Path) -> None:
    model = write(tmp_path / "model", files=3)
    errors = values(tmp_path, 3, group_scenarios.damaged, model)
    assert [error.type for error in errors] == ["Conflict"] * 3
    assert [error.context.get("process") for error in errors] == [2, 2, None]


def test_a_killed_process_is_named_by_all_others(tmp_path: Path) -> None:
    model = write(tmp_path / "model", files=3)
    with running(group_scenarios.killed, model, count=3, framework="torch", directory=tmp_path) as programs:
        errors = [programs.report(index) for index in (0, 2)]
        for index in (0, 2):
            programs.send(index, None)
        ended = programs.end()
    assert [process.exit_code for process in ended] == [0, -signal.SIGKILL, 0]
    assert [(error.type, error.context["process"]) for error in errors] == [("Unavailable", 1)] * 2


def test_a_tensor_that_was_let_go_of_is_refused_in_all(tmp_path: Path) -> None:
    model = write(tmp_path / "model", files=2)
    errors = values(tmp_path, 2, group_scenarios.asked_twice, model)
    assert [error.type for error in errors] == ["InvalidInput"] * 2
