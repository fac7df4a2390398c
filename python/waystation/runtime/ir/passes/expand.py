"""Pass: a placed program becomes lists of instructions, one for each host.

A reshard becomes transfers of exactly the boxes in which a shard to be made meets a shard that is there. Of
replicas that have a box, one on the same host is preferred (a copy), else the device that has sent the least
so far; a host that wants a box for several devices is sent it once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from waystation.grid import Box, ChunkGrid
from waystation.runtime.devices import DeviceId
from waystation.runtime.ir.low import Copy, Exec, Free, HostProgram, Instruction, LowProgram, Recv, Send
from waystation.runtime.ir.passes.place import PlacedProgram
from waystation.runtime.ir.program import Compute, HostCall, Reshard, Value
from waystation.runtime.ir.program import Free as HighFree


def expand(placed: PlacedProgram, nodes: Collection[int] | None = None) -> LowProgram:
    """Expands a program.

    Args:
        placed: A program that has passed the passes before.
        nodes: Places of the nodes to expand, as of one static subgraph; None for all. What others define is
            there already.
    """
    expansion = _Expansion(placed)
    for position, node in enumerate(placed.program.nodes):
        if nodes is not None and position not in nodes:
            continue
        if isinstance(node, Compute | HostCall):
            expansion.call(position, node)
        elif isinstance(node, Reshard):
            expansion.reshard(node)
        elif isinstance(node, HighFree):
            expansion.free(node)
    return expansion.program()


class _Expansion:
    def __init__(self, placed: PlacedProgram) -> None:
        self._placed = placed
        self._placements = placed.by_slice
        self._values = placed.program.values
        self._local = {number: _by_host(found.devices) for number, found in placed.placements}
        self._lists: dict[str, list[Instruction]] = {
            host: [] for _, found in placed.placements for host in found.hosts
        }
        self._sent_counts: defaultdict[DeviceId, int] = defaultdict(int)
        self._transfers = 0

    def program(self) -> LowProgram:
        """What has been expanded."""
        hosts = tuple(HostProgram(host, tuple(steps)) for host, steps in sorted(self._lists.items()))
        values = tuple(self._values.values())
        return LowProgram(self._placed.program.name, values, self._placed.placements, hosts, self._transfers)

    def call(self, position: int, node: Compute | HostCall) -> None:
        """One `Exec` on each host of the slice."""
        results = tuple(value.number for value in node.results)
        for host, devices in self._local[node.slice].items():
            step = Exec(
                position, node.kind, node.function, node.slice, devices, node.operands, results, node.donated
            )
            self._lists[host].append(step)

    def free(self, node: HighFree) -> None:
        """One `Free` on each host that has shards of the values."""
        local: defaultdict[str, list[int]] = defaultdict(list)
        for number in node.operands:
            for host in self._local[self._values[number].slice]:
                local[host].append(number)
        for host, numbers in local.items():
            self._lists[host].append(Free(tuple(numbers)))

    def reshard(self, node: Reshard) -> None:
        """Sends, receives and copies that make the shards of the result."""
        source, target = self._values[node.operand], node.result
        if 0 in source.shape:
            return
        grid = ChunkGrid(source.shape, source.sharding.shard_shape(source.shape))
        holders = self._holders(source, grid)
        takers: defaultdict[Box, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        placed_boxes = zip(
            self._placements[target.slice].devices, target.sharding.boxes(target.shape), strict=True
        )
        for device, box in placed_boxes:
            takers[box][device.host].append(device.index)
        receives: list[tuple[str, Recv]] = []
        for box, hosts in takers.items():
            for chunk, part in grid.overlaps(box):
                for host, devices in hosts.items():
                    receives += self._bring(source, target, part, holders[chunk], host, devices)
        # A host offers all that it has before it waits for anything.
        for host, receive in receives:
            self._lists[host].append(receive)

    def _holders(self, source: Value, grid: ChunkGrid) -> dict[int, list[DeviceId]]:
        """Of each distinct shard of a value the devices that hold it."""
        holders: defaultdict[int, list[DeviceId]] = defaultdict(list)
        boxes = source.sharding.boxes(source.shape)
        for device, box in zip(self._placements[source.slice].devices, boxes, strict=True):
            number = 0
            for begin, step, count in zip(box[0], grid.chunk_shape, grid.counts, strict=True):
                number = number * count + begin // step
            holders[number].append(device)
        return holders

    def _bring(
        self, source: Value, target: Value, box: Box, holders: list[DeviceId], host: str, devices: list[int]
    ) -> list[tuple[str, Recv]]:
        """Brings a box to devices of one host; returns what that host has to receive."""
        local = [holder.index for holder in holders if holder.host == host]
        if local:
            own = [device for device in devices if device in local]
            others = tuple(device for device in devices if device not in local)
            steps = self._lists[host]
            steps += [Copy(source.number, device, target.number, (device,), box) for device in own]
            if others:
                steps.append(Copy(source.number, local[0], target.number, others, box))
            return []
        sender = min(holders, key=lambda holder: (self._sent_counts[holder], holder))
        self._sent_counts[sender] += 1
        transfer = self._transfers
        self._transfers += 1
        self._lists[sender.host].append(Send(transfer, source.number, sender.index, box, host))
        return [(host, Recv(transfer, target.number, tuple(devices), box, sender.host))]


def _by_host(devices: tuple[DeviceId, ...]) -> dict[str, tuple[int, ...]]:
    """The devices of each host, by name, ascending."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for device in sorted(devices):
        found[device.host].append(device.index)
    return {host: tuple(indices) for host, indices in found.items()}
