"""What processes do with several checkpointables. Each function runs in every process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.programs import Place, raised

import waystation
from waystation import handlers
from waystation.coordination import store_session


class Reader:
    """Reads a data set at a place of its own in every process, and saves that itself."""

    def __init__(self, place: Place, position: int = 0) -> None:
        self._place = place
        self.position = position

    async def save(self, directory: Any) -> Any:
        position = self.position

        async def write() -> None:
            path = await directory.await_creation()
            (path / self._name()).write_text(json.dumps(position))

        return write()

    async def load(self, directory: Any) -> Any:
        async def read() -> None:
            self.position = json.loads((directory / self._name()).read_text())

        return read()

    def _name(self) -> str:
        return f"process_{self._place.index}-of-{self._place.count}.json"


class FailingReader(Reader):
    """Fails in one process, in one of the phases."""

    phase = ""

    async def save(self, directory: Any) -> Any:
        rest = await super().save(directory)
        if self._place.index == 1 and self.phase == "save":
            rest.close()
            raise RuntimeError("told to fail")

        async def write() -> None:
            await rest
            if self._place.index == 1 and self.phase == "background":
                raise RuntimeError("told to fail")

        return write()


def outcome(work: Callable[[], Any]) -> Any:
    """What a function returns, or what it raised."""
    try:
        return work()
    except Exception as error:
        return raised(error)


def join(place: Place) -> None:
    """Joins the other processes."""
    if place.framework == "jax":
        from tests.distributed.jax_scenarios import join as join_jax

        join_jax(place, 2)
    else:
        place.connect()


def arrays(place: Place, scale: float) -> dict[str, Any]:
    """A state that all processes hold together."""
    values = np.arange(4 * 3 * place.count, dtype=np.float32).reshape(-1, 3) * scale
    if place.framework == "jax":
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), PartitionSpec("x"))
        sharded = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
        return {"sharded": sharded, "host": values, "step": 7}
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (place.count,))
    sharded = distribute_tensor(torch.from_numpy(values), mesh, [Shard(0)])
    return {"sharded": sharded, "host": values, "step": 7}


def same(loaded: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether what this process has of two such states is the same."""
    if hasattr(loaded["sharded"], "to_local"):
        is_same = bool((loaded["sharded"].to_local() == given["sharded"].to_local()).all())
    else:
        pairs = zip(loaded["sharded"].addressable_shards, given["sharded"].addressable_shards, strict=True)
        is_same = all(np.array_equal(one.data, two.data) for one, two in pairs)
    return is_same and np.array_equal(loaded["host"], given["host"]) and loaded["step"] == 7


def save_and_load(place: Place, is_local: bool) -> dict[str, Any]:
    """Saves two states, a JSON value and a reader, in the foreground and in the background; then loads."""
    join(place)
    context = waystation.Context()
    registry = handlers.local_registry()
    registry.add(handlers.JsonHandler, checkpointable_name="config")
    context.checkpointables.registry = registry
    root = place.directory / "checkpoints"
    if is_local:
        context.multiprocessing.primary_host = None
        root = root / str(place.index)
    seen: dict[str, Any] = {}
    given = {"model": arrays(place, 1.0), "optimizer": arrays(place, 2.0), "config": {"name": "x"}}
    with context:
        waystation.save_checkpointables(root / "one", {**given, "data": Reader(place, 10 + place.index)})
        response = waystation.save_checkpointables_async(
            root / "two", {**given, "data": Reader(place, 20 + place.index)}
        )
        response.result()
        seen["listed"] = _listed(root / "one")
        for name in ("one", "two"):
            reader = Reader(place)
            loaded = waystation.load_checkpointables(root / name, {**given, "config": None, "data": reader})
            seen[name] = (
                same(loaded["model"], given["model"]) and same(loaded["optimizer"], given["optimizer"]),
                loaded["config"],
                reader.position,
            )
        background = waystation.load_checkpointables_async(root / "one", {"optimizer": given["optimizer"]})
        seen["background"] = same(background.result()["optimizer"], given["optimizer"])
        seen["deleted"] = waystation.delete(root / "one", checkpointable_name="optimizer")
        seen["again"] = waystation.delete(root / "one", checkpointable_name="optimizer", missing_ok=True)
        seen["absent"] = outcome(lambda: waystation.load_checkpointables(root / "one", {"optimizer": None}))
        seen["left"] = list(waystation.load_checkpointables(root / "one", {"model": None, "config": None}))
    place.disconnect()
    return seen


def _listed(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def fail(place: Place) -> dict[str, Any]:
    """One failure after another, none of which may leave anything, or stop the next save."""
    join(place)
    root = place.directory / "checkpoints"
    model = arrays(place, 1.0)
    seen: dict[str, Any] = {}
    for phase in ("save", "background"):
        reader = FailingReader(place)
        reader.phase = phase
        given = {"model": model, "data": reader}
        seen[phase] = outcome(lambda given=given: waystation.save_checkpointables(root / "bad", given))  # type: ignore[misc]
        response = outcome(lambda given=given: waystation.save_checkpointables_async(root / "bad", given))  # type: ignore[misc]
        seen[f"{phase} async"] = (
            outcome(response.result) if isinstance(response, waystation.AsyncResponse) else response
        )
    other = {"model": model} if place.index == 1 else {"model": model, "data": Reader(place)}
    seen["other handlers"] = outcome(lambda: waystation.save_checkpointables(root / "bad", other))
    different = {"model": model, "optimizer": {"x": 1 if place.index == 1 else "text"}}
    seen["other state"] = outcome(lambda: waystation.save_checkpointables(root / "bad", different))
    seen["left"] = sorted(os.listdir(root)) if root.exists() else []
    waystation.save_checkpointables(root / "good", {"model": model, "data": Reader(place, 3)})
    if place.index == 0:
        (root / "good" / "data" / f"process_1-of-{place.count}.json").write_text("4")
    place.report("damaged")
    place.receive()
    wanted = {"model": model, "data": Reader(place)}
    seen["damaged"] = outcome(lambda: waystation.load_checkpointables(root / "good", wanted))
    names = {"model": None} if place.index == 1 else {"model": None, "data": Reader(place)}
    seen["other names"] = outcome(lambda: waystation.load_checkpointables(root / "good", names))
    seen["fine"] = same(waystation.load_checkpointables(root / "good", {"model": model})["model"], model)
    place.disconnect()
    return seen


def count_rounds(place: Place) -> list[int]:
    """How many rounds saves take that have more and more checkpointables."""
    join(place)
    rounds: list[int] = []
    original = store_session.StoreSession.round

    def counted(self: Any, work: Any, decide: Any) -> bytes:
        rounds[-1] += 1
        return original(self, work, decide)

    store_session.StoreSession.round = counted  # type: ignore[method-assign]
    try:
        for number in (1, 2, 8):
            rounds.append(0)
            given = {f"c{index}": {"x": np.arange(3)} for index in range(number)}
            waystation.save_checkpointables(place.directory / "checkpoints" / f"n{number}", given)
            rounds.append(0)
            readers = {f"r{index}": Reader(place) for index in range(number)}
            waystation.save_checkpointables(place.directory / "checkpoints" / f"r{number}", readers)
    finally:
        store_session.StoreSession.round = original  # type: ignore[method-assign]
    place.disconnect()
    return rounds
