"""Runs the training program over the hosts, loses one of them on the way, and follows what is reported.

On every host `waystation launch` starts the program, and starts it again when it ends because another host
was lost; in the place of a lost host comes a new one, with a launch of its own. Invariants: no launch
outlives the call that started it, or its host; a launch that fails, or a program that is silent for so long
that it must hang, raises `DemoFailed` with the end of what it has said.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from waystation_demo.memory_tier.hosts import Hosts
from waystation_demo.proof import DemoFailed

Event = dict[str, Any]

SILENCE_LIMIT_S = 300.0  # nothing that is right takes so long, however busy the machine is
RESTARTS = 5
_LOOK_S = 0.02
_AGENT_MEMORY = "256MiB"


@dataclass(frozen=True)
class Plan:
    """What is trained.

    Attributes:
        host_count: On how many hosts, with one process each.
        steps: How many steps.
        save_every: How many steps between two saves to disk.
        width: Of the model.
        layers: Of the model.
    """

    host_count: int
    steps: int
    save_every: int
    width: int
    layers: int


@dataclass
class Loss:
    """The loss of a host.

    Attributes:
        host: Which.
        after_step: It comes a random moment after this step, or one soon after.
        at_s: When it was, in seconds since 1970.
        was_new: Whether the agent that came in its place, if there was one, had found nothing in memory.
    """

    host: int
    after_step: int
    at_s: float = 0.0
    was_new: bool | None = None


@dataclass
class HostsRun:
    """What a run over all hosts has reported.

    Attributes:
        name: Of the run.
        starts: For each process the events of each of its starts.
        launches: The report of the last launch of each host.
        agent_logs: For each host what its agent has said, if there was one.
        loss: The host that was lost, if one was.
    """

    name: str
    starts: list[list[list[Event]]] = field(default_factory=list)
    launches: list[Event] = field(default_factory=list)
    agent_logs: list[list[str]] = field(default_factory=list)
    loss: Loss | None = None

    def first(self, event: str, *, start: int, process: int = 0) -> Event | None:
        """The first event of a kind after a process has begun for this time."""
        events = self.starts[process][start] if start < len(self.starts[process]) else []
        return next((found for found in events if found["event"] == event), None)

    def losses(self, start: int) -> dict[int, str]:
        """The mean losses that one start has reported, exactly, by their steps."""
        steps = [event for event in self.starts[0][start] if event["event"] == "step"]
        return {event["step"]: event["loss"] for event in steps}

    def last(self, event: str) -> list[Event | None]:
        """The first event of a kind after each process has begun for the last time."""
        ends = enumerate(len(starts) - 1 for starts in self.starts)
        return [self.first(event, start=start, process=process) for process, start in ends]

    def start_numbers(self) -> range:
        """The starts of the first process."""
        return range(len(self.starts[0]))

    def digests(self) -> set[str | None]:
        """What all processes held in the end."""
        return {None if event is None else event["digest"] for event in self.last("done")}

    def kept_step(self, until_s: float) -> int | None:
        """The newest step that any process knew to be kept in memory by then."""
        events = (event for starts in self.starts for start in starts for event in start)
        kept = [event.get("kept_step") for event in events if event["at_s"] <= until_s]
        return max((step for step in kept if step is not None), default=None)


class Runs:
    """Runs over the same hosts, one after the other.

    Args:
        directory: For logs, events and checkpoints, which all hosts reach.
        plan: What is trained.
        random: Draws moments.
        silence_limit_s: After how long without a word a run is taken to hang.
    """

    def __init__(
        self, directory: Path, plan: Plan, random: Random, *, silence_limit_s: float = SILENCE_LIMIT_S
    ) -> None:
        self._directory = directory
        self._plan = plan
        self._random = random
        self._silence_limit_s = silence_limit_s

    def run(
        self,
        run: HostsRun,
        hosts: Hosts,
        *,
        save_every: int,
        has_memory: bool,
        on_loss: Callable[[int, float], None],
    ) -> None:
        """Trains from the first step to the last, losing what `run.loss` says, and fills in `run`."""
        following = _Following(self._directory / run.name, run, hosts, self._plan, has_memory, save_every)
        following.prepare()
        try:
            for index in range(self._plan.host_count):
                following.launch(index)
            self._follow(following, on_loss)
            following.gather()
        finally:
            following.end()

    def _follow(self, following: _Following, on_loss: Callable[[int, float], None]) -> None:
        heard, heard_at = 0, time.monotonic()
        is_to_be_lost = following.run.loss
        while following.is_running():
            events = following.read()
            if len(events) > heard:
                heard_at = time.monotonic()
                for event in (event for event in events[heard:] if event["event"] == "step"):
                    on_loss(event["step"], float.fromhex(event["loss"]))
                    if is_to_be_lost is not None and _is_due(is_to_be_lost, event, following.has_memory):
                        time.sleep(self._random.uniform(0, _step_s(events)))
                        following.lose(is_to_be_lost)
                        is_to_be_lost = None
                heard = len(events)
            if time.monotonic() - heard_at > self._silence_limit_s:
                raise following.failure(
                    f"was ended, as it had reported nothing for {self._silence_limit_s:g} s"
                )
            time.sleep(_LOOK_S)
        if is_to_be_lost is not None:
            raise following.failure("came to its end before the host could be lost")


def _is_due(loss: Loss, event: Event, has_memory: bool) -> bool:
    """Whether a host may be lost after this step. On a machine that is too busy, a step may not have got its
    copy in time, and the next ones are left out of memory; then it is waited until memory has the newest
    steps again."""
    is_kept = not has_memory or (event["kept_step"] or 0) >= event["step"] - 1
    return event["step"] >= loss.after_step and is_kept


def _step_s(events: list[Event]) -> float:
    """How long a step takes, from the last two."""
    ends = [event["at_s"] for event in events if event["event"] == "step"][-2:]
    return float(ends[-1] - ends[0]) if len(ends) == 2 else 0.0


@dataclass
class _Following:
    """A run that is followed."""

    directory: Path
    run: HostsRun
    hosts: Hosts
    plan: Plan
    has_memory: bool
    save_every: int
    _launches: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)  # how often a host had a launch

    def prepare(self) -> None:
        """Makes what all hosts reach: the list of them, and the secret of their agents."""
        (self.directory / "events").mkdir(parents=True)
        names, addresses, ports = self.hosts.names, self.hosts.addresses, self.hosts.ports
        listed = [
            {"name": name, "address": f"{address}:{port}"}
            for name, address, port in zip(names, addresses, ports, strict=True)
        ]
        (self.directory / "hosts.json").write_text(json.dumps(listed, indent=1))
        (self.directory / "secret").touch(0o600)
        (self.directory / "secret").write_text(secrets.token_hex(32))

    def launch(self, index: int) -> None:
        """Has a host begin."""
        count = self._counts[index] = self._counts.get(index, 0) + 1
        environment = os.environ | {"GLOO_SOCKET_IFNAME": self.hosts.interface, "OMP_NUM_THREADS": "1"}
        with (
            self._path(index, "json", count).open("w") as document,
            self._path(index, "log", count).open("w") as log,
        ):
            self._launches[index] = self.hosts.start(
                index,
                self._command(index),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=document,
                stderr=log,
            )

    def _path(self, index: int, kind: str, count: int) -> Path:
        return self.directory / f"{self.hosts.names[index]}-{count}.{kind}"

    def _command(self, index: int) -> list[str]:
        # -P: neither the working directory nor that of a script may provide modules.
        python, plan = [sys.executable, "-P"], self.plan
        launch = [*python, "-c", "from waystation.cli import main; main()", "launch", "--torch", "--json"]
        launch += ["--hosts", str(self.directory / "hosts.json"), "--host", self.hosts.names[index]]
        launch += ["--port", str(self.hosts.first_port), "--restarts", str(RESTARTS)]
        train = [*python, "-m", "waystation_demo.memory_tier.train"]
        train += ["--checkpoints", str(self.directory / "checkpoints")]
        train += ["--events", str(self.directory / "events"), "--steps", str(plan.steps)]
        train += ["--save-every", str(self.save_every)]
        train += ["--width", str(plan.width), "--layers", str(plan.layers)]
        if self.has_memory:
            launch += ["--agent", str(self.hosts.stores[index]), "--agent-memory", _AGENT_MEMORY]
            launch += ["--secret-file", str(self.directory / "secret")]
            train.append("--memory")
        return [*launch, "--", *train]

    def is_running(self) -> bool:
        """Whether a launch still runs.

        Raises: DemoFailed: One has failed.
        """
        codes = {index: launch.poll() for index, launch in self._launches.items()}
        for index, code in codes.items():
            if code:
                raise self.failure(
                    f"failed: the launch on {self.hosts.names[index]} ended with {code}", index
                )
        return None in codes.values()

    def lose(self, loss: Loss) -> None:
        """Loses a host, and brings up another one in its place."""
        loss.at_s = time.time()
        self.hosts.lose(loss.host)
        self._launches.pop(loss.host).wait()
        self._drop_cached()
        self.hosts.replace(loss.host)
        self.launch(loss.host)

    def _drop_cached(self) -> None:
        """Has what is on disk be read from there: all hosts share the page cache of this machine."""
        for path in (self.directory / "checkpoints").rglob("*"):
            with contextlib.suppress(OSError):
                file = os.open(path, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)

    def read(self) -> list[Event]:
        """What the first process has reported so far, of all its starts."""
        self.run.starts = [self._starts_of(index) for index in range(self.plan.host_count)]
        return [event for start in self.run.starts[0] for event in start]

    def _starts_of(self, index: int) -> list[list[Event]]:
        files = sorted((self.directory / "events").glob(f"{index}-*.jsonl"))
        # The last line of a process that was killed may be cut short.
        return [[json.loads(line) for line in file.read_text().split("\n")[:-1]] for file in files]

    def gather(self) -> None:
        """Takes what can be known in the end, while there are hosts and agents."""
        self.read()
        for index, count in self._counts.items():
            self.run.launches.append(json.loads(self._path(index, "json", count).read_text()))
            if self.has_memory:
                log = self.hosts.seen(index, Path(f"{self.hosts.stores[index]}.log"))
                self.run.agent_logs.append(log.read_text().splitlines())
        if self.has_memory and self.run.loss is not None:
            self.run.loss.was_new = self.hosts.agent(self.run.loss.host).status()["adoption"]["is_new"]

    def failure(self, what: str, index: int = 0) -> DemoFailed:
        """An error that says how the run ended, with the last words of the launch of a host."""
        log = self._path(index, "log", self._counts[index])
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        return DemoFailed(f"the run '{self.run.name}' {what}:\n{tail}", path=str(log))

    def end(self) -> None:
        """Ends what still runs; agents end with their hosts."""
        for launch in self._launches.values():
            if launch.poll() is None:
                launch.terminate()
