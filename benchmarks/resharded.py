"""`python -m benchmarks.resharded`: a load of 2,048 chunks over another axis, and what planning it costs.

256 float32 arrays of JAX, sharded by rows over eight devices of one process, are loaded sharded by columns,
so that every one of 2,048 shards needs a part of eight chunks: 16,384 parts. The arrays are small (16 KiB
each), since the question is what the parts cost and not their bytes. Waystation, and Orbax at its fastest
settings, each in processes of its own with an untimed load before; the limit is one plain read of as many
bytes. Planning is the time from the tables of the checkpoint to the plan that the engine is given.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command, measure
from benchmarks.report import show_machine, show_targets
from benchmarks.rounds import Document
from benchmarks.systems import SYSTEMS
from benchmarks.targets import Line

DEVICES, ARRAYS, QUICK_ARRAYS, EXTENT = 8, 256, 16, 64
OWN, PEER, LIMIT = "waystation", "orbax-plain", "plain read"
MOST_PLANNING_US = 2.0
"""For each part of a chunk."""
LEAST_SPEED = 4.0
"""Of Orbax's."""


def main() -> None:
    parser = command.rounds_parser("benchmarks.resharded", __doc__, quick="few arrays: does it work?")
    arguments = parser.parse_args()
    console = command.wide_console()
    show(command.document_of(arguments, lambda: run(arguments, console)), console)


def run(arguments: argparse.Namespace, console: Console) -> Document:
    """Makes all measurements; returns the document, which is also kept."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    arrays = QUICK_ARRAYS if arguments.quick else ARRAYS
    with command.documented(arguments, "resharded", console, evaluate) as (directory, document):
        document |= {"parts": arrays * DEVICES * DEVICES, "chunks": arrays * DEVICES, "runs": []}
        for name in (OWN, PEER):
            _in_a_process(_save, name, directory / name, arrays)
        for repetition in range(arguments.rounds):
            for name in (OWN, PEER) if repetition % 2 else (PEER, OWN):
                run = _in_a_process(_load, name, directory / name, arrays)
                run |= {"round": repetition, "system": name}
                document["runs"].append(run)
                console.print(", ".join(f"{key} {value}" for key, value in run.items()), highlight=False)
    return document


def _in_a_process(work: Any, *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _arrays(count: int, axis: int) -> dict[str, Any]:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((DEVICES,), ("x",))
    spec = PartitionSpec("x", None) if axis == 0 else PartitionSpec(None, "x")
    return {
        f"layer{number}": jax.device_put(_values(number), NamedSharding(mesh, spec))
        for number in range(count)
    }


def _values(number: int) -> Any:
    return np.arange(EXTENT * EXTENT, dtype=np.float32).reshape(EXTENT, EXTENT) + number


def _save(name: str, path: Path, count: int) -> None:
    system = SYSTEMS[name]()
    system.prepare("default")
    system.save(path, _arrays(count, axis=0))


def _load(name: str, path: Path, count: int) -> dict[str, Any]:
    import jax

    from waystation.layouts.native import boxes

    spent: list[float] = []
    planned = boxes.read_words

    def timed(*arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return planned(*arguments, **options)
        finally:
            spent.append(time.perf_counter() - begun)

    boxes.read_words = timed
    system = SYSTEMS[name]()
    system.prepare("default")
    template = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding),
        _arrays(count, axis=1),
    )
    system.load(path, template)
    spent.clear()
    begun = time.perf_counter()
    loaded = system.load(path, template)
    seconds = time.perf_counter() - begun
    for number in range(count):
        assert np.array_equal(loaded[f"layer{number}"], _values(number))
        assert loaded[f"layer{number}"].sharding.spec == jax.sharding.PartitionSpec(None, "x")
    return {"load": seconds, "planning": sum(spent) if name == OWN else None, LIMIT: _plain_read(path, count)}


def _plain_read(directory: Path, count: int) -> float:
    """Seconds that plain reads of as many bytes take, from the largest file of the checkpoint."""
    file = max(measure.files_under(directory), key=lambda path: path.stat().st_size)
    scratch = memoryview(bytearray(EXTENT * EXTENT * 4))
    with file.open("rb", buffering=0) as opened:
        opened.readinto(scratch)
        begun = time.perf_counter()
        for _ in range(count):
            os.preadv(opened.fileno(), [scratch], 0)
        return time.perf_counter() - begun


def show(document: Document, console: Console) -> None:
    """Prints the table and the targets."""
    show_machine(document, console)
    title = f"a load of {document['chunks']:,} chunks in {document['parts']:,} parts: median [worst]"
    table = Table(title=title, title_justify="left")
    for heading in ("system", "load, ms", "planning, ms", "planning, µs a part", "µs a chunk"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    own_planning = _values_of(document, OWN, "planning")
    for name in (OWN, PEER):
        cells = [_cell(_values_of(document, name, "load"), 1e3)]
        if name == OWN:
            cells += [_cell(own_planning, 1e3), _cell(own_planning, 1e6 / document["parts"])]
            cells += [_cell(own_planning, 1e6 / document["chunks"])]
        table.add_row(name, *cells)
    table.add_row(LIMIT, _cell(_values_of(document, OWN, LIMIT), 1e3))
    console.print(table)
    show_targets(list(evaluate(document)), console)


def evaluate(document: Document) -> Iterator[Line]:
    """What a part costs, and the load against Orbax's."""
    parts = [seconds * 1e6 / document["parts"] for seconds in _values_of(document, OWN, "planning")]
    median = statistics.median(parts)
    yield Line(
        "planning a part of a chunk",
        f"≤ {MOST_PLANNING_US:g} µs",
        f"{median:.2f} µs",
        f"{max(parts):.2f} µs",
        median <= MOST_PLANNING_US,
    )
    pairs = zip(_values_of(document, PEER, "load"), _values_of(document, OWN, "load"), strict=True)
    ratios = [theirs / ours for theirs, ours in pairs]
    median = statistics.median(ratios)
    yield Line(
        "speed of the load over Orbax's fastest",
        f"≥ {LEAST_SPEED:g}x",
        f"{median:.1f}x",
        f"{min(ratios):.1f}x",
        median >= LEAST_SPEED,
    )


def _cell(values: list[float], scale: float) -> str:
    return f"{statistics.median(values) * scale:.2f} [{max(values) * scale:.2f}]"


def _values_of(document: Document, system: str, member: str) -> list[float]:
    return [float(run[member]) for run in document["runs"] if run["system"] == system]


if __name__ == "__main__":
    main()
