"""The systems that are tortured: how a user of each saves, loads, and keeps the last steps of a sequence.

Each is used as its documentation says, with nothing added that would make it safer or less safe. Importing
this imports none of their libraries; `prepare` does.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torture import states
from torture.states import State

KEPT = 2


class System(Protocol):
    """One way of keeping states.

    Attributes:
        name: As the tables call it.
        ours: Whether every column has to be 0.
        has_collection: Whether it keeps sequences.
        has_files: Whether a version is files that lie at the path.
    """

    name: ClassVar[str]
    ours: ClassVar[bool]
    has_collection: ClassVar[bool]
    has_files: ClassVar[bool]

    def prepare(self) -> None:
        """Imports everything that a save or load needs; starts no threads."""

    def save(self, path: Path, step: int) -> None:
        """Saves the state of a step, over whatever version is at the path."""

    def load(self, path: Path) -> int:
        """Loads all of it, and returns the step whose state it is."""

    def is_there(self, path: Path) -> bool:
        """Whether a program that looks for a finished version takes this for one."""

    def keep(self, root: Path, step: int) -> None:
        """Saves a step of a sequence, of which the last `KEPT` are kept."""

    def kept(self, root: Path) -> list[int]:
        """The steps that a program finds when it starts again."""

    def load_kept(self, root: Path, step: int) -> int:
        """Loads a step of a sequence."""

    def load_newest(self, root: Path) -> int:
        """Loads the newest step, as a program does that starts again."""


class _Steps:
    """A sequence for systems that have none: a directory for each step, and old ones are removed."""

    name: ClassVar[str]
    ours: ClassVar[bool] = False
    has_collection: ClassVar[bool] = True
    has_files: ClassVar[bool] = True

    def keep(self: Any, root: Path, step: int) -> None:
        root.mkdir(exist_ok=True)
        self.save(root / str(step), step)
        for old in self.kept(root)[:-KEPT]:
            path = root / str(old)
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def kept(self: Any, root: Path) -> list[int]:
        if not root.exists():
            return []
        names = (path.name for path in root.iterdir())
        return sorted(int(name) for name in names if name.isdigit() and self.is_there(root / name))

    def load_kept(self: Any, root: Path, step: int) -> int:
        return int(self.load(root / str(step)))

    def load_newest(self: Any, root: Path) -> int:
        return int(self.load_kept(root, self.kept(root)[-1]))


class Waystation:
    """Waystation's own layout."""

    name: ClassVar[str] = "waystation"
    ours: ClassVar[bool] = True
    has_collection: ClassVar[bool] = True
    has_files: ClassVar[bool] = True
    mode: ClassVar[str | None] = None

    def prepare(self) -> None:
        import waystation
        import waystation.checkpoint
        import waystation.training  # noqa: F401

    def set(self, context: Any) -> None:
        """Sets what this way of saving needs."""
        context.engine.write_mode = context.engine.read_mode = self.mode

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        import waystation

        context = waystation.Context()
        self.set(context)
        with context:
            yield

    def save(self, path: Path, step: int) -> None:
        import waystation

        with self._context():
            waystation.save(path, states.state_of(step), overwrite=True)

    def load(self, path: Path) -> int:
        import waystation

        with self._context():
            return states.step_of(waystation.load(path))

    def is_there(self, path: Path) -> bool:
        import waystation

        return bool(waystation.is_checkpoint(path))

    @contextlib.contextmanager
    def _sequence(self, root: Path) -> Iterator[Any]:
        from waystation.training import Checkpointer, preservation_policies, save_decision_policies

        with (
            self._context(),
            Checkpointer(
                root,
                save_decision_policy=save_decision_policies.FixedIntervalPolicy(1),
                preservation_policy=preservation_policies.LatestN(KEPT),
            ) as checkpointer,
        ):
            yield checkpointer

    def keep(self, root: Path, step: int) -> None:
        with self._sequence(root) as checkpointer:
            checkpointer.save(step, states.state_of(step))

    def kept(self, root: Path) -> list[int]:
        with self._sequence(root) as checkpointer:
            return sorted(info.step for info in checkpointer.checkpoints)

    def load_kept(self, root: Path, step: int) -> int:
        with self._sequence(root) as checkpointer:
            return states.step_of(checkpointer.load(step))

    def load_newest(self, root: Path) -> int:
        with self._sequence(root) as checkpointer:
            return states.step_of(checkpointer.load())


class WaystationDirect(Waystation):
    """The same, past the page cache, by threads."""

    name = "waystation-direct"
    mode = "direct-threads"


class WaystationRing(Waystation):
    """The same, past the page cache, by io_uring."""

    name = "waystation-ring"
    mode = "direct-ring"


class WaystationZarr2(Waystation):
    """Orbax's layout of one directory for each array, zarr version 2, written by us."""

    name = "waystation-zarr2"
    use_ocdbt: ClassVar[bool] = False
    use_zarr3: ClassVar[bool] = False

    def set(self, context: Any) -> None:
        super().set(context)
        context.array.saving.use_ocdbt = self.use_ocdbt
        context.array.saving.use_zarr3 = self.use_zarr3


class WaystationZarr3(WaystationZarr2):
    """The same with zarr version 3."""

    name = "waystation-zarr3"
    use_zarr3 = True


class WaystationOcdbt(WaystationZarr2):
    """Orbax's OCDBT, written by us."""

    name = "waystation-ocdbt"
    use_ocdbt = True
    use_zarr3 = True


class WaystationSafetensors(_Steps):
    """One safetensors file, written by us."""

    name = "waystation-safetensors"
    ours = True

    def prepare(self) -> None:
        import waystation.safetensors  # noqa: F401

    def save(self, path: Path, step: int) -> None:
        import waystation.safetensors

        path.parent.mkdir(parents=True, exist_ok=True)
        waystation.safetensors.save(states.state_of(step), path.with_suffix(".safetensors"), overwrite=True)

    def load(self, path: Path) -> int:
        import waystation.safetensors

        return states.step_of(
            dict(waystation.safetensors.load(path.with_suffix(".safetensors"), framework="numpy"))
        )

    def is_there(self, path: Path) -> bool:
        return path.with_suffix(".safetensors").exists()

    def keep(self, root: Path, step: int) -> None:
        root.mkdir(exist_ok=True)
        self.save(root / str(step), step)
        for old in self.kept(root)[:-KEPT]:
            (root / f"{old}.safetensors").unlink()

    def kept(self, root: Path) -> list[int]:
        return sorted(int(path.stem) for path in root.glob("*.safetensors") if path.stem.isdigit())


class Orbax:
    """Genuine Orbax, version 1 of its interface."""

    name: ClassVar[str] = "orbax"
    ours: ClassVar[bool] = False
    has_collection: ClassVar[bool] = True
    has_files: ClassVar[bool] = True

    def prepare(self) -> None:
        from orbax.checkpoint import v1  # noqa: F401

    def save(self, path: Path, step: int) -> None:
        from orbax.checkpoint import v1 as orbax

        orbax.save(path, states.state_of(step), overwrite=True)

    def load(self, path: Path) -> int:
        from orbax.checkpoint import v1 as orbax

        return states.step_of(orbax.load(path))

    def is_there(self, path: Path) -> bool:
        from orbax.checkpoint import v1 as orbax

        return path.exists() and bool(orbax.is_orbax_checkpoint(path))

    @contextlib.contextmanager
    def _sequence(self, root: Path) -> Iterator[Any]:
        from orbax.checkpoint import v1

        training = v1.training
        with training.Checkpointer(
            root,
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=training.preservation_policies.LatestN(KEPT),
        ) as checkpointer:
            yield checkpointer

    def keep(self, root: Path, step: int) -> None:
        with self._sequence(root) as checkpointer:
            checkpointer.save_pytree(step, states.state_of(step))

    def kept(self, root: Path) -> list[int]:
        with self._sequence(root) as checkpointer:
            return sorted(info.step for info in checkpointer.checkpoints)

    def load_kept(self, root: Path, step: int) -> int:
        with self._sequence(root) as checkpointer:
            return states.step_of(checkpointer.load_pytree(step))

    def load_newest(self, root: Path) -> int:
        with self._sequence(root) as checkpointer:
            return states.step_of(checkpointer.load_pytree())


class TorchDcp(_Steps):
    """Genuine `torch.distributed.checkpoint`."""

    name = "torch-dcp"

    def prepare(self) -> None:
        import torch.distributed.checkpoint  # noqa: F401

    def save(self, path: Path, step: int) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        path.parent.mkdir(parents=True, exist_ok=True)
        state = {name: torch.from_numpy(values) for name, values in states.state_of(step).items()}
        dcp.state_dict_saver.save(state, checkpoint_id=path, no_dist=True)

    def load(self, path: Path) -> int:
        import torch
        import torch.distributed.checkpoint as dcp

        state = {name: torch.from_numpy(values) for name, values in states.template().items()}
        dcp.state_dict_loader.load(state, checkpoint_id=path, no_dist=True)
        return states.step_of({name: tensor.numpy() for name, tensor in state.items()})

    def is_there(self, path: Path) -> bool:
        return (path / ".metadata").exists()


class Safetensors(WaystationSafetensors):
    """Genuine safetensors, with NumPy."""

    name = "safetensors"
    ours = False

    def prepare(self) -> None:
        import safetensors.numpy  # noqa: F401

    def save(self, path: Path, step: int) -> None:
        import safetensors.numpy

        path.parent.mkdir(parents=True, exist_ok=True)
        safetensors.numpy.save_file(states.state_of(step), path.with_suffix(".safetensors"))

    def load(self, path: Path) -> int:
        import safetensors.numpy

        loaded: State = safetensors.numpy.load_file(path.with_suffix(".safetensors"))
        return states.step_of(loaded)


_KINDS: tuple[Callable[[], System], ...] = (
    Waystation,
    WaystationDirect,
    WaystationRing,
    WaystationZarr2,
    WaystationZarr3,
    WaystationOcdbt,
    WaystationSafetensors,
    Orbax,
    TorchDcp,
    Safetensors,
)
SYSTEMS: dict[str, System] = {system.name: system for system in (kind() for kind in _KINDS)}
