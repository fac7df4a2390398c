"""`waystation launch`: runs the processes of one program on this machine, and names the one that failed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from waystation.cli.host_agent import HostAgent
from waystation.cli.launching import Launch, Outcome, Program, describe
from waystation.cli.output import Output
from waystation.cli.ports import free_ports
from waystation.errors import InvalidInput

FOUND_FAILURE = 1
_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be run.

    Attributes:
        command: The program and its arguments.
        count: How many processes.
        jax: Whether to set what JAX reads.
        torch: Whether to set what torch reads.
        grace_s: How long others may go on when one has failed.
        restarts: How often the program, and the agent, are started again at most.
        agent: The directory of the agent's store; None for no agent.
        agent_memory: How much memory it may take, as a number of bytes with or without a unit.
    """

    command: Sequence[str]
    count: int
    jax: bool
    torch: bool
    grace_s: float
    restarts: int = 0
    agent: Path | None = None
    agent_memory: str | None = None


def run(output: Output, request: Request) -> None:
    """Runs the command so many times over, and reports how that went.

    Raises:
        InvalidInput: The command cannot be started, or the options contradict each other.
        WaystationError: The agent cannot be started.
    """
    if sys.platform != "linux":
        raise InvalidInput(f"'waystation launch' runs on Linux only, and this is {sys.platform}")
    agent = _agent(output, request)
    for left in range(request.restarts, -1, -1):
        outcome = _launched(output, request, agent)
        report = _report(outcome)
        for line in report:
            output.note(line, style="red" if line is report[0] else None)
        code = _exit_code(outcome)
        if not code or not left or outcome.passed_on is not None:
            break
        output.note(f"the program is started again, {left - 1} more times at most", style="yellow")
    if output.as_json:
        output.document(_document(outcome, report, agent) | {"restarts": request.restarts - left})
    if code:
        raise typer.Exit(code)


def _agent(output: Output, request: Request) -> HostAgent | None:
    if request.agent is None:
        if request.agent_memory is not None:
            raise InvalidInput("--agent-memory says what an agent may take; give its directory, --agent")
        return None
    agent = HostAgent(
        request.agent,
        request.agent_memory,
        request.count,
        request.restarts,
        lambda text: output.note(text, style="yellow"),
    )
    agent.start()
    return agent


def _launched(output: Output, request: Request, agent: HostAgent | None) -> Outcome:
    environments = _environments(request.count, jax=request.jax, torch=request.torch)
    if agent is not None:
        environments = [environment | agent.environment for environment in environments]
    launch = Launch(
        request.command,
        environments,
        request.grace_s,
        _printer(output, request.count),
        _announcer(output, request.count, request.grace_s),
        agent,
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


def _environments(count: int, *, jax: bool, torch: bool) -> list[dict[str, str]]:
    """What both frameworks read, in each process."""
    jax_port, torch_port = free_ports(2)
    environments = []
    for index in range(count):
        # Or the last lines of a process that is killed would stay in its buffer.
        added = {
            "PYTHONUNBUFFERED": "1",
            "WAYSTATION_PROCESS_COUNT": str(count),
            "WAYSTATION_PROCESS_INDEX": str(index),
        }
        if jax:
            added["JAX_COORDINATOR_ADDRESS"] = f"{_ADDRESS}:{jax_port}"
        if torch:
            added |= {
                "MASTER_ADDR": _ADDRESS,
                "MASTER_PORT": str(torch_port),
                "WORLD_SIZE": str(count),
                "RANK": str(index),
                "LOCAL_WORLD_SIZE": str(count),
                "LOCAL_RANK": str(index),
            }
        environments.append({**os.environ, **added})
    return environments


def _printer(output: Output, count: int) -> Any:
    width = len(str(count - 1))

    def show(index: int, is_error: bool, line: str) -> None:
        # Where a document is wanted, stdout is for that alone.
        stream = sys.stderr if is_error or output.as_json else sys.stdout
        stream.write(f"[{index:>{width}}] {line}\n")
        stream.flush()

    return show


def _announcer(output: Output, count: int, grace_s: float) -> Any:
    def announce(program: Program) -> None:
        others = f"; the others have {grace_s:g} s to end" if count > 1 else ""
        output.note(f"{_name(program)} {_how(program)}{others}", style="yellow")

    return announce


def _report(outcome: Outcome) -> list[str]:
    """What to say at the end, the essence first; nothing if all went well."""
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


def _document(outcome: Outcome, report: list[str], agent: HostAgent | None) -> dict[str, Any]:
    return {
        "agent": None if agent is None else agent.describe(),
        "processes": [describe(program) for program in outcome.programs],
        "first_failure": None if outcome.first is None else outcome.first.index,
        "passed_on": None if outcome.passed_on is None else outcome.passed_on.name,
        "report": report,
    }
