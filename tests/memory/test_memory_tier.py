"""A `Checkpointer` with a memory tier, in one process: what is kept and preferred, and what fails softly."""

from __future__ import annotations

import errno
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from tests.memory.scenarios import checkpointer_of, damage, fingerprint, state_of
from tests.support import failing_calls
from tests.support.agents import Agent, memory_directory, running_agent

import waystation
from waystation import errors
from waystation.memory import DoubtedStepWarning, MemoryTier, MemoryTierWarning
from waystation.training import Checkpointer
from waystation.training.save_decision_policies import FixedIntervalPolicy, SpecificStepsPolicy


@pytest.fixture
def agent() -> Iterator[Agent]:
    with memory_directory() as directory, running_agent(directory) as agent:
        yield agent


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def listed(checkpointer: Checkpointer) -> list[tuple[int, tuple[str, ...]]]:
    return [(info.step, info.tiers) for info in checkpointer.checkpoints]


def loaded_step(checkpointer: Checkpointer) -> int:
    """The step of the newest state, of which every bit is looked at."""
    state = checkpointer.load()
    step = int(state["optimizer"][0]["step"])
    assert fingerprint(state) == fingerprint(state_of("numpy", step))
    return step


def save_steps(root: Path, agent: Agent, steps: range, *, on_disk_every: int | None = None) -> None:
    with checkpointer_of(root, agent.directory, on_disk_every=on_disk_every) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of("numpy", step))


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_what_is_saved_at_each_step_comes_back_to_the_bit(agent: Agent, root: Path, framework: str) -> None:
    with checkpointer_of(root, agent.directory) as checkpointer:
        for step in range(5):
            assert not checkpointer.save(step, state_of(framework, step)), "it is not in the directory"
        checkpointer.wait()
        assert listed(checkpointer) == [(2, ("memory",)), (3, ("memory",)), (4, ("memory",))]
    with checkpointer_of(root, agent.directory) as again:
        assert listed(again) == [(2, ("memory",)), (3, ("memory",)), (4, ("memory",))]
        for step in (None, 4, 3):
            expected = fingerprint(state_of(framework, 4 if step is None else step))
            assert fingerprint(again.load(step)) == expected
            assert fingerprint(again.load_async(step).result()) == expected
        with pytest.raises(errors.StepNotFoundError):
            again.load(1)
    assert [path.name for path in root.iterdir() if path.is_dir()] == []


def test_errors_about_a_step_say_that_memory_has_it(agent: Agent, root: Path) -> None:
    with checkpointer_of(root, agent.directory) as checkpointer:
        checkpointer.save(4, state_of("numpy", 4))
        checkpointer.wait()
        for look in (checkpointer.metadata, checkpointer.checkpointables_metadata):
            with pytest.raises(
                errors.StepNotFoundError, match=r"of step 4 in .*Memory has it, .*`load`"
            ) as raised:
                look(4)
            assert raised.value.context["step"] == 4
            with pytest.raises(errors.StepNotFoundError, match="Memory has others"):
                look()
            with pytest.raises(errors.StepNotFoundError) as raised:
                look(3)
            assert "emory" not in raised.value.message
        damage(agent, 4)
        with pytest.warns(MemoryTierWarning), pytest.raises(errors.StepNotFoundError) as raised:
            checkpointer.load(4)
        assert "there is no checkpoint of step 4 in" in raised.value.message
        assert "in memory only, and could not be loaded from there: Corrupt: " in raised.value.message


def test_a_program_recovers_into_its_own_tensors(agent: Agent, root: Path) -> None:
    expected, own = state_of("torch", 1), state_of("torch", 2)
    tensors = {name: leaf for name, leaf in jax.tree.leaves_with_path(own) if isinstance(leaf, torch.Tensor)}
    context = waystation.Context()
    context.array.loading.in_place = True
    with context, checkpointer_of(root, agent.directory) as checkpointer:
        checkpointer.save(1, expected)
        loaded = checkpointer.load(1, own)
        assert checkpointer.tier_statistics is not None
        assert checkpointer.tier_statistics.loads == 1
    assert fingerprint(loaded) == fingerprint(expected)
    kept = dict(jax.tree.leaves_with_path(loaded))
    assert tensors
    assert all(kept[name] is tensor for name, tensor in tensors.items())


def test_the_state_may_change_once_the_call_returns(agent: Agent, root: Path) -> None:
    state = {"values": np.zeros(1 << 19, np.int32)}
    with checkpointer_of(root, agent.directory) as checkpointer:
        for step in range(1, 4):
            checkpointer.wait()
            state["values"][:] = step
            assert checkpointer.save_async(step, state) is None, "it is not in the directory"
            state["values"][:] = -1
        for step in (2, 3):
            assert (checkpointer.load(step)["values"] == step).all()


def test_another_framework_takes_it_up(agent: Agent, root: Path) -> None:
    values = torch.arange(3000, dtype=torch.bfloat16).reshape(30, 100)
    with checkpointer_of(root, agent.directory) as checkpointer:
        checkpointer.save(1, {"values": values.T, "step": 1})
        wanted = {"values": jax.ShapeDtypeStruct((100, 30), "float32"), "step": int}
        loaded = checkpointer.load(None, wanted)
        assert checkpointer.tier_statistics is not None
        assert checkpointer.tier_statistics.loads == 1
    assert isinstance(loaded["values"], jax.Array)
    assert np.asarray(loaded["values"]).tobytes() == values.T.float().contiguous().numpy().tobytes()


def test_the_newer_of_memory_and_directory_is_loaded(agent: Agent, root: Path) -> None:
    save_steps(root, agent, range(8), on_disk_every=3)
    with checkpointer_of(root, agent.directory) as checkpointer:
        assert listed(checkpointer)[-2:] == [(6, ("memory", "directory")), (7, ("memory",))]
        assert loaded_step(checkpointer) == 7
    with Checkpointer(root, save_decision_policy=FixedIntervalPolicy(1)) as without:
        without.save(8, state_of("numpy", 8))
    with checkpointer_of(root, agent.directory) as checkpointer:
        assert checkpointer.latest is not None
        assert (checkpointer.latest.step, checkpointer.latest.tiers) == (8, ("directory",))
        assert loaded_step(checkpointer) == 8
        assert checkpointer.tier_statistics is not None
        assert checkpointer.tier_statistics.loads == 0


def test_other_checkpointables_are_kept_as_well(agent: Agent, root: Path) -> None:
    step = {"weights": np.arange(10.0), "step": 3}
    metrics = {"loss": 0.5}
    with checkpointer_of(root, agent.directory) as checkpointer:
        checkpointer.save_checkpointables(
            3,
            {"state": step, "other": {"b": np.ones(3)}, "data": {"epoch": 1, "at": [1, 2]}},
            metrics=metrics,
        )
        found = checkpointer.load_checkpointables(3)
        assert sorted(found) == ["data", "other", "state"]
        assert found["data"] == {"epoch": 1, "at": [1, 2]}
        assert fingerprint(found["state"]) == fingerprint(step)
        only = checkpointer.load_checkpointables(3, {"data": None})
        assert only == {"data": {"epoch": 1, "at": [1, 2]}}
        assert fingerprint(checkpointer.load(3, checkpointable_name="other")) == fingerprint(
            {"b": np.ones(3)}
        )


@pytest.mark.parametrize("within", ["data", "tables"])
def test_damage_in_memory_is_passed_over(agent: Agent, root: Path, within: str) -> None:
    save_steps(root, agent, range(6), on_disk_every=2)
    damage(agent, 5, within=within)
    with checkpointer_of(root, agent.directory) as checkpointer:
        with pytest.warns(MemoryTierWarning, match=r"step 5.*Corrupt"):
            assert loaded_step(checkpointer) == 4
        assert checkpointer.tier_statistics is not None
        assert checkpointer.tier_statistics.loads == 1, "the older version, not the directory"
        assert listed(checkpointer)[-1] == (4, ("memory", "directory"))
    damage(agent, 4, within=within)
    with (
        checkpointer_of(root, agent.directory) as checkpointer,
        pytest.warns(MemoryTierWarning, match=r"step 4.*Corrupt"),
    ):
        assert loaded_step(checkpointer) == 4
    with checkpointer_of(root, agent.directory) as checkpointer:
        assert listed(checkpointer)[-1] == (4, ("directory",))
        checkpointer.save(6, state_of("numpy", 6))
        checkpointer.save(7, state_of("numpy", 7))
        assert loaded_step(checkpointer) == 7


class SandboxedAgent(Agent):
    """An agent whose system refuses to rename without replacing."""

    refusal = errno.EPERM

    @property
    def command(self) -> list[str]:
        """Runs the agent beneath a filter of system calls."""
        program = (
            "import os, sys; from tests.support import failing_calls; "
            "failing_calls.fail('renameat2', int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
        )
        return [sys.executable, "-c", program, str(self.refusal), *super().command]


@pytest.mark.skipif(not failing_calls.SUPPORTED, reason="system calls are made to fail on Linux only")
@pytest.mark.parametrize("code", ["EPERM", "ENOSYS", "EINVAL"])
def test_an_agent_does_without_renames_that_a_sandbox_refuses(code: str, root: Path) -> None:
    with memory_directory() as directory:
        agent = SandboxedAgent(directory)
        agent.refusal = getattr(errno, code)
        agent.start()
        try:
            save_steps(root, agent, range(6))
            agent.kill()
            agent.start()
            with checkpointer_of(root, directory) as checkpointer:
                assert loaded_step(checkpointer) == 5
                checkpointer.save(6, state_of("numpy", 6))
                checkpointer.wait()
                assert checkpointer.tier_statistics is not None
                assert checkpointer.tier_statistics.failures == 0
                assert listed(checkpointer)[-1] == (6, ("memory",))
        finally:
            agent.close()


def test_an_agent_may_be_replaced_at_any_time(agent: Agent, root: Path) -> None:
    with checkpointer_of(root, agent.directory) as checkpointer:
        for step in range(6):
            checkpointer.save(step, state_of("numpy", step))
            if step % 2:
                agent.kill()
                agent.start()
        assert loaded_step(checkpointer) == 5
        statistics = checkpointer.tier_statistics
        assert statistics is not None
        assert (statistics.saves, statistics.failures, statistics.last_saved_step) == (6, 0, 5)
    agent.kill()
    agent.start()
    with checkpointer_of(root, agent.directory) as checkpointer:
        assert loaded_step(checkpointer) == 5


def test_without_an_agent_the_program_goes_on(agent: Agent, root: Path) -> None:
    save_steps(root, agent, range(3), on_disk_every=1)
    agent.kill()
    tier = MemoryTier(directory=agent.directory, deadline_s=0.2)
    with pytest.warns(MemoryTierWarning, match="Unavailable") as warned:
        checkpointer = Checkpointer(root, save_decision_policy=FixedIntervalPolicy(1), memory=tier)
    assert len(warned) == 1
    with checkpointer, warnings.catch_warnings():
        warnings.simplefilter("error")  # it is told once
        assert loaded_step(checkpointer) == 2
        for step in range(3, 7):
            assert checkpointer.save(step, state_of("numpy", step))
        statistics = checkpointer.tier_statistics
        assert statistics is not None
        assert (statistics.saves, statistics.failures) == (0, 3), "one of the four was left out"
        assert statistics.last_failure is not None
        agent.start()
        for step in range(7, 12):
            checkpointer.save(step, state_of("numpy", step))
        checkpointer.wait()
        assert listed(checkpointer)[-1] == (11, ("memory", "directory"))


def test_what_does_not_fit_is_not_kept(agent: Agent, root: Path) -> None:
    large = {"values": np.zeros(5 << 20, np.uint8)}
    with checkpointer_of(root, agent.directory) as checkpointer:
        checkpointer.save(1, state_of("numpy", 1))
        checkpointer.save(2, large)
        with pytest.warns(MemoryTierWarning, match="step 2"):
            checkpointer.wait()
        checkpointer.save(3, state_of("numpy", 3))
        assert loaded_step(checkpointer) == 3


def test_what_cannot_be_saved_is_told_and_not_raised(agent: Agent, root: Path) -> None:
    with checkpointer_of(root, agent.directory) as checkpointer:
        with pytest.warns(MemoryTierWarning, match="Unsupported"):
            checkpointer.save(1, {"values": np.ones(2), "odd": object()})
        checkpointer.save(2, state_of("numpy", 2))
        assert loaded_step(checkpointer) == 2


def test_an_abstract_state_that_does_not_fit_is_the_programs_own_error(agent: Agent, root: Path) -> None:
    save_steps(root, agent, range(2))
    with checkpointer_of(root, agent.directory) as checkpointer:
        with pytest.raises(errors.StructureMismatch):
            checkpointer.load(None, {"other": np.ones(3)})
        assert loaded_step(checkpointer) == 1


def test_a_version_that_was_loaded_twice_to_no_avail_is_passed_over(agent: Agent, root: Path) -> None:
    save_steps(root, agent, range(4), on_disk_every=2)
    for _ in range(2):
        with checkpointer_of(root, agent.directory) as checkpointer:
            assert loaded_step(checkpointer) == 3
    with pytest.warns(DoubtedStepWarning, match="step 2 is restored from memory instead"):
        checkpointer = checkpointer_of(root, agent.directory)
    with checkpointer:
        assert loaded_step(checkpointer) == 2
        checkpointer.save(3, state_of("numpy", 3))
    with checkpointer_of(root, agent.directory) as checkpointer:
        assert loaded_step(checkpointer) == 3, "it was saved anew"


def test_a_program_that_goes_back_saves_what_it_does_then(agent: Agent, root: Path) -> None:
    with checkpointer_of(root, agent.directory) as checkpointer:
        for step in (1, 2, 3, 2, 3):
            checkpointer.save(step, {"values": np.full(10, step), "at": len(listed(checkpointer))})
        checkpointer.save(2, {"values": np.full(10, -2), "at": 0})
        assert (checkpointer.load()["values"] == -2).all()
        assert listed(checkpointer) == [(2, ("memory",))], "the later steps are of a past that it left"
    with checkpointer_of(root, agent.directory) as checkpointer:
        assert (checkpointer.load()["values"] == -2).all()


def test_a_deleted_step_is_not_loaded_from_memory(agent: Agent, root: Path) -> None:
    save_steps(root, agent, range(4), on_disk_every=1)
    with checkpointer_of(root, agent.directory) as checkpointer:
        assert checkpointer.delete(3)
        assert loaded_step(checkpointer) == 2
        with pytest.raises(errors.StepNotFoundError):
            checkpointer.delete(3)
    with checkpointer_of(root, agent.directory) as checkpointer:
        assert loaded_step(checkpointer) == 2


def test_policies_of_the_tier_decide_about_memory_alone(agent: Agent, root: Path) -> None:
    tier = MemoryTier(directory=agent.directory, save_decision_policy=FixedIntervalPolicy(2))
    with Checkpointer(root, save_decision_policy=FixedIntervalPolicy(3), memory=tier) as checkpointer:
        assert [step for step in range(7) if checkpointer.should_save(step)] == [0, 2, 3, 4, 6]
        for step in range(8):
            assert bool(checkpointer.save(step, state_of("numpy", step))) == (step % 3 == 0)
        checkpointer.save(7, state_of("numpy", 7), force=True)
        checkpointer.wait()
        assert listed(checkpointer) == [
            (0, ("directory",)),
            (3, ("directory",)),
            (4, ("memory",)),
            (6, ("memory", "directory")),
            (7, ("memory", "directory")),
        ]


def test_memory_of_another_sequence_is_not_taken_for_this_one(agent: Agent, tmp_path: Path) -> None:
    save_steps(tmp_path / "one", agent, range(1))
    with checkpointer_of(tmp_path / "other", agent.directory) as checkpointer:
        assert checkpointer.latest is None
        for step in range(4):
            checkpointer.save(step, state_of("numpy", step))
        assert loaded_step(checkpointer) == 3
        statistics = checkpointer.tier_statistics
        assert statistics is not None
        assert statistics.saves == 4


def test_versions_of_another_sequence_give_way(tmp_path: Path) -> None:
    with (
        memory_directory() as directory,
        running_agent(directory, slots=2, options=["--versions=1"]) as agent,
    ):
        save_steps(tmp_path / "one", agent, range(4))
        with checkpointer_of(tmp_path / "other", agent.directory) as checkpointer:
            checkpointer.save(0, state_of("numpy", 0))
            with pytest.warns(MemoryTierWarning, match="Unavailable"):
                checkpointer.wait()
            for step in range(1, 4):
                checkpointer.save(step, state_of("numpy", step))
            checkpointer.wait()
            assert listed(checkpointer) == [(2, ("memory",)), (3, ("memory",))]
            assert loaded_step(checkpointer) == 3


def test_a_step_that_only_memory_has_can_be_deleted(agent: Agent, root: Path) -> None:
    save_steps(root, agent, range(4))
    with checkpointer_of(root, agent.directory) as checkpointer:
        checkpointer.delete(3)
        assert loaded_step(checkpointer) == 2


def test_an_earlier_program_that_still_runs_is_fenced(agent: Agent, root: Path) -> None:
    with checkpointer_of(root, agent.directory) as early:
        early.save(1, state_of("numpy", 1))
        early.wait()
        with checkpointer_of(root, agent.directory) as late:
            assert loaded_step(late) == 1
            late.save(2, state_of("numpy", 2))
            early.save_async(3, state_of("numpy", 3))
            with pytest.warns(MemoryTierWarning, match="Fenced"):
                early.wait()
            assert loaded_step(late) == 2


def test_an_agent_keeps_one_sequence_of_checkpoints_at_a_time(
    agent: Agent, root: Path, tmp_path: Path
) -> None:
    with checkpointer_of(root, agent.directory) as checkpointer:
        checkpointer.save(1, state_of("numpy", 1))
        with pytest.raises(errors.Conflict, match="save_checkpointables"):
            checkpointer_of(tmp_path / "other", agent.directory)
        checkpointer.save(2, state_of("numpy", 2))
        assert loaded_step(checkpointer) == 2
    with checkpointer_of(tmp_path / "other", agent.directory) as other:
        assert other.latest is None


def test_the_agent_is_found_by_the_environment(
    agent: Agent, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = SpecificStepsPolicy(())
    with pytest.raises(errors.InvalidInput, match="waystation launch --agent"):
        Checkpointer(root, save_decision_policy=never, memory=MemoryTier())
    monkeypatch.setenv("WAYSTATION_AGENT_DIRECTORY", str(agent.directory))
    with Checkpointer(root, save_decision_policy=never, memory=MemoryTier()) as checkpointer:
        checkpointer.save(1, state_of("numpy", 1))
        assert loaded_step(checkpointer) == 1


def test_the_memory_of_another_run_is_refused(agent: Agent, root: Path) -> None:
    tier = MemoryTier(directory=agent.directory, run="f" * 32)
    with pytest.warns(MemoryTierWarning, match="Conflict"):
        Checkpointer(root, save_decision_policy=FixedIntervalPolicy(1), memory=tier).close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"directory": 5}, "directory must be a path, not 5"),
        ({"save_decision_policy": 5}, "one of training.save_decision_policies, not 5"),
        ({"run": "zz"}, "32 hexadecimal digits, not 'zz'"),
        ({"deadline_s": "a"}, "deadline_s must be a number of seconds, not 'a'"),
        ({"deadline_s": float("nan")}, "it must be above 0 seconds"),
        ({"deadline_s": 0}, "it must be above 0 seconds"),
        ({"deadline_s": -1.0}, "it must be above 0 seconds"),
        ({"start_from_nothing": "x"}, "start_from_nothing must be True or False"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.InvalidInput, match=text):
        MemoryTier(**options)
