"""The cells of the conformance suite: each layout in each storage, by each way in which programs keep
checkpoints there. A new layout, storage or tier is one more of the names below.

The storage is where checkpoints are at last. The tier is what the program calls: `call` saves to paths,
`run` is a `Checkpointer` of the storage, `remote` one of a directory that copies to the storage, `memory` one
that has the memory tier above the storage.

As a program it saves a step on a disk, and is killed before one of its changes there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.support import disks, gcs, s3
from tests.support.agents import memory_directory, running_agent
from tests.support.places import on_this_machine
from tests.support.programs import HANG_S

import waystation
from waystation import storage
from waystation.memory import MemoryTier
from waystation.path import Location
from waystation.storage import AnyPath
from waystation.training import Checkpointer, Remote, save_decision_policies

LAYOUTS = {"native": None, "orbax-ocdbt": True, "orbax-zarr": False}
STORAGES = ("disk", "tmpfs", "s3", "gs")
TIERS = ("call", "run", "remote", "memory")
_RUN = "run/"  # where checkpoints are in a bucket
# The servers of stores.
SERVERS = {"s3": s3, "gs": gcs}
EVERY_STEP = save_decision_policies.FixedIntervalPolicy(1)


def state_of(value: int) -> dict[str, Any]:
    """A state all of which says which it is, and which no compression makes small."""
    large = np.random.default_rng(value).random(70_000, np.float32)
    return {"a": large, "b": {"c": np.arange(10) + value}, "step": value}


def value_of(state: dict[str, Any]) -> int:
    """Which state it is; fails if it is a mixture."""
    value = int(state["step"])
    expected = state_of(value)
    assert np.array_equal(np.asarray(state["a"]), expected["a"])
    assert np.array_equal(np.asarray(state["b"]["c"]), expected["b"]["c"])
    return value


@dataclass(frozen=True)
class Cell:
    """One of them; its text names it."""

    layout: str
    storage: str
    tier: str

    def __str__(self) -> str:
        return f"{self.layout}-{self.storage}-{self.tier}"

    @property
    def is_native(self) -> bool:
        return self.layout == "native"

    @property
    def is_in_store(self) -> bool:
        return self.storage in SERVERS

    @property
    def refusal(self) -> str | None:
        """What Unsupported says where the cell is refused; None where it works."""
        if self.tier == "memory" and self.is_in_store:
            return "leave out memory="
        return None

    @property
    def replaces(self) -> bool:
        """Whether a checkpoint can be overwritten. Steps of a remote are replaced on this machine first."""
        return self.is_native or not self.is_in_store or self.tier == "remote"


CELLS = [Cell(*each) for each in ((a, b, c) for a in LAYOUTS for b in STORAGES for c in TIERS)]
WORKING = [cell for cell in CELLS if cell.refusal is None]
REFUSED = [cell for cell in CELLS if cell.refusal is not None]


class Place:
    """Where the checkpoints of a cell are.

    Attributes:
        cell: The cell.
        root: Where they are at last.
        bucket: Of a store.
        endpoint: Where that is reached, if not where the environment says.
        deadline_s: Of each request.
    """

    def __init__(self, cell: Cell, root: AnyPath, here: Path, agent: Path | None, bucket: s3.Bucket | None):
        self.cell, self.root, self.bucket = cell, root, bucket
        self.endpoint: str | None = None
        self.deadline_s = HANG_S
        self.here = here
        self._agent = agent

    def options(self) -> waystation.Context:
        """Those of its layout, and how the store is reached."""
        made = waystation.Context()
        made.array.saving.use_ocdbt = LAYOUTS[self.cell.layout]
        made.storage.deadline_s = self.deadline_s
        if self.endpoint is not None:
            made.storage.settings = SERVERS[self.cell.storage].settings(self.endpoint)
        return made

    def path(self, step: int) -> AnyPath:
        return self.root / str(step)

    @contextlib.contextmanager
    def checkpointer(self) -> Iterator[Checkpointer]:
        """What keeps them, where no paths are saved to."""
        given: dict[str, Any] = {}
        root = self.root
        if self.cell.tier == "remote":
            root, given["remote"] = self.here, Remote(self.root)
        if self.cell.tier == "memory":
            given["memory"] = MemoryTier(directory=self._agent)
        with self.options(), Checkpointer(root, save_decision_policy=EVERY_STEP, **given) as made:
            yield made
            made.wait()

    def save(self, step: int, value: int, *, overwrite: bool = False) -> None:
        if self.cell.tier == "call":
            with self.options():
                waystation.save(self.path(step), state_of(value), overwrite=overwrite)
            return
        with self.checkpointer() as checkpointer:
            checkpointer.save(step, state_of(value), overwrite=overwrite, force=True)

    def load(self, step: int) -> int:
        """The value of a step; of a remote as if the directory was lost."""
        if self.cell.tier == "call":
            with self.options():
                return value_of(waystation.load(self.path(step)))
        if self.cell.tier == "remote":
            shutil.rmtree(self.here, ignore_errors=True)
        with self.checkpointer() as checkpointer:
            return value_of(checkpointer.load(step))

    def delete(self, step: int) -> None:
        if self.cell.tier == "call":
            with self.options():
                waystation.delete(self.path(step))
            return
        with self.checkpointer() as checkpointer:
            checkpointer.delete(step)

    def steps(self) -> list[int]:
        found = [entry.name for entry in storage.entries_or_none(self.root)]
        return sorted(
            int(name) for name in found if name.isdigit() and waystation.is_checkpoint(self.root / name)
        )

    def values(self) -> dict[int, int]:
        """What loads, by its step."""
        return {step: self.load(step) for step in self.steps()}

    def files(self, step: int | None = None) -> dict[str, int]:
        """The lengths of all files of a step, or of all, by their names beneath the root."""
        top = "" if step is None else f"{step}/"
        if isinstance(self.bucket, gcs.Bucket):
            found = {
                name.removeprefix(_RUN): nbytes
                for name, nbytes in self.bucket.sizes().items()
                if name.startswith(_RUN)
            }
        else:
            root = on_this_machine(self.root)
            paths = sorted(path for path in root.rglob("*") if path.is_file())
            found = {os.fspath(path.relative_to(root)): path.stat().st_size for path in paths}
        return {name: nbytes for name, nbytes in found.items() if name.startswith(top)}

    def flip(self, name: str) -> None:
        """Damages a file in its middle."""

        def damaged(content: bytes) -> bytes:
            middle = len(content) // 2
            return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]

        if isinstance(self.bucket, gcs.Bucket):
            self.bucket.write(_RUN + name, damaged(self.bucket.read(_RUN + name)))
        else:
            path = on_this_machine(self.root) / name
            path.write_bytes(damaged(path.read_bytes()))

    def lose(self, name: str) -> None:
        """Removes a file."""
        if isinstance(self.bucket, gcs.Bucket):
            self.bucket.remove(_RUN + name)
        else:
            (on_this_machine(self.root) / name).unlink()

    def damages(self, step: int) -> list[Any]:
        return list(waystation.verify(self.path(step)).damages)


@contextlib.contextmanager
def opened(cell: Cell, tmp_path: Path, setenv: Callable[[str, str], None]) -> Iterator[Place]:
    """A place for a cell. The environment says how its store is reached, also in other processes."""
    with contextlib.ExitStack() as stack:
        agent = bucket = None
        if cell.tier == "memory" and cell.refusal is None:
            agent = stack.enter_context(memory_directory())
            stack.enter_context(running_agent(agent))
        root: AnyPath = tmp_path / "run"
        if cell.storage == "tmpfs":
            root = stack.enter_context(disks.in_memory()) / "run"
        if cell.is_in_store:
            bucket = SERVERS[cell.storage].bucket()
            for name, value in bucket.settings(bucket.endpoint).items():
                setenv(name.upper(), value)
            root = Location(f"{bucket.location}/{_RUN.removesuffix('/')}")
        yield Place(cell, root, tmp_path / "here", agent, bucket)


# ---- kills -------------------------------------------------------------------------------------


def save_in_process(endpoint: str, cell: Cell, root: str, here: str, step: int, value: int) -> None:
    """A save in a process of its own, to the store at an endpoint."""
    place = Place(cell, Location(root), Path(here), None, None)
    place.endpoint = endpoint
    place.save(step, value)


def killed_at(place: Place, number: int, step: int, value: int) -> bool:
    """Has a process save a step, and kills it before a request, or change of the disk; False if there are
    not so many."""
    if place.bucket is not None:
        given = place.cell, os.fspath(place.root), os.fspath(place.here), step, value
        return s3.killed_at(place.bucket, number, save_in_process, *given)
    cell = place.cell
    command = [sys.executable, "-m", "tests.conformance.cells", cell.layout, cell.storage, cell.tier]
    command += [os.fspath(place.root), os.fspath(place.here), str(number), str(step), str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() == "killed"


def main() -> None:
    from tests.support import system_calls

    *named, root, here, number, step, value = sys.argv[1:]
    place = Place(Cell(*named), Path(root), Path(here), None, None)
    was_killed, _ = system_calls.run(lambda: place.save(int(step), int(value)), int(number))
    sys.stdout.write("killed" if was_killed else "ended")


if __name__ == "__main__":
    main()
