"""Keeps a process ready for each process of a program, to take its place when the program is started again.

A program that starts again spends most of its time on imports. After its first step the launch prepares, one
after the other and at low priority, as many *standbys* as it runs processes: interpreters that have imported
what the program begins with (`waystation_launch.standby`). When it starts the program again, each standby
becomes one of its processes.

What can go wrong, in order: the command is not one of Python (there are no standbys); an import fails, or the
standby is killed (it is not replaced until the next start); it is not ready in time, it was prepared in
another environment, or what it has imported has changed since (a fresh process is started). The launch says
why, and it costs time at most. Invariants: a standby runs nothing of the program before it
is told to, and it is told only when it is counted as a process of the program; it dies with the launch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waystation._launched import FIRST_STEP_VARIABLE
from waystation.memory import RECOVERY_VARIABLE

PREPARE_AFTER_S = 30.0  # if the program has not said by then that it has taken a step
ANSWER_S = 2.0  # for which a standby may keep the program from starting
# What each start sets anew: where processes meet, and what the launch knows. It is read when processes
# connect and when a step is saved, not by imports.
LATE_VARIABLES = frozenset({RECOVERY_VARIABLE, "JAX_COORDINATOR_ADDRESS", "MASTER_PORT"})

_PROGRAM = Path(__file__).with_name("standby.py")
_INTERPRETER = re.compile(r"python(\d+(\.\d+)*t?)?")
_OPTIONS = re.compile(r"-[bBdEIOPqRsSuv]+")
_WITH_VALUE = re.compile(r"-[bBdEIOPqRsSuv]*[WX](.*)", re.DOTALL)
_MODULE = re.compile(r"-([bBdEIOPqRsSuv]*)m(.*)", re.DOTALL)
_MOST_TOLD_BYTES = 1 << 20
_HAS_ENDED = "the standby has ended"
_log = logging.getLogger("waystation")

# Starts a process: its command, its environment, and the descriptors that it gets besides.
Spawn = Callable[[Sequence[str], Mapping[str, str], Sequence[int]], "subprocess.Popen[bytes]"]


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A command that runs a script or a module.

    Attributes:
        words: All of it.
        interpreter: The interpreter and its options.
        place: Where in the words the arguments of the program begin; those of a script begin with its path.
        module: The module; None for a script.
    """

    words: tuple[str, ...]
    interpreter: tuple[str, ...]
    place: int
    module: str | None


def python_command(words: Sequence[str]) -> PythonCommand | None:
    """Reads a command as the interpreter would; None if a standby could not become what it starts."""
    if not words or not _INTERPRETER.fullmatch(os.path.basename(words[0])):
        return None
    place = 1
    while place < len(words):
        word = words[place]
        if (found := _MODULE.fullmatch(word)) is not None:
            flags, module = [f"-{found[1]}"] if found[1] else [], found[2]
            if not module:
                place += 1
                module = words[place] if place < len(words) else ""
            own = (*words[: place if found[2] else place - 1], *flags)
            return PythonCommand(tuple(words), own, place + 1, module) if module else None
        if (found := _WITH_VALUE.fullmatch(word)) is not None:
            place += 1 if found[1] else 2
        elif _OPTIONS.fullmatch(word):
            place += 1
        elif word.startswith("-") or not os.path.isfile(word):
            return None
        else:
            return PythonCommand(tuple(words), tuple(words[:place]), place, None)
    return None


@dataclass(eq=False)
class _Standby:
    """One of them.

    Attributes:
        index: The number of the process that it is to become.
        process: Its process.
        control: The connection to it.
        environment: The variables that it was prepared in.
        is_ready: Whether it waits.
    """

    index: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    environment: Mapping[str, str]
    is_ready: bool = False
    _begun: bytes = b""

    def heard(self) -> list[dict[str, Any]] | None:
        """What it has said since; None if it has ended."""
        try:
            data = self.control.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._begun = (self._begun + data).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:  # something that it has imported writes to what is not its own
            return None

    def say(self, **what: Any) -> bool:
        """Tells it something; returns whether it is there."""
        try:
            self.control.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            return False
        return True

    def last_words(self) -> str:
        """The last line that it has written to stderr."""
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        written = b""
        with contextlib.suppress(BlockingIOError):
            written = os.read(self.process.stderr.fileno(), 1 << 16)
        return (written.decode(errors="replace").splitlines() or ["it has said nothing"])[-1]

    def end(self) -> None:
        """Kills it, with all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.control.close()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


class Standbys:
    """The standbys of the processes that one launch starts.

    Args:
        command: The command of the program.
        spawn: Starts a process as those of the program are started.
        on_unused: Called at a restart with the reasons why processes are no standbys, by their number.
        prepare_after_s: When they are prepared if the program does not say that it has taken a step.

    Attributes:
        is_wanted: Whether the program may be started once more.
        unused: Why processes of the latest restart were no standbys, by their number; empty before it.
    """

    def __init__(
        self,
        command: PythonCommand,
        spawn: Spawn,
        on_unused: Callable[[Mapping[int, str]], None],
        prepare_after_s: float = PREPARE_AFTER_S,
    ) -> None:
        self.is_wanted = True
        self.unused: dict[int, str] = {}
        self._command = command
        self._spawn = spawn
        self._on_unused = on_unused
        self._prepare_after_s = prepare_after_s
        self._standbys: dict[int, _Standby] = {}
        self._name = f"waystation-launch-{secrets.token_hex(16)}"
        self._steps = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._steps.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._steps.bind(f"\0{self._name}")
        self._steps.setblocking(False)
        self._run: _Run | None = None
        self._absent: dict[int, str] = {}  # why a process of the program has no standby now, by its number

    @property
    def environment(self) -> dict[str, str]:
        """The variable that tells the program how to say that it has taken a step."""
        return {FIRST_STEP_VARIABLE: self._name}

    def take(self, environments: Mapping[int, Mapping[str, str]]) -> dict[int, subprocess.Popen[bytes]]:
        """Has the standbys become the processes of the program; the others are ended.

        Args:
            environments: The variables of each process, by its number.

        Returns:
            The processes that standbys have become.
        """
        self.unused, self._absent = self._absent, {}
        asked: dict[int, _Standby] = {}
        for index, standby in self._standbys.items():
            why = self._ask(standby, environments.get(index, {}))
            if why is None:
                asked[index] = standby
            else:
                self.unused[index] = why
        refusals = _refusals(asked)
        taken = {}
        for index, standby in self._standbys.items():
            if index in asked and index not in refusals and standby.say(is_begun=True):
                standby.control.close()
                taken[index] = standby.process
                continue
            if index in asked:
                self.unused[index] = refusals.get(index, _HAS_ENDED)
            standby.end()
        self._standbys.clear()
        if self.unused:
            self._on_unused(self.unused)
        return taken

    def _ask(self, standby: _Standby, environment: Mapping[str, str]) -> str | None:
        """Asks a standby whether it can be used; returns why not, if that is known already."""
        heard = standby.heard()
        standby.is_ready = standby.is_ready or bool(heard and heard[0].get("is_ready"))
        if heard is None:
            return _HAS_ENDED
        if not standby.is_ready:
            return "the standby was not ready"
        before = standby.environment
        changed = {name for name in {*before, *environment} if before.get(name) != environment.get(name)}
        if not changed <= LATE_VARIABLES:
            names = ", ".join(sorted(changed - LATE_VARIABLES))
            return f"the standby was prepared with other values of {names}"
        is_there = standby.say(environment={name: environment.get(name) for name in sorted(changed)})
        return None if is_there else _HAS_ENDED

    # ---- while the program runs ----------------------------------------------------------------

    def follow(
        self,
        selector: selectors.BaseSelector,
        processes: Mapping[int, int],
        environments: Mapping[int, Mapping[str, str]],
        children: set[int],
    ) -> None:
        """See `Reserve`."""
        self._run = _Run(selector, dict(processes), environments, children, time.monotonic())
        self._run.waiting = sorted(processes)
        self._absent = dict.fromkeys(processes, "no standby was prepared yet")
        selector.register(self._steps, selectors.EVENT_READ, self._hear_of_step)

    def leave(self) -> None:
        """The program is ending, and no more is prepared; what is ready stays."""
        run, self._run = self._run, None
        if run is not None:
            for watched in (self._steps, *(standby.control for standby in self._standbys.values())):
                with contextlib.suppress(KeyError):
                    run.selector.unregister(watched)

    @property
    def patience_s(self) -> float | None:
        """After how long `look` is to be called at the latest; None if that does not matter."""
        run = self._run
        if run is None or run.may_prepare or not self.is_wanted:
            return None
        return max(0.0, run.began_s + self._prepare_after_s - time.monotonic())

    def look(self) -> None:
        """Prepares the next standby, if it is time and the one before is ready."""
        run = self._run
        if run is None or not self.is_wanted:
            return
        run.may_prepare = run.may_prepare or time.monotonic() >= run.began_s + self._prepare_after_s
        if not run.may_prepare or not all(standby.is_ready for standby in self._standbys.values()):
            return
        if run.waiting:
            self._prepare(run, run.waiting.pop(0))

    def _hear_of_step(self) -> None:
        size = struct.calcsize("3i")
        try:
            data, credentials, _, _ = self._steps.recvmsg(_MOST_TOLD_BYTES, socket.CMSG_SPACE(size))
        except OSError:
            return
        run = self._run
        senders = [struct.unpack("3i", content[:size])[0] for _, _, content in credentials]
        if run is None or not senders or senders[0] not in run.processes.values():
            return  # of an earlier start, or nobody of the program
        with contextlib.suppress(ValueError, zlib.error):
            run.told[senders[0]] = json.loads(zlib.decompress(data))
        run.may_prepare = run.may_prepare or run.told.keys() >= set(run.processes.values())

    def _prepare(self, run: _Run, index: int) -> None:
        told = run.told.get(run.processes[index], {})
        environment = run.environments[index]
        request = {
            "place": self._command.place,
            "module": self._command.module,
            "modules": [] if index in run.plain else told.get("modules", []),
            "environment": told.get("environment", ""),
        }
        own, other = socket.socketpair()
        memory = os.memfd_create("waystation-standby")
        with other, open(memory, "w+b") as file:
            file.write(json.dumps(request).encode())
            file.seek(0)
            numbers = other.fileno(), memory
            words = [*self._command.interpreter, str(_PROGRAM), *map(str, numbers), *self._command.words]
            try:
                process = self._spawn(words, environment, numbers)
            except OSError as error:
                own.close()
                self._absent[index] = f"the standby could not be started: {error}"
                return
        own.setblocking(False)
        self._absent.pop(index, None)
        standby = self._standbys[index] = _Standby(index, process, own, environment)
        run.children.add(process.pid)
        run.selector.register(own, selectors.EVENT_READ, lambda: self._hear(run, standby))
        _log.debug("the standby of process %d is being prepared (pid %d)", index, process.pid)

    def _hear(self, run: _Run, standby: _Standby) -> None:
        heard = standby.heard()
        if heard is None:
            run.selector.unregister(standby.control)
            words = standby.last_words()
            self._absent[standby.index] = f"{_HAS_ENDED}: {words}"
            _log.debug("the standby of process %d has ended: %s", standby.index, words)
            self._end(standby, run)
        elif heard and not heard[0].get("is_ready"):
            run.selector.unregister(standby.control)
            _log.debug(
                "the standby of process %d is prepared anew, with the first imports of the program alone: it "
                "changes its environment afterwards",
                standby.index,
            )
            self._end(standby, run)
            run.plain.add(standby.index)
            run.waiting.insert(0, standby.index)
        elif heard:
            standby.is_ready = True
            imported = heard[0].get("imported")
            _log.debug("the standby of process %d is ready, with %s modules", standby.index, imported)

    def _end(self, standby: _Standby, run: _Run | None = None) -> None:
        del self._standbys[standby.index]
        standby.end()
        if run is not None:
            run.children.discard(standby.process.pid)

    def close(self) -> None:
        """Ends all of them."""
        self.leave()
        for standby in list(self._standbys.values()):
            self._end(standby)
        self._steps.close()


@dataclass
class _Run:
    """One start of the program, as far as standbys are concerned.

    Attributes:
        selector: Watches what wakes the launch.
        processes: The process ids, by number.
        environments: The variables, by number.
        children: The processes of the launch that are not of the program.
        began_s: When it began, by the monotonic clock.
        told: What processes have said of their first step, by process id.
        waiting: The numbers of the processes that are still to get a standby.
        plain: Those whose standbys import only what the program begins with.
        may_prepare: Whether it is time.
    """

    selector: selectors.BaseSelector
    processes: dict[int, int]
    environments: Mapping[int, Mapping[str, str]]
    children: set[int]
    began_s: float
    told: dict[int, dict[str, Any]] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    plain: set[int] = field(default_factory=set)
    may_prepare: bool = False


def _refusals(asked: dict[int, _Standby]) -> dict[int, str]:
    """Why standbys cannot be used, by their numbers; the others have said in time that they can."""
    refusals: dict[int, str] = {}
    waiting = dict(asked)
    until_s = time.monotonic() + ANSWER_S
    with selectors.DefaultSelector() as selector:
        for index, standby in asked.items():
            selector.register(standby.control, selectors.EVENT_READ, index)
        while waiting and (left_s := until_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                heard = waiting[key.data].heard()
                if heard == []:
                    continue
                selector.unregister(key.fileobj)
                del waiting[key.data]
                if heard is None:
                    refusals[key.data] = _HAS_ENDED
                elif not heard[0].get("is_valid"):
                    refusals[key.data] = heard[0].get("why", "")
    return refusals | dict.fromkeys(waiting, f"the standby did not answer within {ANSWER_S:g} s")
