"""What the processes of a program do in the tests of sequences. Each function runs in every process."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support import s3
from tests.support.programs import Place
from tests.training.gates import Gate

import waystation
from waystation.path import Location
from waystation.storage import AnyPath
from waystation.training import (
    Checkpointer,
    CheckpointMetadata,
    handle_sigterm,
    preservation_policies,
    save_decision_policies,
)

EVERY_STEP = save_decision_policies.FixedIntervalPolicy(1)


def join(place: Place) -> None:
    """Joins the other processes."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    place.connect()


def state(place: Place, step: int) -> dict[str, Any]:
    """A state of which every process has a part."""
    if place.framework != "jax":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (place.count,))
        values = torch.full((place.count * 4, 1000), step, dtype=torch.int32)
        return {"rows": distribute_tensor(values, mesh, [Shard(0)]), "step": step}
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    whole = np.full((place.count * 4, 1000), step, np.int32)
    return {
        "rows": jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index]),
        "step": step,
    }


def seed_of(place: Place, loaded: dict[str, Any]) -> int:
    """The step of a loaded state, of which this process has looked at its part."""
    step = int(loaded["step"])
    if place.framework == "jax":
        for shard in loaded["rows"].addressable_shards:
            assert (np.asarray(shard.data) == step).all()
    else:
        assert (loaded["rows"].to_local() == step).all()
    return step


def steps_of(checkpointer: Checkpointer) -> list[int]:
    return [info.step for info in checkpointer.checkpoints]


class OwnClock(save_decision_policies.SaveDecisionPolicy):
    """Says something else in every process."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def should_save(
        self,
        step: CheckpointMetadata[None],
        previous_steps: Sequence[CheckpointMetadata[None]],
        *,
        context: save_decision_policies.DecisionContext,
    ) -> bool:
        return step.step % 3 == self._place.index


def save_and_collect(place: Place, root: AnyPath) -> dict[str, Any]:
    """Saves by a policy that differs from process to process, and collects."""
    join(place)
    keep = preservation_policies.AnyPreservationPolicy(
        [
            preservation_policies.LatestN(2),
            preservation_policies.BestN(get_metric_fn=lambda m: m["score"], n=1),
        ]
    )
    with Checkpointer(root, save_decision_policy=OwnClock(place), preservation_policy=keep) as checkpointer:
        saved = [
            bool(checkpointer.save(step, state(place, step), metrics={"score": -abs(step - 3)}))
            for step in range(13)
        ]
        found = {
            "saved": saved,
            "steps": steps_of(checkpointer),
            "times": [info.commit_timestamp_nsecs for info in checkpointer.checkpoints],
            "loaded": seed_of(place, checkpointer.load(None, state(place, 0))),
            "in the background": seed_of(place, checkpointer.load_async(3, state(place, 0)).result()),
        }
    with Checkpointer(root) as again:
        found["again"] = steps_of(again)
        found["metrics"] = [info.metrics for info in again.checkpoints]
    place.disconnect()
    return found


def save_and_collect_in_store(place: Place, endpoint: str, root: Location) -> dict[str, Any]:
    """The same in an object store."""
    with s3.context(endpoint):
        probe_store(place, root)
        return save_and_collect(place, root)


def probe_store(place: Place, root: Location) -> None:
    """Has each process find out what the store can. The one of the tests refuses new objects while another
    process removes the last object of their directory, as a probe does."""
    waystation.save(root.parent / f"probed-{place.index}", {"a": np.zeros(1)})


class Files:
    """Makes files with these contents, or reads all that there are."""

    def __init__(self, contents: dict[str, str]) -> None:
        self.contents = contents

    async def save(self, directory: Any) -> Awaitable[None]:
        async def write() -> None:
            path = await directory.await_creation()
            for name, content in self.contents.items():
                (path / name).write_text(content)

        return write()

    async def load(self, directory: Path) -> Awaitable[None]:
        async def read() -> None:
            self.contents = {path.name: path.read_text() for path in directory.iterdir()}

        return read()


def handlers_in_store(place: Place, endpoint: str, root: Location) -> dict[str, Any]:
    """Saves files of which each process makes its own, and such that are equal, or not."""
    found: dict[str, Any] = {}
    with s3.context(endpoint):
        probe_store(place, root)
    join(place)
    with s3.context(endpoint), Checkpointer(root, save_decision_policy=EVERY_STEP) as checkpointer:
        own = Files({f"p{place.index}": f"of {place.index}", "common": "same"})
        checkpointer.save_checkpointables(0, {"files": own})
        loaded = Files({})
        checkpointer.load_checkpointables(0, {"files": loaded})
        found["own"] = sorted(loaded.contents.values())
        other = Files({"common": f"of {place.index}"})
        found["conflict"] = attempt(lambda: checkpointer.save_checkpointables(1, {"files": other}))
    place.disconnect()
    return found


def save_several_at_once(place: Place, root: Path) -> list[int]:
    """Has several saves in flight, which end in another order in every process."""
    join(place)
    gates = [Gate() for _ in range(3)]
    with Checkpointer(
        root,
        save_decision_policy=EVERY_STEP,
        preservation_policy=preservation_policies.LatestN(2),
        max_saves_in_flight=3,
    ) as checkpointer:
        for step, gate in enumerate(gates):
            checkpointer.save_checkpointables_async(step, {"state": state(place, step), "gate": gate})
        for gate in gates if place.index else reversed(gates):
            gate.open()
            time.sleep(0.05)
    place.disconnect()
    return steps_of(checkpointer)


def load_past_damage(place: Place, root: Path) -> dict[str, Any]:
    """Loads the newest whole step; others have been damaged."""
    join(place)
    with Checkpointer(root, save_decision_policy=EVERY_STEP) as checkpointer:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = seed_of(place, checkpointer.load(None, state(place, 0)))
        found = {
            "step": step,
            "warned": [str(warning.message) for warning in caught],
            "damaged": [info.step for info in checkpointer.damaged],
            "latest": checkpointer.latest.step if checkpointer.latest else None,
        }
        checkpointer.save(step + 1, state(place, step + 1))
        found["then"] = seed_of(place, checkpointer.load(None, state(place, 0)))
    place.disconnect()
    return found


def load_past_damage_in_the_background(place: Place, root: Path, checkpointables: bool) -> dict[str, Any]:
    """Loads the newest whole step in the background; others have been damaged. Meanwhile every process loads
    a step that is whole, at a moment of its own."""
    join(place)
    with (
        Checkpointer(root, save_decision_policy=EVERY_STEP) as checkpointer,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        if checkpointables:
            begun = checkpointer.load_checkpointables_async(None, {"state": state(place, 0)})
        else:
            begun = checkpointer.load_async(None, state(place, 0))
        time.sleep(0.1 * place.index)
        other = checkpointer.load_async(0, state(place, 0))
        loaded = begun.result()
        found = {
            "step": seed_of(place, loaded["state"] if checkpointables else loaded),
            "other": seed_of(place, other.result()),
            "damaged": [info.step for info in checkpointer.damaged],
            "latest": checkpointer.latest.step if checkpointer.latest else None,
            "asked": attempt(lambda: checkpointer.load_async(3, state(place, 0)).result()),
            "none": attempt(lambda: checkpointer.load_async(7).result()),
        }
    found["warned"] = [str(warning.message) for warning in caught]
    place.disconnect()
    return found


def attempt(call: Callable[[], Any]) -> str:
    """The type of the error that a call raises; the empty text if it raises none."""
    try:
        call()
    except waystation.errors.WaystationError as error:
        return type(error).__name__
    return ""


def save_steps(place: Place, root: Path, count: int) -> None:
    """Saves so many steps, and keeps them."""
    join(place)
    with Checkpointer(root, save_decision_policy=EVERY_STEP) as checkpointer:
        for step in range(count):
            checkpointer.save(step, state(place, step))
    place.disconnect()


def raise_the_same(place: Place, root: Path) -> list[str]:
    """Makes calls that are wrong; returns the types of the errors."""
    join(place)
    raised = []
    with Checkpointer(root) as checkpointer:
        checkpointer.save(0, state(place, 0))
        for call in (
            lambda: checkpointer.load(7),
            lambda: checkpointer.save(0, state(place, 0)),
            lambda: checkpointer.delete(7),
            lambda: checkpointer.metadata(7),
            lambda: checkpointer.save(1, state(place, place.index * 0) | {str(place.index): 1}),
        ):
            try:
                call()
            except waystation.errors.WaystationError as error:
                raised.append(type(error).__name__)
        assert checkpointer.delete(0)
        raised.append(str(steps_of(checkpointer)))
    place.disconnect()
    return raised


def train_on_own_disks(place: Place, root: Path, steps: list[int]) -> dict[str, Any]:
    """Saves to a disk that only this process sees."""
    join(place)
    context = waystation.Context()
    context.multiprocessing.primary_host = None
    with Checkpointer(
        root / f"disk {place.index}",
        context=context,
        save_decision_policy=EVERY_STEP,
        preservation_policy=preservation_policies.LatestN(2),
    ) as checkpointer:
        before = steps_of(checkpointer)
        for step in steps:
            checkpointer.save(step, state(place, step), metrics={"score": step})
        found = {
            "before": before,
            "steps": steps_of(checkpointer),
            "metrics": [info.metrics for info in checkpointer.checkpoints],
            "loaded": seed_of(place, checkpointer.load(None, state(place, 0))),
            "there": sorted(path.name for path in checkpointer.directory.iterdir() if path.name.isdigit()),
        }
    place.disconnect()
    return found


def train_until_told(place: Place, root: Path, handles: bool) -> dict[str, Any]:
    """Trains until a signal says that the program will be ended, and saves then."""
    join(place)
    handler = handle_sigterm() if handles else None
    policy = save_decision_policies.PreemptionCheckpointingPolicy()
    step = 0
    with Checkpointer(root, save_decision_policy=policy) as checkpointer:
        place.report("ready")
        while not checkpointer.is_preempted:
            step += 1
            checkpointer.save(step, state(place, step))
            time.sleep(0.01)
        more = [checkpointer.save(step + number, state(place, step + number)) for number in (1, 2)]
        found = {"step": step, "steps": steps_of(checkpointer), "more": more}
    if handler is not None:
        handler.uninstall()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    place.disconnect()
    return found


def train_and_be_killed(place: Place, root: Path) -> None:
    """Trains without end; says which steps it was told were committed."""
    join(place)
    policy = preservation_policies.LatestN(2)
    with Checkpointer(
        root, save_decision_policy=EVERY_STEP, preservation_policy=policy, max_saves_in_flight=2
    ) as checkpointer:
        start = 0
        if checkpointer.latest is not None:
            start = seed_of(place, checkpointer.load(None, state(place, 0)))
        place.report(("start", start))
        for step in range(start + 1, start + 10_000):
            response = checkpointer.save_async(step, state(place, step))
            assert response is not None
            if step % 2:
                response.result()
                place.report(("committed", step))
