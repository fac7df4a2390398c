"""The systems that are tortured: how a user of each saves, loads, and keeps the last steps of a sequence.

Each is used as its documentation says, with nothing added that would make it safer or less safe. Importing
this imports none of their libraries; `prepare` does.
"""

from __future__ import annotations

import contextlib
import subprocess
import warnings
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
        moves_by_calls: Whether all bytes go through system calls that can be seen.
        keeps_threads: Whether threads stay after a save or load, so that a process which has made one cannot
            be forked.
        runs_alone: Whether a save or load needs nothing that has to run already.
        package: Whose version is meant where the system is not ours.
    """

    name: ClassVar[str]
    ours: ClassVar[bool]
    has_collection: ClassVar[bool]
    has_files: ClassVar[bool]
    moves_by_calls: ClassVar[bool]
    keeps_threads: ClassVar[bool]
    runs_alone: ClassVar[bool]
    package: ClassVar[str]

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


class _OneVersion:
    """A system that keeps no sequences."""

    name: ClassVar[str]
    ours: ClassVar[bool] = False
    has_collection: ClassVar[bool] = False
    has_files: ClassVar[bool] = True
    moves_by_calls: ClassVar[bool] = True
    keeps_threads: ClassVar[bool] = False
    runs_alone: ClassVar[bool] = True
    package: ClassVar[str] = "waystation"

    def keep(self, root: Path, step: int) -> None:
        raise NotImplementedError

    def kept(self, root: Path) -> list[int]:
        raise NotImplementedError

    def load_kept(self, root: Path, step: int) -> int:
        raise NotImplementedError

    def load_newest(self, root: Path) -> int:
        raise NotImplementedError


class Waystation:
    """Waystation's own layout."""

    name: ClassVar[str] = "waystation"
    ours: ClassVar[bool] = True
    has_collection: ClassVar[bool] = True
    has_files: ClassVar[bool] = True
    moves_by_calls: ClassVar[bool] = True
    keeps_threads: ClassVar[bool] = False
    runs_alone: ClassVar[bool] = True
    package: ClassVar[str] = "waystation"
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

    def save_state(self, path: Path, state: Any) -> None:
        """Saves any state."""
        import waystation

        with self._context():
            waystation.save(path, state, overwrite=True)

    def load_state(self, path: Path, abstract: Any = None) -> Any:
        """Loads any state, as an abstract one says."""
        import waystation

        with self._context():
            return waystation.load(path, abstract)

    def save(self, path: Path, step: int) -> None:
        self.save_state(path, states.state_of(step))

    def load(self, path: Path) -> int:
        return states.step_of(self.load_state(path))

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
    moves_by_calls = False
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


class WaystationSafetensors(_OneVersion):
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


class WaystationMemory(_OneVersion):
    """The memory tier of one host. Each process starts the host's agent, if none runs, and ends the one it
    started.

    So a later process begins with the recovery of an agent, or with one that has outlived the program.
    """

    name = "waystation-memory"
    ours = True
    has_files = False
    keeps_threads = True

    def prepare(self) -> None:
        import waystation.memory
        import waystation.training  # noqa: F401

    @contextlib.contextmanager
    def _agent(self, path: Path) -> Iterator[Path]:
        """The store of an agent that runs."""
        with _running_agent(path / "store"):
            yield path / "store"

    @contextlib.contextmanager
    def tier(self, path: Path) -> Iterator[Any]:
        """A program that has begun: its checkpointer, which writes to memory only."""
        from waystation.memory import DoubtedStepWarning, MemoryTier, MemoryTierWarning
        from waystation.training import Checkpointer, save_decision_policies

        never = save_decision_policies.SpecificStepsPolicy(())
        path.mkdir(exist_ok=True)
        with warnings.catch_warnings(), self._agent(path) as store:
            # A save that was not kept has failed, as nothing else is written here.
            warnings.simplefilter("error", MemoryTierWarning)
            warnings.simplefilter("ignore", DoubtedStepWarning)  # it is told; what counts is what is loaded
            memory = MemoryTier(directory=store, deadline_s=20)
            with Checkpointer(path / "steps", save_decision_policy=never, memory=memory) as checkpointer:
                yield checkpointer

    def save(self, path: Path, step: int) -> None:
        with self.tier(path) as checkpointer:
            self.save_in(checkpointer, step)

    def save_in(self, checkpointer: Any, step: int) -> None:
        """Saves in a program that has begun."""
        checkpointer.save(step, states.state_of(step))
        checkpointer.wait()
        saved = checkpointer.tier_statistics.last_saved_step
        if saved != step:
            raise RuntimeError(f"the tier has saved {saved}, not {step}")

    def load(self, path: Path) -> int:
        with self.tier(path) as checkpointer:
            return states.step_of(checkpointer.load())

    def is_there(self, path: Path) -> bool:
        if not path.exists():
            return False
        with self.tier(path) as checkpointer:
            return checkpointer.latest is not None


class WaystationAgent(WaystationMemory):
    """The memory tier of a host whose agent runs already, and outlives the programs.

    Attributes:
        hosts: How many there are, whose agents keep copies for each other; programs run on the first.
    """

    name = "waystation-agent"
    runs_alone = False
    hosts: ClassVar[int] = 1

    @contextlib.contextmanager
    def _agent(self, path: Path) -> Iterator[Path]:
        yield path.parent / "agents" / "host-0"


class WaystationHosts(WaystationAgent):
    """The memory tier of three hosts."""

    name = "waystation-3-hosts"
    hosts = 3


class WaystationFiveHosts(WaystationAgent):
    """The memory tier of five hosts, of which two may be lost at once."""

    name = "waystation-5-hosts"
    hosts = 5


@contextlib.contextmanager
def _running_agent(store: Path) -> Iterator[None]:
    from waystation.memory import agent_program

    command = [str(agent_program()), "run", f"--directory={store}", f"--run-id={_RUN}", "--slots=4"]
    command += ["--data-bytes=2MiB", "--contents-bytes=64KiB", "--memory-cap-bytes=64MiB"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        if not agent.stdout.readline():
            raise RuntimeError(f"the agent ended with {agent.wait()}")
        try:
            yield
        finally:
            agent.terminate()
            agent.wait()


_RUN = "0123456789abcdef0123456789abcdef"


class Orbax:
    """Genuine Orbax, version 1 of its interface."""

    name: ClassVar[str] = "orbax"
    ours: ClassVar[bool] = False
    has_collection: ClassVar[bool] = True
    has_files: ClassVar[bool] = True
    moves_by_calls: ClassVar[bool] = True
    keeps_threads: ClassVar[bool] = True
    runs_alone: ClassVar[bool] = True
    package: ClassVar[str] = "orbax-checkpoint"

    def prepare(self) -> None:
        from orbax.checkpoint import v1  # noqa: F401

    def save_state(self, path: Path, state: Any) -> None:
        """Saves any state."""
        from orbax.checkpoint import v1 as orbax

        orbax.save(path, state, overwrite=True)

    def load_state(self, path: Path, abstract: Any = None) -> Any:
        """Loads any state, as an abstract one says."""
        from orbax.checkpoint import v1 as orbax

        return orbax.load(path, abstract)

    def save(self, path: Path, step: int) -> None:
        self.save_state(path, states.state_of(step))

    def load(self, path: Path) -> int:
        return states.step_of(self.load_state(path))

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


class TorchDcp(_OneVersion):
    """Genuine `torch.distributed.checkpoint`."""

    name = "torch-dcp"
    package = "torch"

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
    package = "safetensors"

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
    WaystationMemory,
    WaystationAgent,
    WaystationHosts,
    WaystationFiveHosts,
    Orbax,
    TorchDcp,
    Safetensors,
)
SYSTEMS: dict[str, System] = {system.name: system for system in (kind() for kind in _KINDS)}
