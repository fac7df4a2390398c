"""Random sequences of calls of a manager do the same as with genuine Orbax: the same steps are seen at each
moment, the same is restored, the same is on disk, and errors are of the same built-in kinds. Sequences also
have both libraries go on with what the other one has saved.
"""

from __future__ import annotations

import datetime
import random
import types
from pathlib import Path
from typing import Any

import jax
import pytest
from tests.support.long import amount
from tests.version0.pair import Pair, ours, state

# No test is about how fast a machine is: so much time passes at every step, or at none.
AT_ONCE, NEVER = datetime.timedelta(0), datetime.timedelta(days=1)


def loss(metrics: dict[str, float]) -> float:
    return metrics["loss"]


def is_even(step: int, _last: int | None) -> bool:
    return step % 2 == 0


def chosen_options(chance: random.Random) -> tuple[Any, bool]:  # noqa: C901 - one case for each option
    """Options, as a function of the library, and whether they look at metrics."""
    plain: dict[str, Any] = {
        "enable_async_checkpointing": chance.random() < 0.6,
        "cleanup_tmp_directories": chance.random() < 0.2,
        "lightweight_initialize": chance.random() < 0.2,
        "single_host_load_and_broadcast": chance.random() < 0.2,
        "save_root_metadata": chance.random() < 0.8,
        "enable_background_delete": False,
    }
    if chance.random() < 0.5:
        plain["step_prefix"] = chance.choice(["step", "ckpt", "a"])
    if chance.random() < 0.5:
        plain["step_format_fixed_length"] = chance.choice([1, 4, 8])
    when = chance.choice(["interval", "steps", "function", "policy", "default"])
    if when in ("interval", "steps"):
        plain["save_interval_steps"] = chance.randint(1, 4)
    if when == "steps":
        plain["save_on_steps"] = chance.sample(range(12), 3)
    if when == "function":
        plain["should_save_fn"] = is_even
    best = chance.random() < 0.4
    if best:
        plain |= {"best_fn": loss, "best_mode": chance.choice(["min", "max"])}
        plain["keep_checkpoints_without_metrics"] = chance.random() < 0.5
        plain["prevent_write_metrics"] = chance.random() < 0.2
        plain["lightweight_initialize"] = False  # with which genuine Orbax forgets which step is the best
    how = chance.choice(["count", "count", "policy", "all"])
    if how == "count":
        plain["max_to_keep"] = chance.randint(1, 3)
        if chance.random() < 0.3:
            plain["keep_period"] = chance.randint(2, 4)
        if chance.random() < 0.3:
            plain["keep_time_interval"] = chance.choice([AT_ONCE, NEVER])
        if chance.random() < 0.2:
            plain["todelete_subdir"] = "trash"
    seed = chance.random()

    def options(library: types.ModuleType) -> dict[str, Any]:
        policies = library.checkpoint_managers
        made = dict(plain)
        own = random.Random(seed)
        if when == "policy":
            made["save_decision_policy"] = own.choice(
                [
                    policies.FixedIntervalPolicy(2),
                    policies.SpecificStepsPolicy({1, 4, 5, 8}),
                    policies.AnySavePolicy([policies.InitialSavePolicy(), policies.FixedIntervalPolicy(3)]),
                    policies.ContinuousCheckpointingPolicy(minimum_interval_secs=86400),
                ]
            )
        if how == "policy":
            made["preservation_policy"] = own.choice(
                [
                    policies.LatestN(2),
                    policies.AnyPreservationPolicy([policies.CustomSteps([1, 3, 4]), policies.LatestN(1)]),
                    policies.AnyPreservationPolicy([policies.LatestN(1), policies.EveryNSteps(3)]),
                    policies.AnyPreservationPolicy([policies.EveryNStepsClosest(3), policies.LatestN(1)]),
                ]
            )
        return made

    return options, best


def composite(library: Any, step: int) -> Any:
    args = library.args
    return args.Composite(
        state=args.StandardSave(state(step)), config=args.JsonSave({"step": step, "x": [1, None, "é"]})
    )


class Sequence:
    """One random sequence of calls."""

    def __init__(self, seed: int, root: Path) -> None:
        self.chance = random.Random(seed)
        options, self.has_metrics = chosen_options(self.chance)
        # Without any metrics nothing would stay, where the last good step stays here.
        self.keeps_unmeasured = options(ours).get("keep_checkpoints_without_metrics", True)
        self.is_composite = self.chance.random() < 0.4
        given: dict[str, Any] = {}
        if self.chance.random() < 0.3:
            given["metadata"] = {"run": seed}
        # Genuine Orbax does not find out what these items are, before they are saved or restored.
        self.has_names = self.is_composite and self.chance.random() < 0.5
        if self.has_names:
            given["item_names"] = ("state", "config")
        # It fails where a new manager has to compare times.
        policy = type(options(ours).get("save_decision_policy")).__name__
        self.is_restarted = policy != "ContinuousCheckpointingPolicy" and "keep_time_interval" not in options(
            ours
        )
        # It cannot move a step away twice.
        self.is_ascending = "todelete_subdir" in options(ours)
        self.pair = Pair(root, options, **given)
        self.step = 0
        # Genuine Orbax takes a new manager for one of several items once a step is asked for that is not
        # there, and knows nothing of items that it has not saved or restored.
        self.is_settled = False

    def choose(self) -> int | None:
        """A step that is there, or one that is not."""
        steps = self.pair.same("all_steps", lambda manager, _: manager.all_steps())
        others = [None, 99] if self.is_settled else []
        chosen = [*steps, *others]
        return self.chance.choice(chosen) if chosen else 0

    def saved(self, library: Any, step: int) -> Any:
        return composite(library, step) if self.is_composite else library.args.StandardSave(state(step))

    def save(self) -> None:
        chance = self.chance
        change = chance.choice([1, 1, 1, 1, 2, 0, -1])
        self.step = max(0, self.step + (abs(change) or 1 if self.is_ascending else change))
        step, force = self.step, chance.random() < 0.15
        metrics = None
        if self.has_metrics and chance.random() < (0.8 if self.keeps_unmeasured else 1):
            metrics = {"loss": chance.randint(0, 5)}
        custom = {"note": step} if chance.random() < 0.3 else None
        is_saved = self.pair.same(
            f"save {step}",
            lambda manager, library: manager.save(
                step, args=self.saved(library, step), metrics=metrics, force=force, custom_metadata=custom
            ),
        )
        self.is_settled |= bool(is_saved)

    def should_save(self) -> None:
        step = self.step + self.chance.choice([-1, 0, 1, 2])
        if step >= 0:
            self.pair.same(f"should_save {step}", lambda manager, _: manager.should_save(step))

    def restore(self) -> None:
        step = self.choose()
        if step == 0 and not self.is_settled:
            return
        self.pair.wait()
        way = 3 if self.has_names and not self.is_settled else self.chance.randint(0, 3)

        def restored(manager: Any, library: Any) -> Any:
            args = library.args
            if way == 0:
                return manager.restore(step)
            if self.is_composite:
                wanted = {"state": args.StandardRestore(state(0) if way == 1 else None)}
                if way == 3:
                    wanted["config"] = args.JsonRestore()
                return manager.restore(step, args=args.Composite(**wanted))
            return manager.restore(step, args=args.StandardRestore(state(0) if way == 1 else None))

        self.pair.same(f"restore {step} by {way}", restored)

    def look(self) -> None:
        step = self.choose()
        if step is None or not self.is_settled:
            return
        self.pair.wait()
        self.pair.same(f"metrics {step}", lambda manager, _: manager.metrics(step))
        self.pair.same("root metadata", lambda manager, _: manager.metadata())
        self.pair.same(f"metadata {step}", lambda manager, _: manager.metadata(step))
        self.pair.same(f"item_metadata {step}", lambda manager, _: manager.item_metadata(step))

    def delete(self) -> None:
        steps = self.pair.same("all_steps", lambda manager, _: manager.all_steps())
        if len(steps) > 1:
            step = self.chance.choice([*steps, 99])
            self.pair.wait()
            self.pair.same(f"delete {step}", lambda manager, _: manager.delete(step))

    def wait(self) -> None:
        self.pair.wait()
        self.pair.on_disk()

    def look_again(self) -> None:
        self.pair.wait()
        self.pair.same("all_steps(read)", lambda manager, _: sorted(manager.all_steps(read=True)))

    def restart(self) -> None:
        if not self.is_restarted:
            return
        self.pair.restart()
        self.is_settled = False

    def exchange(self) -> None:
        if not self.is_restarted:
            return
        self.pair.exchange()
        self.is_settled = False

    def run(self, length: int) -> None:
        calls = [self.save] * 8 + [self.should_save] * 2 + [self.restore] * 3 + [self.look] * 2
        calls += [self.delete, self.wait, self.wait, self.look_again, self.restart, self.exchange]
        for _ in range(length):
            self.chance.choice(calls)()
            self.pair.assert_same_steps()
        self.pair.close()
        self.pair.on_disk()


@pytest.mark.long
@pytest.mark.parametrize("part", range(amount(2, 10)))
def test_the_same_calls_do_the_same(part: int, tmp_path: Path) -> None:
    for seed in range(part * 24, part * 24 + amount(5, 24)):
        try:
            Sequence(seed, tmp_path / str(seed)).run(amount(12, 25))
        except Exception as error:
            error.add_note(f"in the sequence of seed {seed}")
            raise
    assert jax.device_count() == 8
