"""Holds low programs to their rules, by running them without data.

Checked are: every transfer is sent and received once, of one box; what is sent or copied is there; the boxes
that arrive cover each shard exactly once, before it is used; nothing is used after it was freed or donated;
and all lists run to their end, so hosts never wait for each other in a circle. Errors name the host and the
instruction.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import NoReturn

from waystation.grid import Box, contains, find_cover_defect, relative_to, volume
from waystation.runtime.errors import InvalidProgram
from waystation.runtime.ir.low import Copy, Exec, Free, HostProgram, Instruction, LowProgram, Recv, Send
from waystation.runtime.ir.program import Value

_KINDS = {"hole": "a hole", "overlap": "an overlap", "outside": "a box outside"}


def verify_low(program: LowProgram) -> None:
    """Checks a program in the low form.

    Raises:
        InvalidProgram: A rule is broken; the context has the `host`.
    """
    rules = _Rules(program)
    hosts = {part.host: _HostRun(part, rules) for part in program.hosts}
    runnable = deque(hosts.values())
    while runnable:
        run = runnable.popleft()
        runnable += (hosts[name] for name in run.advance())
    for run in hosts.values():
        run.finish()
    lost = sorted(rules.sent.keys() - rules.received)
    if lost:
        raise InvalidProgram(f"program '{program.name}' sends transfer {lost[0]}, which no host receives")


class _Rules:
    """What all hosts have in common."""

    def __init__(self, program: LowProgram) -> None:
        self.program = program
        self.values = {value.number: value for value in program.values}
        self.made = {number for part in program.hosts for step in part.instructions for number in _made(step)}
        self.boxes: dict[tuple[int, str], dict[int, Box]] = defaultdict(dict)
        placements = dict(program.placements)
        for value in program.values:
            boxes = value.sharding.boxes(value.shape)
            for device, box in zip(placements[value.slice].devices, boxes, strict=True):
                self.boxes[value.number, device.host][device.index] = box
        self.devices: dict[tuple[int, str], list[int]] = defaultdict(list)
        for number, placement in placements.items():
            for device in sorted(placement.devices):
                self.devices[number, device.host].append(device.index)
        self.sent: dict[int, tuple[Send, str]] = {}
        self.received: set[int] = set()
        self.waiting: dict[int, str] = {}


class _HostRun:
    """One host on its way through its list."""

    def __init__(self, part: HostProgram, rules: _Rules) -> None:
        self.host = part.host
        self.steps = part.instructions
        self.rules = rules
        self.at = 0
        self.pieces: defaultdict[tuple[int, int], list[Box]] = defaultdict(list)
        self.whole: set[int] = set()
        self.gone: set[int] = set()

    def advance(self) -> list[str]:
        """Runs until the end or a transfer that has not come; returns hosts that waited for what was sent."""
        woken: list[str] = []
        while self.at < len(self.steps):
            step = self.steps[self.at]
            if isinstance(step, Recv) and step.transfer not in self.rules.sent:
                self.rules.waiting[step.transfer] = self.host
                return woken
            self.run(step)
            if isinstance(step, Send) and step.transfer in self.rules.waiting:
                woken.append(self.rules.waiting.pop(step.transfer))
            self.at += 1
        return woken

    def finish(self) -> None:
        """The list has come to its end, and what arrived covers every shard exactly."""
        if self.at < len(self.steps):
            self.fail("waits for ever: the transfer is sent too late, or never")
        for (number, device), boxes in self.pieces.items():
            offset, shape = self.rules.boxes[number, self.host][device]
            defect = find_cover_defect(shape, [relative_to(box, offset) for box in boxes])
            if defect is not None:
                self.fail_program(f"leaves {_KINDS[defect.kind]} in %{number}[{device}] at {defect.box}")

    def fail(self, what: str) -> NoReturn:
        """Raises the error of the instruction at hand."""
        self.fail_program(f"instruction {self.at} ({self.steps[self.at]}) {what}")

    def fail_program(self, what: str) -> NoReturn:
        """Raises the error of this host."""
        where = f"program '{self.rules.program.name}', host '{self.host}':"
        raise InvalidProgram(f"{where} {what}", program=self.rules.program.name, host=self.host)

    def run(self, step: Instruction) -> None:
        """Checks an instruction and notes what it does."""
        if isinstance(step, Exec):
            self.execute(step)
        elif isinstance(step, Send):
            self.check_has(step.value, step.device, step.box)
            if step.transfer in self.rules.sent:
                self.fail("sends a transfer a second time")
            self.rules.sent[step.transfer] = step, self.host
        elif isinstance(step, Recv):
            self.receive(step)
        elif isinstance(step, Copy):
            self.check_has(step.source, step.device, step.box)
            self.put(step.value, step.devices, step.box)
        else:
            self.end(step.values)

    def execute(self, step: Exec) -> None:
        """A call: operands are there, and all devices of the slice on this host take part."""
        if tuple(self.rules.devices.get((step.slice, self.host), ())) != step.devices:
            self.fail(f"must run on all devices of slice @{step.slice} on this host")
        for number in step.operands:
            self.check_whole(number)
        self.end(tuple(step.operands[place] for place in step.donated))
        self.whole.update(step.results)

    def receive(self, step: Recv) -> None:
        """A transfer: what was sent is what is received, once."""
        sent, sender = self.rules.sent[step.transfer]
        if (sent.box, sent.host, sender) != (step.box, self.host, step.host):
            self.fail(f"differs from what host '{sender}' sends: {sent}")
        if step.transfer in self.rules.received:
            self.fail("receives a transfer a second time")
        self.rules.received.add(step.transfer)
        self.put(step.value, step.devices, step.box)

    def put(self, number: int, devices: tuple[int, ...], box: Box) -> None:
        """Notes a box that has come to shards."""
        for device in devices:
            shard = self.rules.boxes[number, self.host].get(device)
            if shard is None or not contains(shard, box):
                self.fail(f"brings %{number}[{device}] what its shard does not have")
            self.pieces[number, device].append(box)

    def check_has(self, number: int, device: int, box: Box) -> None:
        """A shard of this host has a box."""
        self.check_whole(number)
        shard = self.rules.boxes[number, self.host].get(device)
        if shard is None or not contains(shard, box):
            self.fail(f"uses a box that %{number}[{device}] does not have")

    def check_whole(self, number: int) -> None:
        """All shards of a value on this host are there, and complete."""
        if number in self.gone:
            self.fail(f"uses %{number} after it was given up")
        shards = self.rules.boxes.get((number, self.host))
        if shards is None:
            self.fail(f"uses %{number}, which has no shard on this host")
        if number in self.whole:
            return
        if number in self.rules.made and not self._complete(self.rules.values[number], shards):
            self.fail(f"uses %{number} before it is there")
        self.whole.add(number)

    def _complete(self, value: Value, shards: dict[int, Box]) -> bool:
        elements = math.prod(value.sharding.shard_shape(value.shape))  # more is told at the end
        return all(sum(map(volume, self.pieces[value.number, device])) >= elements for device in shards)

    def end(self, numbers: tuple[int, ...]) -> None:
        """Notes values that are gone."""
        for number in numbers:
            self.check_whole(number)
            self.gone.add(number)


def _made(step: Instruction) -> tuple[int, ...]:
    if isinstance(step, Exec):
        return step.results
    if isinstance(step, Recv | Copy):
        return (step.value,)
    assert isinstance(step, Send | Free)
    return ()
