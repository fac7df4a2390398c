"""The agent of a host, as `waystation launch --agent` starts and follows it.

It runs in a session of its own and outlives the launch: what it keeps is for the next one. What can go wrong,
in order: an agent serves the directory already (it is used as it is, if it is the one that is wanted); a new
one is refused its memory or its directory (the launch ends, and says why); it ends while the program runs (it
is started again, so often as was said, and finds what it has kept); its directory vanishes under it, as the
memory of a host does that is lost (it is ended and started anew, with nothing). Its stderr goes to a file
beside the directory, since it must not keep the output of a launch open that has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from waystation import _native
from waystation._errors import from_os_error
from waystation.errors import Conflict, InvalidInput, Unavailable, WaystationError
from waystation.memory import DIRECTORY_VARIABLE, agent_program

_SLOT_STEP_BYTES = 1 << 18
_STORE_BYTES = 1 << 20  # what a store takes beside its slots, generously
_UNITS = {"": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What an agent shows the others, and whom it believes; PEM.

    Attributes:
        certificate: That of its host, by its name.
        key: The key of that.
        authorities: Who signs the certificates of all hosts.
    """

    certificate: Path
    key: Path
    authorities: Path

    def options(self) -> list[str]:
        """What the agent is told of them."""
        return [
            f"--tls-certificate={self.certificate}",
            f"--tls-key={self.key}",
            f"--tls-authorities={self.authorities}",
        ]


@dataclass(frozen=True, slots=True)
class Membership:
    """What makes an agent one of several.

    Attributes:
        host: The name of its host.
        address: Where it listens.
        names: The names of all hosts.
        hosts_path: The list of them.
        secret_path: The secret that their agents share.
        copies: How many copies of each shard they keep.
        tls: What they show each other; None if nothing is encrypted.
    """

    host: str
    address: str
    names: tuple[str, ...]
    hosts_path: Path
    secret_path: Path
    copies: int
    tls: TlsFiles | None = None

    def options(self) -> list[str]:
        """What the agent is told of it."""
        return [
            f"--listen={self.address}",
            f"--host={self.host}",
            f"--hosts={self.hosts_path}",
            f"--secret-file={self.secret_path}",
            f"--copies={self.copies}",
            *(self.tls.options() if self.tls is not None else []),
        ]


class HostAgent:
    """The agent of one directory.

    Args:
        directory: Of its store.
        memory: What a new agent may take.
        versions: How many committed versions of each shard a new agent keeps.
        process_count: How many processes will save to it.
        restarts: How often it is started again.
        tell: Takes what people should know.
        membership: Among which others it is one; None if it is alone.
    """

    def __init__(
        self,
        directory: Path,
        memory: str | None,
        versions: int,
        process_count: int,
        restarts: int,
        tell: Callable[[str], None],
        membership: Membership | None = None,
    ) -> None:
        self.directory = Path(os.path.abspath(directory))
        self._memory = memory
        self._versions = versions
        self._process_count = process_count
        self._restarts = restarts
        self._tell = tell
        self._membership = membership
        self._name = "the agent" if membership is None else f"the agent of {membership.host}"
        self._own_directory: tuple[int, int] | None = None  # as it was when the agent was ready
        self._process: subprocess.Popen[bytes] | None = None
        self._process_id: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What the processes of the program are told."""
        return {DIRECTORY_VARIABLE: str(self.directory)}

    @property
    def process_id(self) -> int | None:
        """Its number; None if it is not to be followed."""
        return self._process_id

    def describe(self) -> dict[str, Any]:
        """The agent, for a JSON document."""
        host = {} if self._membership is None else {"host": self._membership.host}
        return host | {"directory": str(self.directory), "pid": self._process_id}

    @property
    def is_lost(self) -> bool:
        """Whether its directory is gone, with what it kept there."""
        found = self._found_directory()
        self._own_directory = self._own_directory or found
        return found != self._own_directory

    def _found_directory(self) -> tuple[int, int] | None:
        """What tells the directory that is there now from any other."""
        with contextlib.suppress(OSError):
            status = self.directory.stat()
            return status.st_dev, status.st_ino
        return None

    def start(self) -> None:
        """Makes sure that an agent serves the directory.

        Raises:
            InvalidInput: There is none, and it was not said what a new one may take.
            Conflict: An agent serves it that is alone, or one of others.
            NotFound: Its program is not installed.
            Unavailable: It could not be started.
        """
        if (status := self._status()) is not None:
            self._check(status)
            self._process_id = int(status["process"])
            self._own_directory = self._found_directory()
            return
        self._spawn()
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as said:
            is_ready = bool(said.readline())
        # At once: a directory that is gone before somebody first asks for it would never be missed.
        self._own_directory = self._found_directory()
        if not is_ready:
            code = self._process.wait()
            raise Unavailable(
                f"{self._name} for '{self.directory}' ended with code {code}; its last words are in "
                f"'{self._log_path}': {self._last_words()}",
                path=str(self.directory),
            )

    def _status(self) -> dict[str, Any] | None:
        with contextlib.suppress(WaystationError):
            return _native.AgentClient(str(self.directory), timeout_s=0.0).status()
        return None

    def _check(self, status: dict[str, Any]) -> None:
        """Refuses an agent that is not the one that is wanted."""
        member = self._membership
        wanted = ("", 1) if member is None else (member.host, len(member.names))
        found = status["host"], status["agent_count"]
        if found != wanted:
            described = "alone" if found[1] == 1 else f"'{found[0]}' of {found[1]} hosts"
            raise Conflict(
                f"the agent that serves '{self.directory}' is {described}; end it "
                f"(pid {status['process']}), or give another directory",
                path=str(self.directory),
            )

    def restart(self) -> None:
        """Starts it again, if it may be: it has ended."""
        if self._process is not None:
            self._process.wait()
        self._process_id = None
        if not self._restarts:
            self._tell(f"{self._name} has ended; the program goes on without it")
            return
        self._restarts -= 1
        self._tell(f"{self._name} has ended and is started again, {self._restarts} more times at most")
        try:
            self._spawn(wait=False)
        except (OSError, WaystationError) as error:
            self._tell(f"{self._name} could not be started again: {error}")

    def _spawn(self, *, wait: bool = True) -> None:
        command = [str(agent_program()), "run", *self._options()]
        self._own_directory = None
        with self._opened_log() as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if wait else subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        self._process_id = self._process.pid

    def _opened_log(self) -> BinaryIO:
        try:
            return open(os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb")
        except OSError as error:
            raise from_os_error(error, "write", self._log_path) from error

    def _options(self) -> list[str]:
        if self._memory is None:
            raise InvalidInput(
                f"no agent serves '{self.directory}' yet; say what a new one may take, such as "
                "--agent-memory 8GiB"
            )
        memory_bytes = bytes_of(self._memory)
        slots = (self._versions + 1) * self._process_count  # and one for the version that is written
        # The run is that of the directory, so that a later launch is of the same.
        run = b"waystation launch " + os.fsencode(self.directory)
        options: list[str] = []
        if self._membership is not None:
            slots *= self._membership.copies
            run = b"\0".join([b"waystation launch", *map(str.encode, self._membership.names)])
            options = self._membership.options()
        slot_bytes = (memory_bytes - _STORE_BYTES) // slots // _SLOT_STEP_BYTES * _SLOT_STEP_BYTES
        if slot_bytes < 2 * _SLOT_STEP_BYTES:
            raise InvalidInput(f"--agent-memory {self._memory} is too little for {slots} slots; give more")
        return [
            f"--directory={self.directory}",
            f"--run-id={hashlib.sha256(run).hexdigest()[:32]}",
            f"--slots={slots}",
            f"--versions={self._versions}",
            f"--slot-bytes={slot_bytes}",
            f"--memory-cap-bytes={memory_bytes}",
            *options,
        ]

    @property
    def _log_path(self) -> str:
        return f"{self.directory}.log"

    def _last_words(self) -> str:
        with open(self._log_path, encoding="utf-8", errors="replace") as log:
            return (log.read().splitlines() or ["nothing"])[-1]


def bytes_of(text: str) -> int:
    """A number of bytes, with or without a unit.

    Raises:
        InvalidInput: It is none.
    """
    for unit, shift in reversed(_UNITS.items()):
        digits = text.removesuffix(unit).rstrip()
        if text.endswith(unit) and digits.isdecimal():
            return int(digits) << shift
    raise InvalidInput(f"'{text}' is no number of bytes; give one such as 8GiB")
