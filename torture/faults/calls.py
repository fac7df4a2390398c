"""Faults at one system call: the process is killed before it, or it fails, or moves less than it was told to.

The calls of an operation are taken from a run that nothing disturbs. Seed n is for the n-th of them, so
that as many seeds as there are calls meet each once. io_uring is refused, so that every byte goes through a
call; the system that is named for the ring has it, and is killed around its calls.
"""

from __future__ import annotations

from torture import supervisor
from torture.faults.base import MISSED, Done, Fault
from torture.operations import OPERATIONS, Operation, Workspace
from torture.outcomes import Outcome, Verdict
from torture.processes import in_child
from torture.systems import System, WaystationRing

# A fault after which the operation has to have done what it was called for, as nothing had gone wrong for
# good.
_TRANSIENT = frozenset({"EINTR", "short"})


class CallFault:
    """One kind of fault, at each call of one operation."""

    def __init__(self, kind: str, operation: Operation) -> None:
        self.name = f"{kind}/{operation.name}"
        self._kind, self._operation = kind, operation
        self._addresses: dict[str, list[str]] = {}

    def applies(self, system: System) -> bool:
        has_it = system.runs_alone and (self._operation.name != "collection" or system.has_collection)
        return supervisor.SUPPORTED and has_it

    def seeds(self, system: System, workspace: Workspace) -> int:
        return len(self._calls(system, workspace))

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        addresses = self._calls(system, workspace)
        if not addresses:
            return Done(MISSED)
        return self.run_at(system, addresses[seed % len(addresses)], workspace)

    def run_at(self, system: System, address: str, workspace: Workspace) -> Done:
        """Makes the run for the call of an address."""
        root = workspace.prepare(system, self._operation)
        done = supervisor.supervise(
            lambda: self._operation.act(system, root),
            root,
            address=address,
            fault=self._kind,
            ring=isinstance(system, WaystationRing),
            loses=system.has_files,
        )
        # Answered by nobody any more, they would not be what they are.
        workspace.end_agents()
        if not done.is_hit:
            return Done(MISSED, address)
        may_fail = self._kind not in _TRANSIENT
        return Done(self._operation.judge(system, root, done.ended, may_fail), address)

    def _calls(self, system: System, workspace: Workspace) -> list[str]:
        if system.name not in self._addresses:
            root = workspace.prepare(system, self._operation)
            done = supervisor.supervise(
                lambda: self._operation.act(system, root), root, ring=isinstance(system, WaystationRing)
            )
            if done.ended.how != "returned":
                raise RuntimeError(
                    f"'{system.name}' fails at '{self._operation.name}' undisturbed: {done.ended.error}"
                )
            self._addresses[system.name] = supervisor.in_order(done.calls, self._kind)
        return self._addresses[system.name]


class Undisturbed:
    """No fault at all: what the bench judges then is what the judge itself gets wrong."""

    def __init__(self, operation: Operation) -> None:
        self.name = f"none/{operation.name}"
        self._operation = operation

    def applies(self, system: System) -> bool:
        return system.runs_alone and (self._operation.name != "collection" or system.has_collection)

    def seeds(self, system: System, workspace: Workspace) -> int:
        del system, workspace
        return 1

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        del seed
        root = workspace.prepare(system, self._operation)
        ended = in_child(lambda: self._operation.act(system, root))
        if ended.how != "returned":
            return Done(Verdict(Outcome.REFUSED_WRONGLY, ended.error))
        return Done(self._operation.judge(system, root, ended, False))


KINDS = ("kill", *supervisor.MAY_FAIL)
CALL_FAULTS: list[Fault] = [
    *(Undisturbed(operation) for operation in OPERATIONS.values()),
    *(CallFault(kind, operation) for kind in KINDS for operation in OPERATIONS.values()),
]
