"""`python -m benchmarks.tensors`: tensors of a published model, read one by one.

A file of 2,000 float32 tensors is opened once, and each of its tensors is asked for by its name, in an order
that is not that of the file: by the `safetensors` package, by what takes its place
(`waystation.compat.safetensors.safe_open`), by `waystation.safetensors.open`, and by plain reads into memory
that exists, which make no array and are the limit. One byte of every page of every tensor is touched. Each
measurement is a process of its own, whose imports and first hundred tensors are not timed; readers take
turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command, measure
from benchmarks.report import show_machine, show_targets
from benchmarks.rounds import Document
from benchmarks.targets import Line

TENSORS, QUICK_TENSORS, UNTIMED = 2000, 200, 100
SIZES_BYTES = (4 << 10, 256 << 10)
CACHES = ("warm", "cold")
FRAMEWORKS = ("numpy", "torch")
LIMIT, PACKAGE, COMPAT, OPEN = "plain reads", "safetensors", "compat.safe_open", "safetensors.open"
LEAST_SPEED = 1.0
"""Of the package's."""

Read = Callable[[str], Any]


def main() -> None:
    parser = command.rounds_parser("benchmarks.tensors", __doc__, quick="few tensors: does it work?")
    arguments = parser.parse_args()
    console = command.wide_console()
    show(command.document_of(arguments, lambda: run(arguments, console)), console)


def run(arguments: argparse.Namespace, console: Console) -> Document:
    """Makes all measurements; returns the document, which is also kept."""
    with command.documented(arguments, "tensors", console, evaluate) as (directory, document):
        document["runs"] = []
        paths = {size: _write(directory, size, quick=arguments.quick) for size in SIZES_BYTES}
        for repetition in range(arguments.rounds):
            for case in _cases(repetition):
                cache, size, framework, reader = case
                microseconds = _in_a_process(paths[size], cache, framework, reader, quick=arguments.quick)
                document["runs"].append(
                    {
                        "round": repetition,
                        "cache": cache,
                        "tensor_bytes": size,
                        "framework": framework,
                        "reader": reader,
                        "microseconds": microseconds,
                    }
                )
                console.print(f"{size >> 10} KiB, {cache}, {framework}, {reader}: {microseconds:.1f} µs")
    return document


def _cases(repetition: int) -> Iterator[tuple[str, int, str, str]]:
    """What a round measures; the next one begins with another reader."""
    readers = [LIMIT, PACKAGE, COMPAT, OPEN]
    turned = readers[repetition % len(readers) :] + readers[: repetition % len(readers)]
    for cache in CACHES:
        for size in SIZES_BYTES:
            for framework in FRAMEWORKS:
                for reader in turned:
                    if reader != LIMIT or framework == FRAMEWORKS[0]:  # plain reads make no array of any
                        yield cache, size, framework, reader


def _write(directory: Path, tensor_bytes: int, *, quick: bool) -> Path:
    from safetensors.numpy import save_file

    path = directory / f"{tensor_bytes}.safetensors"
    values = np.arange(tensor_bytes // 4, dtype=np.float32)
    count = QUICK_TENSORS if quick else TENSORS
    save_file({f"layers.{number}.weight": values + number for number in range(count)}, path)
    measure.make_durable(path)
    return path


def _in_a_process(path: Path, cache: str, framework: str, reader: str, *, quick: bool) -> float:
    """Microseconds for each tensor."""
    if cache == "cold":
        measure.make_cold(path, quick=quick)
    else:
        measure.make_warm(path)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        microseconds: float = pool.apply(_measured, (path, framework, reader))
    return microseconds


def _measured(path: Path, framework: str, reader: str) -> float:
    names = _names(path)
    random.Random(5).shuffle(names)
    with _READERS[reader](path, framework) as read:
        for name in names[:UNTIMED]:
            _touch(read(name))
        begun = time.perf_counter()
        for name in names[UNTIMED:]:
            _touch(read(name))
        seconds = time.perf_counter() - begun
        last = int(names[-1].split(".")[1])
        found = np.asarray(read(names[-1])).reshape(-1).view(np.float32)
        assert found[0] == last
        assert found[-1] == last + len(found) - 1
    return seconds / (len(names) - UNTIMED) * 1e6


def _names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as opened:
        return list(opened.keys())


def _touch(tensor: Any) -> None:
    """One item of every page, which all readers pay alike."""
    tensor[:: measure.PAGE_BYTES // 4].sum()


@contextmanager
def _plain(path: Path, framework: str) -> Iterator[Read]:
    del framework
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    tensors = {name: tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"}
    start = 8 + length
    array = np.zeros(max(end - begin for begin, end in tensors.values()), np.uint8)
    descriptor = os.open(path, os.O_RDONLY)

    def read(name: str) -> Any:
        begin, end = tensors[name]
        part = array[: end - begin]
        assert os.preadv(descriptor, [part], start + begin) == end - begin
        return part.view(np.float32)

    try:
        yield read
    finally:
        os.close(descriptor)


@contextmanager
def _package(path: Path, framework: str) -> Iterator[Read]:
    from safetensors import safe_open

    with safe_open(path, framework="pt" if framework == "torch" else "np") as opened:
        yield opened.get_tensor


@contextmanager
def _compat(path: Path, framework: str) -> Iterator[Read]:
    from waystation.compat.safetensors import safe_open

    with safe_open(path, framework="pt" if framework == "torch" else "np") as opened:
        yield opened.get_tensor


@contextmanager
def _open(path: Path, framework: str) -> Iterator[Read]:
    import waystation.safetensors

    with closing(waystation.safetensors.open(path, framework=framework)) as opened:  # type: ignore[arg-type]
        yield opened.tensor


_READERS = {LIMIT: _plain, PACKAGE: _package, COMPAT: _compat, OPEN: _open}


def show(document: Document, console: Console) -> None:
    """Prints the table and the targets."""
    show_machine(document, console)
    table = Table(title="µs for each tensor: the median of the rounds [the worst]", title_justify="left")
    for heading in ("tensor", "page cache", "framework", *_READERS):
        table.add_column(heading, justify="left" if heading in ("page cache", "framework") else "right")
    for size in SIZES_BYTES:
        for cache in CACHES:
            for framework in FRAMEWORKS:
                cells = [_cell(_values(document, size, cache, framework, reader)) for reader in _READERS]
                table.add_row(f"{size >> 10} KiB", cache, framework, *cells)
    console.print(table)
    show_targets(list(evaluate(document)), console)


def evaluate(document: Document) -> Iterator[Line]:
    """Both of ours against the package, in each framework."""
    for size in SIZES_BYTES:
        for cache in CACHES:
            for framework in FRAMEWORKS:
                for reader in (COMPAT, OPEN):
                    package = _values(document, size, cache, framework, PACKAGE)
                    own = _values(document, size, cache, framework, reader)
                    ratios = [theirs / ours for theirs, ours in zip(package, own, strict=True)]
                    median = statistics.median(ratios)
                    text = f"{size >> 10} KiB, {cache}, {framework}: speed of {reader} over the package's"
                    reached = median >= LEAST_SPEED
                    yield Line(text, f"≥ {LEAST_SPEED:g}x", f"{median:.2f}x", f"{min(ratios):.2f}x", reached)


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} [{max(values):.1f}]"


def _values(document: Document, size: int, cache: str, framework: str, reader: str) -> list[float]:
    framework = FRAMEWORKS[0] if reader == LIMIT else framework
    wanted = {"tensor_bytes": size, "cache": cache, "framework": framework, "reader": reader}
    return [float(run["microseconds"]) for run in document["runs"] if wanted.items() <= run.items()]


if __name__ == "__main__":
    main()
