"""What loads of published models are to reach against other libraries and the limit, and whether they do.

Like is compared with like: loads into memory of their own with each other, and loads that alias the mapped
file with each other, by the time until every page was touched. A library counts with its best manner of
each kind. Targets are about ratios of medians; the least favourable round is shown beside each.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.analysis import Results, Series, is_mapped
from benchmarks.systems import SYSTEMS
from benchmarks.targets import EVEN, MIB, Line, Standard, below, beside, compare

JAX, TORCH = "waystation-safetensors-jax", "waystation-safetensors-torch"
JAX_PEER, TORCH_PEERS = "safetensors-jax", ("safetensors-torch", "fastsafetensors", "runai", "instanttensor")
MODEL, ALIGNED = "llama", "llama-aligned"
SMALLER = ("llama-half-gb", "llama-1gb")
"""The same model, narrower: loads that are over before a host has taken back what they will need."""
OPERATIONS = {"load-cold": "cold", "load-warm": "warm"}
MEMORY_BYTES = 256 * MIB


def evaluate(results: Results) -> list[Line]:
    """All targets, in the order in which they are stated."""
    return [*_jax(results), *_limit(results), *_torch(results), *_memory(results)]


PUBLISHED = Standard(evaluate, {"jax": JAX, "torch": TORCH})
"""Of sessions that load published models."""


def _jax(results: Results) -> Iterator[Line]:
    for operation, factor in (("load-cold", 2.0), ("load-warm", 3.0)):
        ours, theirs = _copying(results, MODEL, JAX, operation), results.best(MODEL, JAX_PEER, operation)
        yield compare(f"{MODEL}, {OPERATIONS[operation]}, JAX: faster than {JAX_PEER}", ours, theirs, factor)
    until = "until it has returned (every page touched)"
    returned, touched = (
        compare(
            f"{ALIGNED}, warm, JAX, mmap=True, {until}: faster than {JAX_PEER}",
            results.best(ALIGNED, JAX, "load-warm", metric, ["mmap"]),
            results.best(ALIGNED, JAX_PEER, "load-warm", metric),
            20.0,
        )
        for metric in ("loaded", "touched")
    )
    yield replace(returned, measured=f"{returned.measured} ({touched.measured})")


def _limit(results: Results) -> Iterator[Line]:
    for state in (MODEL, *(name for name in SMALLER if name in results.states())):
        limit = results.best(state, "limit", "load-cold")
        for ours in (JAX, TORCH):
            text = f"{state}, cold, {ours}: of the raw read limit"
            yield compare(text, _copying(results, state, ours, "load-cold"), limit, 0.85)


def _torch(results: Results) -> Iterator[Line]:
    """The peers that copy: the fastest and the median one. The one that maps: as fast as it."""
    for state in results.states():
        for operation, shown in OPERATIONS.items():
            peers = [_copying(results, state, peer, operation) for peer in TORCH_PEERS]
            ranked = sorted((peer for peer in peers if peer), key=lambda series: series.median)
            mapping = results.best(state, "safetensors-torch", operation, ways=["mmap"])
            if not ranked or mapping is None:
                continue
            ours = _copying(results, state, TORCH, operation)
            mapped = results.best(state, TORCH, operation, ways=["mmap"])
            beginning, first = f"{state}, {shown}, torch", ranked[0]
            text = f"{beginning}: no slower than the fastest that copies ({first.system}, {first.way})"
            yield compare(text, ours, first, EVEN)
            text = f"{beginning}: faster than the median of those that copy"
            middle = _middle(ranked)
            limit = results.best(state, "limit", operation) if operation == "load-cold" else None
            yield beside(compare(text, ours, middle, 1.5), "raw reads", limit, middle)
            text = f"{beginning}: no slower than the one that maps (safetensors), touched"
            yield compare(text, mapped, mapping, EVEN)


def _memory(results: Results) -> Iterator[Line]:
    for ours in (JAX, TORCH):
        yield below(f"memory above the tensors, {ours}, any load", _most_memory(results, ours), MEMORY_BYTES)


def _most_memory(results: Results, system: str) -> float | None:
    return results.largest("memory_above", lambda key: key[1] == system)


def _copying(results: Results, state: str, system: str, operation: str) -> Series | None:
    """The best manner of a system that ends with bytes in memory of its own."""
    ways = [way for way in SYSTEMS[system].load_ways if not is_mapped(system, way)]
    return results.best(state, system, operation, ways=ways)


def _middle(ranked: list[Series]) -> Series:
    """The median peer; between two of them, their mean in each round."""
    lower, upper = ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
    rounds = lower.values.keys() & upper.values.keys()
    values = {index: statistics.mean((lower.values[index], upper.values[index])) for index in rounds}
    return Series(lower.system, lower.way, values)
