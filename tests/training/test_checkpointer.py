"""A `Checkpointer` saves, lists, loads and deletes steps."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support.places import names_in
from tests.training.gates import Gate

import waystation
from waystation import errors
from waystation.storage import AnyPath
from waystation.training import (
    Checkpointer,
    CheckpointMetadata,
    RootMetadata,
    preservation_policies,
    save_decision_policies,
)
from waystation.training.step_names import composite_name_format, standard_name_format

EVERY_STEP = save_decision_policies.FixedIntervalPolicy(1)


def state(step: int) -> dict[str, Any]:
    return {"weights": jnp.arange(8.0) + step, "host": np.full(3, step), "step": step}


def seed_of(loaded: dict[str, Any]) -> int:
    step = int(loaded["step"])
    np.testing.assert_array_equal(np.asarray(loaded["weights"]), np.arange(8.0) + step)
    np.testing.assert_array_equal(loaded["host"], np.full(3, step))
    return step


def steps_of(checkpointer: Checkpointer) -> list[int]:
    return [info.step for info in checkpointer.checkpoints]


def test_a_new_directory_is_made_and_empty(directory: AnyPath) -> None:
    with Checkpointer(directory / "a" / "b") as checkpointer:
        assert checkpointer.directory == directory / "a" / "b"
        assert not isinstance(directory, Path) or (directory / "a" / "b").is_dir()
        assert checkpointer.latest is None
        assert list(checkpointer.checkpoints) == []
        with pytest.raises(errors.StepNotFoundError, match="no checkpoint"):
            checkpointer.load()


def test_steps_are_saved_and_loaded(directory: AnyPath) -> None:
    with Checkpointer(directory, save_decision_policy=EVERY_STEP) as checkpointer:
        assert checkpointer.save(0, state(0))
        response = checkpointer.save_async(1, state(1))
        assert response is not None
        assert response.result() is True
        assert steps_of(checkpointer) == [0, 1]
        assert seed_of(checkpointer.load()) == 1
        assert seed_of(checkpointer.load(0)) == 0
        assert seed_of(checkpointer.load(checkpointer.checkpoints[0])) == 0
        abstract = jax.tree.map(lambda leaf: leaf, checkpointer.metadata(1).metadata)
        assert seed_of(checkpointer.load(1, abstract)) == 1
        assert seed_of(checkpointer.load(1, checkpointer.metadata(0))) == 1
    with Checkpointer(directory) as again:
        assert steps_of(again) == [0, 1]
        assert seed_of(again.load_async().result()) == 1
        assert seed_of(waystation.load(directory / "0")) == 0


def test_what_is_loaded_in_the_background_sees_the_options_of_the_call(directory: AnyPath) -> None:
    context = waystation.Context()
    context.array.loading.restore_on_host = True
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(0, state(0))
        with context:
            loading = checkpointer.load_async(0)
        assert isinstance(loading.result()["weights"], np.ndarray)
        assert isinstance(checkpointer.load_async(0).result()["weights"], jax.Array)


def test_checkpointables_are_saved_and_loaded_by_name(directory: AnyPath) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save_checkpointables(
            0, {"state": state(0), "dataset": {"position": 17}}, metrics={"loss": 1.5}
        )
        found = checkpointer.load_checkpointables(0)
        assert found.keys() == {"state", "dataset"}
        assert found["dataset"] == {"position": 17}
        only = checkpointer.load_checkpointables(0, {"dataset": None})
        assert only == {"dataset": {"position": 17}}
        assert checkpointer.load_checkpointables_async(0, {"dataset": None}).result() == only
        described = checkpointer.checkpointables_metadata(0)
        assert described.metadata.keys() == {"state", "dataset"}
        assert described.metrics == {"loss": 1.5}
        assert seed_of(checkpointer.load(0, checkpointable_name="state")) == 0


def test_metadata_and_metrics_outlive_the_program(directory: AnyPath) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(3, state(3), metrics={"loss": 0.5}, custom_metadata={"commit": "1f3c9a"})
        before = checkpointer.metadata(3)
        assert checkpointer.latest is not None
        assert checkpointer.latest.metrics == {"loss": 0.5}
    with Checkpointer(directory) as again:
        after = again.metadata()
        assert isinstance(after, CheckpointMetadata)
        assert (after.step, after.path, after.metrics) == (3, directory / "3", {"loss": 0.5})
        assert after.custom_metadata == {"commit": "1f3c9a"}
        assert after.metadata.keys() == {"weights", "host", "step"}
        assert after.init_timestamp_nsecs is not None
        assert after.commit_timestamp_nsecs is not None
        assert after.init_timestamp_nsecs <= after.commit_timestamp_nsecs
        assert (after.time, after.metrics) == (before.time, before.metrics)
        assert again.latest is not None
        assert (again.latest.time, again.latest.metrics) == (before.time, before.metrics)


@pytest.mark.parametrize("use_ocdbt", [None, True], ids=["native", "orbax"])
def test_metrics_and_json_may_hold_no_numbers(tmp_path: Path, use_ocdbt: bool | None) -> None:
    """They come back as the floats they were; the files of the native layout are JSON all the same."""
    values = {"loss": math.nan, "norms": (math.inf, -math.inf, 1.5), "name": "nan"}
    registry = waystation.handlers.local_registry()
    registry.add(waystation.handlers.JsonHandler, checkpointable_name="config")
    context = waystation.Context()
    context.array.saving.use_ocdbt = use_ocdbt
    context.checkpointables.registry = registry
    with context:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_checkpointables(0, {"state": state(0), "config": values}, metrics=values)
        with Checkpointer(tmp_path) as again:
            assert again.latest is not None
            found = [again.latest.metrics, again.load_checkpointables(0)["config"]]
    for read in found:
        assert math.isnan(read["loss"])
        assert read["norms"] == [math.inf, -math.inf, 1.5]
        assert read["name"] == "nan"
    for name in ("metrics", "data.json"):
        (file,) = (path for path in tmp_path.rglob(name) if path.is_file())
        parsed = json.loads(file.read_text(), parse_constant=lambda name: f"not JSON: {name}")
        assert parsed["loss"] == ({"waystation.float": "nan"} if use_ocdbt is None else "not JSON: NaN")


def test_the_policy_decides_unless_forced(directory: AnyPath) -> None:
    policy = save_decision_policies.FixedIntervalPolicy(2)
    with Checkpointer(directory, save_decision_policy=policy) as checkpointer:
        assert [checkpointer.should_save(step) for step in range(3)] == [True, False, True]
        assert [checkpointer.save(step, state(step)) for step in range(4)] == [True, False, True, False]
        assert checkpointer.save_async(5, state(5)) is None
        assert checkpointer.save(5, state(5), force=True)
        assert steps_of(checkpointer) == [0, 2, 5]
        assert not checkpointer.should_save(4), "a later step has a checkpoint"


def test_a_step_is_saved_once_unless_told_to_overwrite(directory: AnyPath) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(0, state(0))
        with pytest.raises(errors.StepAlreadyExistsError, match="overwrite=True") as caught:
            checkpointer.save(0, state(9))
        assert isinstance(caught.value, FileExistsError)
        assert caught.value.context["step"] == 0
        assert seed_of(checkpointer.load(0)) == 0
        assert checkpointer.save(0, state(9), overwrite=True)
        assert seed_of(checkpointer.load(0)) == 9
        assert steps_of(checkpointer) == [0]


def test_an_overwrite_that_the_policy_refuses_leaves_what_is_there(directory: AnyPath) -> None:
    with Checkpointer(
        directory, save_decision_policy=save_decision_policies.SpecificStepsPolicy([0])
    ) as checkpointer:
        checkpointer.save(0, state(0))
        checkpointer.save(1, state(1), force=True)
        assert not checkpointer.save(1, state(5), overwrite=True)
        assert seed_of(checkpointer.load(1)) == 1


def test_names_follow_the_format(directory: AnyPath) -> None:
    padded = standard_name_format(step_prefix="step", step_format_fixed_length=6)
    with Checkpointer(directory, step_name_format=padded) as checkpointer:
        checkpointer.save(12, state(12))
        assert names_in(directory) == ["step_000012"]
    both = composite_name_format(standard_name_format(), [standard_name_format(), padded])
    with Checkpointer(directory, step_name_format=both) as again:
        assert seed_of(again.load(12)) == 12
        again.save(13, state(13))
        assert names_in(directory) == ["13", "step_000012"]
        assert steps_of(again) == [12, 13]
        assert again.delete(12)
        assert names_in(directory) == ["13"]


def test_a_step_that_is_still_being_saved_is_deleted_once_it_is_there(directory: AnyPath) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save_async(1, {"x": np.zeros(10_000_000)})
        assert checkpointer.delete(1)
        checkpointer.save_async(2, {"x": np.zeros(10_000_000)})
        assert checkpointer.delete_async(2).result()
        assert (list(checkpointer.checkpoints), names_in(directory)) == ([], [])


def test_a_step_is_deleted_whole_or_in_part(directory: AnyPath) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save_checkpointables(0, {"state": state(0), "dataset": {"position": 1}})
        checkpointer.save(1, state(1))
        assert checkpointer.delete(0, checkpointable_name="dataset")
        assert checkpointer.load_checkpointables(0).keys() == {"state"}
        assert checkpointer.delete_async(0).result()
        assert steps_of(checkpointer) == [1]
        assert names_in(directory) == ["1"]
        assert not checkpointer.delete(0, missing_ok=True)
        with pytest.raises(FileNotFoundError):
            checkpointer.delete(0)


@pytest.mark.parametrize("step", ["1", 1.5, None, True])
def test_a_step_is_an_integer(directory: AnyPath, step: Any) -> None:
    with Checkpointer(directory) as checkpointer:
        with pytest.raises(TypeError):
            checkpointer.delete(step)
        with pytest.raises(TypeError):
            checkpointer.save(step, state(0))


def test_a_step_may_be_an_array_but_not_negative(directory: AnyPath) -> None:
    with Checkpointer(directory) as checkpointer:
        assert checkpointer.save(jnp.int32(2), state(2))  # type: ignore[arg-type]
        assert checkpointer.save(np.int64(3), state(3))  # type: ignore[arg-type]
        assert steps_of(checkpointer) == [2, 3]
        with pytest.raises(ValueError, match="negative"):
            checkpointer.save(-1, state(0))


def test_changes_of_others_are_seen_after_a_reload(directory: AnyPath) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(0, state(0))
        checkpointer.save(1, state(1))
        waystation.delete(directory / "1")
        waystation.save(directory / "7", state(7))
        assert steps_of(checkpointer) == [0, 1]
        checkpointer.reload()
        assert steps_of(checkpointer) == [0, 7]


def test_a_step_that_another_program_has_removed_is_passed_over(directory: AnyPath) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(0, state(0))
        checkpointer.save(1, state(1))
        waystation.delete(directory / "1")
        assert seed_of(checkpointer.load()) == 0
        with pytest.raises(errors.StepNotFoundError, match="the last ones are: 0"):
            checkpointer.load(1)


def test_root_metadata_is_written_once(directory: AnyPath) -> None:
    with Checkpointer(directory, custom_metadata={"model": "small"}):
        pass
    with Checkpointer(directory, custom_metadata={"model": "large"}) as again:
        found = again.root_metadata()
        assert isinstance(found, RootMetadata)
        assert (found.directory, found.custom_metadata) == (directory, {"model": "small"})
    with pytest.raises(errors.InvalidInput, match="custom_metadata"):
        Checkpointer(directory / "other", custom_metadata={"model": object()})


def test_without_records_everything_is_there_but_times_and_metrics(directory: AnyPath) -> None:
    policy = preservation_policies.BestN(get_metric_fn=lambda found: found["score"], n=2)
    with Checkpointer(directory) as checkpointer:
        for step, score in enumerate([5, 1, 4, 2]):
            checkpointer.save(step, state(step), metrics={"score": score})
    with Checkpointer(directory, lightweight_initialize=True, preservation_policy=policy) as light:
        assert steps_of(light) == [0, 1, 2, 3]
        assert light.latest is not None
        assert (light.latest.metrics, light.latest.commit_timestamp_nsecs) == (None, None)
        assert seed_of(light.load()) == 3
        light.save(4, state(4), metrics={"score": 3})
        assert steps_of(light) == [0, 2], "the policy was shown the metrics"


def test_the_context_around_a_call_comes_first(directory: AnyPath) -> None:
    own, other = waystation.Context(), waystation.Context()
    own.array.saving.storage_options.dtype = "bfloat16"
    with Checkpointer(directory, context=own) as checkpointer:
        checkpointer.save(0, {"a": jnp.ones(3)})
        with other:
            checkpointer.save(1, {"a": jnp.ones(3)})
        assert [str(checkpointer.load(step)["a"].dtype) for step in (0, 1)] == ["bfloat16", "float32"]


def test_the_context_of_the_making_is_kept(directory: AnyPath) -> None:
    context = waystation.Context()
    context.array.saving.storage_options.dtype = "bfloat16"
    with context:
        checkpointer = Checkpointer(directory)
    with checkpointer:
        checkpointer.save(0, {"a": jnp.ones(3)})
        assert str(checkpointer.load(0)["a"].dtype) == "bfloat16"


def test_leftovers_are_cleaned_up_only_if_asked_for(tmp_path: Path) -> None:
    (tmp_path / "3.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    dead = "0" * 12 + "-1-1-" + "0" * 8
    Checkpointer(tmp_path).close()
    assert (tmp_path / "3.orbax-checkpoint-tmp").exists()
    unknown = tmp_path / f"4.waystation-tmp-{dead}"
    unknown.mkdir()
    Checkpointer(tmp_path, cleanup_tmp_directories=True).close()
    assert not (tmp_path / "3.orbax-checkpoint-tmp").exists()
    assert unknown.exists(), "of another system, so nothing proves that its process is gone"


def test_a_closed_checkpointer_begins_nothing(directory: AnyPath) -> None:
    checkpointer = Checkpointer(directory)
    checkpointer.save(0, state(0))
    checkpointer.close()
    checkpointer.close()
    assert steps_of(checkpointer) == [0]
    with pytest.raises(errors.InvalidInput, match="closed"):
        checkpointer.save(1, state(1))


def test_the_logger_is_told(directory: AnyPath) -> None:
    entries: list[dict[str, Any]] = []

    class Logger:
        def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
            entries.append(msg)

    with Checkpointer(directory, logger=Logger()) as checkpointer:
        checkpointer.save(0, state(0))
        checkpointer.load()
    assert [(entry["event_type"], entry["step"]) for entry in entries] == [("save", 0), ("restore", 0)]
    assert all(entry["blocking_s"] >= 0 for entry in entries)


def test_older_names_say_that_they_are(directory: AnyPath) -> None:
    with Checkpointer(directory) as checkpointer:
        with pytest.warns(DeprecationWarning, match="use save"):
            assert checkpointer.save_pytree(0, state(0))
        with pytest.warns(DeprecationWarning, match="use load"):
            assert seed_of(checkpointer.load_pytree(0)) == 0
        with pytest.warns(DeprecationWarning, match="use metadata"):
            assert checkpointer.pytree_metadata(0).step == 0


def test_a_save_of_what_cannot_be_saved_changes_nothing(directory: AnyPath) -> None:
    with Checkpointer(directory) as checkpointer:
        with pytest.raises(errors.Unsupported):
            checkpointer.save(0, {"a": object()})
        with pytest.raises(errors.InvalidInput, match="metrics"):
            checkpointer.save(0, state(0), metrics={"a": object()})
        assert not checkpointer.is_saving_in_progress()
        assert checkpointer.latest is None
        assert checkpointer.save(0, state(0))


def test_a_save_is_in_progress_until_it_has_ended(directory: AnyPath) -> None:
    gate = Gate()
    with Checkpointer(directory) as checkpointer:
        response = checkpointer.save_checkpointables_async(0, {"state": state(0), "gate": gate})
        assert response is not None
        assert checkpointer.is_saving_in_progress()
        assert checkpointer.latest is None, "the commit is not there"
        assert not checkpointer.should_save(1), "the default policy does not make the program wait"
        gate.open()
        checkpointer.wait()
        assert not checkpointer.is_saving_in_progress()
        assert steps_of(checkpointer) == [0]
        assert checkpointer.should_save(1)


def test_unchanged_arrays_are_shared_with_the_newest_step(tmp_path: Path) -> None:
    frozen = np.random.default_rng(0).standard_normal(200_000)
    seen: list[waystation.SaveStatistics] = []
    context = waystation.Context()
    context.array.saving.on_statistics = seen.append
    policy = preservation_policies.LatestN(2)
    with Checkpointer(
        tmp_path, context=context, preservation_policy=policy, reuse_unchanged=True
    ) as checkpointer:
        for step in range(6):
            state = {"frozen": frozen, "trained": np.full(1000, step)}
            if step % 2:
                checkpointer.save(step, state, force=True)
            else:
                response = checkpointer.save_async(step, state, force=True)
                assert response is not None
                response.result()
        assert [each.bytes_shared for each in seen] == [0] + 5 * [frozen.nbytes]
        for step in (4, 5):
            loaded = checkpointer.load(step)
            assert np.array_equal(loaded["frozen"], frozen)
            assert np.array_equal(loaded["trained"], np.full(1000, step))
            assert not waystation.verify(tmp_path / str(step)).damages
        shutil.rmtree(tmp_path / "5")  # behind its back: the next save writes everything
        checkpointer.save(6, {"frozen": frozen}, force=True)
        assert seen[-1].bytes_shared == 0
    with pytest.raises(errors.WrongType, match="reuse_unchanged"):
        Checkpointer(tmp_path, reuse_unchanged="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_link", [False, True])
def test_a_step_that_another_program_has_saved_is_refused_as_one_of_this(
    tmp_path: Path, is_link: bool
) -> None:
    (tmp_path / "run").mkdir()
    root = tmp_path / "run"
    if is_link:
        root = tmp_path / "link"
        root.symlink_to("run")
    with Checkpointer(root) as checkpointer:
        waystation.save(tmp_path / "run" / "1", {"a": 1})
        for save in (checkpointer.save, checkpointer.save_async):
            with pytest.raises(
                errors.StepAlreadyExistsError, match=r"step 1 has a checkpoint already.* call reload"
            ):
                save(1, {"a": 2}, force=True)
        checkpointer.reload()
        assert checkpointer.load(1) == {"a": 1}
        checkpointer.save(1, {"a": 2}, force=True, overwrite=True)
        assert checkpointer.load(1) == {"a": 2}


def test_layouts_that_share_nothing_are_refused_at_the_first_save(tmp_path: Path) -> None:
    context = waystation.Context()
    context.array.saving.use_ocdbt = True
    with context, Checkpointer(tmp_path, reuse_unchanged=True) as checkpointer:
        with pytest.raises(errors.Unsupported, match="reuse_unchanged=True, and Orbax's layouts"):
            checkpointer.save(0, {"w": np.ones(3)})
        assert not checkpointer.checkpoints


def test_a_program_that_goes_back_is_told_what_a_restart_will_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path, preservation_policy=preservation_policies.LatestN(2)) as checkpointer:
        for step in (8, 9, 10):
            checkpointer.save(step, {"step": step}, force=True)
        assert caplog.messages == []
        checkpointer.save(4, {"step": 4}, force=True)
        (told,) = caplog.messages
        assert (
            "while later steps are there: 9, 10. A program that is started again loads the greatest" in told
        )
        checkpointer.save(5, {"step": 5}, force=True)
        assert len(caplog.messages) == 1, "of the same steps it is told once"
