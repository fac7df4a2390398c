"""What the processes of a program do by version 0 of Orbax's interface, of genuine Orbax or of ours."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from pathlib import Path
from typing import Any

from tests.support.programs import Place


def library_of(name: str) -> Any:
    return importlib.import_module({"theirs": "orbax.checkpoint", "ours": "waystation.compat.orbax"}[name])


def values() -> dict[str, Any]:
    import numpy as np

    return {
        "rows": np.arange(256, dtype=np.float32).reshape(16, 16),
        "columns": np.arange(256, dtype=np.int32).reshape(16, 16) * 3,
        "whole": np.arange(5, dtype=np.float32),
    }


def shardings() -> dict[str, Any]:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("x",))
    specs = {"rows": PartitionSpec("x"), "columns": PartitionSpec(None, "x"), "whole": PartitionSpec()}
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def state(step: int) -> dict[str, Any]:
    """Arrays over the devices of all processes."""
    import jax

    arrays = {name: value + step for name, value in values().items()}
    made = {
        name: jax.make_array_from_callback(
            arrays[name].shape, sharding, lambda index, name=name: arrays[name][index]
        )
        for name, sharding in shardings().items()
    }
    return {**made, "step": step}


def own_handler(library: Any, index: int) -> tuple[Any, Any]:
    """A handler of a program's own, with the classes of its arguments: each process has a file."""

    class Handler(library.CheckpointHandler):  # type: ignore[misc, name-defined]
        def save(self, directory: Any, args: Any = None) -> None:
            Path(directory, f"process_{index}.json").write_text(json.dumps(args.item))

        def restore(self, directory: Any, args: Any = None) -> Any:
            return json.loads(Path(directory, f"process_{index}.json").read_text())

        def finalize(self, directory: Any) -> None:
            Path(directory, "all.json").write_text(json.dumps(sorted(os.listdir(directory))))

    @library.args.register_with_handler(Handler, for_save=True)
    @dataclasses.dataclass
    class Save(library.args.CheckpointArgs):  # type: ignore[misc, name-defined]
        item: Any

    @library.args.register_with_handler(Handler, for_restore=True)
    @dataclasses.dataclass
    class Restore(library.args.CheckpointArgs):  # type: ignore[misc, name-defined]
        item: Any = None

    return Save, Restore


def save(place: Place, name: str, root: Path, layout: str = "orbax") -> Any:
    """Saves four steps of which two stay; returns what is seen of them."""
    place.connect()
    library = library_of(name)
    if name == "ours":
        library.set_layout(layout)
    own_save, _ = own_handler(library, place.index)
    args = library.args
    seen = []
    options = library.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda metrics: metrics["score"])
    with library.CheckpointManager(root, options=options, metadata={"run": 5}) as manager:
        for step in range(4):
            items = args.Composite(
                state=args.StandardSave(state(step)),
                config=args.JsonSave({"step": step}),
                reader=own_save({"position": 10 * step + place.index}),
            )
            assert manager.save(step, args=items, metrics={"score": -abs(step - 1)})
            seen.append(list(manager.all_steps()))
        manager.wait_until_finished()
        return seen, manager.best_step(), sorted(manager.all_steps(read=True))


def restore(place: Place, name: str, root: Path) -> Any:
    """Restores the best step with the shardings of this program; returns what every process has of it."""
    place.connect()
    import jax
    import numpy as np

    library = library_of(name)
    _, own_restore = own_handler(library, place.index)
    args = library.args
    abstract = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=shardings()[name])
        for name, value in values().items()
    }
    with library.CheckpointManager(root) as manager:
        found = manager.restore(
            1,
            args=args.Composite(
                state=args.StandardRestore({**abstract, "step": 0}),
                config=args.JsonRestore(),
                reader=own_restore(),
            ),
        )
        wrong = [
            f"{name}{shard.index}"
            for name, value in values().items()
            for shard in found.state[name].addressable_shards
            if not np.array_equal(shard.data, (value + 1)[shard.index])
        ]
        return wrong, found.config, found.reader, found.state["step"], manager.metadata().custom_metadata


def save_tree(place: Place, name: str, root: Path) -> None:
    """Saves trees by checkpointers, in the background and not."""
    place.connect()
    library = library_of(name)
    with library.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "standard", state(1))
    with library.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(root / "files", state(2))
    with library.Checkpointer(library.CompositeCheckpointHandler()) as checkpointer:
        args = library.args
        checkpointer.save(
            root / "several",
            args=args.Composite(array=args.ArraySave(state(3)["rows"]), config=args.JsonSave({"a": 1})),
        )
