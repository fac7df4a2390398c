"""What a sequence of checkpoints does as genuine Orbax does it, and what it does otherwise on purpose. Random
calls of both are compared in `test_random_calls.py`."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.training import oracle
from tests.training.gates import Gate

import waystation
from waystation import errors
from waystation.training import Checkpointer

theirs = oracle.training

STATE = {"a": np.arange(4)}


def loss_of(metrics: dict[str, float]) -> float:
    return metrics["loss"]


def steps_of(checkpointer: Any) -> list[int]:
    return [info.step for info in checkpointer.checkpoints]


# ---- what differs on purpose: rows of the table in `docs/orbax.md` ------------------------------


def test_the_only_checkpoint_stays(tmp_path: Path) -> None:
    def save_with(training: Any, root: Path) -> list[int]:
        policy = training.preservation_policies.BestN(get_metric_fn=loss_of, n=0)
        with training.Checkpointer(root, preservation_policy=policy) as checkpointer:
            for step in range(2):
                checkpointer.save(step, STATE, metrics={"loss": 1.0})
            return steps_of(checkpointer)

    assert save_with(theirs, tmp_path / "theirs") == []
    assert save_with(waystation.training, tmp_path / "ours") == [1]


def test_an_overwrite_that_the_policy_refuses_deletes_nothing(tmp_path: Path) -> None:
    def save_with(training: Any, root: Path) -> list[int]:
        policy = training.save_decision_policies.SpecificStepsPolicy([0])
        with training.Checkpointer(root, save_decision_policy=policy) as checkpointer:
            for step in range(2):
                assert checkpointer.save(step, STATE, force=True)
            assert not checkpointer.save(1, STATE, overwrite=True)
            return steps_of(checkpointer)

    assert save_with(theirs, tmp_path / "theirs") == [0]
    assert save_with(waystation.training, tmp_path / "ours") == [0, 1]


def test_only_what_is_committed_is_listed(tmp_path: Path) -> None:
    def listed_meanwhile(training: Any, root: Path) -> list[int]:
        gate = Gate()
        with training.Checkpointer(root) as checkpointer:
            checkpointer.save_checkpointables_async(0, {"state": STATE, "gate": gate})
            listed = steps_of(checkpointer)
            gate.open()
            checkpointer.wait()
            assert steps_of(checkpointer) == [0]
            return listed

    assert listed_meanwhile(theirs, tmp_path / "theirs") == [0]
    assert listed_meanwhile(waystation.training, tmp_path / "ours") == []


def test_what_another_program_has_saved_is_not_overwritten(tmp_path: Path) -> None:
    def save_after_another(training: Any, root: Path) -> bool:
        with training.Checkpointer(root) as checkpointer:
            with training.Checkpointer(root) as another:
                another.save(0, STATE)
            return bool(checkpointer.save(0, {"a": np.zeros(4)}))

    assert save_after_another(theirs, tmp_path / "theirs")
    with pytest.raises(FileExistsError):
        save_after_another(waystation.training, tmp_path / "ours")
    with Checkpointer(tmp_path / "ours") as checkpointer:
        assert checkpointer.load()["a"].tolist() == [0, 1, 2, 3]


def test_nothing_is_saved_after_the_end(tmp_path: Path) -> None:
    def save_after_close(training: Any, root: Path) -> bool:
        checkpointer = training.Checkpointer(root)
        checkpointer.close()
        try:
            return bool(checkpointer.save(0, STATE))
        finally:
            checkpointer.close()

    assert save_after_close(theirs, tmp_path / "theirs")
    with pytest.raises(errors.InvalidInput, match="closed"):
        save_after_close(waystation.training, tmp_path / "ours")


# ---- what is the same --------------------------------------------------------------------------


def test_a_program_may_go_back(tmp_path: Path) -> None:
    """What counts as last is what was saved last, until the directory is read again."""

    def go_back(training: Any, root: Path) -> list[Any]:
        every_step = training.save_decision_policies.FixedIntervalPolicy(1)
        last_two = training.preservation_policies.LatestN(2)
        with training.Checkpointer(
            root, save_decision_policy=every_step, preservation_policy=last_two
        ) as checkpointer:
            for step in range(4):
                checkpointer.save(step, STATE)
            seen = [steps_of(checkpointer), checkpointer.should_save(1)]
            checkpointer.save(1, STATE, force=True)
            seen += [steps_of(checkpointer), checkpointer.latest.step, checkpointer.should_save(2)]
            checkpointer.save(2, STATE)
            seen += [steps_of(checkpointer), checkpointer.should_save(2)]
            checkpointer.save(0, STATE, force=True)
            checkpointer.reload()
            return [*seen, steps_of(checkpointer), checkpointer.should_save(1), checkpointer.should_save(3)]

    expected = go_back(theirs, tmp_path / "theirs")
    assert expected == [[2, 3], False, [1, 3], 3, True, [1, 2], False, [0, 2], False, True]
    assert go_back(waystation.training, tmp_path / "ours") == expected


def test_errors_are_those_of_orbax(tmp_path: Path) -> None:
    """What a call raises is caught by the same built-ins."""
    with theirs.Checkpointer(tmp_path / "theirs") as other, Checkpointer(tmp_path / "ours") as own:
        for checkpointer in (other, own):
            checkpointer.save(0, STATE)
        for wrong in (
            lambda checkpointer: checkpointer.save(0, STATE),
            lambda checkpointer: checkpointer.load(5),
            lambda checkpointer: checkpointer.metadata(5),
            lambda checkpointer: checkpointer.delete(5),
            lambda checkpointer: checkpointer.delete("5"),
            lambda checkpointer: checkpointer.delete(-5),
            lambda checkpointer: checkpointer.delete(0, checkpointable_name="absent"),
            lambda checkpointer: checkpointer.delete(0, checkpointable_name="state"),
            lambda checkpointer: checkpointer.delete(0, missing_ok=1),
            lambda checkpointer: checkpointer.save_checkpointables(1, {}),
            lambda checkpointer: checkpointer.save_checkpointables(1, {"metrics": STATE}),
        ):
            with pytest.raises(Exception) as wanted:  # noqa: PT011 - whatever Orbax raises
                wrong(other)
            built_in = next(base for base in type(wanted.value).__mro__ if base.__module__ == "builtins")
            with pytest.raises(built_in):
                wrong(own)


def test_metrics_alone_are_no_checkpoint(tmp_path: Path) -> None:
    for training in (theirs, waystation.training):
        with training.Checkpointer(tmp_path / training.__name__) as checkpointer:
            checkpointer.save(0, STATE, metrics={"loss": 1.0})
            with pytest.raises(ValueError, match="delete the"):
                checkpointer.delete(0, checkpointable_name="state")
            assert steps_of(checkpointer) == [0]


@pytest.mark.parametrize("what", ["metrics", "custom_metadata"])
def test_what_json_does_not_have_is_a_type_error_as_in_orbax(tmp_path: Path, what: str) -> None:
    """Orbax raises it from within a save, which it leaves half done; so it does not run here."""
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(TypeError, match=f"{what} must be a JSON value"):
            checkpointer.save(0, STATE, **{what: {"a": object()}})
        assert checkpointer.save(0, STATE)
        assert oracle.names_in(tmp_path) == ["0"]


def test_both_read_the_root_metadata_of_the_other(tmp_path: Path) -> None:
    theirs.Checkpointer(tmp_path / "theirs", custom_metadata={"run": [1, {"a": None}]}).close()
    Checkpointer(tmp_path / "ours", custom_metadata={"run": [1, {"a": None}]}).close()
    names = [path.relative_to(tmp_path / "theirs") for path in (tmp_path / "theirs").rglob("*")]
    assert sorted(names) == sorted(
        path.relative_to(tmp_path / "ours") for path in (tmp_path / "ours").rglob("*")
    )
    for root in ("ours", "theirs"):
        written = json.loads((tmp_path / root / "metadata" / "_ROOT_METADATA").read_text())
        assert written == {"internal_metadata": {}, "custom_metadata": {"run": [1, {"a": None}]}}
        with Checkpointer(tmp_path / root) as own, theirs.Checkpointer(tmp_path / root) as other:
            assert own.root_metadata().custom_metadata == other.root_metadata().custom_metadata
    with Checkpointer(tmp_path / "none") as own, theirs.Checkpointer(tmp_path / "none") as other:
        assert own.root_metadata().custom_metadata == other.root_metadata().custom_metadata == {}


@pytest.mark.parametrize("name", [name for name in vars(theirs.Checkpointer) if not name.startswith("_")])
def test_the_surface_is_that_of_orbax(name: str) -> None:
    other, own = getattr(theirs.Checkpointer, name), getattr(Checkpointer, name)
    if isinstance(other, property):
        assert isinstance(own, property)
        return
    wanted = inspect.signature(other).parameters
    assert [(parameter.name, parameter.kind, parameter.default) for parameter in wanted.values()] == [
        (parameter.name, parameter.kind, parameter.default)
        for parameter in inspect.signature(own).parameters.values()
        if parameter.name in wanted
    ]


def test_a_checkpointer_is_made_as_in_orbax() -> None:
    wanted = inspect.signature(theirs.Checkpointer).parameters.values()
    own = inspect.signature(Checkpointer).parameters
    for parameter in wanted:
        assert own[parameter.name].kind == parameter.kind
        assert own[parameter.name].default == parameter.default
