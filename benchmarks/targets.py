"""What Waystation sets out to reach against other libraries and the limit, and whether it does.

Each target compares Waystation in the framework of the peer: `waystation` holds JAX arrays,
`waystation-torch` holds tensors. A target is reached when the ratio of the medians is; the least
favourable round is shown beside it. "As fast as" and "no slower" allow 5 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.analysis import Ratio, Results, Series, is_mapped
from benchmarks.systems import SYSTEMS

MODEL, SMALL = "llama", "small"
JAX, TORCH = "waystation", "waystation-torch"
MIB = 1 << 20
EVEN = 0.95
PEERS = (
    "orbax",
    "orbax-plain",
    "torch-dcp",
    "safetensors-jax",
    "safetensors-torch",
    "fastsafetensors",
    "runai",
)


@dataclass(frozen=True, slots=True)
class Line:
    """One target and what was measured; `reached` is None when something for it is missing."""

    text: str
    needed: str
    measured: str
    worst: str
    reached: bool | None


@dataclass(frozen=True, slots=True)
class Standard:
    """What a session is judged by.

    Attributes:
        evaluate: Its targets.
        ours: By framework, the system of Waystation that others are compared with.
    """

    evaluate: Callable[[Results], list[Line]]
    ours: Mapping[str, str]

    def opponent(self, peer: str) -> str:
        """Waystation in the framework of a peer; plain loops have none, and are compared with JAX."""
        return self.ours.get(SYSTEMS[peer].framework, self.ours["jax"])


def evaluate(results: Results) -> list[Line]:
    """All targets, in the order in which they are stated."""
    return [
        *_durable_save(results),
        *_cold_load(results),
        *_warm_load(results),
        *_mapped_load(results),
        *_blocking(results),
        *_small_arrays(results),
        *_memory(results),
    ]


NATIVE = Standard(evaluate, {"jax": JAX, "torch": TORCH})
"""Of sessions that save checkpoints and load them."""


def as_json(lines: list[Line]) -> list[dict[str, Any]]:
    return [asdict(line) for line in lines]


def _durable_save(results: Results) -> Iterator[Line]:
    for ours in (JAX, TORCH):
        yield _against_limit(results, f"durable save, {ours}: of the raw write limit", "save", ours)
    for peer, factor in (("orbax-plain", 1.0), ("orbax", 4.0), ("torch-dcp", 2.5)):
        text = f"durable save: faster than {peer}"
        yield _against(results, text, MODEL, "save", NATIVE.opponent(peer), peer, factor)


def _cold_load(results: Results) -> Iterator[Line]:
    for ours in (JAX, TORCH):
        yield _against_limit(results, f"cold load, {ours}: of the raw read limit", "load-cold", ours)
    for peer in PEERS:
        text = f"cold load: faster than {peer}"
        yield _against(results, text, MODEL, "load-cold", NATIVE.opponent(peer), peer, 1.0)


def _warm_load(results: Results) -> Iterator[Line]:
    text = "warm load: faster than orbax-plain"
    yield _against(results, text, MODEL, "load-warm", JAX, "orbax-plain", 2.0)
    for peer in ("safetensors-jax", "safetensors-torch"):
        theirs = _owned(results, MODEL, peer, "load-warm")
        ours = _owned(results, MODEL, NATIVE.opponent(peer), "load-warm")
        text = f"warm load: faster than {peer} into memory it owns"
        yield compare(text, ours, theirs, 1.0, strict=True)


def _mapped_load(results: Results) -> Iterator[Line]:
    for ours in (TORCH, JAX):
        for metric, meaning in (("loaded", "returned"), ("touched", "every page touched")):
            theirs = results.best(MODEL, "safetensors-torch", "load-warm", metric, ["mmap"])
            mapped = results.best(MODEL, ours, "load-warm", metric, ["mmap"])
            text = f"warm load with mmap=True, {ours}, {meaning}: as fast as safetensors-torch's mapping"
            yield compare(text, mapped, theirs, EVEN)


def _blocking(results: Results) -> Iterator[Line]:
    copy = results.best(MODEL, "limit", "copy")
    for ours, need in ((TORCH, "the copy of the tensors"), (JAX, "no copy is needed: below one anyway")):
        blocking = results.best(MODEL, ours, "save-async")
        text = f"blocking part of save_async, {ours}: no longer than a plain copy ({need})"
        yield compare(text, blocking, copy, EVEN)


def _small_arrays(results: Results) -> Iterator[Line]:
    for operation, factor in (("save", 50.0), ("load-cold", 20.0), ("load-warm", 20.0)):
        text = f"4,000 small arrays, {operation}: faster than orbax"
        yield _against(results, text, SMALL, operation, JAX, "orbax", factor)
    for peer in ("safetensors-jax", "safetensors-torch"):
        for operation in ("save", "load-cold", "load-warm"):
            text = f"4,000 small arrays, {operation}: no slower than {peer}"
            yield _against(results, text, SMALL, operation, NATIVE.opponent(peer), peer, EVEN)


def _memory(results: Results) -> Iterator[Line]:
    loads = ("load-cold", "load-warm")
    for text, operations, limit in (("save", ("save",), 512 * MIB), ("load", loads, 256 * MIB)):
        worst = _largest(results, "memory_above", (JAX, TORCH), operations)
        yield below(f"memory above the state, synchronous {text} (all states)", worst, limit)
    for ours in (JAX, TORCH):
        worst = _largest(results, "memory_above", (ours,), ("save-async",))
        allowed = _largest(results, "snapshot_limit_bytes", (ours,), ("save-async",))
        text = f"memory above the state, asynchronous save, {ours}: at most snapshot_bytes"
        yield below(text, worst, allowed)


def _largest(
    results: Results, metric: str, systems: tuple[str, ...], operations: tuple[str, ...]
) -> float | None:
    return results.largest(metric, lambda key: key[1] in systems and key[2] in operations)


def _owned(results: Results, state: str, system: str, operation: str) -> Series | None:
    """The best way that ends with bytes in memory of the library's own."""
    ways = [way for way in SYSTEMS[system].load_ways if not is_mapped(system, way)]
    return results.best(state, system, operation, "loaded", ways)


def _against(
    results: Results, text: str, state: str, operation: str, ours: str, peer: str, factor: float
) -> Line:
    """Compares the peer's best way with ours of the same kind; mapped loads count with pages touched."""
    theirs = results.best(state, peer, operation)
    mine = results.best_alike(state, ours, operation, theirs) if theirs else None
    return compare(text, mine, theirs, factor, strict=factor == 1.0)


def _against_limit(results: Results, text: str, operation: str, ours: str) -> Line:
    """The share of the limit's speed; a load must end in memory that it owns, as the limit's does."""
    limit = results.best(MODEL, "limit", operation, "durable" if operation == "save" else "loaded")
    mine = (
        results.best(MODEL, ours, operation)
        if operation == "save"
        else _owned(results, MODEL, ours, operation)
    )
    return compare(text, mine, limit, 0.85)


def compare(
    text: str, ours: Series | None, theirs: Series | None, factor: float, strict: bool = False
) -> Line:
    """Whether one is so many times as fast as another."""
    needed = f"{'>' if strict else '≥'} {factor:g}x"
    if ours is None or theirs is None:
        return Line(text, needed, "not measured", "", None)
    ratio = Ratio.of(ours, theirs)
    reached = ratio.median > factor if strict else ratio.median >= factor
    return Line(text, needed, f"{ratio.median:.2f}x", f"{ratio.worst:.2f}x", reached)


def beside(line: Line, what: str, limit: Series | None, theirs: Series | None) -> Line:
    """The line with what a limit of the hardware would measure in the place of ours: no more can be asked."""
    if limit is None or theirs is None or line.reached is None:
        return line
    return replace(line, measured=f"{line.measured} ({what}: {Ratio.of(limit, theirs).median:.2f}x)")


def below(text: str, worst: float | None, limit: float | None) -> Line:
    """Whether the most bytes that were measured stay within a limit."""
    if worst is None or limit is None:
        return Line(text, "", "not measured", "", None)
    shown = f"{worst / MIB:,.0f} MiB"
    return Line(text, f"≤ {limit / MIB:,.0f} MiB", shown, shown, worst <= limit)
