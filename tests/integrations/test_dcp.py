"""`waystation.integrations.dcp`: programs for torch's functions do the same on ours."""

from __future__ import annotations

import copy
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as genuine
from tests.integrations import dcp_scenarios
from tests.support.programs import running
from torch.distributed.checkpoint import staging, state_dict_saver

import waystation
import waystation.integrations.dcp as dcp
from waystation import errors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def _same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            _same(value, theirs[key])
    elif isinstance(ours, list | tuple):
        for one, other in zip(ours, theirs, strict=True):
            _same(one, other)
    elif isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


def _random_state(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for number in range(chance.randint(1, 4)):
        kinds = ["tensor", "int", "float", "str", "bool", "none", *(["dict", "list"] if depth < 3 else [])]
        value: Any
        match chance.choice(kinds):
            case "tensor":
                shape = [chance.randint(0, 4) for _ in range(chance.randint(0, 3))]
                dtype = chance.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool])
                value = torch.randint(0, 2, shape).to(dtype)
            case "int":
                value = chance.randint(-5, 1 << 40)
            case "float":
                value = chance.random()
            case "str":
                value = chance.choice(["", "words", "ä"])
            case "bool":
                value = chance.random() < 0.5
            case "none":
                value = None
            case "dict":
                value = _random_state(chance, depth + 1)
            case _:
                value = [torch.ones(chance.randint(1, 3)), chance.randint(0, 9)]
        made[f"key{number}"] = value
    return made


def _emptied(state: Any) -> Any:
    """The same with other values of the same kinds."""
    if isinstance(state, dict):
        return {key: _emptied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_emptied(value) for value in state]
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    return state if state is None else type(state)()


@pytest.mark.parametrize("seed", range(12))
def test_a_state_comes_back_as_from_torch(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    state = _random_state(random.Random(seed))
    outcomes = []
    for library in (genuine, dcp):
        path = tmp_path / library.__name__
        library.save(copy.deepcopy(state), checkpoint_id=path)
        wanted = _emptied(state)
        library.load(wanted, checkpoint_id=path)
        outcomes.append(wanted)
    _same(outcomes[1], outcomes[0])
    _same(outcomes[1], state)


def test_tensors_are_loaded_in_place_and_containers_stay_the_same(tmp_path: Path) -> None:
    model, optimizer = _trained()
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "c")
    again, other = _trained()
    weight, inner = again.weight, again.state_dict()
    wanted = {"model": inner, "optimizer": other.state_dict()}
    dcp.load(wanted, checkpoint_id=tmp_path / "c")
    assert again.weight is weight
    assert torch.equal(weight, model.weight)
    assert wanted["model"] is inner
    _same(wanted["optimizer"], optimizer.state_dict())


def test_a_run_goes_on_from_a_checkpoint_of_torch(tmp_path: Path) -> None:
    model, optimizer = _trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    genuine.save(state, checkpoint_id=tmp_path / "step-7")
    again, other = _trained()
    wanted = {"model": again.state_dict(), "optimizer": other.state_dict(), "step": 0}
    dcp.load(wanted, checkpoint_id=tmp_path / "step-7")
    _same(wanted, state)


def test_what_the_checkpoint_lacks_is_an_error_or_stays(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "more": torch.ones(3), "n": 5}, checkpoint_id=tmp_path / "c")
    new = torch.full((2,), 3.0)
    wanted = {"a": torch.zeros(2), "new": new, "m": 4}
    with pytest.raises(errors.StructureMismatch, match="new"):
        dcp.load(wanted, checkpoint_id=tmp_path / "c")
    dcp.load(
        wanted, checkpoint_id=tmp_path / "c", planner=genuine.DefaultLoadPlanner(allow_partial_load=True)
    )
    assert wanted["a"].tolist() == [1, 1]
    assert wanted["new"] is new
    assert new.tolist() == [3, 3]
    assert wanted["m"] == 4
    context = waystation.Context()
    context.pytree.loading.keep_missing = True  # which the error advises
    wanted["a"].zero_()
    with context:
        dcp.load(wanted, checkpoint_id=tmp_path / "c")
    assert wanted["a"].tolist() == [1, 1]
    assert (wanted["new"], wanted["m"]) == (new, 4)


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        ([1, 2, 3], []),
        ([1, 2, 3], [0]),
        ([1], [0, 0, 0]),
        ([], [1, 2]),
        ([[1, "a"], [2, "b"]], [[0]]),
        ((1, 2), [0]),
        ([1, 2], (0, 0)),
        ((1, "a", None), (0,)),
        (5, None),
        ([1, 2], None),
        ("text", 4),
        (None, 5),
        (None, torch.zeros(2)),
        ([torch.ones(2), 4, [7, 8]], [torch.zeros(2), 0, []]),
        ([{"a": 1, "l": [1, 2]}], [{"a": 0, "l": []}]),
        ({"l": [1, 2], "w": torch.ones(2)}, {"l": [], "w": torch.zeros(2)}),
    ],
)
def test_values_that_are_no_tensors_are_replaced_as_a_whole(tmp_path: Path, saved: Any, given: Any) -> None:
    outcomes = []
    for library in (genuine, dcp):
        path = tmp_path / library.__name__
        library.save({"v": copy.deepcopy(saved), "n": 1}, checkpoint_id=path)
        wanted = {"v": copy.deepcopy(given), "n": 0}
        library.load(wanted, checkpoint_id=path)
        outcomes.append(wanted)
    _same(outcomes[1], outcomes[0])
    _same(outcomes[1], {"v": saved, "n": 1})


def test_an_empty_list_beside_tensors_is_replaced(tmp_path: Path) -> None:
    dcp.save({"losses": [0.5, 0.25], "w": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    wanted: dict[str, Any] = {"losses": [], "w": torch.zeros(2)}
    dcp.load(wanted, checkpoint_id=tmp_path / "c")
    assert wanted["losses"] == [0.5, 0.25]


def test_tensors_of_tuples_are_loaded_in_place(tmp_path: Path) -> None:
    dcp.save({"pair": (torch.ones(2), {"n": 3})}, checkpoint_id=tmp_path / "c")
    own = torch.zeros(2)
    wanted = {"pair": (own, {"n": 0})}
    dcp.load(wanted, checkpoint_id=tmp_path / "c")
    assert wanted["pair"][0] is own
    assert own.tolist() == [1, 1]
    assert wanted["pair"][1] == {"n": 3}


def test_schedulers_with_dicts_of_other_classes_are_saved(tmp_path: Path) -> None:
    def scheduler(steps: int) -> torch.optim.lr_scheduler.MultiStepLR:
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        made = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 2])
        for _ in range(steps):
            optimizer.step()
            made.step()
        return made

    first, second = scheduler(3), scheduler(0)
    dcp.save({"scheduler": first, "size": torch.Size([2, 3])}, checkpoint_id=tmp_path / "c")
    wanted = {"scheduler": second, "size": None}
    dcp.load(wanted, checkpoint_id=tmp_path / "c")
    assert second.state_dict() == first.state_dict()
    assert type(second.milestones) is type(first.milestones)
    assert wanted["size"] == (2, 3)


@pytest.mark.parametrize("values", [[4, 5, 6, 7], [4], None])
def test_a_checkpoint_that_is_replaced_meanwhile_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[int] | None
) -> None:
    path = tmp_path / "c"
    dcp.save({"history": [1, 2, 3], "w": torch.ones(2)}, checkpoint_id=path)

    def load_replaced(*given: Any) -> Any:
        dcp.save({"history": values, "w": torch.zeros(2)}, checkpoint_id=path)
        return waystation.load(*given)

    monkeypatch.setattr(dcp, "load_state", load_replaced)
    wanted = {"history": [], "w": torch.full((2,), 9.0)}
    with pytest.raises(errors.Conflict, match="load it again"):
        dcp.load(wanted, checkpoint_id=path)
    assert wanted["history"] == []


def test_another_shape_is_an_error(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    wanted = {"a": torch.zeros(3)}
    with pytest.raises(errors.StructureMismatch, match="shape"):
        dcp.load(wanted, checkpoint_id=tmp_path / "c")
    assert wanted["a"].tolist() == [0, 0, 0]


def test_changes_after_an_asynchronous_save_are_not_saved(tmp_path: Path) -> None:
    weights = torch.ones(1 << 16)
    future = dcp.async_save({"w": weights}, checkpoint_id=tmp_path / "c")
    weights.zero_()
    assert future.result(60) is None
    wanted = {"w": torch.empty(1 << 16)}
    dcp.load(wanted, checkpoint_id=tmp_path / "c")
    assert wanted["w"].eq(1).all()


@pytest.mark.skipif(not hasattr(staging, "DefaultStager"), reason="older releases of torch lack it")
def test_a_stager_that_works_in_the_background_is_answered_as_torch_does(tmp_path: Path) -> None:
    weights = torch.ones(1 << 16)
    stager = staging.DefaultStager(staging.StagingOptions(False, False, True, False))
    try:
        both = dcp.async_save({"w": weights}, checkpoint_id=tmp_path / "c", async_stager=stager)
    finally:
        stager.close()
    assert isinstance(both, state_dict_saver.AsyncSaveResponse)
    both.staging_completion.result(60)
    both.upload_completion.result(60)


def test_a_failure_is_in_the_future_or_raised_at_once(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes.txt").write_text("mine")
    with pytest.raises(errors.Conflict):
        dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(errors.UnsupportedLeaf, match="object"):
        dcp.save({"w": object()}, checkpoint_id=tmp_path / "d")
    with pytest.raises(errors.InvalidInput, match="checkpoint_id"):
        dcp.save({"w": torch.ones(2)})
    with pytest.raises(errors.CheckpointNotFound):
        dcp.load({"w": torch.ones(2)}, checkpoint_id=tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_writer_says_where_and_whether_to_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "c"
    dcp.save({"w": torch.ones(2)}, storage_writer=genuine.FileSystemWriter(path))
    dcp.save({"w": torch.zeros(2)}, storage_writer=genuine.FileSystemWriter(path))
    with pytest.raises(errors.Conflict):
        dcp.save({"w": torch.ones(2)}, storage_writer=genuine.FileSystemWriter(path, overwrite=False))
    wanted = {"w": torch.ones(2)}
    dcp.load(wanted, storage_reader=genuine.FileSystemReader(path))
    assert wanted["w"].tolist() == [0, 0]
    assert waystation.is_checkpoint(path)


def test_other_planners_and_storages_are_torchs(tmp_path: Path) -> None:
    class Renaming(genuine.DefaultSavePlanner):
        pass

    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c", planner=Renaming())
    assert (tmp_path / "c" / ".metadata").exists()
    wanted = {"w": torch.zeros(2)}
    dcp.load(wanted, checkpoint_id=tmp_path / "c")
    assert wanted["w"].tolist() == [1, 1]
    assert dcp.FileSystemWriter is genuine.FileSystemWriter
    assert dcp.state_dict is genuine.state_dict


@pytest.fixture
def installed() -> Iterator[None]:
    dcp.install()
    yield
    dcp.uninstall()


def test_libraries_that_call_torch_save_with_ours(tmp_path: Path, installed: None) -> None:
    from torch.distributed.checkpoint import load, save

    save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    assert waystation.is_checkpoint(tmp_path / "c")
    wanted = {"w": torch.zeros(2)}
    load(wanted, checkpoint_id=tmp_path / "c")
    assert wanted["w"].tolist() == [1, 1]
    dcp.uninstall()
    assert genuine.save is not dcp.save
    genuine.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "d")
    assert not waystation.is_checkpoint(tmp_path / "d")


@pytest.mark.long
@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("by", "way", "count"),
    [("ours", "async", 2), ("torch", "save", 2), ("ours", "save", 4), ("ours", "save", 2)],
)
def test_an_fsdp_run_goes_on_bit_by_bit_in_other_numbers(
    tmp_path: Path, by: str, way: str, count: int
) -> None:
    scenario = dcp_scenarios.train_and_save
    with running(scenario, 3, by, way, count=2, framework="torch", directory=tmp_path) as programs:
        expected = programs.values()[0]
    with running(dcp_scenarios.resume, count=count, framework="torch", directory=tmp_path) as programs:
        for steps, whole in programs.values():
            assert steps == 3
            for name, value in whole.items():
                np.testing.assert_allclose(value, expected[name], rtol=0, atol=0 if count == 2 else 1e-6)


def test_groups_and_single_processes_save_alone(tmp_path: Path) -> None:
    with running(dcp_scenarios.some_save, count=3, framework="torch", directory=tmp_path) as programs:
        first, second, third = programs.values()
    assert first == [[0.0, 0.0]]
    assert second == [([1.0] * 4, 3), [1.0, 1.0]]
    assert third == [([1.0] * 4, 3), [2.0, 2.0]]


@pytest.mark.parametrize(("by", "asynchronous"), [("ours", True), ("ours", False), ("torch", False)])
def test_stages_with_different_keys_are_joined_as_by_torch(
    tmp_path: Path, by: str, asynchronous: bool
) -> None:
    scenario = dcp_scenarios.pipeline
    with running(scenario, by, asynchronous, count=4, framework="torch", directory=tmp_path) as programs:
        seen = programs.values()
    for index, found in enumerate(seen):
        stage = 1 - index // 2  # what it has loaded
        assert found["counter"] == [stage + 1] * 2
        assert found["loader"] == bytes([index]) * (70_000 if index == 3 else 3)
        assert found["step"] == 7
        torch.manual_seed(stage)
        for number in range(2):
            expected = torch.randn(5, 3).numpy()
            np.testing.assert_array_equal(found["model"][f"layers.{stage * 2 + number}.weight"], expected)
    if by == "ours":  # any program loads all of it
        assert not waystation.verify(tmp_path / "stages").damages
        whole = waystation.load(tmp_path / "stages", framework="numpy")
        assert list(whole["model"]) == [f"layers.{number}.weight" for number in range(4)]
        assert whole["counter_1"].tolist() == [2, 2]
        assert list(whole["loaders"]) == [f"rank_{number}" for number in range(4)]


def test_other_tensors_at_one_key_are_an_error_in_all_processes(tmp_path: Path) -> None:
    scenario = dcp_scenarios.other_tensors_at_one_key
    with running(scenario, count=2, framework="torch", directory=tmp_path) as programs:
        said = programs.values()
    assert "an array of float32 with shape (2,)" in said[0]
    assert "['part']['w']" in said[0]
    assert said[1] == said[0]


def test_of_tensors_that_differ_at_one_key_one_is_saved_whole(tmp_path: Path) -> None:
    with running(dcp_scenarios.differ_at_one_key, count=3, framework="torch", directory=tmp_path) as programs:
        first, *others = programs.values()
    assert len(first) == 1, "a tensor that one of them had"
    assert first[0] in (0.0, 1.0, 2.0)
    assert others == [first, first]


def test_a_key_that_is_missing_in_one_process_is_an_error_in_all(tmp_path: Path) -> None:
    with running(dcp_scenarios.missing_in_one, count=2, framework="torch", directory=tmp_path) as programs:
        assert [said[0] for said in programs.values()] == ["mismatch", "mismatch"]


def test_a_checkpoint_of_torch_is_not_replaced_and_the_error_says_what_it_is(tmp_path: Path) -> None:
    genuine.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(errors.Conflict, match=r"torch\.distributed\.checkpoint.*move it away") as raised:
        dcp.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "c")
    assert "inside" not in str(raised.value)


def test_modules_that_have_the_functions_by_name_get_ours(tmp_path: Path) -> None:
    library = types.ModuleType("library_of_this_test")
    library.__dict__.update(write=genuine.save, read=genuine.load, own=dcp.save)
    sys.modules[library.__name__] = library
    try:
        dcp.install()
        dcp.install()
        library.write({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c")
        assert waystation.is_checkpoint(tmp_path / "c")
        dcp.uninstall()
        library.write({"w": torch.ones(2)}, checkpoint_id=tmp_path / "d")
        assert not waystation.is_checkpoint(tmp_path / "d")
        assert library.own is dcp.save
    finally:
        del sys.modules[library.__name__]
