"""Programs that clients have installed, and what they come to where their slices are now.

A program is known by its fingerprint. It is lowered once for each set of placements, subgraph by subgraph,
and each subgraph becomes one list for each host. What one subgraph makes and a later one uses goes from one
to the other by the number of the value.

A program stays as long as a client holds it (`Programs.install`, `forget`, `drop_client`) or a run of it has
not ended, and so do the functions that it calls. What programs have been lowered to is bounded: what no run
uses now and was used least recently goes first, and is made again when it is needed. Hosts forget the lists
of what has gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import is_
from typing import Any

from waystation._errors import NotFound
from waystation.runtime.controller.works import Prepare
from waystation.runtime.ir import (
    Compute,
    Exec,
    HostCall,
    HostProgram,
    LowProgram,
    Program,
    Recv,
    Value,
    fingerprint,
    lower,
    static_subgraphs,
)
from waystation.runtime.ir import Free as HighFree
from waystation.runtime.messages import HostList
from waystation.runtime.objects import Footprint, Held, footprint
from waystation.runtime.resources import Placement

# Of all clients: programs, each with its placements, whose lists hosts keep while no run uses them.
MOST_LOWERED = 1024
_MOST_GRANTED = 4096  # values of one program on slices of clients


class Dispatch(StrEnum):
    """How the calls of a program are given to hosts.

    Attributes:
        PARALLEL: As many at once as can be known: all, unless shapes depend on data.
        SEQUENTIAL: Each when those that it uses have ended, as if all shapes depended on data.
    """

    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"


@dataclass(slots=True, eq=False)
class Installed:
    """A program that is installed.

    Attributes:
        known: Its fingerprint.
        program: As `ir.prepare` has made it.
        dispatch: How it is given to hosts.
        granted: Values on slices of clients, by their number and that of the slice: so each is made once.
        lowered: What it has come to, by placements.
        last: What it came to last: found without a look at every device of it.
    """

    known: str
    program: Program
    dispatch: Dispatch
    granted: dict[tuple[int, int], Value] = field(default_factory=dict)
    lowered: dict[tuple[Placement, ...], Lowered] = field(default_factory=dict)
    last: Lowered | None = None

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
        host_calls: Those of host functions, likewise.
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


@dataclass(slots=True, eq=False)
class Lowered:
    """What a program comes to in one place.

    Attributes:
        installed: The program.
        placements: Where each of its slices is, in its order.
        subgraphs: What hosts do for it.
        users: How many runs that have not ended use it.
    """

    installed: Installed
    placements: tuple[Placement, ...]
    subgraphs: tuple[Subgraph, ...]
    users: int = 0


class Programs:
    """Programs by fingerprint, and lowered.

    Args:
        forget: Has hosts forget the lists of a subgraph, which no run uses.
        most_lowered: How much of what programs came to is kept while no run uses it.

    Attributes:
        functions: The functions that programs call, as JAX exported them, by key.
        host_functions: The functions of Python that they call on hosts, as hosts take them, by key.
    """

    def __init__(
        self, forget: Callable[[Subgraph], None] = lambda subgraph: None, most_lowered: int = MOST_LOWERED
    ) -> None:
        self.functions: Held[bytes] = Held()
        self.host_functions: Held[Any] = Held()
        self._forget = forget
        self._most_lowered = most_lowered
        self._installed: Held[Installed] = Held()
        self._recent: OrderedDict[Lowered, None] = OrderedDict()  # the last one used is the last
        self._numbers = 0

    @property
    def installed_count(self) -> int:
        """How many programs are installed."""
        return len(self._installed)

    @property
    def lowered_count(self) -> int:
        """How much of what programs have come to is kept."""
        return len(self._recent)

    @property
    def function_count(self) -> int:
        """How many functions there are."""
        return len(self.functions) + len(self.host_functions)

    def install(self, program: Program, dispatch: Dispatch, holder: Hashable) -> str:
        """Keeps a program until `forget` or `drop`; returns its fingerprint.

        The same program given to hosts in another way has another fingerprint.

        Args:
            program: As `ir.prepare` has made it.
            dispatch: How it is given to hosts.
            holder: Who wants it: a client, or a run.
        """
        known = fingerprint(program)
        if dispatch is not Dispatch.PARALLEL:
            known = f"{known} {dispatch}"
        self._installed.hold(known, holder)
        if self._installed.get(known) is None:
            self._installed.set(known, Installed(known, program, dispatch))
            for node in program.nodes:
                if isinstance(node, Compute):
                    self.functions.hold(node.function, known)
                elif isinstance(node, HostCall):
                    self.host_functions.hold(node.function, known)
        return known

    def forget(self, known: str, holder: Hashable) -> None:
        """Somebody who has installed a program does not want it any more; it ends with the last of them."""
        self._end(self._installed.release(known, holder))

    def drop(self, holder: Hashable) -> None:
        """Somebody wants no program, and no function, any more."""
        for installed in self._installed.drop(holder):
            self._end(installed)
        self.functions.drop(holder)
        self.host_functions.drop(holder)

    def code_of(self, effect: Prepare) -> tuple[dict[str, bytes], dict[str, Any]]:
        """The functions, and host functions, that lists call which hosts are to be given."""
        found = {key: self.functions.get(key) for key in effect.functions}
        named = {key: self.host_functions.get(key) for key in effect.host_calls}
        return (
            {key: code for key, code in found.items() if code is not None},
            {key: code for key, code in named.items() if code is not None},
        )

    def get(self, known: str) -> Installed:
        """An installed program.

        Raises:
            NotFound: There is none.
        """
        found = self._installed.get(known)
        if found is None:
            raise NotFound(f"no program '{known}' has been installed; install it before it runs")
        return found

    def begin(self, known: str, run: Hashable) -> Installed:
        """A run of an installed program begins, which is not forgotten before `end`.

        Raises:
            NotFound: There is no such program.
        """
        found = self.get(known)
        self._installed.hold(known, run)
        return found

    def end(self, known: str, run: Hashable, lowered: Lowered | None) -> None:
        """A run has ended, or will never begin.

        Args:
            known: What `begin` was told.
            run: Likewise.
            lowered: What it has used, if it has come to that.
        """
        if lowered is not None:
            lowered.users -= 1
        self.forget(known, run)

    def use(self, known: str, placements: tuple[Placement, ...]) -> Lowered:
        """What an installed program comes to, for a run that has begun; `end` says when it has used it.

        Args:
            known: Its fingerprint.
            placements: Where each of its slices is, in its order.

        Raises:
            NotFound: There is no such program.
            InvalidProgram: A slice has another number of devices.
        """
        installed = self.get(known)
        found = installed.last
        if found is None or not all(map(is_, found.placements, placements)):
            found = installed.lowered.get(placements)
        if found is None:
            found = Lowered(installed, placements, self._lower(installed, placements))
            self._make_room()
            installed.lowered[placements] = found
            self._recent[found] = None
        self._recent.move_to_end(found)
        installed.last = found
        found.users += 1
        return found

    def _make_room(self) -> None:
        """Makes room for one more, unless runs use all that there is."""
        while len(self._recent) >= self._most_lowered:
            oldest = next((each for each in self._recent if not each.users), None)
            if oldest is None:
                return
            self._evict(oldest)

    def _evict(self, lowered: Lowered) -> None:
        installed = lowered.installed
        del self._recent[lowered], installed.lowered[lowered.placements]
        if installed.last is lowered:
            installed.last = None
        for subgraph in lowered.subgraphs:
            self._forget(subgraph)

    def _end(self, installed: Installed | None) -> None:
        """Nobody wants a program any more."""
        if installed is not None:
            for lowered in list(installed.lowered.values()):
                self._evict(lowered)
            self.functions.drop(installed.known)
            self.host_functions.drop(installed.known)

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
            lists={name: _list_of(str(self._numbers), low, name, inputs, outputs) for name in hosts},
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


def _list_of(
    known: str, low: LowProgram, host: str, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> HostList:
    part = low.on(host)
    placements = dict(low.placements)
    here = {number for number, found in placements.items() if host in found.hosts}
    slices = {value.number: value.slice for value in low.values}
    own = replace(low, hosts=(part,))
    arguments = tuple(number for number in inputs if slices[number] in here)
    results = tuple(number for number in outputs if slices[number] in here)
    return HostList(known, own, arguments, results)


def _called(
    parts: Iterable[HostProgram], island_of: Mapping[str, str], kind: str
) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {}
    for part in parts:
        names = {step.function for step in part.instructions if isinstance(step, Exec) and step.kind == kind}
        found.setdefault(island_of[part.host], set()).update(names)
    return {island: tuple(sorted(names)) for island, names in found.items()}
