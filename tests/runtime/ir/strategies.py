"""Random programs, and random places for their slices."""

from __future__ import annotations

from hypothesis import strategies as st

from waystation.runtime.devices import DeviceId
from waystation.runtime.ir import (
    Arg,
    Compute,
    HostCall,
    Node,
    Program,
    Reshard,
    Result,
    Sharding,
    SliceShape,
    Value,
)
from waystation.runtime.resources import Placement

# Every number of devices here divides 12, the extent of every axis that is not empty.
MESHES = {
    1: [(1,)],
    2: [(2,), (1, 2)],
    3: [(3,)],
    4: [(4,), (2, 2)],
    6: [(6,), (2, 3), (3, 1, 2)],
    12: [(2, 6)],
}
LABELS = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def shardings(draw: st.DrawFn, devices: int, ndim: int) -> Sharding:
    sizes = draw(st.sampled_from(MESHES[devices]))
    axes = tuple(zip("xyz", sizes, strict=False))
    parts: list[list[str]] = [[] for _ in range(ndim)]
    for name, _ in draw(st.permutations(axes)):
        place = draw(st.integers(-1, ndim - 1))
        if place >= 0:
            parts[place].append(name)
    return Sharding(axes, tuple(map(tuple, parts))[: draw(st.integers(0, ndim)) or ndim])


class Builder:
    """A program under construction: only what is alive is used."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        counts = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
        self.slices = tuple(SliceShape(7 + number, (count,)) for number, count in enumerate(counts))
        self.nodes: list[Node] = []
        self.alive: dict[int, Value] = {}
        self.made = 0

    def value(self, place: SliceShape, like: Value | None = None) -> Value:
        """A new value on a slice."""
        shape = (
            like.shape if like else tuple(self.draw(st.lists(st.sampled_from([12, 12, 12, 0]), max_size=2)))
        )
        sharding = self.draw(shardings(place.device_count, len(shape)))
        self.made += 1
        return Value(self.made, shape, like.dtype if like else "int64", place.number, sharding)

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        self.alive.update((value.number, value) for value in node.results)

    def call(self) -> None:
        place = self.draw(st.sampled_from(self.slices))
        operands = self.draw(st.lists(st.sampled_from(sorted(self.alive)), max_size=3))
        wanted = tuple(
            self.draw(shardings(place.device_count, len(self.alive[number].shape))) for number in operands
        )
        label, dynamic = self.draw(LABELS), self.draw(st.booleans())
        results = tuple(self.value(place) for _ in range(self.draw(st.integers(0, 2))))
        if self.draw(st.booleans()):
            node: Node = HostCall(
                label, f"h{self.made}", place.number, tuple(operands), wanted, results, dynamic
            )
        else:
            once = [at for at, number in enumerate(operands) if operands.count(number) == 1]
            donated = tuple(sorted(self.draw(st.sets(st.sampled_from(once))))) if once else ()
            for at in donated:
                del self.alive[operands[at]]
            node = Compute(
                label, f"f{self.made}", place.number, tuple(operands), wanted, results, donated, dynamic
            )
        self.add(node)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    build = Builder(draw)
    for _ in range(draw(st.integers(0, 3))):
        build.add(Arg(draw(LABELS), build.value(draw(st.sampled_from(build.slices))), draw(st.booleans())))
    for _ in range(draw(st.integers(0, 5))):
        if not build.alive:
            build.add(Arg("more", build.value(build.slices[0])))
        if draw(st.integers(0, 3)):
            build.call()
        else:
            source = build.alive[draw(st.sampled_from(sorted(build.alive)))]
            build.add(Reshard(source.number, build.value(draw(st.sampled_from(build.slices)), source)))
    returned = draw(st.lists(st.sampled_from(sorted(build.alive)), max_size=3)) if build.alive else []
    build.add(Result(tuple(returned)))
    return Program(draw(LABELS), build.slices, tuple(build.nodes))


@st.composite
def placements(draw: st.DrawFn, program: Program) -> dict[int, Placement]:
    """Any devices of some hosts, in any order; slices may have devices in common."""
    per_host = draw(st.integers(1, 4))
    devices = [DeviceId(f"host{at // per_host}", at % per_host) for at in range(8)]
    return {
        part.number: Placement(1, "island", tuple(draw(st.permutations(devices))[: part.device_count]))
        for part in program.slices
    }
