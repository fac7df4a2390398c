"""Programs that clients have installed, and what they come to where their slices are now.

A program is known by its fingerprint. It is lowered once for each set of placements, subgraph by subgraph,
and each subgraph becomes one list for each host. What one subgraph makes and a later one uses goes from one
to the other by the number of the value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import is_

from waystation._errors import NotFound
from waystation.runtime.ir import (
    Compute,
    Exec,
    HostCall,
    HostProgram,
    LowProgram,
    Program,
    Recv,
    Value,
    encode,
    fingerprint,
    lower,
    static_subgraphs,
)
from waystation.runtime.ir import Free as HighFree
from waystation.runtime.messages import HostList
from waystation.runtime.objects import Footprint, footprint
from waystation.runtime.resources import Placement

_MOST_LOWERED = 256  # programs and placements that are kept
_MOST_GRANTED = 4096  # values of one program on slices of clients


class Dispatch(StrEnum):
    """How the calls of a program are given to hosts.

    Attributes:
        PARALLEL: As many at once as can be known: all, unless shapes depend on data.
        SEQUENTIAL: Each when those that it uses have ended, as if all shapes depended on data.
    """

    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, slots=True)
class Installed:
    """A program that a client has installed.

    Attributes:
        program: As `ir.prepare` has made it.
        dispatch: How it is given to hosts.
        granted: Values on slices of clients, by their number and that of the slice: so each is made once.
    """

    program: Program
    dispatch: Dispatch
    granted: dict[tuple[int, int], Value] = field(default_factory=dict)

    def value_on(self, value: Value, slice_number: int) -> Value:
        """A value of the program as an array of a client: its slice is that of the client."""
        found = self.granted.get((value.number, slice_number))
        if found is None:
            if len(self.granted) >= _MOST_GRANTED:
                self.granted.clear()
            found = self.granted[value.number, slice_number] = replace(value, slice=slice_number)
        return found


@dataclass(frozen=True, slots=True)
class Subgraph:
    """What hosts do for one static subgraph.

    Attributes:
        number: Its identity among all that are lowered.
        islands: The hosts of each island that take part.
        lists: The list of each.
        footprints: What each needs.
        senders: For each host those that it receives from.
        inputs: Values that are there before it.
        outputs: Those that it makes and that stay.
        ended: The inputs that it ends.
        functions: Keys of the functions that each island's hosts call.
        host_calls: Names of host functions, likewise.
        computation: The name of its first call.
    """

    number: int
    islands: dict[str, tuple[str, ...]]
    lists: dict[str, HostList]
    footprints: dict[str, Footprint]
    senders: dict[str, tuple[str, ...]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ended: frozenset[int]
    functions: dict[str, tuple[str, ...]]
    host_calls: dict[str, tuple[str, ...]]
    computation: str


class Programs:
    """Programs by fingerprint, and lowered."""

    def __init__(self) -> None:
        self._installed: dict[str, Installed] = {}
        self._lowered: dict[tuple[str, tuple[Placement, ...]], tuple[Subgraph, ...]] = {}
        # What each program came to last, and where: found without a look at every device of it.
        self._last: dict[str, tuple[tuple[Placement, ...], tuple[Subgraph, ...]]] = {}
        self._numbers = 0

    def install(self, program: Program, dispatch: Dispatch = Dispatch.PARALLEL) -> str:
        """Keeps a program; returns its fingerprint.

        The same program given to hosts in another way has another fingerprint.
        """
        known = fingerprint(program)
        if dispatch is not Dispatch.PARALLEL:
            known = f"{known} {dispatch}"
        self._installed[known] = Installed(program, dispatch)
        return known

    def get(self, known: str) -> Installed:
        """An installed program.

        Raises:
            NotFound: There is none.
        """
        found = self._installed.get(known)
        if found is None:
            raise NotFound(f"no program '{known}' has been installed; install it before it runs")
        return found

    def lowered(self, known: str, placements: tuple[Placement, ...]) -> tuple[Subgraph, ...]:
        """What an installed program comes to.

        Args:
            known: Its fingerprint.
            placements: Where each of its slices is, in its order.

        Raises:
            NotFound: There is no such program.
            InvalidProgram: A slice has another number of devices.
        """
        last = self._last.get(known)
        if last is not None and all(map(is_, last[0], placements)):
            return last[1]
        key = known, placements
        found = self._lowered.get(key)
        if found is None:
            while len(self._lowered) >= _MOST_LOWERED:
                oldest = next(iter(self._lowered))
                del self._lowered[oldest]
                self._last.pop(oldest[0], None)
            found = self._lowered[key] = self._lower(self.get(known), placements)
        self._last[known] = placements, found
        return found

    def _lower(self, installed: Installed, placements: tuple[Placement, ...]) -> tuple[Subgraph, ...]:
        program = installed.program
        placed = dict(zip((part.number for part in program.slices), placements, strict=True))
        cut = _each_by_itself(program) if installed.dispatch is Dispatch.SEQUENTIAL else program
        parts = static_subgraphs(cut)
        later: set[int] = set()
        kept: list[set[int]] = []  # of each subgraph what is used after it
        for part in reversed(parts):
            kept.append(set(later))
            later.update(number for place in part.nodes for number in program.nodes[place].operands)
        found = []
        for part, after in zip(parts, reversed(kept), strict=True):
            after.update(program.nodes[-1].operands)
            low = lower(program, placed, frozenset(part.nodes))
            if any(host.instructions for host in low.hosts):
                found.append(self._subgraph(program, low, part.nodes, after))
        return tuple(found)

    def _subgraph(
        self, program: Program, low: LowProgram, nodes: tuple[int, ...], after: set[int]
    ) -> Subgraph:
        members = [
            program.nodes[place] for place in nodes if program.nodes[place].kind not in ("arg", "result")
        ]
        made = {value.number for node in members for value in node.results}
        inputs = tuple(sorted({number for node in members for number in node.operands} - made))
        outputs = tuple(sorted(made & after))
        ended = {number for node in members if isinstance(node, HighFree) for number in node.operands}
        ended |= {node.operands[at] for node in members if isinstance(node, Compute) for at in node.donated}
        placements = dict(low.placements)
        hosts = {part.host: part for part in low.hosts if part.instructions}
        island_of = {name: found.island for found in placements.values() for name in found.hosts}
        islands: dict[str, tuple[str, ...]] = {}
        for name in hosts:
            islands[island_of[name]] = (*islands.get(island_of[name], ()), name)
        self._numbers += 1
        calls = [node for node in members if isinstance(node, Compute | HostCall)]
        return Subgraph(
            number=self._numbers,
            islands=islands,
            lists={name: _list_of(low, name, inputs, outputs) for name in hosts},
            footprints={name: footprint(low, part) for name, part in hosts.items()},
            senders={
                name: tuple(sorted({step.host for step in part.instructions if isinstance(step, Recv)}))
                for name, part in hosts.items()
            },
            inputs=inputs,
            outputs=outputs,
            ended=frozenset(ended & set(inputs)),
            functions=_called(hosts.values(), island_of, "compute"),
            host_calls=_called(hosts.values(), island_of, "host_call"),
            computation=calls[0].label if calls else "reshard",
        )


def _each_by_itself(program: Program) -> Program:
    nodes = tuple(
        replace(node, dynamic=True) if isinstance(node, Compute | HostCall) else node
        for node in program.nodes
    )
    return replace(program, nodes=nodes)


def _list_of(low: LowProgram, host: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> HostList:
    part = low.on(host)
    placements = dict(low.placements)
    here = {number for number, found in placements.items() if host in found.hosts}
    slices = {value.number: value.slice for value in low.values}
    own = replace(low, hosts=(part,))
    arguments = tuple(number for number in inputs if slices[number] in here)
    results = tuple(number for number in outputs if slices[number] in here)
    digest = hashlib.sha256(encode(own) + repr((host, arguments, results)).encode()).hexdigest()
    return HostList(digest, own, arguments, results)


def _called(
    parts: Iterable[HostProgram], island_of: Mapping[str, str], kind: str
) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {}
    for part in parts:
        names = {step.function for step in part.instructions if isinstance(step, Exec) and step.kind == kind}
        found.setdefault(island_of[part.host], set()).update(names)
    return {island: tuple(sorted(names)) for island, names in found.items()}
