"""Loads by the processes of a torch program together: who reads how much, and how they fail.

What each gets is in `test_placement.py`.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.published import group_scenarios
from tests.published.group_scenarios import bytes_of
from tests.support import disks
from tests.support.programs import Raised, running

from waystation import telemetry
from waystation.errors import Corrupt, InvalidInput
from waystation.safetensors import Divided, Only, load_in_group, write_checksums

MIB = 1 << 20
STATE = {
    "a": torch.arange(120.0).reshape(10, 12),
    "b": torch.arange(35, dtype=torch.int16).reshape(5, 7),
    "narrow": torch.arange(9.0).to(torch.float8_e4m3fn),
    "none": torch.zeros(0, 3),
    "packed": torch.arange(12, dtype=torch.uint8).reshape(4, 3).view(torch.float4_e2m1fn_x2),
    "scalar": torch.tensor(True),
    "vector": torch.arange(17, dtype=torch.int64),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for number in range(3):
        save_file(
            {f"{number}.{name}": tensor for name, tensor in STATE.items()},
            directory / f"{number}.safetensors",
        )
    return directory


def values(tmp_path: Path, count: int, scenario: Any, *arguments: Any) -> list[Any]:
    with running(scenario, *arguments, count=count, framework="torch", directory=tmp_path) as programs:
        return programs.values()


@pytest.mark.parametrize(("count", "send"), [(1, None), (2, True), (2, False), (4, True), (4, None)])
@pytest.mark.share(5)
def test_all_get_all(tmp_path: Path, model: Path, count: int, send: bool | None) -> None:
    expected = {f"{number}.{name}": bytes_of(tensor) for number in range(3) for name, tensor in STATE.items()}
    for found in values(tmp_path, count, group_scenarios.load, model, {"send": send}):
        assert dict(found) == expected


def test_choices_are_those_of_load(tmp_path: Path, model: Path) -> None:
    options = {"select": r"\.[ab]$", "rename": {"0.a": "first"}, "dtype": "bfloat16"}
    expected = [
        ("first" if name == "0.a" else name, bytes_of(tensor))
        for number in range(3)
        for name, tensor in ((f"{number}.a", STATE["a"].bfloat16()), (f"{number}.b", STATE["b"]))
    ]
    for found in values(tmp_path, 2, group_scenarios.load, model, options):
        assert found == expected


@pytest.mark.parametrize("limit", [1, 100, 100_000])
def test_a_limit_on_memory_makes_no_load_fail(tmp_path: Path, model: Path, limit: int) -> None:
    (expected,) = {tuple(found) for found in values(tmp_path, 2, group_scenarios.load, model, {"send": True})}
    options = {"send": True, "memory_limit": limit}
    for found in values(tmp_path, 2, group_scenarios.load, model, options):
        assert tuple(found) == expected


@pytest.mark.parametrize("send", [True, False])
def test_statistics_tell_what_was_read_and_what_was_received(tmp_path: Path, model: Path, send: bool) -> None:
    received = 0
    for (statistics,), held in values(tmp_path, 2, group_scenarios.told, model, {"send": send}):
        assert statistics.path == str(model)
        assert statistics.bytes_needed == held
        assert (statistics.bytes_received > 0) == send
        assert statistics.bytes_read >= statistics.bytes_needed - statistics.bytes_received
        received += statistics.bytes_received
    assert received == (held if send else 0)


def test_statistics_of_columns_and_casts_tell_what_each_process_needed(tmp_path: Path) -> None:
    """What it reads for others does not count, and what is cast counts as it is stored."""
    write_model(tmp_path / "model", 2)
    options = {
        "send": True,
        "dtype": "bfloat16",
        "placement": {f"0.{part}": Divided(1) for part in range(20)},
    }
    for (statistics,), held in values(tmp_path, 2, group_scenarios.told, tmp_path / "model", options):
        assert statistics.bytes_needed == 2 * held == 30 * MIB
        assert statistics.bytes_received > 0


def test_a_process_alone_needs_no_group(model: Path) -> None:
    found = load_in_group(model, group=None, placement={"0.a": Divided(0)})
    assert bytes_of(found["0.a"]) == bytes_of(STATE["a"])
    assert list(found) == [name for number in range(3) for name in found if name.startswith(f"{number}.")]


def test_a_process_outside_of_the_group_is_told_so(model: Path) -> None:
    outside = torch.distributed.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(InvalidInput, match="this process is not in the group"):
        load_in_group(model, group=outside)
    with pytest.raises(InvalidInput, match="no process group"):
        load_in_group(model, group=3)


def write_model(directory: Path, files: int) -> Path:
    """40 tensors of 1 MiB each, in so many files."""
    directory.mkdir()
    for number in range(files):
        state = {f"{number}.{part}": torch.randn(512, 512) for part in range(40 // files)}
        save_file(state, directory / f"{number}.safetensors")
    return directory


def bytes_of_files(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


@pytest.mark.share(3)
@pytest.mark.parametrize("files", [1, 5])
@pytest.mark.parametrize("place", [None, Divided(0), Divided(1)], ids=["all", "rows", "columns"])
def test_every_byte_is_read_by_one_process(tmp_path: Path, files: int, place: Any) -> None:
    directory = write_model(tmp_path / "model", files)
    names = [f"{number}.{part}" for number in range(files) for part in range(40 // files)]
    options = {"placement": dict.fromkeys(names, place), "send": True}
    counted = values(tmp_path, 4, group_scenarios.read, directory, options)
    assert [held for _, held, _ in counted] == [40 * MIB if place is None else 10 * MIB] * 4
    total = bytes_of_files(directory)
    assert 40 * MIB <= sum(nbytes for nbytes, _, _ in counted) <= 1.05 * total
    for nbytes, _, _ in counted:
        assert abs(nbytes - total / 4) < 3 * MIB


def test_who_reads_for_itself_reads_less_for_others(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", 5)
    placement = {f"0.{part}": Only(1) for part in range(8)}
    options = {"placement": placement, "send": True}
    counted = values(tmp_path, 4, group_scenarios.read, directory, options)
    assert [held for _, held, _ in counted] == [32 * MIB, 40 * MIB, 32 * MIB, 32 * MIB]
    for nbytes, _, _ in counted:
        assert abs(nbytes - 10 * MIB) < 2 * MIB


@pytest.mark.parametrize("place", [None, Divided(0), Divided(1)], ids=["all", "rows", "columns"])
@pytest.mark.share(3)
def test_each_reads_its_share_of_every_disk(tmp_path: Path, place: Any) -> None:
    """The larger part of the model is on the disk, the smaller one in memory: each process reads of both."""
    with disks.in_memory() as elsewhere:
        directory = write_model(tmp_path / "model", 5)
        placement = {f"{number}.{part}": place for number in range(5) for part in range(8)}
        for number in range(2):
            shutil.move(directory / f"{number}.safetensors", elsewhere)
        files = sorted([*directory.iterdir(), *elsewhere.iterdir()])
        options = {"placement": placement, "send": True}
        counted = values(tmp_path, 4, group_scenarios.read, files, options)
    for _, _, by_device in counted:
        slow, fast = sorted(by_device.values(), reverse=True)
        assert abs(slow - 6 * MIB) < 2 * MIB
        assert abs(fast - 4 * MIB) < 2 * MIB


@pytest.mark.share(3)
@pytest.mark.parametrize("send", [True, False])
@pytest.mark.parametrize("place", [None, Divided(0), Divided(1)], ids=["all", "rows", "columns"])
def test_memory_stays_within_its_limit(tmp_path: Path, place: Any, send: bool) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"large": torch.randn(1 << 12, 1 << 12)}, directory / "large.safetensors")
    options = {"placement": {"large": place}, "memory_limit": 8 * MIB, "send": send}
    found = values(tmp_path, 2, group_scenarios.peak, directory, options)
    for held, extra in found:
        assert held == 64 * MIB // (1 if place is None else 2)
        assert extra < 8 * MIB + 4 * MIB, "beside it what gloo and the interpreter allocate"


@pytest.mark.parametrize("place", [None, Divided(1)], ids=["all", "columns"])
def test_on_one_machine_each_reads_through_the_page_cache(tmp_path: Path, place: Any) -> None:
    directory = write_model(tmp_path / "model", 1)
    options = {"placement": {f"0.{part}": place for part in range(40)}}
    counted = values(tmp_path, 4, group_scenarios.read, directory, options)
    for nbytes, held, _ in counted:
        assert held == 40 * MIB // (1 if place is None else 4)
        assert nbytes >= 39 * MIB, "what lies between its own columns, too"


@pytest.mark.parametrize("place", [None, Divided(1)], ids=["all", "columns"])
def test_the_disk_of_one_machine_is_read_once(tmp_path: Path, place: Any) -> None:
    directory = write_model(tmp_path / "model", 5)
    options = {"placement": {f"{number}.{part}": place for number in range(5) for part in range(8)}}
    counted = values(tmp_path, 4, group_scenarios.read_cold, directory, options)
    assert sum(counted) <= 1.05 * bytes_of_files(directory)


def test_processes_with_files_of_their_own_send(tmp_path: Path) -> None:
    """As those of several machines with disks of their own do."""
    directory = write_model(tmp_path / "model", 1)
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    counted = values(tmp_path, 2, group_scenarios.read_copies, [directory, copy], {})
    for nbytes, held, _ in counted:
        assert held == 40 * MIB
        assert abs(nbytes - 20 * MIB) < 3 * MIB


def test_memory_is_bounded_and_all_arrive(tmp_path: Path, model: Path) -> None:
    options = {"memory_limit": 8 * MIB, "send": True}
    found = values(tmp_path, 2, group_scenarios.load, model, options)
    assert found[0] == found[1] == values(tmp_path, 2, group_scenarios.load, model, {})[0]


def test_different_models_are_refused_in_all(tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(3)}, other)
    errors = values(tmp_path, 2, group_scenarios.different, [model, other])
    assert [error.type for error in errors] == ["InvalidInput"] * 2
    assert all("different files, select, rename or join" in error.message for error in errors)


@pytest.mark.parametrize("send", [True, None])
def test_models_that_differ_in_their_values_alone_are_refused_in_all(
    tmp_path: Path, model: Path, send: bool | None
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    state = {f"1.{name}": tensor for name, tensor in STATE.items()}
    save_file(state | {"1.b": state["1.b"] + 1}, other / "1.safetensors")
    errors = values(tmp_path, 3, group_scenarios.different, [model, model, other], {"send": send})
    assert [error.type for error in errors] == ["InvalidInput"] * 3
    assert {error.message for error in errors} == {
        "processes 0 and 2 load different models together: the values of '1.b' are not the same in "
        f"'{model}' and '{other}'; give all of them the same model"
    }


@pytest.mark.parametrize("send", [True, None])
def test_each_may_have_a_copy(tmp_path: Path, model: Path, send: bool | None) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    expected = {f"{number}.{name}": bytes_of(tensor) for number in range(3) for name, tensor in STATE.items()}
    for found in values(tmp_path, 2, group_scenarios.different, [model, other], {"send": send}):
        assert dict(found) == expected


def test_a_damaged_tensor_is_told_of_by_a_process_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    write_checksums(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="checksum"):
        load_in_group(path, group=None)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_tensors_without_elements_are_sent_beside_others(tmp_path: Path, shape: tuple[int, ...]) -> None:
    model = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3), "e": torch.zeros(shape)}, model)
    for found in values(tmp_path, 2, group_scenarios.load, model, {"send": True}):
        assert dict(found)["e"] == ("torch.float32", shape, b"")


def test_what_one_process_alone_gives_wrongly_is_raised_by_all(tmp_path: Path, model: Path) -> None:
    errors = values(tmp_path, 2, group_scenarios.different_options, model, [{}, {"memory_limit": -1}])
    assert [(error.type, error.context.get("process")) for error in errors] == [
        ("InvalidInput", 1),
        ("InvalidInput", None),
    ]


def test_what_a_function_raises_in_one_process_is_named_in_all(tmp_path: Path, model: Path) -> None:
    options = [{}, {"select": group_scenarios.fails}]
    other, own = values(tmp_path, 2, group_scenarios.different_options, model, options)
    assert own.type == "KeyError"
    assert (other.type, other.message) == ("ProcessFailed", "process 1 raised KeyError: 'of the program'")


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        ({}, {"dtype": "bfloat16"}, "dtype"),
        ({}, {"placement": {"0.a": Only(0)}}, "placement or join"),
        ({"select": "a"}, {"select": "b"}, "files, select, rename or join"),
        ({"send": True}, {"send": False}, "send"),
    ],
)
def test_an_argument_that_differs_is_named(
    tmp_path: Path, model: Path, first: dict[str, Any], second: dict[str, Any], differs: str
) -> None:
    for error in values(tmp_path, 2, group_scenarios.different_options, model, [first, second]):
        assert f"were given different {differs};" in error.message


@pytest.mark.parametrize("placement", [{}, {"2.a": Only(0)}])
def test_what_one_cannot_read_fails_in_all(tmp_path: Path, model: Path, placement: dict[str, Any]) -> None:
    options = {"placement": placement, "send": True}
    errors = values(tmp_path, 3, group_scenarios.broken, model, "2.safetensors", options)
    assert all(isinstance(error, Raised) for error in errors), errors
    assert [error.type for error in errors] == ["Conflict"] * 3
    processes = [error.context.get("process") for error in errors]
    (failed,) = [rank for rank, process in enumerate(processes) if process is None]
    assert processes == [None if rank == failed else failed for rank in range(3)]


def test_what_all_read_fails_in_all(tmp_path: Path, model: Path) -> None:
    errors = values(tmp_path, 2, group_scenarios.broken, model, "2.safetensors", {})
    assert [error.type for error in errors] == ["Conflict"] * 2


def test_what_one_cannot_open_fails_in_all(tmp_path: Path, model: Path) -> None:
    """Each host has a copy of its own, and one of them lacks a file."""
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "1.safetensors").write_bytes(b"damaged!")
    errors = values(tmp_path, 3, group_scenarios.different, [model, copy, model])
    assert [error.type for error in errors] == ["Corrupt"] * 3
    assert [error.context.get("process") for error in errors] == [1, None, 1]
    assert {error.context["path"] for error in errors} == {str(copy / "1.safetensors")}


@pytest.mark.parametrize(("victim", "send"), [(0, True), (1, None), (2, True)])
def test_an_interrupted_process_is_named_by_all_others_and_all_may_load_again(
    tmp_path: Path, model: Path, victim: int, send: bool | None
) -> None:
    found = values(tmp_path, 3, group_scenarios.interrupted, model, victim, {"send": send})
    expected = {f"{number}.{name}": bytes_of(tensor) for number in range(3) for name, tensor in STATE.items()}
    for index, (first, again) in enumerate(found):
        told = first if index == victim else (first.type, first.context["process"])
        assert told == ("interrupted" if index == victim else ("Cancelled", victim))
        assert again == expected


@pytest.mark.share(2)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_interrupted_while_tensors_are_sent_is_named_by_all_others(
    tmp_path: Path, model: Path, victim: int
) -> None:
    expected = {f"{number}.{name}": bytes_of(tensor) for number in range(3) for name, tensor in STATE.items()}
    for index, found in enumerate(values(tmp_path, 3, group_scenarios.interrupted_sending, model, victim)):
        first, again, in_another_group = found
        told = first if index == victim else (first.type, first.context["process"])
        assert told == ("interrupted" if index == victim else ("Cancelled", victim))
        assert again.type == "InvalidInput"
        assert "give another group" in again.message
        assert in_another_group == expected


@pytest.mark.share(3)
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("where", ["reading", "sending"])
def test_a_killed_process_is_named_by_all_others(
    tmp_path: Path, model: Path, victim: int, where: str
) -> None:
    with running(
        *(group_scenarios.killed, model, victim, where, {"send": True}),
        count=3,
        framework="torch",
        directory=tmp_path,
    ) as programs:
        survivors = [index for index in range(3) if index != victim]
        errors = [programs.report(index) for index in survivors]
        for index in survivors:
            programs.send(index, None)
        ended = programs.end()
    assert ended[victim].exit_code == -signal.SIGKILL
    assert [(error.type, error.context["process"]) for error in errors] == [("Unavailable", victim)] * 2


def test_what_is_no_group_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="process group"):
        load_in_group(model, group="world")


def test_a_load_that_fails_as_it_opens_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"damaged!")
    seen: list[Any] = []
    with telemetry.subscribe(seen.append), pytest.raises(ValueError, match="safetensors"):
        load_in_group(tmp_path / "model.safetensors", group=None)
    assert [type(each).__name__ for each in seen] == ["TransferFailure"]
