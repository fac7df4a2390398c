"""The program of kill schedules: a trainer in each host, which follows its trajectory and is killed."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.memory import trajectories
from tests.memory.clusters import STORE
from tests.memory.namespaces import enter
from tests.memory.trajectories import ROWS, State
from tests.support.programs import Place

from waystation import _native
from waystation.errors import CommittedStepsLost
from waystation.memory import MemoryTier, MemoryTierWarning
from waystation.training import Checkpointer
from waystation.training.save_decision_policies import FixedIntervalPolicy

ON_DISK_EVERY = 4


@dataclass(frozen=True)
class Run:
    """What trainers are told.

    Attributes:
        root: Of the checkpoints on disk, which all hosts reach.
        seed: Of the trajectory.
        inits: The first process of each host.
        coordinator: Where the first trainer is reached by the others.
    """

    root: Path
    seed: int
    inits: tuple[int, ...]
    coordinator: str


def train(place: Place, run: Run) -> None:
    """Resumes, and trains without end; tells what it restores, each step, and what is kept."""
    enter(run.inits[place.index])
    if place.count > 1:
        import jax

        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_num_cpu_devices", 1)
        jax.distributed.initialize(run.coordinator, place.count, place.index)
    policy = FixedIntervalPolicy(ON_DISK_EVERY)
    memory = MemoryTier(directory=STORE, deadline_s=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryTierWarning)  # of agents that are killed
        place.report(("opening",))
        try:
            checkpointer = Checkpointer(run.root, save_decision_policy=policy, memory=memory)
        except CommittedStepsLost:
            place.report(("nothing left",))
            memory = dataclasses.replace(memory, start_from_nothing=True)
            checkpointer = Checkpointer(run.root, save_decision_policy=policy, memory=memory)
        with checkpointer:
            step, state = _restored(place, run, checkpointer)
            agent = _native.AgentClient(str(STORE))
            epoch = (agent.standing() if agent.status()["agent_count"] > 1 else agent.status())["epoch"]
            place.report(("restored", step, trajectories.digest(state), epoch))
            while True:
                step, state = step + 1, trajectories.following(state)
                place.report(("advanced", step, trajectories.digest(state)))
                checkpointer.save_async(step, _whole(place, step, state))
                checkpointer.wait()
                place.report(("kept", *_kept(checkpointer)))


def _restored(place: Place, run: Run, checkpointer: Checkpointer) -> tuple[int, State]:
    state = trajectories.first(run.seed, place.index)
    if checkpointer.latest is None:
        return 0, state
    loaded = checkpointer.load(None, _whole(place, 0, state))
    return int(loaded["step"]), {name: _part(loaded["state"][name]) for name in state}


def _kept(checkpointer: Checkpointer) -> tuple[int, int]:
    statistics = checkpointer.tier_statistics
    in_memory = statistics.last_saved_step if statistics is not None else None
    on_disk = [info.step for info in checkpointer.checkpoints if "directory" in info.tiers]
    return in_memory or 0, max(on_disk, default=0)


def _whole(place: Place, step: int, state: State) -> dict[str, Any]:
    """The state of all trainers, of which this one has its part."""
    if place.count == 1:
        return {"step": step, "state": state}
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("hosts",)), PartitionSpec("hosts"))
    arrays = {
        name: jax.make_array_from_process_local_data(sharding, part, (place.count * ROWS, *part.shape[1:]))
        for name, part in state.items()
    }
    return {"step": step, "state": arrays}


def _part(array: Any) -> np.ndarray[Any, Any]:
    if isinstance(array, np.ndarray):
        return array
    (shard,) = array.addressable_shards
    return np.asarray(shard.data)
