"""Runs programs on NumPy arrays: the high form at once, the low form host by host in a random order.

Functions are made up: every element of a result depends on every element of every operand, so that a single
wrong element shows. Calls of the low form wait for all hosts of their slice, as collectives do.
"""

from __future__ import annotations

import random

import numpy as np

from waystation.grid import Box, relative_to, slices_of_box
from waystation.runtime.devices import DeviceId
from waystation.runtime.ir import Arg, Compute, Copy, Exec, HostCall, LowProgram, Program, Recv, Send, Value
from waystation.runtime.ir import Free as HighFree
from waystation.runtime.ir.low import Free

Arrays = dict[int, np.ndarray]


def apply(function: str, operands: list[np.ndarray], results: list[Value]) -> list[np.ndarray]:
    """The made-up function of a hash."""
    weighted = [int((np.arange(1, array.size + 1) * array.ravel()).sum()) for array in operands]
    total = sum((at + 1) * number for at, number in enumerate(weighted)) + len(function) + ord(function[-1])
    return [
        (np.arange(np.prod(value.shape, dtype=int)).reshape(value.shape) + (at + 1) * total) % 1009
        for at, value in enumerate(results)
    ]


def arguments(program: Program) -> Arrays:
    """An array for each argument."""
    made = {}
    for node in program.nodes:
        if isinstance(node, Arg):
            size = int(np.prod(node.result.shape, dtype=int))
            made[node.result.number] = np.arange(size).reshape(node.result.shape) + 31 * node.result.number
    return made


def run_high(program: Program) -> list[np.ndarray]:
    """What a program returns, by the high form."""
    arrays = arguments(program)
    for node in program.nodes:
        if isinstance(node, Compute | HostCall):
            made = apply(node.function, [arrays[number] for number in node.operands], list(node.results))
            arrays.update(zip([value.number for value in node.results], made, strict=True))
        elif not isinstance(node, Arg | HighFree) and node.results:
            arrays[node.results[0].number] = arrays[node.operands[0]]
    return [arrays[number] for number in program.nodes[-1].operands]


class LowRun:
    """All hosts of a low program, and the shards that they hold."""

    def __init__(self, program: LowProgram, given: Arrays) -> None:
        self.program = program
        self.values = {value.number: value for value in program.values}
        self.placements = dict(program.placements)
        self.shards: dict[tuple[int, DeviceId], np.ndarray] = {}
        self.at = {part.host: 0 for part in program.hosts}
        self.steps = {part.host: part.instructions for part in program.hosts}
        self.flying: dict[int, np.ndarray] = {}
        for number, array in given.items():
            self.scatter(number, array)

    def boxes(self, number: int) -> list[tuple[DeviceId, Box]]:
        value = self.values[number]
        boxes = value.sharding.boxes(value.shape)
        return list(zip(self.placements[value.slice].devices, boxes, strict=True))

    def scatter(self, number: int, array: np.ndarray) -> None:
        for device, box in self.boxes(number):
            self.shards[number, device] = array[slices_of_box(box)].copy()

    def gather(self, number: int) -> np.ndarray:
        """The whole array; replicas must agree, and no element may be missing."""
        array = np.full(self.values[number].shape, -1)
        for device, box in self.boxes(number):
            shard = self.shards[number, device] if array.size else np.empty(box[1])
            held = array[slices_of_box(box)]
            assert ((held == -1) | (held == shard)).all()
            array[slices_of_box(box)] = shard
        assert (array != -1).all()
        return array

    def run(self, chance: random.Random) -> None:
        """Lets hosts take steps, one at a time, until all are done."""
        while waiting := [host for host, at in self.at.items() if at < len(self.steps[host])]:
            able = [host for host in waiting if self.can_step(host)]
            assert able, f"hosts {waiting} wait for each other"
            self.step(chance.choice(able))

    def can_step(self, host: str) -> bool:
        step = self.steps[host][self.at[host]]
        if isinstance(step, Recv):
            return step.transfer in self.flying
        if isinstance(step, Exec):
            gang = {device.host for device in self.placements[step.slice].devices}
            return all(self.is_at(member, step.node) for member in gang)
        return True

    def is_at(self, host: str, node: int) -> bool:
        at = self.at[host]
        step = self.steps[host][at] if at < len(self.steps[host]) else None
        return isinstance(step, Exec) and step.node == node

    def step(self, host: str) -> None:
        step = self.steps[host][self.at[host]]
        if isinstance(step, Exec):
            self.execute(step)
            return
        self.at[host] += 1
        if isinstance(step, Send):
            self.flying[step.transfer] = self.cut(step.value, DeviceId(host, step.device), step.box)
        elif isinstance(step, Recv):
            self.put(step.value, host, step.devices, step.box, self.flying.pop(step.transfer))
        elif isinstance(step, Copy):
            data = self.cut(step.source, DeviceId(host, step.device), step.box)
            self.put(step.value, host, step.devices, step.box, data)
        elif isinstance(step, Free):
            for number in step.values:
                self.drop(number, host)

    def execute(self, step: Exec) -> None:
        operands = [self.gather(number) for number in step.operands]
        results = [self.values[number] for number in step.results]
        hosts = {device.host for device in self.placements[step.slice].devices}
        for place in step.donated:
            for host in hosts:
                self.drop(step.operands[place], host)
        for value, array in zip(results, apply(step.function, operands, results), strict=True):
            self.scatter(value.number, array)
        for host in hosts:
            self.at[host] += 1

    def drop(self, number: int, host: str) -> None:
        for device, box in self.boxes(number):
            if device.host == host and 0 not in box[1]:
                del self.shards[number, device]

    def cut(self, number: int, device: DeviceId, box: Box) -> np.ndarray:
        own = dict(self.boxes(number))[device]
        return self.shards[number, device][slices_of_box(relative_to(box, own[0]))].copy()

    def put(self, number: int, host: str, devices: tuple[int, ...], box: Box, data: np.ndarray) -> None:
        boxes = dict(self.boxes(number))
        for index in devices:
            device = DeviceId(host, index)
            shard = self.shards.setdefault((number, device), np.full(boxes[device][1], -1))
            place = slices_of_box(relative_to(box, boxes[device][0]))
            assert (shard[place] == -1).all(), "an element arrived twice"
            shard[place] = data
