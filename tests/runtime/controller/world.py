"""A world of modelled hosts under a controller: what happens to different hosts comes in random order."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from waystation.errors import InvalidInput, Unavailable, WaystationError
from waystation.runtime.controller import (
    Abandon,
    Begin,
    Controller,
    Dispatch,
    ForgetLists,
    MemoryLimits,
    Prepare,
    Release,
    Stall,
)
from waystation.runtime.controller.lowered import MOST_LOWERED
from waystation.runtime.devices import Host, Island
from waystation.runtime.ir import Arg, Compute, Program, Result, Sharding, SliceShape, Value, prepare
from waystation.runtime.messages import BeginJoining, Done, Identify, Load, Message, Run, Said
from waystation.runtime.resources import SliceRequest

ROWS = Sharding((("rows", 4),), (("rows",),))
WHOLE = Sharding((("rows", 4),))
NUMBERS = (4,), "float32"


def value(number: int, slice_number: int = 0, sharding: Sharding = ROWS) -> Value:
    return Value(number, *NUMBERS, slice_number, sharding)


def step(*, donates: bool = False, dynamic: bool = False) -> Program:
    """One computation on one slice."""
    call = Compute("step", "f0", 0, (0,), (ROWS,), (value(1),), (0,) * donates, dynamic)
    return prepare(Program("step", (SliceShape(0, (4,)),), (Arg("x", value(0)), call, Result((1,)))))


def pipeline() -> Program:
    """A computation on each of two slices, and the way between them."""
    nodes = (
        Arg("x", value(0)),
        Compute("front", "f0", 0, (0,), (ROWS,), (value(1),)),
        Compute("back", "f1", 1, (1,), (WHOLE,), (value(2, 1, WHOLE),)),
        Result((2,)),
    )
    return prepare(Program("pipeline", (SliceShape(0, (4,)), SliceShape(1, (4,))), nodes))


class World:
    """Hosts that do what they are told, in random order of what happens to different ones.

    They are told to run only lists that they have.
    """

    def __init__(
        self,
        seed: int = 0,
        limits: MemoryLimits | None = None,
        islands: str = "ab",
        most_lowered: int = MOST_LOWERED,
    ) -> None:
        self.chance = random.Random(seed)
        self.controller = Controller(most_lowered)
        self.lists: dict[str, set[str]] = defaultdict(set)  # what each host has, in this epoch
        self.lines: dict[str, list[tuple[str, int, Message]]] = defaultdict(list)
        self.begun: dict[str, list[int]] = defaultdict(list)
        self.told: list[tuple[str, Message]] = []  # and done
        self.released: set[tuple[str, int]] = set()
        self.preparing: list[Prepare] = []
        self.abandoned: list[Abandon] = []
        self.stalled: list[Stall] = []
        self.installed: dict[Program, str] = {}
        self.next = 1000
        self.limits = limits or MemoryLimits()
        for name in islands:
            self.add(name)

    def carry_out(self) -> None:
        effects, self.controller.orders.effects = self.controller.orders.effects, []
        for effect in effects:
            match effect:
                case Begin() if effect.epoch == self.controller.orders.epoch(effect.island):
                    for host, message in effect.messages.items():
                        self.lines[host].append((effect.island, effect.epoch, message))
                case Prepare():
                    self.preparing.append(effect)
                case Release():
                    self.released.update((effect.host, handle) for handle in effect.handles)
                case Abandon():
                    self.abandoned.append(effect)
                case Stall():
                    self.stalled.append(effect)
                case ForgetLists() if effect.epoch == self.controller.orders.epoch(effect.island):
                    for host, listed in effect.lists.items():
                        self.lists[host].remove(listed)

    def step(self, fails: float = 0.0) -> bool:
        """Something happens; False if nothing is left to."""
        self.carry_out()
        able: list[Callable[[], None]] = [self.prepare] * len(self.preparing)
        able += [lambda host=host: self.end(host, fails) for host, line in self.lines.items() if line]
        if not able:
            return False
        self.chance.choice(able)()
        self.carry_out()
        return True

    def prepare(self) -> None:
        effect = self.preparing.pop(self.chance.randrange(len(self.preparing)))
        if effect.epoch == self.controller.orders.epoch(effect.island):
            for host, listed in effect.lists.items():
                self.lists[host].add(listed.fingerprint)
        self.controller.orders.prepared(effect.number, None)

    def end(self, host: str, fails: float) -> None:
        island, epoch, message = self.lines[host].pop(0)
        self.begun[host].append(message.work)
        runs = [each for each in message.instructions if isinstance(each, Run)]
        assert {run.list for run in runs} <= self.lists[host], "a list was forgotten under a run"
        error = InvalidInput("it is broken") if self.chance.random() < fails else None
        said = "" if error else self.said(message, host)
        self.told.append((host, message))
        self.controller.orders.done(island, epoch, host, Done(message.work, 0.001, error, said=said))

    def said(self, message: Message, host: str) -> Said:
        """What else a host answers."""
        for instruction in message.instructions:
            if isinstance(instruction, Load) and host.endswith(f"/{instruction.processes[0]}"):
                return tuple(f"loaded as {value}" for _, value in instruction.tree.values)
            if isinstance(instruction, BeginJoining):
                return f"{instruction.path}.parts"
            if isinstance(instruction, Identify):
                return "the first"
        return ""

    def run(self, fails: float = 0.0) -> None:
        while self.step(fails):
            pass

    def add(self, island: str) -> None:
        hosts = tuple(Host(f"{island}/{index}", island, 2) for index in range(2))
        self.controller.add_island(Island(island, hosts), self.limits)
        self.controller.addresses.update({host.name: f"at {host.name}" for host in hosts})
        self.carry_out()

    def remove(self, island: str) -> None:
        self.forget(island)
        self.controller.remove_island(island, Unavailable(f"island '{island}' has been removed"))
        self.carry_out()

    def forget(self, island: str) -> None:
        for host in [host for host in self.lines if host.startswith(island)]:
            self.lines[host].clear()
        for host in [host for host in self.lists if host.startswith(island)]:
            self.lists[host].clear()

    def lose(self, island: str) -> None:
        self.forget(island)
        why = Unavailable(f"island '{island}' is lost")
        self.controller.lose(island, why.message, lambda work: why, lambda program: why)
        self.carry_out()

    def client(self, name: str, *islands: str) -> tuple[str, list[int]]:
        client = self.controller.add_client(name)
        requests = [SliceRequest.of(4, island=island, shared=True) for island in islands or ("a",)]
        return client, [self.controller.grant(client, request) for request in requests]

    def put(self, client: str, slice_number: int, sharding: Sharding = ROWS) -> int:
        self.next += 1
        array = np.zeros(*NUMBERS)
        self.controller.works.put(client, self.next, array, value(self.next, slice_number, sharding))
        return self.next

    def call(self, client: str, program: Program, slices: list[int], *arguments: int) -> int:
        self.next += 1
        known = self.installed[program] = self.controller.install(client, program, Dispatch.PARALLEL)
        self.controller.run(client, known, slices, arguments, [self.next], None, 0)
        return self.next


def error_of(world: World, client: str, handle: int) -> WaystationError | None:
    try:
        world.controller.arrays.get(client, handle)
    except WaystationError as error:
        return error
    return None
