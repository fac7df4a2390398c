"""Starts the processes of one program on this machine, follows them, and finds which of them failed first.

Every process is the leader of a session of its own, so that all it starts can be ended with it. Its end is
seen through a file descriptor (pidfd) in the moment it happens, and noted with the time, before anything is
read or reaped: when one death makes others fail, the order says which was the cause.

What can end a launch: all processes end by themselves; one ends abnormally, after which the others have
`failure_grace_s` to fail by themselves and say why; a launch on another host says that the program has failed
there, which is the same; a signal to the launcher, which is passed on. Whoever is still there then gets
SIGTERM, and after `TERMINATION_S` SIGKILL.

Invariants: no process of the program outlives the launch, nor what it has started (a launcher that is killed
itself takes the processes along, through PR_SET_PDEATHSIG); each line of output appears whole. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

TERMINATION_S = 5.0
SAME_REQUEST_S = 0.5
LOOK_S = 1.0  # how often companions are looked after, at least
KEPT_LINES = 12
# A program that never ends its line (a progress bar) is shown what it has written by then.
LONGEST_LINE_BYTES = 1 << 16
_READ_BYTES = 1 << 16
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 1, 36, 37
_libc = ctypes.CDLL(None, use_errno=True)

# Takes the index of a process, whether it wrote to stderr, and a line without its end.
OnLine = Callable[[int, bool, str], None]


@dataclass
class Program:
    """One process of the program.

    Attributes:
        index: Its number among all processes of the program.
        process: Its handle.
        exit_code: What it returned; negative is the signal that killed it; None while it runs.
        ended_s: When it ended, in seconds since the launch.
        told_to_end: The signal that the launcher had sent it by then.
        last_lines: The end of its output.
        was_standby: Whether it was prepared before it was needed.
    """

    index: int
    process: subprocess.Popen[bytes]
    exit_code: int | None = None
    ended_s: float | None = None
    told_to_end: signal.Signals | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    was_standby: bool = False

    @property
    def process_id(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def failed(self) -> bool:
        """Whether it ended abnormally."""
        return self.exit_code not in (None, 0)

    @property
    def signal_name(self) -> str | None:
        """The signal that killed it; None if none did."""
        if self.exit_code is None or self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"

    def describe(self) -> dict[str, Any]:
        """The process, for a JSON document."""
        return {
            "index": self.index,
            "pid": self.process_id,
            "exit_code": self.exit_code if self.signal_name is None else None,
            "signal": self.signal_name,
            "ended_s": self.ended_s,
            "told_to_end": None if self.told_to_end is None else self.told_to_end.name,
            "last_lines": list(self.last_lines),
        }


@dataclass
class Outcome:
    """How a launch went.

    Attributes:
        programs: All processes, by their index.
        first: The one that failed first, if any failed.
        passed_on: The first signal to the launcher, if there was one.
        began_at_s: When it began, in seconds since 1970.
        stopped: Why others have ended it, if they did before anything failed here.
    """

    programs: list[Program]
    first: Program | None
    passed_on: signal.Signals | None
    began_at_s: float
    stopped: str | None = None


class Companion(Protocol):
    """A process that the program needs while it runs, and that outlives the launch."""

    @property
    def process_id(self) -> int | None:
        """Its process id; None if there is no process to follow."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether it must be replaced although it runs, because what it kept is gone."""
        ...

    def restart(self) -> None:
        """Called when it has ended; starts it again if restarts are left."""
        ...


class Others(Protocol):
    """The launches of the same program on other hosts.

    Attributes:
        stopped: Why the program must end on this host; None while it may continue.
    """

    stopped: str | None

    def fileno(self) -> int:
        """A descriptor that is readable when `handle` has something to do."""
        ...

    def handle(self) -> None:
        """Takes the messages that have arrived; called at least every second."""
        ...

    def fails(self, why: str) -> None:
        """Tells the others that the program ends on this host."""
        ...


class Reserve(Protocol):
    """Processes that are prepared to become those of the program when it is started again."""

    def take(self, environments: Mapping[int, Mapping[str, str]]) -> dict[int, subprocess.Popen[bytes]]:
        """Has those that are ready become processes of the program; ends the others.

        Args:
            environments: The variables of each process of the program, by its number.

        Returns:
            What they have become, by number.
        """
        ...

    def follow(
        self,
        selector: selectors.BaseSelector,
        processes: Mapping[int, int],
        environments: Mapping[int, Mapping[str, str]],
        children: set[int],
    ) -> None:
        """The program has been started.

        Args:
            selector: Watches what wakes the launch.
            processes: The process ids of the program, by their numbers.
            environments: Their variables.
            children: The processes of the launch that are not of the program; its own are added.
        """
        ...

    @property
    def patience_s(self) -> float | None:
        """After how long `look` is to be called at the latest; None if that does not matter."""
        ...

    def look(self) -> None:
        """Prepares more, if it is time."""
        ...

    def leave(self) -> None:
        """The program is ending; the selector is not used any more."""
        ...


def spawn(
    command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a process as those of the program are: it dies with the launch, and leads a session of its own.

    Args:
        command: The program and its arguments.
        environment: Its variables.
        descriptors: What it has open besides input and output.

    Raises:
        OSError: It cannot be started.
    """
    launcher = os.getpid()

    def bind_to_launcher() -> None:
        _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != launcher:  # it was killed before that
            os._exit(1)

    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=descriptors,
        # Safe: the launcher has a single thread.
        preexec_fn=bind_to_launcher,  # noqa: PLW1509
    )


class Signals:
    """The signals that end a program, from its first start to its last end: none of them is lost.

    Between its start and its close they do nothing but wait to be taken, and `fileno` is readable then.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[int, Any] = {}
        self._before_fd = -1
        self._receive()

    def fileno(self) -> int:
        """What is readable when signals have come."""
        return self._reader.fileno()

    def take(self) -> list[signal.Signals]:
        """Those that have come since, in order."""
        try:
            values = self._reader.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        return [signal.Signals(value) for value in values if value in _PASSED_ON]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """While no process of the program runs, signals do what they did before."""
        self._leave()
        try:
            yield
        finally:
            self._receive()

    def close(self) -> None:
        """From now on signals do what they did before."""
        self._leave()
        self._reader.close()
        self._writer.close()

    def _receive(self) -> None:
        self._before_fd = signal.set_wakeup_fd(self._writer.fileno())
        # The handlers do nothing: what counts is what the file descriptor says.
        self._before = {number: signal.signal(number, lambda *_: None) for number in _PASSED_ON}

    def _leave(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before_fd)


class Launch:
    """Runs several processes of a command and follows them until all have ended."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[dict[str, str]],
        grace_s: float,
        on_line: OnLine,
        on_failure: Callable[[Program], None],
        signals: Signals,
        companions: Sequence[Companion] = (),
        first_index: int = 0,
        others: Others | None = None,
        reserve: Reserve | None = None,
        failure_grace_s: float | None = None,
    ) -> None:
        """
        Args:
            command: The program and its arguments.
            environments: The environment of each process.
            grace_s: How long processes may still run when a signal was passed on to them.
            on_line: Takes each line of output.
            on_failure: Called when a process has failed and the others are given their time.
            signals: What is passed on to the processes.
            companions: What runs beside the program, and is started again when it ends.
            first_index: The number of the first process, of all that the program has.
            others: The launches of other hosts; None if there are none that this one has to heed.
            reserve: What may become processes of the program; None if all are started anew.
            failure_grace_s: How long the others may still run when one has failed; None for `grace_s`.
        """
        self._command = list(command)
        self._environments = dict(enumerate(environments, first_index))
        self._grace_s = grace_s
        self._failure_grace_s = grace_s if failure_grace_s is None else failure_grace_s
        self._on_line = on_line
        self._on_failure = on_failure
        self._signals = signals
        self._companions = companions
        self._companion_ends: dict[int, int] = {}  # of those that are followed, by their places
        self._others = others
        self._reserve = reserve
        self._selector = selectors.DefaultSelector()
        self._programs: list[Program] = []
        self._order: list[Program] = []  # of ending
        self._passed_on: signal.Signals | None = None
        self._passed_on_s = 0.0  # since the launch
        self._strangers: set[int] = set()
        self._open_streams = 0
        self._deadline_s: float | None = None  # since the launch, for what is to happen next
        self._seen_s = 0.0  # since the launch: when what is handled now was seen
        self._began = time.monotonic()
        self._began_at_s = time.time()

    def run(self) -> Outcome:
        """Starts all processes, and returns when all have ended.

        Raises:
            OSError: The command cannot be started; no process of it is left running.
        """
        with adopting_orphans() as strangers:
            self._strangers = strangers
            try:
                self._selector.register(self._signals, selectors.EVENT_READ, self._pass_on)
                for place in range(len(self._companions)):
                    self._follow_companion(place)
                if self._others is not None:
                    self._selector.register(self._others, selectors.EVENT_READ, self._others.handle)
                self._start()
                self._follow()
            finally:
                if self._reserve is not None:
                    self._reserve.leave()
                for place in list(self._companion_ends):
                    self._leave_companion(place)
                self._end_everything()
                self._selector.close()
        self._pass_on()  # what has come while the last processes were ended
        stopped = None if self._others is None else self._others.stopped
        return Outcome(self._programs, self._first_failure(), self._passed_on, self._began_at_s, stopped)

    # Starting -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        taken = {} if self._reserve is None else self._reserve.take(self._environments)
        # All at once, so that each is ended with the rest if one of the others cannot be started.
        for index, process in taken.items():
            self._add(Program(index, process, was_standby=True))
        for index, environment in self._environments.items():
            if index not in taken:
                self._add(Program(index, spawn(self._command, environment)))
        self._programs.sort(key=lambda program: program.index)
        if self._reserve is not None:
            processes = {program.index: program.process_id for program in self._programs}
            self._reserve.follow(self._selector, processes, self._environments, self._strangers)

    def _add(self, program: Program) -> None:
        """Follows a process that has been started."""
        self._programs.append(program)
        process = program.process
        end = os.pidfd_open(process.pid)
        self._selector.register(end, selectors.EVENT_READ, lambda: self._ended(program, end))
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            self._read_lines(program, stream, is_error=stream is process.stderr)

    def _read_lines(self, program: Program, stream: IO[bytes], *, is_error: bool) -> None:
        os.set_blocking(stream.fileno(), False)
        lines = Lines(lambda line: self._show(program, is_error, line))

        def read() -> None:
            try:
                data = os.read(stream.fileno(), _READ_BYTES)
            except BlockingIOError:
                return
            lines.feed(data)
            if not data:
                self._selector.unregister(stream)
                stream.close()
                self._open_streams -= 1

        self._selector.register(stream, selectors.EVENT_READ, read)
        self._open_streams += 1

    def _show(self, program: Program, is_error: bool, line: str) -> None:
        program.last_lines.append(line)
        self._on_line(program.index, is_error, line)

    def _follow_companion(self, place: int) -> None:
        companion = self._companions[place]
        while (process_id := companion.process_id) is not None:
            self._strangers.add(process_id)
            try:
                end = os.pidfd_open(process_id)
            except ProcessLookupError:  # it has ended since it was followed last
                companion.restart()
                continue
            self._companion_ends[place] = end
            self._selector.register(end, selectors.EVENT_READ, lambda: self._companion_ended(place))
            return

    def _companion_ended(self, place: int) -> None:
        self._leave_companion(place)
        self._companions[place].restart()
        self._follow_companion(place)

    def _leave_companion(self, place: int) -> None:
        end = self._companion_ends.pop(place)
        self._selector.unregister(end)
        os.close(end)

    def _end_lost_companions(self) -> None:
        """Kills the companions that must be replaced, which are then started again."""
        for place, end in self._companion_ends.items():
            if self._companions[place].is_lost:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(end, signal.SIGKILL)

    # Following ------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Handles events until every process has ended."""
        while any(program.exit_code is None for program in self._programs):
            self._handle(self._patience_s())
            self._end_lost_companions()
            self._heed_others()
            self._look_after_reserve()
            if self._deadline_s is not None and self._now_s() >= self._deadline_s:
                self._press()

    def _patience_s(self) -> float | None:
        """How long to wait for the next event."""
        left_s = None if self._deadline_s is None else max(0.0, self._deadline_s - self._now_s())
        if left_s is None and self._reserve is not None:
            left_s = self._reserve.patience_s
        if not self._companion_ends and self._others is None:
            return left_s
        return LOOK_S if left_s is None else min(left_s, LOOK_S)

    def _handle(self, timeout_s: float | None) -> bool:
        """Handles the events that have happened; returns whether there were any."""
        happened = [key for key, _ in self._selector.select(timeout_s)]
        self._seen_s = self._now_s()
        # Ends first: their time counts.
        for key in sorted(happened, key=lambda key: not isinstance(key.fileobj, int)):
            key.data()
        return bool(happened)

    def _ended(self, program: Program, end: int) -> None:
        program.ended_s = self._seen_s
        self._selector.unregister(end)
        os.close(end)
        # What it started keeps its group, so that the group's number cannot be given to another meanwhile.
        _signal_group(program, signal.SIGKILL)
        program.exit_code = program.process.wait()
        self._order.append(program)
        if program.failed and self._deadline_s is None:
            self._deadline_s = self._now_s() + self._failure_grace_s
            self._on_failure(program)
            if self._others is not None:
                self._others.fails(f"process {program.index} has failed")

    def _heed_others(self) -> None:
        """If the program has failed on another host, processes here have as long to end as those there."""
        if self._others is None:
            return
        self._others.handle()
        if self._others.stopped is not None and self._deadline_s is None:
            self._deadline_s = self._now_s() + self._failure_grace_s

    def _look_after_reserve(self) -> None:
        """Nothing is prepared once the program is ending: it would only slow that down."""
        if self._reserve is not None:
            if self._deadline_s is None and not self._order:
                self._reserve.look()
            else:
                self._reserve.leave()

    def _press(self) -> None:
        """Sends SIGTERM to the processes that are left, and SIGKILL the next time."""
        left = [program for program in self._programs if program.exit_code is None]
        asked = any(program.told_to_end == signal.SIGTERM for program in left)
        self._send(signal.SIGKILL if asked else signal.SIGTERM)
        self._deadline_s = self._now_s() + TERMINATION_S

    def _send(self, number: signal.Signals) -> None:
        for program in self._programs:
            if program.exit_code is None:
                program.told_to_end = number
                _signal_group(program, number)

    def _first_failure(self) -> Program | None:
        """The first process that failed without having been told to end. Among ends that were seen at one
        moment, an abort counts last, because JAX aborts the survivors when another process dies."""
        failed = [program for program in self._order if program.failed]
        by_itself = [program for program in failed if program.told_to_end is None] or failed
        if not by_itself:
            return None
        first_s = by_itself[0].ended_s or 0.0
        together = [program for program in by_itself if (program.ended_s or 0.0) - first_s < 0.001]
        return min(together, key=lambda program: program.signal_name == "SIGABRT")

    def _now_s(self) -> float:
        return time.monotonic() - self._began

    # Signals --------------------------------------------------------------------------------------------

    def _pass_on(self) -> None:
        for number in self._signals.take():
            # Whoever asks a second time does not want to wait. `timeout` and others signal a process and then
            # its group, which is one request.
            if self._passed_on is not None and self._now_s() - self._passed_on_s < SAME_REQUEST_S:
                continue
            again = self._passed_on is not None
            self._passed_on_s = self._now_s()
            self._passed_on = self._passed_on or number
            self._send(signal.SIGKILL if again else number)
            self._deadline_s = self._now_s() + (TERMINATION_S if again else self._grace_s)

    # Ending ---------------------------------------------------------------------------------------------

    def _end_everything(self) -> None:
        """Kills and reaps what is left, and takes the output that it had still written."""
        self._send(signal.SIGKILL)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):  # of a process whose end was not waited for
                key.data()
        kill_adopted(self._strangers)
        # With all writers gone, the pipes end.
        while self._open_streams and self._handle(TERMINATION_S):
            pass


def _signal_group(program: Program, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program.process_id, number)


class Lines:
    """Cuts a stream of bytes into lines.

    Args:
        on_line: Takes each line, without its end.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._begun = b""

    def feed(self, data: bytes) -> None:
        """Takes bytes; none at the end."""
        *whole, self._begun = (self._begun + data).split(b"\n")
        for line in whole:
            self._give(line)
        if self._begun and (not data or len(self._begun) > LONGEST_LINE_BYTES):
            self._give(self._begun)
            self._begun = b""

    def _give(self, line: bytes) -> None:
        # Of a line that was written over, what was seen last.
        shown = line.removesuffix(b"\r").rpartition(b"\r")[2]
        self._on_line(shown.decode(errors="replace"))


@contextlib.contextmanager
def adopting_orphans() -> Iterator[set[int]]:
    """Makes this process adopt the orphans of its descendants, so that they can be found and ended; yields
    the children that this process has already."""
    before = ctypes.c_int()
    _libc.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _libc.prctl(_SET_CHILD_SUBREAPER, 1)
    try:
        yield set(_children())
    finally:
        _libc.prctl(_SET_CHILD_SUBREAPER, before.value)


def kill_adopted(strangers: set[int]) -> None:
    """Kills and reaps all children but these. Each may leave children, which this process then adopts."""
    while adopted := [child for child in _children() if child not in strangers]:
        for child in adopted:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in adopted:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    found.append(int(entry.name))
    return found
