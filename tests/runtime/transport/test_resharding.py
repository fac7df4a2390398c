"""Lowered programs move shards between real processes, and nothing that they need not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.ir.strategies import shardings
from tests.runtime.transport.processes import LONG_S, HostProcess, host_processes
from tests.support.long import amount

from waystation.grid import Box, relative_to, slices_of_box
from waystation.runtime.devices import DeviceId
from waystation.runtime.ir import (
    Arg,
    Copy,
    LowProgram,
    Program,
    Recv,
    Reshard,
    Result,
    Send,
    SliceShape,
    Value,
    lower,
    prepare,
)
from waystation.runtime.resources import Placement
from waystation.runtime.transport import Key, TcpTransport, Wanted

NAMES = ("host0", "host1", "host2", "host3")
Shards = dict[int, np.ndarray]


@pytest.fixture(scope="module", params=[True, False], ids=["memory", "network"])
def hosts(request: pytest.FixtureRequest) -> Iterator[dict[str, HostProcess]]:
    with host_processes(*NAMES, reads_memory=request.param) as started:
        yield dict(zip(NAMES, started, strict=True))


def move(
    transport: TcpTransport, low: LowProgram, host: str, addresses: dict[str, str], run: int, shards: Shards
) -> tuple[Shards, int]:
    """Does what a list says: from the shards of its argument to those of its result, and bytes received."""
    values = {value.number: value for value in low.values}
    placements = dict(low.placements)

    def boxes(number: int) -> dict[int, Box]:
        value = values[number]
        placed = zip(placements[value.slice].devices, value.sharding.boxes(value.shape), strict=True)
        return {device.index: box for device, box in placed if device.host == host}

    steps = low.on(host).instructions
    receives = [step for step in steps if isinstance(step, Recv)]
    made: dict[int, Shards] = {0: shards}
    result = boxes(1)
    made[1] = {device: np.full(box[1], -1) for device, box in result.items()}
    fetches = {}
    for peer in {step.host for step in receives}:
        own = [step for step in receives if step.host == peer]
        wanted = [Wanted(Key(run, 1, step.transfer), step.box[1], np.dtype(np.int64)) for step in own]
        fetches[peer] = own, transport.fetch(addresses[peer], wanted, deadline_s=LONG_S)

    def part(number: int, device: int, box: Box) -> np.ndarray:
        return made[number][device][slices_of_box(relative_to(box, boxes(number)[device][0]))]

    for step in steps:
        if isinstance(step, Send):
            transport.offer({Key(run, 1, step.transfer): part(step.value, step.device, step.box)})
        elif isinstance(step, Copy):
            for device in step.devices:
                part(step.value, device, step.box)[...] = part(step.source, step.device, step.box)
    received = 0
    for own, fetch in fetches.values():
        for step, block in zip(own, fetch.result(), strict=True):
            received += block.nbytes
            for device in step.devices:
                part(step.value, device, step.box)[...] = block
    return made[1], received


def elements(shape: tuple[int, ...], boxes: list[Box]) -> int:
    """How many elements some boxes have, each counted once."""
    covered = np.zeros(shape, bool)
    for box in boxes:
        covered[slices_of_box(box)] = True
    return int(covered.sum())


RUNS = iter(range(1 << 30))


@settings(max_examples=amount(20, 800))
@given(data=st.data())
def test_a_reshard_brings_only_the_intersections(hosts: dict[str, HostProcess], data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.just(12), min_size=1, max_size=3)))
    counts = data.draw(st.tuples(*[st.sampled_from([1, 2, 3, 4, 6])] * 2))
    source, target = (data.draw(shardings(count, len(shape))) for count in counts)
    program = Program(
        "move",
        (SliceShape(0, (counts[0],)), SliceShape(1, (counts[1],))),
        (
            Arg("x", Value(0, shape, "int64", 0, source)),
            Reshard(0, Value(1, shape, "int64", 1, target)),
            Result((1,)),
        ),
    )
    devices = [DeviceId(NAMES[at // 2], at % 2) for at in range(8)]
    placed = {
        at: Placement(1, "i", tuple(data.draw(st.permutations(devices))[: counts[at]])) for at in (0, 1)
    }
    low = lower(prepare(program), placed)
    addresses = {name: host.address() for name, host in hosts.items()}
    array = np.arange(np.prod(shape)).reshape(shape)
    held, wanted = (
        list(zip(placed[at].devices, sharding.boxes(shape), strict=True))
        for at, sharding in ((0, source), (1, target))
    )
    run = next(RUNS)
    for name, host in hosts.items():
        shards = {
            device.index: np.ascontiguousarray(array[slices_of_box(box)])
            for device, box in held
            if device.host == name
        }
        host.tell(move, low, name, addresses, run, shards)
    for name, host in hosts.items():
        made, received = host.told()
        for device, box in wanted:
            if device.host == name:
                np.testing.assert_array_equal(made[device.index], array[slices_of_box(box)])
        here = [[box for device, box in boxes if device.host == name] for boxes in (held, wanted)]
        needed = elements(shape, here[0] + here[1]) - elements(shape, here[0])
        assert received == needed * array.itemsize
    for host in hosts.values():
        assert host.call(held_bytes) == 0


def held_bytes(transport: TcpTransport) -> int:
    """What a host still holds, once it has heard that all is fetched."""
    transport.wait_for_room(1, deadline_s=LONG_S)
    return transport.held_bytes
