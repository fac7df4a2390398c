"""A snapshot of GPU memory against a plain pinned copy of the same bytes: `python -m benchmarks.device_copy`.

The plain copy is one `cuMemcpyDtoH` of everything into memory that `cuMemHostAlloc` pinned: what the bus
can do. A snapshot copies the same bytes, as many arrays, to the arena; the first pins its memory, later
ones find it pinned. Both are timed in turns, in one process, and the bytes are compared afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, field

import numpy as np

from benchmarks.cuda_driver import CudaDriver
from waystation import _native
from waystation._options import ArraySavingOptions, MemoryOptions
from waystation.checkpoint import snapshot
from waystation.checkpoint.snapshot import WriteShares
from waystation.frameworks.base import ArraySource, Block
from waystation.layouts.native.chunks import cut

TARGET_RATIO = 0.9
# Sizes of the arrays that a decoder layer has, in bfloat16, and its norms.
LAYER_BYTES = (8 << 20, 2 << 20, 2 << 20, 8 << 20, 32 << 20, 32 << 20, 32 << 20, 4096, 4096)


@dataclass(slots=True)
class Results:
    """Seconds of every run, over the same bytes."""

    nbytes: int
    arrays: int
    plain_s: list[float] = field(default_factory=list)
    snapshot_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median bandwidth of a repeated snapshot over that of the plain copy."""
        return statistics.median(self.plain_s) / statistics.median(self.snapshot_s[1:])


def array_sizes(total_bytes: int) -> list[int]:
    layers = max(1, total_bytes // sum(LAYER_BYTES))
    return [nbytes for _ in range(layers) for nbytes in LAYER_BYTES]


def device_sources(address: int, sizes: list[int], ordinal: int, owner: object) -> list[ArraySource]:
    """Arrays of bytes, one after another in device memory."""
    sources = []
    for nbytes in sizes:
        block = Block((0,), (nbytes,), (1,), address, owner, ordinal)
        source = ArraySource(
            (nbytes,),
            "uint8",
            "jax",
            "U8",
            (nbytes,),
            storage_item_bytes=1,
            blocks=[block],
            mutable=True,
        )
        sources.append(source)
        address += nbytes
    return sources


def view(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def measure(driver: CudaDriver, total_bytes: int, rounds: int) -> Results:
    sizes = array_sizes(total_bytes)
    nbytes = sum(sizes)
    results = Results(nbytes, len(sizes))
    options = MemoryOptions(snapshot_bytes=nbytes)
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(driver.device_memory(nbytes))
        pinned = stack.enter_context(driver.pinned_memory(nbytes))
        view(pinned, nbytes)[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        driver.copy_to_device(device, pinned, nbytes)
        for _ in range(rounds + 1):
            view(pinned, nbytes)[:] = 0
            begin = time.perf_counter()
            driver.copy_to_host(pinned, device, nbytes)
            results.plain_s.append(time.perf_counter() - begin)
            sources = device_sources(device, sizes, driver.ordinal, driver)
            chunks = cut(sources, ["array"] * len(sources), ArraySavingOptions())
            shares = WriteShares.of(options, with_snapshot=True)
            begin = time.perf_counter()
            waited_for = snapshot.take(chunks, sources, options, shares)
            results.snapshot_s.append(time.perf_counter() - begin)
            check(sources, waited_for, pinned)
            del sources
    return results


def check(sources: list[ArraySource], waited_for: list[tuple[int, int]], expected: int) -> None:
    """Compares the copies with what the plain copy brought."""
    if waited_for:
        raise RuntimeError("the snapshot left arrays on the device")
    for source in sources:
        (block,), nbytes = source.blocks, math.prod(source.shape)
        if not np.array_equal(view(block.address, nbytes), view(expected, nbytes)):
            raise RuntimeError("the snapshot has other bytes than the device")
        expected += nbytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="bytes to copy")
    parser.add_argument("--rounds", type=int, default=7, help="timed snapshots after the first")
    parser.add_argument("--device", type=int, default=0, help="CUDA ordinal")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    devices = _native.devices()
    if not devices:
        print("no CUDA device here: nothing measured", file=sys.stderr)
        return 0
    arena = _native.arena_statistics()["limit_bytes"]
    total_bytes = int(arguments.gib * (1 << 30))
    if total_bytes > arena * 3 // 4:
        print(f"the arena keeps {arena >> 20} MiB; give less than --gib {arguments.gib}", file=sys.stderr)
        return 2
    driver = CudaDriver(arguments.device)
    results = measure(driver, total_bytes, arguments.rounds)
    driver.close()
    report(results, devices[arguments.device]["name"], as_json=arguments.json)
    return 0 if results.ratio >= TARGET_RATIO else 1


def report(results: Results, name: str, *, as_json: bool) -> None:
    speeds = {
        "plain pinned copy": results.nbytes / statistics.median(results.plain_s),
        "snapshot, memory not pinned yet": results.nbytes / results.snapshot_s[0],
        "snapshot, memory reused": results.nbytes / statistics.median(results.snapshot_s[1:]),
        "snapshot, slowest with memory reused": results.nbytes / max(results.snapshot_s[1:]),
    }
    if as_json:
        found = {"device": name, "nbytes": results.nbytes, "arrays": results.arrays, "ratio": results.ratio}
        print(json.dumps({**found, "bytes_per_s": speeds}))
        return
    print(f"{name}: {results.nbytes / 1e9:.2f} GB in {results.arrays} arrays")
    for label, speed in speeds.items():
        print(f"  {label:<38} {speed / 1e9:7.2f} GB/s")
    print(f"  {'ratio to the plain copy':<38} {results.ratio:7.2f}  (target {TARGET_RATIO})")


if __name__ == "__main__":
    sys.exit(main())
