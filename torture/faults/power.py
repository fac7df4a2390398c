"""A power cut before each call: what was not made durable is on the disk, or not, or in part.

Three seeds in a row cut the power before one call: nothing has reached the disk that need not, the entries of
directories have but no content of files, and some of both has. The last call of all is the end: then the
save has returned, so it has to be there.
"""

from __future__ import annotations

from torture import supervisor
from torture.disk import Disk
from torture.faults.base import MISSED, Done, Fault, random_of
from torture.operations import OPERATIONS, Operation, Workspace
from torture.processes import Ended
from torture.systems import System

_WAYS = ("nothing", "entries", "some")
_END = "the end"


class PowerCut:
    """One operation, with the power cut before each of its calls."""

    def __init__(self, operation: Operation) -> None:
        self.name = f"power cut/{operation.name}"
        self._operation = operation
        self._addresses: dict[str, list[str]] = {}

    def applies(self, system: System) -> bool:
        if not supervisor.SUPPORTED or not system.has_files or not system.moves_by_calls:
            return False
        return self._operation.name != "collection" or system.has_collection

    def seeds(self, system: System, workspace: Workspace) -> int:
        return len(_WAYS) * len(self._calls(system, workspace))

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        addresses = self._calls(system, workspace)
        address = addresses[-1 - seed // len(_WAYS) % len(addresses)]
        how = _WAYS[seed % len(_WAYS)]
        root = workspace.prepare(system, self._operation)
        disk = Disk(root)
        done = supervisor.supervise(
            lambda: self._operation.act(system, root), root, address=address, observe=disk.observe
        )
        at = f"{address}, {how}"
        if not done.is_hit and address != _END:
            return Done(MISSED, at)
        ended = done.ended if address == _END else Ended("killed")
        disk.leave(root, random_of(system, self.name, seed), how)
        return Done(self._operation.judge(system, root, ended, False), at)

    def _calls(self, system: System, workspace: Workspace) -> list[str]:
        if system.name not in self._addresses:
            root = workspace.prepare(system, self._operation)
            done = supervisor.supervise(lambda: self._operation.act(system, root), root)
            self._addresses[system.name] = [*supervisor.in_order(done.calls, "kill"), _END]
        return self._addresses[system.name]


POWER_CUTS: list[Fault] = [PowerCut(OPERATIONS[name]) for name in ("save", "overwrite", "collection")]
