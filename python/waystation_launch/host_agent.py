"""The agent of a host, as `waystation launch --agent` starts and follows it.

The agent runs in a session of its own and outlives the launch, because the next launch loads what it keeps.
What can go wrong, in order: an agent already serves the directory (the launch uses it, if it is the right
one); the system refuses a new agent its memory or its directory (the launch ends and says why); the agent
ends while the program runs (the launch restarts it, as often as `--restarts` allows, and it finds what it has
kept); its directory vanishes, as the memory of a lost host does (the launch kills it and starts a new one,
which has nothing). The agent writes its stderr to a file beside the directory, so that it does not keep the
output of an ended launch open.
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
    """The files of an agent for TLS, in PEM.

    Attributes:
        certificate: The certificate of its host, issued to the host's name.
        key: The private key of the certificate.
        authorities: The authorities that sign the certificates of all hosts.
    """

    certificate: Path
    key: Path
    authorities: Path

    def options(self) -> list[str]:
        """The options of the agent for them."""
        return [
            f"--tls-certificate={self.certificate}",
            f"--tls-key={self.key}",
            f"--tls-authorities={self.authorities}",
        ]


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of an agent among the agents of several hosts.

    Attributes:
        host: The name of its host.
        address: The address at which it listens.
        names: The names of all hosts.
        hosts_path: The file that lists the hosts.
        secret_path: The file with the secret that their agents share.
        copies: How many copies of each shard they keep.
        tls: The certificates of this host; None if the secret is all that it proves.
    """

    host: str
    address: str
    names: tuple[str, ...]
    hosts_path: Path
    secret_path: Path
    copies: int
    tls: TlsFiles | None = None

    def options(self) -> list[str]:
        """The options of the agent for it."""
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
        directory: The directory of its store.
        memory: How much memory a new agent may take.
        versions: How many committed versions of each shard a new agent keeps.
        process_count: How many processes will save to it.
        restarts: How often it is restarted.
        tell: Takes each line that people should read.
        membership: Its place among the agents of several hosts; None if it is alone.
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
        """The variables that tell the processes of the program about it."""
        return {DIRECTORY_VARIABLE: str(self.directory)}

    @property
    def process_id(self) -> int | None:
        """Its process id; None if there is no process to follow."""
        return self._process_id

    def describe(self) -> dict[str, Any]:
        """The agent, for a JSON document."""
        host = {} if self._membership is None else {"host": self._membership.host}
        return host | {"directory": str(self.directory), "pid": self._process_id}

    @property
    def is_lost(self) -> bool:
        """Whether its directory is gone, and with it what the agent kept."""
        found = self._found_directory()
        self._own_directory = self._own_directory or found
        return found != self._own_directory

    def _found_directory(self) -> tuple[int, int] | None:
        """The identity of the directory that exists now; None if there is none."""
        with contextlib.suppress(OSError):
            status = self.directory.stat()
            return status.st_dev, status.st_ino
        return None

    def check(self) -> None:
        """Refuses what `start` refuses before it makes anything.

        Raises:
            InvalidInput: No agent serves the directory, and the memory limit of a new one is missing.
            Conflict: The agent that serves it has another place among the hosts.
        """
        if (status := self._status()) is not None:
            self._check(status)
        else:
            self._options()

    def start(self) -> None:
        """Makes sure that an agent serves the directory.

        Raises:
            InvalidInput: No agent serves it, and the memory limit of a new one is missing.
            Conflict: The agent that serves it has another place among the hosts.
            NotFound: The program of the agent is not installed.
            Unavailable: The agent could not be started.
        """
        if (status := self._status()) is not None:
            self._check(status)
            self._tell_of_its_memory(status)
            self._process_id = int(status["process"])
            self._own_directory = self._found_directory()
            return
        self._spawn()
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as said:
            is_ready = bool(said.readline())
        # Noted at once: the loss of a directory that vanishes before the first look would go unnoticed.
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
        """Refuses an agent that has another place among the hosts."""
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

    def _tell_of_its_memory(self, status: dict[str, Any]) -> None:
        """Says that a running agent keeps the slots it has, where this launch asks for others."""
        if self._memory is None:
            return
        found = status["slot_count"], status["slot_bytes"]
        wanted = self._slots()
        if found != wanted:
            self._tell(
                f"{self._name} of '{self.directory}' runs already and keeps its memory: {_in_words(*found)}, "
                f"where this launch asks for {_in_words(*wanted)}; to change that, end that agent first (pid "
                f"{status['process']})"
            )

    def restart(self) -> None:
        """Called when it has ended; starts it again if restarts are left."""
        if self._process is not None:
            self._process.wait()
        self._process_id = None
        if not self._restarts:
            self._tell(f"{self._name} has ended; the program goes on without it")
            return
        self._restarts -= 1
        self._tell(f"{self._name} has ended and is started again; restarts left: {self._restarts}")
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
        slots, slot_bytes = self._slots()
        # The run is that of the directory, so that a later launch is of the same.
        run = b"waystation launch " + os.fsencode(self.directory)
        options: list[str] = []
        if self._membership is not None:
            run = b"\0".join([b"waystation launch", *map(str.encode, self._membership.names)])
            options = self._membership.options()
        return [
            f"--directory={self.directory}",
            f"--run-id={hashlib.sha256(run).hexdigest()[:32]}",
            f"--slots={slots}",
            f"--versions={self._versions}",
            f"--slot-bytes={slot_bytes}",
            f"--memory-cap-bytes={bytes_of(self._memory)}",
            *options,
        ]

    def _slots(self) -> tuple[int, int]:
        """How many slots a new agent has, and of how many bytes each is."""
        assert self._memory is not None
        slots = (self._versions + 1) * self._process_count  # and one for the version that is written
        if self._membership is not None:
            slots *= self._membership.copies
        slot_bytes = (bytes_of(self._memory) - _STORE_BYTES) // slots // _SLOT_STEP_BYTES * _SLOT_STEP_BYTES
        if slot_bytes < 2 * _SLOT_STEP_BYTES:
            least = slots * 2 * _SLOT_STEP_BYTES + _STORE_BYTES
            raise InvalidInput(
                f"--agent-memory {self._memory} is too little for the {slots} slots that {self._versions} "
                f"versions need; give {-(-least >> 20)}MiB or more"
            )
        return slots, slot_bytes

    @property
    def _log_path(self) -> str:
        return f"{self.directory}.log"

    def _last_words(self) -> str:
        with open(self._log_path, encoding="utf-8", errors="replace") as log:
            return (log.read().splitlines() or ["nothing"])[-1]


def _in_words(slots: int, slot_bytes: int) -> str:
    return f"{slots} slots of {slot_bytes} bytes"


def bytes_of(text: str) -> int:
    """A number of bytes, with or without a unit.

    Raises:
        InvalidInput: The text is not a number of bytes.
    """
    for unit, shift in reversed(_UNITS.items()):
        digits = text.removesuffix(unit).rstrip()
        if text.endswith(unit) and digits.isdecimal():
            return int(digits) << shift
    raise InvalidInput(f"'{text}' is no number of bytes; give one such as 8GiB")
