"""The agent of this host: its program, the variables that name it, the connection to it, and its room."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from waystation import _native
from waystation._errors import MemoryTooSmall
from waystation.errors import NotFound

DIRECTORY_VARIABLE = "WAYSTATION_AGENT_DIRECTORY"
"""The directory of the agent of this host."""
RECOVERY_VARIABLE = "WAYSTATION_RECOVERY"
"""A JSON object: `file`, and the moments of `Recovery` that only the launch has seen."""


_NAME = "waystation-agent"
_VARIABLE = "WAYSTATION_AGENT"


def agent_program() -> Path:
    """Finds the agent's program.

    It is the program that the environment variable `WAYSTATION_AGENT` names, else the one that was installed
    with this package, else the first on `PATH`.

    Raises:
        NotFound: No such program exists, or the variable names none.
    """
    named = os.environ.get(_VARIABLE)
    if named:
        if not _is_program(Path(named)):
            raise NotFound(f"{_VARIABLE} is '{named}', which is not an executable file; correct or unset it")
        return Path(named)
    for candidate in (_recorded(), Path(sysconfig.get_path("scripts")) / _NAME):
        if candidate is not None and _is_program(candidate):
            return candidate
    found = shutil.which(_NAME)
    if found is None:
        raise NotFound(
            f"'{_NAME}', the agent of the memory tier, is missing, though it is installed with "
            f"waystation: install waystation again, or name the program in {_VARIABLE}"
        )
    return Path(found)


def _recorded() -> Path | None:
    """Where the installer has put the program: after `pip install --target` not beside the interpreter."""
    try:
        files = importlib.metadata.files("waystation") or []
    except importlib.metadata.PackageNotFoundError:  # sources on PYTHONPATH
        return None
    return next((Path(os.path.normpath(file.locate())) for file in files if file.name == _NAME), None)


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


# How long a save waits for an agent that has gone and may come back.
PATIENCE_S = 2.0


class OwnAgent:
    """The connection to the agent, made when it is first needed.

    Args:
        directory: The directory of its store.
        run: The id that the store must have; None for any.
        deadline_s: How long to wait for it.
    """

    def __init__(self, directory: str, run: str | None, deadline_s: float) -> None:
        self.directory = directory
        self.deadline_s = deadline_s
        self._run = run
        self._clients: dict[float, _native.AgentClient] = {}

    @property
    def client(self) -> _native.AgentClient:
        """It, for what a program waits for before it goes on.

        Raises:
            Unavailable: None is there.
            Conflict: It is that of another run.
        """
        return self.waiting(self.deadline_s)

    @property
    def saver(self) -> _native.AgentClient:
        """It, for what a program rather goes on without: saves."""
        return self.waiting(min(self.deadline_s, PATIENCE_S))

    def waiting(self, timeout_s: float) -> _native.AgentClient:
        """It, waited for so long in every call."""
        client = self._clients.get(timeout_s)
        if client is None:
            client = _native.AgentClient(self.directory, run=self._run, timeout_s=timeout_s)
            self._clients[timeout_s] = client
        return client


def check_room(status: Mapping[str, Any], shards: int) -> None:
    """Checks that the store of an agent has room for the versions that it is to keep.

    Each shard takes a slot for every committed version that is kept, and one for the next, while that is
    written.

    Args:
        status: Of the agent, as `AgentClient.status` gives it.
        shards: How many shards the agent is to keep.

    Raises:
        MemoryTooSmall: There are too few slots.
    """
    versions, slot_bytes, found = status["versions_per_shard"], status["slot_bytes"], status["slot_count"]
    needed = shards * versions
    if needed <= found:
        return
    raise MemoryTooSmall(
        f"the agent in '{status['directory']}' is to keep {versions - 1} committed versions of {shards} "
        f"shards, and the next one while it is written: that takes {needed} slots, {needed * slot_bytes} "
        f"bytes, and it has {found}, {found * slot_bytes} bytes. Start it with --slots {needed} (launch: "
        "give more --agent-memory), or have fewer committed versions kept: --versions 1 (launch: "
        "--agent-versions 1) leaves nothing to fall back to",
        path=status["directory"],
        needed_bytes=needed * slot_bytes,
        found_bytes=found * slot_bytes,
    )
