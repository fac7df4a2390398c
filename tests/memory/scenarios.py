"""Programs that keep their state in memory, for tests that kill them. Each function runs in every process."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.agents import Agent
from tests.support.held_memory import HeldMemory
from tests.support.programs import Place
from tests.training import sequences

from waystation import _native
from waystation.memory import MemoryTier, MemoryTierWarning, hosts
from waystation.memory import agent as agent_of_host
from waystation.training import Checkpointer
from waystation.training.save_decision_policies import FixedIntervalPolicy, SpecificStepsPolicy

NEVER = SpecificStepsPolicy(())


def checkpointer_of(root: Path, agent: Path, *, on_disk_every: int | None = None) -> Checkpointer:
    """Keeps every step in memory, and some in the directory."""
    policy = NEVER if on_disk_every is None else FixedIntervalPolicy(on_disk_every)
    return Checkpointer(root, save_decision_policy=policy, memory=MemoryTier(directory=agent))


PATIENCE_S = 60.0


def wait_for_agents_long(put: Callable[[Any, str, float], object], seconds: float = PATIENCE_S) -> None:
    """Has all that waits for agents do so for as long, whatever it would rather go on without."""
    for module in (agent_of_host, hosts):
        put(module, "PATIENCE_S", seconds)
    put(hosts, "COMMIT_S", seconds)


def damage(agent: Agent, step: int, *, within: str = "data") -> None:
    """Flips bits of the slot that holds a step: in its data, or in its tables."""
    client = _native.AgentClient(str(agent.directory))
    (slot,) = [slot for slot in client.inventory() if slot.get("step") == step]
    held = client.hold(slot["epoch"], step, slot["shard"])
    path, _, _ = held.file
    (offset, nbytes) = next((entry[5], entry[6]) for entry in held.entries if entry[0].endswith("weights"))
    held.release()
    at = offset + nbytes // 2 if within == "data" else 12_288 + 40
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def state_of(framework: str, step: int) -> dict[str, Any]:
    """A state of one process whose every leaf depends on the step."""
    random = np.random.default_rng(step)
    values = random.standard_normal((300, 257)).astype(np.float32)
    narrow = random.integers(0, 1 << 15, (64, 31)).astype(np.int16)
    plain = {"step": step, "rate": 1 / (step + 1), "name": f"step {step}", "noise": random.bytes(1000)}
    if framework == "torch":
        import torch

        arrays: dict[str, Any] = {
            "weights": torch.from_numpy(values).bfloat16(),
            "columns": torch.from_numpy(narrow).T,
            "random": torch.Generator().manual_seed(step).get_state(),
        }
    elif framework == "jax":
        import jax

        arrays = {
            "weights": jax.numpy.asarray(values).astype("bfloat16"),
            "columns": jax.numpy.asarray(narrow.T),
            "random": jax.random.key(step),
        }
    else:
        arrays = {"weights": values, "columns": narrow.T, "empty": np.zeros((0, 3), np.float64)}
    return {"arrays": arrays, "optimizer": [plain, (np.float32(step), True, None)]}


def fingerprint(state: Any) -> list[tuple[str, str, bytes]]:
    """Every bit of a state, to be compared between processes."""
    from waystation.tree import flatten

    leaves, structure = flatten(state)
    return [
        (
            label,
            f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')} {getattr(leaf, 'shape', '')}",
            _bits(leaf),
        )
        for label, leaf in zip(structure.labels(), leaves, strict=True)
    ]


def _bits(leaf: Any) -> bytes:
    module = type(leaf).__module__
    if module.startswith("torch"):
        import torch

        return leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if module.startswith("jax"):
        import jax

        plain = jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return np.asarray(plain).tobytes()
    if isinstance(leaf, np.ndarray | np.generic):
        return np.ascontiguousarray(leaf).tobytes()
    return repr(leaf).encode()


def train_until_killed(place: Place, root: Path, agent: Path, framework: str) -> None:
    """Resumes, and saves each step, without end; tells of each step that a save has begun for."""
    with checkpointer_of(root, agent) as checkpointer:
        latest = checkpointer.latest
        loaded = None if latest is None else checkpointer.load()
        place.report(
            (None if latest is None else latest.step, None if loaded is None else fingerprint(loaded))
        )
        step = -1 if latest is None else latest.step
        while True:
            step += 1
            checkpointer.save(step, state_of(framework, step))
            place.report(step)
            place.receive()


def die_within_a_save(place: Place, root: Path, agent: Path, steps: int) -> None:
    """Saves some steps; of the last one, a part cannot be read, so that the copy does not end."""
    with checkpointer_of(root, agent) as checkpointer:
        for step in range(steps):
            checkpointer.save(step, state_of("numpy", step))
        checkpointer.wait()
        held = HeldMemory(1 << 20)
        place.report("saving")
        checkpointer.save_async(
            steps, {**state_of("numpy", steps), "held": np.frombuffer(held.buffer, np.uint8)}
        )


def save_and_die(place: Place, root: Path, agent: Path, framework: str, steps: int) -> None:
    """Saves some steps, and is killed by itself once all are whole."""
    with checkpointer_of(root, agent) as checkpointer:
        for step in range(steps):
            checkpointer.save(step, state_of(framework, step))
        checkpointer.wait()
        os.kill(os.getpid(), signal.SIGKILL)


# ---- several processes ---------------------------------------------------------------------------


def join(place: Place, devices: int) -> None:
    """Joins the other processes, each with so many devices."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    if place.count > 1:
        place.connect()


SHAPES = {"matrix": (48, 64), "odd": (37, 10), "vector": (96,)}


def values_of(name: str, step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([step, len(name)]).standard_normal(SHAPES[name]).astype(np.float32)


def sharded_state(step: int, *, divided: bool) -> dict[str, Any]:
    """A state over the devices of all processes: rows, columns, replicas; or only rows."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = np.array(jax.devices())
    specs = {"matrix": PartitionSpec("x"), "odd": PartitionSpec(), "vector": PartitionSpec("x")}
    mesh = Mesh(devices, ("x",))
    if divided and len(devices) % 2 == 0:
        mesh = Mesh(devices.reshape(2, -1), ("y", "x"))
        specs["matrix"] = PartitionSpec("x", "y")
    state = {}
    for name, spec in specs.items():
        whole = values_of(name, step)
        sharding = NamedSharding(mesh, spec)
        state[name] = jax.make_array_from_callback(whole.shape, sharding, lambda index, of=whole: of[index])
    return {**state, "step": step}


def save_sharded(
    place: Place, root: Path, agent: Path, steps: int, on_disk_every: int | None = None
) -> list[int]:
    """Saves steps of a state that is spread over two devices of each process."""
    join(place, 2)
    with checkpointer_of(root, agent, on_disk_every=on_disk_every) as checkpointer:
        for step in range(steps):
            checkpointer.save(step, sharded_state(step, divided=True))
        checkpointer.wait()
        found = [info.step for info in checkpointer.checkpoints if info.tiers == ("memory",)]
    if place.count > 1:
        place.disconnect()
    return found


def save_sharded_on_hosts(
    place: Place, root: Path, agents: list[Path], steps: int, on_disk_every: int | None = None
) -> list[int]:
    """The same, each process on a host of its own."""
    return save_sharded(place, root, agents[place.index], steps, on_disk_every)


STEPS_BESIDE_STOPPED_AGENTS = 8


def save_beside_agents_that_stop(place: Place, root: Path, agents: list[Path]) -> dict[str, Any]:
    """Saves in the background while an agent is stopped, and then until a step is kept again."""
    join(place, 2)
    wait_for_agents_long(setattr)
    with checkpointer_of(root, agents[place.index]) as checkpointer:

        def counts() -> dict[str, Any]:
            statistics = checkpointer.tier_statistics
            assert statistics is not None
            names = "saves", "skipped", "failures", "last_saved_step"
            return {name: getattr(statistics, name) for name in names}

        def save(step: int) -> None:
            begun = time.monotonic()
            checkpointer.save_async(step, sharded_state(step, divided=True))
            assert time.monotonic() - begun < PATIENCE_S / 2

        save(1)
        checkpointer.wait()
        place.report("begun")
        place.receive()
        for step in range(2, STEPS_BESIDE_STOPPED_AGENTS + 1):
            save(step)
        place.report(counts())
        place.receive()
        checkpointer.wait()
        for step in range(STEPS_BESIDE_STOPPED_AGENTS + 1, STEPS_BESIDE_STOPPED_AGENTS + 5):
            save(step)
            checkpointer.wait()
        found = counts()
    place.disconnect()
    return found


def load_sharded(place: Place, root: Path, agent: Path) -> dict[str, Any]:
    """Loads the newest step to other shardings, and looks at every shard of this process."""
    join(place, 1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", MemoryTierWarning)
        with checkpointer_of(root, agent) as checkpointer:
            wanted = sharded_state(0, divided=False)
            loaded = checkpointer.load(None, wanted)
            statistics = checkpointer.tier_statistics
    for name in SHAPES:
        expected = values_of(name, loaded["step"])
        assert loaded[name].sharding == wanted[name].sharding
        for shard in loaded[name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(expected[shard.index]).tobytes()
    assert statistics is not None
    if place.count > 1:
        place.disconnect()
    return {
        "step": loaded["step"],
        "from memory": statistics.loads,
        "warned": [str(entry.message) for entry in warned],
    }


def load_sharded_on_hosts(place: Place, root: Path, agents: list[Path]) -> dict[str, Any]:
    """The same, each process on the host that is said."""
    return load_sharded(place, root, agents[place.index])


def take_up_and_save(place: Place, root: Path, agent: Path, steps: int) -> dict[str, Any]:
    """Loads what other processes have kept, and saves so many steps more, to the directory as well."""
    join(place, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryTierWarning)  # until there is room
        with checkpointer_of(root, agent, on_disk_every=1) as checkpointer:
            first = checkpointer.load(None, sharded_state(0, divided=False))["step"]
            for step in range(first + 1, first + 1 + steps):
                checkpointer.save(step, sharded_state(step, divided=False))
            checkpointer.wait()
            statistics = checkpointer.tier_statistics
            newest = checkpointer.latest
    assert statistics is not None
    assert newest is not None
    if place.count > 1:
        place.disconnect()
    return {"first": first, "tiers": newest.tiers, "kept": statistics.last_saved_step}


def train_together_until_killed(place: Place, root: Path, agent: Path) -> None:
    """Resumes, and saves each step, without end, in several processes."""
    sequences.join(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryTierWarning)  # of the one that is killed
        with checkpointer_of(root, agent) as checkpointer:
            step = -1
            if checkpointer.latest is not None:
                step = sequences.seed_of(place, checkpointer.load(None, sequences.state(place, 0)))
            place.report(step)
            while True:
                step += 1
                checkpointer.save_async(step, sequences.state(place, step))
                checkpointer.wait()
                place.report(step)
