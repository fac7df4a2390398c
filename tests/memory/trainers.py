"""A program that trains, and that kills what it is told to at a step; run by `waystation launch`.

    python -m tests.memory.trainers jax|ddp|fsdp DIRECTORY STEPS [VICTIM STEP [disk]]

Every step depends on all before it, on a random state and on a data iterator, all of which are kept. Each
process writes to `DIRECTORY/<index>.log` what it resumed from, and a digest of all that it holds after each
step. VICTIM is `trainer`, `agent` (that of the host of process 1), or `host`: process 1, the agent, and the
memory. With `disk` the step is on the disk as well, but for what other processes than that one have written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tests.support.programs import Place

from waystation import _native
from waystation.memory import DIRECTORY_VARIABLE, MemoryTier
from waystation.training import Checkpointer
from waystation.training.save_decision_policies import SpecificStepsPolicy

ROWS, COLUMNS = 24, 40
VICTIM_PROCESS = 1


class Batches:
    """A data iterator that can be taken up again."""

    def __init__(self) -> None:
        self.position = 0
        self.random = np.random.default_rng(7)

    def next(self) -> np.ndarray[Any, Any]:
        self.position += 1
        return self.random.standard_normal((ROWS, COLUMNS)).astype(np.float32)

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "random": repr(self.random.bit_generator.state)}

    def set_state(self, state: dict[str, Any]) -> None:
        import ast

        self.position = state["position"]
        self.random.bit_generator.state = ast.literal_eval(state["random"])


class Trainer(Protocol):
    def step(self, batch: np.ndarray[Any, Any]) -> None: ...

    def state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...

    def held(self) -> Iterable[bytes]:
        """Every bit of what this process holds."""
        ...

    def close(self) -> None: ...


class JaxTrainer:
    """Rows of two arrays, spread over all devices."""

    def __init__(self, index: int, count: int) -> None:
        import jax

        jax.distributed.initialize(num_processes=count, process_id=index, heartbeat_timeout_seconds=10)
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        self._sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        self._key = jax.random.key(3)
        begin = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
        self._weights = self._made(lambda rows: begin[rows])
        self._momentum = self._made(lambda rows: np.zeros_like(begin[rows]))

        @jax.jit
        def moved(weights: Any, momentum: Any, batch: Any, noise: Any) -> tuple[Any, Any]:
            # The mean is one over all processes.
            momentum = 0.9 * momentum + 0.1 * (batch - 0.01 * weights + noise - weights.mean())
            return weights + momentum, momentum

        self._moved = moved

    def _made(self, rows_of: Callable[[Any], Any]) -> Any:
        import jax

        return jax.make_array_from_callback((ROWS, COLUMNS), self._sharding, rows_of)

    def step(self, batch: np.ndarray[Any, Any]) -> None:
        import jax

        self._key, own = jax.random.split(self._key)
        noise = np.asarray(jax.random.normal(own, (ROWS, COLUMNS)))
        spread = (self._made(values.__getitem__) for values in (batch, noise))
        self._weights, self._momentum = self._moved(self._weights, self._momentum, *spread)

    def state(self) -> Any:
        import jax

        key = np.asarray(jax.random.key_data(self._key))
        return {"weights": self._weights, "momentum": self._momentum, "key": key}

    def set_state(self, state: Any) -> None:
        import jax

        self._weights, self._momentum = state["weights"], state["momentum"]
        self._key = jax.random.wrap_key_data(np.asarray(state["key"]))

    def held(self) -> Iterable[bytes]:
        state = self.state()
        for name in ("weights", "momentum"):
            for shard in state[name].addressable_shards:
                yield np.ascontiguousarray(shard.data).tobytes()
        yield state["key"].tobytes()

    def close(self) -> None:
        import jax

        jax.distributed.shutdown()


class TorchTrainer:
    """A small network with dropout, and Adam: replicated (DDP) or sharded (FSDP2)."""

    def __init__(self, index: int, count: int, *, is_sharded: bool) -> None:
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        torch.manual_seed(5)
        self._index, self._count = index, count
        layers = torch.nn.Linear(COLUMNS, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, COLUMNS)
        self._module: Any = torch.nn.Sequential(*layers)
        if is_sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(self._module, mesh=init_device_mesh("cpu", (count,)))
        else:
            self._module = torch.nn.parallel.DistributedDataParallel(self._module)
            self._module.register_comm_hook(None, lambda _, bucket: mean_in_order(bucket))
        self._optimizer = torch.optim.Adam(self._module.parameters(), lr=0.01)

    def step(self, batch: np.ndarray[Any, Any]) -> None:
        import torch

        own = torch.from_numpy(batch)[self._index :: self._count]
        self._optimizer.zero_grad()
        (self._module(own) - own).square().mean().backward()
        self._optimizer.step()

    def state(self) -> Any:
        import torch
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._module, self._optimizer)
        return {"model": model, "optimizer": optimizer, "random": torch.get_rng_state()}

    def set_state(self, state: Any) -> None:
        import torch
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            self._module,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        torch.set_rng_state(state["random"])

    def held(self) -> Iterable[bytes]:
        from waystation.tree import flatten

        for leaf in flatten(self.state())[0]:
            own = leaf.to_local() if hasattr(leaf, "to_local") else leaf
            yield own.detach().numpy().tobytes() if hasattr(own, "detach") else repr(own).encode()

    def close(self) -> None:
        import torch

        torch.distributed.destroy_process_group()


def mean_in_order(bucket: Any) -> Any:
    """The mean of gradients, added up in the order of processes: DDP puts them into other buckets after the
    first step, and gloo adds in another order then."""
    import torch

    own = bucket.buffer()
    parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, own)
    total = functools.reduce(torch.add, parts) / len(parts)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(total)
    return done


def trainer_of(framework: str, index: int, count: int) -> Trainer:
    if framework == "jax":
        return JaxTrainer(index, count)
    return TorchTrainer(index, count, is_sharded=framework == "fsdp")


def digest(trainer: Trainer, batches: Batches) -> str:
    total = hashlib.sha256(repr(batches.state()).encode())
    for part in trainer.held():
        total.update(part)
    return total.hexdigest()


def kill(victim: str) -> None:
    """Does to this process, its agent or its host what is to be survived."""
    store = Path(os.environ[DIRECTORY_VARIABLE])
    if victim in ("agent", "host"):
        agent = int(_native.AgentClient(str(store)).status()["process"])
        if victim == "host":
            gone = store.with_name(f"{store.name}-gone")
            store.rename(gone)  # whoever starts the agent again finds nothing
        os.kill(agent, signal.SIGKILL)
        if victim == "host":
            shutil.rmtree(gone)
    if victim in ("trainer", "host"):
        os.kill(os.getpid(), signal.SIGKILL)


def keep_own_files(checkpoint: Path) -> None:
    """Removes what other processes have written of a checkpoint."""
    for path in checkpoint.rglob("p*.safetensors"):
        if not path.name.startswith(f"p{VICTIM_PROCESS:05}-"):
            path.unlink()


def was_saved(checkpointer: Checkpointer, step: int) -> bool:
    """Whether a step is whole in memory, once its save has ended."""
    checkpointer.wait()
    statistics = checkpointer.tier_statistics
    return statistics is not None and statistics.last_saved_step == step


def main(
    framework: str, directory: Path, steps: int, victim: str = "", at: int = -1, beneath: str = ""
) -> None:
    index, count = (int(os.environ[f"WAYSTATION_PROCESS_{name}"]) for name in ("INDEX", "COUNT"))
    trainer, batches = trainer_of(framework, index, count), Batches()
    killed = directory / "killed"
    memory = MemoryTier() if DIRECTORY_VARIABLE in os.environ else None
    with (
        (directory / f"{index}.log").open("a", buffering=1) as log,
        Checkpointer(
            directory / "run", save_decision_policy=SpecificStepsPolicy((at,) * bool(beneath)), memory=memory
        ) as checkpointer,
    ):
        step = 0
        if checkpointer.latest is not None:
            loaded = checkpointer.load_checkpointables(
                None, {"state": trainer.state(), "data": batches.state()}
            )
            trainer.set_state(loaded["state"])
            batches.set_state(loaded["data"])
            step = batches.position
            log.write(f"resumed {step} {digest(trainer, batches)}\n")
        while step < steps:
            trainer.step(batches.next())
            step = batches.position
            whole = {"state": trainer.state(), "data": batches.state()}
            if step == at:  # memory is not to leave out what is gone on from
                checkpointer.save_checkpointables(step, whole)
            else:
                checkpointer.save_checkpointables_async(step, whole)
            log.write(f"step {step} {digest(trainer, batches)}\n")
            if step == at and not killed.exists():
                checkpointer.wait()
                if index == VICTIM_PROCESS:
                    killed.touch()
                    if beneath:
                        keep_own_files(directory / "run" / str(at))
                    kill(victim)
            if victim == "agent" and step > at and not was_saved(checkpointer, step):
                time.sleep(1)  # so that agents recover meanwhile
        checkpointer.wait()
        statistics = checkpointer.tier_statistics
        if statistics is not None:
            log.write(f"saved {statistics.last_saved_step} {statistics.last_failure}\n")
    with contextlib.suppress(Exception):
        trainer.close()


def train_here(place: Place, framework: str, directory: Path, steps: int) -> None:
    """Trains in a process that was forked where the frameworks are imported, without memory."""
    port = place.ports[0]
    os.environ |= {
        "WAYSTATION_PROCESS_INDEX": str(place.index),
        "WAYSTATION_PROCESS_COUNT": str(place.count),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(place.index),
        "WORLD_SIZE": str(place.count),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    main(framework, directory, steps)


if __name__ == "__main__":
    _, given, where, number, *rest = sys.argv
    main(given, Path(where), int(number), *rest[:1], *map(int, rest[1:2]), *rest[2:])
