"""The same sequence of calls leaves the same steps as with genuine Orbax."""

from __future__ import annotations

import inspect
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.training import oracle

from waystation.training import Checkpointer, preservation_policies, save_decision_policies
from waystation.training.step_names import standard_name_format

theirs = oracle.training

STATE = {"a": np.arange(4)}


@dataclass(frozen=True)
class Call:
    """One save.

    Attributes:
        step: Its step.
        force: Whatever the policy says.
        loss: Metrics; None for none.
        is_repeated: Made twice.
    """

    step: int
    force: bool = False
    loss: float | None = None
    is_repeated: bool = False


@dataclass(frozen=True)
class Policies:
    """The policies of a sequence, by name and arguments, in either library."""

    save: tuple[str, tuple[Any, ...]]
    keep: tuple[str, dict[str, Any]]
    prefix: str | None = None

    def arguments(self, save_policies: Any, keep_policies: Any, formats: Any) -> dict[str, Any]:
        name, values = self.save
        keep_name, keep_values = self.keep
        return {
            "save_decision_policy": getattr(save_policies, name)(*values),
            "preservation_policy": getattr(keep_policies, keep_name)(**keep_values),
            "step_name_format": formats(step_prefix=self.prefix, step_format_fixed_length=4),
        }


def loss_of(metrics: dict[str, float]) -> float:
    return metrics["loss"]


def run(checkpointer: Any, calls: list[Call]) -> list[Any]:
    """Makes the calls; returns what each did: saved, skipped, or the built-in errors that it raised."""
    outcomes: list[Any] = []
    with checkpointer:
        for call in calls:
            for _ in range(2 if call.is_repeated else 1):
                metrics = None if call.loss is None else {"loss": call.loss}
                try:
                    outcomes.append(checkpointer.save(call.step, STATE, force=call.force, metrics=metrics))
                except FileExistsError:
                    outcomes.append(FileExistsError)
        outcomes.append([(info.step, info.metrics) for info in checkpointer.checkpoints])
        outcomes.append(None if checkpointer.latest is None else checkpointer.latest.step)
    return outcomes


@st.composite
def calls(draw: st.DrawFn) -> list[Call]:
    found, step = [], 0
    for gap, force, loss, is_repeated in draw(
        st.lists(
            st.tuples(
                st.integers(1, 3), st.booleans(), st.sampled_from([None, 0.5, 1.0, 2.0]), st.booleans()
            ),
            min_size=1,
            max_size=5,
        )
    ):
        found.append(Call(step, force, loss, is_repeated))
        step += gap
    return found


policies = st.builds(
    Policies,
    st.one_of(
        st.just(("InitialSavePolicy", ())),
        st.just(("ContinuousCheckpointingPolicy", ())),
        st.integers(1, 3).map(lambda n: ("FixedIntervalPolicy", (n,))),
        st.sets(st.integers(0, 8)).map(lambda steps: ("SpecificStepsPolicy", (frozenset(steps),))),
    ),
    st.one_of(
        st.just(("PreserveAll", {})),
        st.integers(1, 3).map(lambda n: ("LatestN", {"n": n})),
        # The last one stays, so that something always does; see the test below.
        st.integers(1, 3).map(lambda n: ("EveryNStepsClosest", {"interval_steps": n})),
        st.integers(1, 2).map(lambda n: ("BestN", {"get_metric_fn": loss_of, "n": n})),
    ),
    st.sampled_from([None, "step"]),
)


@settings(max_examples=15)
@example(
    Policies(("FixedIntervalPolicy", (2,)), ("LatestN", {"n": 1})),
    [Call(0), Call(1), Call(2, is_repeated=True)],
)
@given(policies, calls())
def test_the_same_steps_are_saved_and_kept(wanted: Policies, made: list[Call]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        other = theirs.Checkpointer(
            root / "theirs",
            **wanted.arguments(
                theirs.save_decision_policies,
                theirs.preservation_policies,
                oracle.ocp.path.step.standard_name_format,
            ),
        )
        own = Checkpointer(
            root / "ours",
            **wanted.arguments(save_decision_policies, preservation_policies, standard_name_format),
        )
        assert run(own, made) == run(other, made)
        assert oracle.names_in(root / "ours") == oracle.names_in(root / "theirs")


def test_the_only_checkpoint_stays_unlike_in_orbax(tmp_path: Path) -> None:
    made = [Call(0, loss=1.0), Call(1, loss=2.0)]
    kept = {"get_metric_fn": loss_of, "n": 0}
    other = theirs.Checkpointer(
        tmp_path / "theirs", preservation_policy=theirs.preservation_policies.BestN(**kept)
    )
    own = Checkpointer(tmp_path / "ours", preservation_policy=preservation_policies.BestN(**kept))
    assert run(other, made)[-2:] == [[], None]
    assert run(own, made)[-2:] == [[(1, {"loss": 2.0})], 1]


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
