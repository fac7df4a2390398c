"""Runs the processes of one program on this machine, and names the one that failed first.

With a list of hosts it runs those of one host, and launches on the others run the rest: all launches start,
end and restart the program together (`waystation_launch.rendezvous`). With a number of hosts it runs the
processes of all, each host with an agent of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from waystation._errors import from_os_error
from waystation._ports import claimed_ports
from waystation.errors import Conflict, InvalidInput, Unavailable
from waystation.memory import RECOVERY_VARIABLE
from waystation_launch.host_agent import HostAgent, Membership, TlsFiles
from waystation_launch.hosts import (
    HOSTS_FILE,
    SECRET_FILE,
    ListedHost,
    emulated,
    index_of,
    prepare,
    read_hosts,
    read_secret,
)
from waystation_launch.processes import Launch, OnLine, Outcome, Program, Signals, spawn
from waystation_launch.rendezvous import Rendezvous
from waystation_launch.standbys import Standbys, python_command
from waystation_launch.world import LOCAL_ADDRESS, World

# Takes a line for people, and the colour to show it in.
Tell: TypeAlias = Callable[[str, str | None], None]
# Takes whether a process wrote it to stderr, and its line with the number of the process.
Show: TypeAlias = Callable[[bool, str], None]

FOUND_FAILURE = 1
# What processes have time for once one has failed: whoever waits for a restart pays for it.
GRACE_S, RESTART_GRACE_S = 30.0, 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """What to run.

    Attributes:
        command: The program and its arguments.
        count: The number of processes on each host.
        jax: Whether to set the variables of JAX.
        torch: Whether to set the variables of torch.
        grace_s: How long processes may continue after one has failed, or a signal was passed on; None:
            `GRACE_S`, and `RESTART_GRACE_S` where the program is then started again.
        restarts: How often the program, and the agent, are restarted at most.
        agent: The directory of the agent's store, or of the stores of all emulated hosts; None for no agent.
        agent_memory: How much memory a new agent may take: a number of bytes with or without a unit.
        agent_versions: How many committed versions of each shard a new agent keeps.
        hosts: The file that lists the hosts, or the number of hosts to emulate; None for this host alone.
        host: The name of this host in the list.
        secret_file: The file with the secret that the agents of all hosts share.
        tls: The certificate of this host's agent, its key, and the authorities; all or none.
        copies: How many copies of each shard the agents keep.
        port: The first of three ports of the first host, where processes and launches of all hosts meet.
        wait_s: How long launches wait for each other.
        has_standbys: Whether processes are kept ready for a restart.
    """

    command: Sequence[str]
    count: int
    jax: bool
    torch: bool
    grace_s: float | None = None
    restarts: int = 0
    agent: Path | None = None
    agent_memory: str | None = None
    agent_versions: int = 2
    hosts: str | None = None
    host: str | None = None
    secret_file: Path | None = None
    tls: tuple[Path | None, Path | None, Path | None] = (None, None, None)
    copies: int = 2
    port: int = 29500
    wait_s: float = 600.0
    has_standbys: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    """How a program that was launched has ended.

    Attributes:
        exit_code: What the launcher returns: 0 only if all processes on all hosts ended well.
        document: The processes, starts and recoveries, plain enough for JSON.
    """

    exit_code: int
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Hosts:
    """The hosts of the program.

    Attributes:
        listed: All hosts.
        own: The numbers of the hosts whose processes this launch starts.
        list_path: The file that lists them.
        secret_path: The file with the secret of their agents; None if there are no agents.
        are_emulated: Whether this machine emulates all of them.
        tls: The certificates of their agents; None if the secret is all that they prove.
    """

    listed: Sequence[ListedHost]
    own: Sequence[int]
    list_path: Path
    secret_path: Path | None
    are_emulated: bool
    tls: TlsFiles | None = None


@dataclass(frozen=True, slots=True)
class _Others:
    """What is there beside the processes of one start.

    Attributes:
        launches: The launches of the other hosts; None if this one starts all processes.
        standbys: What the processes are restarted from; None if each is started anew.
        signals: What is passed on to the processes.
        may_restart: Whether the program is started again if it fails.
    """

    launches: Rendezvous | None
    standbys: Standbys | None
    signals: Signals
    may_restart: bool


def run(request: Request, tell: Tell, show: Show) -> Result:
    """Runs the command as often as requested, until all its processes have ended.

    Args:
        request: What to run.
        tell: Takes each line about the launch itself.
        show: Takes each line that the processes write.

    Raises:
        InvalidInput: The command cannot be started, or the options contradict each other.
        Conflict: Another launch uses the agent.
        WaystationError: The agent cannot be started.
    """
    if sys.platform != "linux":
        raise InvalidInput(f"'waystation launch' runs on Linux only, and this is {sys.platform}")
    hosts = _hosts(request)
    agents = _agents(request, hosts, tell)
    for agent in agents:
        agent.check()
    with _claim(request.agent):
        _start(agents, hosts)
        return _run(request, hosts, agents, tell, show)


def _run(
    request: Request, hosts: _Hosts | None, agents: Sequence[HostAgent], tell: Tell, show: Show
) -> Result:
    recoveries = Recoveries(Path(f"{agents[0].directory}.recoveries.jsonl") if agents else None)
    outcome, code = None, FOUND_FAILURE
    with (
        contextlib.closing(Signals()) as signals,
        _rendezvous(request, hosts, tell) as rendezvous,
        _standbys(request, tell) as standbys,
    ):
        for left in range(request.restarts, -1, -1):
            if rendezvous is not None and not _joined(rendezvous, signals):
                tell(f"the program is not started again: {rendezvous.left}", "red")
                break
            told = recoveries.environment()
            if standbys is not None:
                standbys.is_wanted = left > 0
                told |= standbys.environment
            others = _Others(rendezvous, standbys, signals, left > 0)
            outcome = _launched(request, hosts, agents, told, others, tell, show)
            recoveries.note(outcome, {} if standbys is None else standbys.unused)
            code, report = _ended(outcome, rendezvous, signals)
            for line in report:
                tell(line, "red" if line is report[0] else None)
            if not code or not left or outcome.passed_on is not None:
                break
            if rendezvous is not None and rendezvous.left is not None:
                break
            if late := signals.take():
                outcome.passed_on = late[0]
                code = _exit_code(outcome)
                break
            tell(f"the program is started again; restarts left: {left - 1}", "yellow")
        if outcome is None:
            raise Unavailable(f"the program is not started: {rendezvous.left if rendezvous else ''}")
        if outcome.passed_on is not None and left and outcome.first and outcome.first.told_to_end is None:
            tell(f"{outcome.passed_on.name} has come, so the program is not started again", "yellow")
        if code and rendezvous is not None and rendezvous.left is None:
            rendezvous.leave(report[0] if report else "its launch was told to end")
    recovered = recoveries.found()
    for recovery in recovered:
        tell(sentence(recovery), "green")
    described = [agent.describe() for agent in agents]
    about: dict[str, Any] = {"agents": described} if hosts else {"agent": described[0] if agents else None}
    about |= {"restarts": request.restarts - left, "starts": recoveries.starts, "recoveries": recovered}
    return Result(code, about | _document(outcome, report))


@contextlib.contextmanager
def _standbys(request: Request, tell: Tell) -> Iterator[Standbys | None]:
    """What the processes of the program are restarted from; None if each is started anew."""
    command = python_command(request.command) if request.has_standbys and request.restarts else None
    if command is None:
        yield None
        return

    def on_unused(reasons: Mapping[int, str]) -> None:
        for reason in dict.fromkeys(reasons.values()):
            indices = sorted(index for index in reasons if reasons[index] == reason)
            named = f"process {indices[0]} starts" if len(indices) == 1 else f"{len(indices)} processes start"
            tell(f"{named} without a standby: {reason}", None)

    with contextlib.closing(Standbys(command, spawn, on_unused)) as standbys:
        yield standbys


@contextlib.contextmanager
def _claim(directory: Path | None) -> Iterator[None]:
    """Keeps the directory of the agents for this launch: programs of two would fence each other.

    The claim ends with this process, however that ends.

    Raises:
        Conflict: Another launch has it.
    """
    if directory is None:
        yield
        return
    path = f"{os.path.abspath(directory)}.launch"
    try:
        held = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise from_os_error(error, "write", path) from error
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            first = os.pread(held, 32, 0).decode() or "unknown"
            raise Conflict(
                f"the launch with process id {first} uses the agent in '{directory}', and one agent serves "
                "one program; end that launch first, or give another --agent directory",
                path=str(directory),
            ) from None
        os.ftruncate(held, 0)
        os.pwrite(held, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(held)


@contextlib.contextmanager
def _rendezvous(request: Request, hosts: _Hosts | None, tell: Tell) -> Iterator[Rendezvous | None]:
    """The launches of all hosts; None if this one starts all processes."""
    if hosts is None or hosts.are_emulated:
        yield None
        return
    (own,) = hosts.own
    names = [host.name for host in hosts.listed]
    address = hosts.listed[0].machine, request.port + 2
    secret = b"" if hosts.secret_path is None else read_secret(hosts.secret_path)

    rendezvous = Rendezvous(
        names, names[own], address, secret, request.wait_s, lambda text: tell(text, "yellow")
    )
    with contextlib.closing(rendezvous):
        try:
            yield rendezvous
        except BaseException:
            rendezvous.leave("its launch has ended")
            raise


def _joined(rendezvous: Rendezvous, signals: Signals) -> bool:
    """Whether the launches of all hosts are ready; a signal ends the wait for them."""
    with signals.as_before():
        return rendezvous.join()


def _ended(outcome: Outcome, rendezvous: Rendezvous | None, signals: Signals) -> tuple[int, list[str]]:
    """The exit code of a start that has ended, and its report. It is 0 only if all hosts ended well."""
    code, report = _exit_code(outcome), _report(outcome)
    if rendezvous is None or outcome.passed_on is not None:
        return code, report
    if outcome.stopped is None and not code:
        with signals.as_before():
            ends_well = rendezvous.ends_well()
        if ends_well:
            return 0, []
    why = rendezvous.left or rendezvous.stopped
    if why is not None:
        report = [f"the program has failed elsewhere: {why}", *report]
    return FOUND_FAILURE, report


def _hosts(request: Request) -> _Hosts | None:
    """The hosts that the options name; None if the program runs on this host alone."""
    if request.hosts is None:
        if _names_one_of_several(request):
            raise InvalidInput(
                "--host, --secret-file and --tls-… are for a program on several hosts; list the hosts in a "
                "file, and give that as --hosts FILE"
            )
        return None
    if request.hosts.isdecimal():
        if request.agent is None:
            raise InvalidInput(
                "emulated hosts have agents; give a directory for the agents, such as --agent /dev/shm/agents"
            )
        if _names_one_of_several(request):
            raise InvalidInput(
                "hosts that are emulated have their own names and secret, and no certificates; "
                "give the number alone"
            )
        directory = Path(os.path.abspath(request.agent))
        listed = emulated(directory, int(request.hosts))
        paths = directory / HOSTS_FILE, directory / SECRET_FILE
        return _Hosts(listed, range(len(listed)), *paths, are_emulated=True)
    path = Path(os.path.abspath(request.hosts))
    listed = read_hosts(path)
    if request.host is None or (request.secret_file is None) != (request.agent is None):
        raise InvalidInput(
            "--hosts FILE needs --host NAME, the name of this host in the file, and together with --agent "
            "also --secret-file FILE, the secret of the agents; "
            f"'{path}' has the hosts {', '.join(host.name for host in listed)}"
        )
    own = index_of(listed, request.host, path)
    secret = None if request.secret_file is None else Path(os.path.abspath(request.secret_file))
    return _Hosts(listed, [own], path, secret, are_emulated=False, tls=_tls(request))


def _names_one_of_several(request: Request) -> bool:
    return any(given is not None for given in (request.host, request.secret_file, *request.tls))


def _tls(request: Request) -> TlsFiles | None:
    given = [Path(os.path.abspath(path)) for path in request.tls if path is not None]
    if not given:
        return None
    if len(given) < len(request.tls) or request.agent is None:
        raise InvalidInput(
            "--tls-certificate, --tls-key and --tls-authorities are for the agent of this host; "
            "give all three, and its directory, --agent"
        )
    return TlsFiles(*given)


def _agents(request: Request, hosts: _Hosts | None, tell: Tell) -> list[HostAgent]:
    """The agents of the hosts whose processes this launch starts."""
    if request.agent is None:
        if request.agent_memory is not None:
            raise InvalidInput(
                "--agent-memory limits an agent, and no agent is asked for; give its directory, such as "
                "--agent /dev/shm/agent"
            )
        return []

    def agent_of(directory: Path, membership: Membership | None) -> HostAgent:
        memory, count, restarts = request.agent_memory, request.count, request.restarts
        return HostAgent(
            directory,
            memory,
            request.agent_versions,
            count,
            restarts,
            lambda text: tell(text, "yellow"),
            membership,
        )

    if hosts is None:
        return [agent_of(request.agent, None)]
    if not 1 <= request.copies <= len(hosts.listed):
        count = len(hosts.listed)
        raise InvalidInput(
            f"--copies {request.copies}: each copy needs a host of its own, and there are {count}; give "
            f"{count} or fewer"
        )
    assert hosts.secret_path is not None, "it is there if there are agents"
    names = tuple(host.name for host in hosts.listed)
    agents = []
    for own in (hosts.listed[index] for index in hosts.own):
        directory = request.agent / own.name if hosts.are_emulated else request.agent
        paths = hosts.list_path, hosts.secret_path
        membership = Membership(own.name, own.address, names, *paths, request.copies, hosts.tls)
        agents.append(agent_of(directory, membership))
    return agents


def _start(agents: Sequence[HostAgent], hosts: _Hosts | None) -> None:
    """Starts agents, once all is refused that can be: a refused launch leaves nothing behind."""
    if hosts is not None and hosts.are_emulated:
        prepare(hosts.list_path.parent, hosts.listed)
    for agent in agents:
        agent.start()


def _launched(
    request: Request,
    hosts: _Hosts | None,
    agents: Sequence[HostAgent],
    told: Mapping[str, str],
    others: _Others,
    tell: Tell,
    show: Show,
) -> Outcome:
    with _world(request, hosts) as world:
        return _launched_in(world, request, agents, told, others, tell, show)


def _launched_in(
    world: World,
    request: Request,
    agents: Sequence[HostAgent],
    told: Mapping[str, str],
    others: _Others,
    tell: Tell,
    show: Show,
) -> Outcome:
    environments = world.environments({**os.environ, **told}, jax=request.jax, torch=request.torch)
    for place, agent in enumerate(agents):
        for environment in environments[place * request.count : (place + 1) * request.count]:
            environment.update(agent.environment)
    indices = range(world.first_index, world.first_index + len(environments))
    grace_s = failure_grace_s = request.grace_s
    if grace_s is None or failure_grace_s is None:
        grace_s, failure_grace_s = GRACE_S, RESTART_GRACE_S if others.may_restart else GRACE_S
    launch = Launch(
        request.command,
        environments,
        grace_s,
        _numbered(show, indices),
        _announcer(tell, len(environments), failure_grace_s),
        others.signals,
        agents,
        world.first_index,
        others.launches,
        others.standbys,
        failure_grace_s,
    )
    try:
        return launch.run()
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise InvalidInput(
            f"'{request.command[0]}' cannot be started: {error.strerror or error}; "
            "give the command as a shell would take it, such as: waystation launch -n 2 -- python train.py"
        ) from error


@contextlib.contextmanager
def _world(request: Request, hosts: _Hosts | None) -> Iterator[World]:
    """All processes of the program. On one machine they meet at new ports with each start."""
    if hosts is not None and not hosts.are_emulated:
        ports = request.port + 1, request.port
        yield World(len(hosts.listed), request.count, hosts.own, hosts.listed[0].machine, *ports)
        return
    with claimed_ports(2) as (jax_port, torch_port):
        if hosts is None:
            yield World(1, request.count, [0], LOCAL_ADDRESS, jax_port, torch_port)
        else:
            address = hosts.listed[0].machine
            yield World(len(hosts.listed), request.count, hosts.own, address, jax_port, torch_port)


def _numbered(show: Show, indices: range) -> OnLine:
    width = len(str(indices[-1]))
    return lambda index, is_error, line: show(is_error, f"[{index:>{width}}] {line}")


def _announcer(tell: Tell, count: int, grace_s: float) -> Callable[[Program], None]:
    def announce(program: Program) -> None:
        others = f"; the others have {grace_s:g} s to end" if count > 1 else ""
        tell(f"{_name(program)} {_how(program)}{others}", "yellow")

    return announce


def _report(outcome: Outcome) -> list[str]:
    """The lines to say at the end, the most important first; none if all went well."""
    first = outcome.first
    if first is None:
        return []
    if outcome.passed_on is not None and first.told_to_end is not None:
        lines = [f"{outcome.passed_on.name} was passed on to all processes"]
        return lines + [_line(program, first) for program in outcome.programs if program.failed]
    others = [program for program in outcome.programs if program is not first]
    after = [program for program in others if program.failed]
    because = "; the others ended because of that" if after and len(after) == len(others) else ""
    lines = [f"{_name(first)} {_how(first)} first, after {first.ended_s:.1f} s{because}"]
    lines += [_line(program, first) for program in others]
    if first.last_lines:
        lines.append(f"the last lines of process {first.index}:")
        lines += [f"  | {line}" for line in first.last_lines]
    return lines


def _line(program: Program, first: Program) -> str:
    line = f"  {_name(program)} {_how(program)}"
    if program is first or program.ended_s is None or first.ended_s is None:
        return line
    later_s = program.ended_s - first.ended_s
    line += f", {abs(later_s):.1f} s {'later' if later_s >= 0 else 'earlier'}"
    return line + (f", after it was sent {program.told_to_end.name}" if program.told_to_end else "")


def _name(program: Program) -> str:
    return f"process {program.index} (pid {program.process_id})"


def _how(program: Program) -> str:
    if program.signal_name is not None:
        return f"was killed by {program.signal_name}"
    return "ended well" if program.exit_code == 0 else f"exited with code {program.exit_code}"


def _exit_code(outcome: Outcome) -> int:
    if outcome.passed_on == signal.SIGINT:
        return 130
    if outcome.first is None:
        return 0
    return FOUND_FAILURE if outcome.passed_on is None else 128 + outcome.passed_on


def _document(outcome: Outcome, report: list[str]) -> dict[str, Any]:
    return {
        "processes": [program.describe() for program in outcome.programs],
        "first_failure": None if outcome.first is None else outcome.first.index,
        "passed_on": None if outcome.passed_on is None else outcome.passed_on.name,
        "report": report,
    }


class Recoveries:
    """What a launch knows of the failures of its program, and what the program tells of its recoveries.

    The launch notes when it saw a process fail, when the last one had ended, and when it started them again.
    The program adds a line to a file beside the agent's store at its next step (`memory.Recovery`).
    The file stays, as the store does. Other launches may use the store at the same time, or take it over:
    a launch reports the lines that its own program has added, which have its name.

    Args:
        path: The file of recoveries; None if there is no agent from whose memory a program could resume.

    Attributes:
        starts: For each start `started_at_s`, `failed_at_s` (the first failure, None if there was none) and
            `ended_at_s`, in seconds since 1970, `standbys`, how many processes began as standbys, and
            `unused_standbys`, which processes of a restart did not, and why.
    """

    def __init__(self, path: Path | None) -> None:
        self.starts: list[dict[str, Any]] = []
        self._path = path
        self._launch = uuid.uuid4().hex

    def environment(self) -> dict[str, str]:
        """What the processes are told that are started now."""
        if self._path is None:
            return {}
        told: dict[str, Any] = {"file": str(self._path), "launch": self._launch}
        if self.starts:
            before = self.starts[-1]
            told |= {name: before[name] for name in ("failed_at_s", "ended_at_s")}
            told["started_at_s"] = time.time()
        return {RECOVERY_VARIABLE: json.dumps(told)}

    def note(self, outcome: Outcome, unused: Mapping[int, str]) -> None:
        """A start has come to its end; `unused` says why processes were no standbys, by their number."""

        def moment_s(ended_s: float | None) -> float | None:
            return None if ended_s is None else outcome.began_at_s + ended_s

        ended_s = [program.ended_s for program in outcome.programs if program.ended_s is not None]
        self.starts.append(
            {
                "started_at_s": outcome.began_at_s,
                "failed_at_s": None if outcome.first is None else moment_s(outcome.first.ended_s),
                "ended_at_s": moment_s(max(ended_s, default=None)),
                "standbys": sum(program.was_standby for program in outcome.programs),
                "unused_standbys": [
                    {"process": index, "reason": reason} for index, reason in sorted(unused.items())
                ],
            }
        )

    def found(self) -> list[dict[str, Any]]:
        """What the program of this launch has added to the file."""
        recoveries: list[dict[str, Any]] = []
        if self._path is None:
            return recoveries
        content = b""
        with contextlib.suppress(OSError):
            content = self._path.read_bytes()
        for line in content.splitlines():
            with contextlib.suppress(ValueError):
                recovery = json.loads(line)
                if isinstance(recovery, dict) and recovery.pop("launch", None) == self._launch:
                    recoveries.append(recovery)
        return recoveries


def sentence(recovery: dict[str, Any]) -> str:
    """A recovery, for people."""
    phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in recovery["phases_s"].items())
    return f"went on from step {recovery['step']} in memory: {phases}"
