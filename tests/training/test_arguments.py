"""Arguments of a `Checkpointer` that cannot work are refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from waystation import errors, training


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("save_decision_policy", 10, "not 10"),
        ("save_decision_policy", training.save_decision_policies.InitialSavePolicy, "call it"),
        ("memory", True, "MemoryTier or None, not True"),
        ("preservation_policy", 3, "training.preservation_policies or None, not 3"),
        ("preservation_policy", training.preservation_policies.LatestN, "call it"),
        ("preservation_policy", [training.preservation_policies.LatestN(2)], "not "),
        ("step_name_format", "step_{}", "a name format of waystation.path.step or None"),
        ("logger", print, "an object with a method log_entry or None, not <built-in"),
        ("context", {}, "a waystation.Context or None, not {}"),
        ("max_saves_in_flight", "2", "an integer, not '2'"),
        ("max_saves_in_flight", True, "an integer, not True"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(
    tmp_path: Path, argument: str, value: Any, text: str
) -> None:
    with pytest.raises(errors.WrongType, match=text):
        training.Checkpointer(tmp_path, **{argument: value})


def test_a_state_in_the_place_of_the_step_is_refused_with_advice(tmp_path: Path) -> None:
    with training.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(errors.WrongType, match="not dict; give the step first, then the state"):
            checkpointer.save({"a": 1}, 3)  # type: ignore[arg-type]
        with pytest.raises(errors.WrongType, match="not dict; give the step first, then the state"):
            checkpointer.load({"a": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "given", "text"),
    [
        (training.preservation_policies.LatestN, "3", "n must be an integer or None, not '3'"),
        (
            training.preservation_policies.EveryNSteps,
            (2, True, 1.5),
            "max_to_keep must be an integer or None",
        ),
        (training.save_decision_policies.FixedIntervalPolicy, "3", "integer number of steps, not '3'"),
        (training.save_decision_policies.AnySavePolicy, 3, "a list of policies, not 3"),
        (training.save_decision_policies.AnySavePolicy, [3], "instances of policies, not 3"),
        (training.preservation_policies.AnyPreservationPolicy, [int], "instances of policies, not <class"),
        (training.save_decision_policies.SpecificStepsPolicy, 5, "container of steps, not 5"),
        (training.save_decision_policies.ContinuousCheckpointingPolicy, "3", "number of seconds, not '3'"),
        (training.preservation_policies.CustomSteps, 5, "a list of steps, not 5"),
        (training.preservation_policies.EveryNSeconds, "3", "a number of seconds, not '3'"),
        (training.preservation_policies.LatestDuration, 3, "a datetime.timedelta, not 3"),
    ],
)
def test_policies_that_cannot_work_are_refused_at_once(make: Any, given: Any, text: str) -> None:
    with pytest.raises(errors.WrongType, match=text):
        make(*given) if isinstance(given, tuple) else make(given)


def test_the_text_of_a_checkpointer_names_its_directory(tmp_path: Path) -> None:
    with training.Checkpointer(tmp_path / "run") as checkpointer:
        assert repr(checkpointer) == f"<Checkpointer: '{tmp_path}/run'>"


def test_metrics_may_be_scalars_of_any_framework(tmp_path: Path) -> None:
    metrics = {"numpy": np.float32(0.5), "jax": jnp.float32(1), "torch": torch.tensor(2)}
    several = {"all": [np.int64(3)]}
    with training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"x": np.ones(2)}, metrics=metrics | several)
        found = checkpointer.latest
        assert found is not None
        assert found.metrics == {"numpy": 0.5, "jax": 1.0, "torch": 2, "all": [3]}


def test_a_metric_that_is_no_function_is_refused_at_once() -> None:
    with pytest.raises(errors.WrongType, match="get_metric_fn must be a function of metrics, not 'loss'"):
        training.preservation_policies.BestN(get_metric_fn="loss", n=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("get_metric_fn", [lambda metrics: metrics["accuracy"], lambda _: None, str])
def test_a_function_without_a_number_names_the_step(tmp_path: Path, get_metric_fn: Any) -> None:
    policy = training.preservation_policies.BestN(get_metric_fn=get_metric_fn, n=1)
    every_step = training.save_decision_policies.FixedIntervalPolicy(1)
    with training.Checkpointer(
        tmp_path, save_decision_policy=every_step, preservation_policy=policy
    ) as checkpointer:
        checkpointer.save(1, {"a": 1}, metrics={"loss": 2.0})
        with pytest.raises(errors.InvalidInput, match="gives no number for the metrics") as caught:
            checkpointer.save(2, {"a": 1}, metrics={"loss": 3.0})
        assert caught.value.context["step"] == 1
        assert [info.step for info in checkpointer.checkpoints] == [1, 2]


def test_a_policy_that_answers_nothing_is_told_of(tmp_path: Path) -> None:
    class Silent(training.preservation_policies.PreservationPolicy):
        def should_preserve(self, checkpoints: Any, *, context: Any) -> Any:
            return None

    with (
        training.Checkpointer(tmp_path, preservation_policy=Silent()) as checkpointer,
        pytest.raises(errors.InvalidInput, match="was asked about 1 checkpoints and answered for 0"),
    ):
        checkpointer.save(1, {"a": 1}, force=True)
