"""One measurement of `benchmarks.gpu`: `python -m benchmarks.gpu_worker SYSTEM FILE PLACE`, a fresh process.

The library is imported, its device started, and a small model loaded once, before the clock starts. The bytes
are compared after it has stopped. Prints one JSON object: the seconds, or why nothing could be measured.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure, states
from benchmarks.cuda_driver import CudaDriver
from benchmarks.states import Leaf
from waystation import _native

BUS = "bus"
STORAGE = "storage"
BUS_BYTES = 1 << 30
READ_BYTES = 4 << 20
# Ways of reading a file of which the best counts as the limit of its place: past the page cache or through
# it, and with how many threads.
READ_WAYS = {
    "cold": [(True, 4), (True, 8), (True, 16), (False, 8)],
    "cached": [(False, 8), (False, 16)],
    "tmpfs": [(False, 8), (False, 16)],
}


class NotMeasuredError(Exception):
    """Something that is needed is not here."""


def leaves_of(state: str, copies: int, *, quick: bool) -> list[Leaf]:
    """The tensors of a model that is so many times as large as a state."""
    leaves = states.describe(state, quick)
    return [
        Leaf(f"copies.{number}.{leaf.name}", leaf.shape, leaf.dtype)
        for number in range(copies)
        for leaf in leaves
    ]


def write_model(path: Path, leaves: list[Leaf]) -> None:
    """A file as the package `safetensors` writes it: tensors in the order of names, aligned to 8 bytes."""
    ordered = sorted(leaves, key=lambda leaf: leaf.name)
    names = {"bfloat16": "BF16", "float32": "F32", "int32": "I32", "uint8": "U8", "bool": "BOOL"}
    header = _native.build_safetensors_header(
        [(leaf.name, names[leaf.dtype], leaf.shape) for leaf in ordered], None, 8
    )
    with path.open("wb") as file:
        file.write(header)
        for leaf in ordered:
            file.write(states.expected(leaf).data)
        os.fsync(file.fileno())


# ---- systems -----------------------------------------------------------------------------------


Load = Callable[[Path], dict[str, Any]]


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise NotMeasuredError("torch is not installed") from error
    if not torch.cuda.is_available():
        raise NotMeasuredError("this torch has no CUDA")
    torch.zeros(1, device="cuda").cpu()
    return torch


def _jax() -> Any:
    try:
        import jax
    except ImportError as error:
        raise NotMeasuredError("JAX is not installed") from error
    try:
        gpu = jax.devices("gpu")[0]
    except RuntimeError as error:
        raise NotMeasuredError(f"this JAX has no GPU: {error}") from error
    jax.config.update("jax_default_device", gpu)
    return jax


def waystation_torch() -> Load:
    torch = _torch()
    import waystation

    def load(path: Path) -> dict[str, Any]:
        loaded = waystation.safetensors.load(path, framework="torch", device="cuda")
        torch.cuda.synchronize()
        return loaded

    return load


def waystation_jax() -> Load:
    jax = _jax()
    import waystation

    return lambda path: dict(jax.block_until_ready(waystation.safetensors.load(path, framework="jax")))


def safetensors_torch() -> Load:
    torch = _torch()
    library = _imported("safetensors.torch")

    def load(path: Path) -> dict[str, Any]:
        loaded: dict[str, Any] = library.load_file(path, device="cuda")
        torch.cuda.synchronize()
        return loaded

    return load


def safetensors_jax() -> Load:
    jax = _jax()
    library = _imported("safetensors.flax")
    return lambda path: dict(jax.block_until_ready(library.load_file(path)))


def fastsafetensors_torch() -> Load:
    torch = _torch()
    library = _imported("fastsafetensors")

    def load(path: Path) -> dict[str, Any]:
        loader = library.SafeTensorsFileLoader(library.SingleGroup(), device="cuda:0", nogds=True)
        loader.add_filenames({0: [str(path)]})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        torch.cuda.synchronize()
        loader.close()
        return tensors

    return load


def _imported(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotMeasuredError(f"{name.partition('.')[0]} is not installed: {error}") from error


SYSTEMS: dict[str, Callable[[], Load]] = {
    "waystation-torch": waystation_torch,
    "waystation-jax": waystation_jax,
    "safetensors-torch": safetensors_torch,
    "safetensors-jax": safetensors_jax,
    "fastsafetensors-torch": fastsafetensors_torch,
}


# ---- limits ------------------------------------------------------------------------------------


def bus_seconds(nbytes: int) -> float:
    """A plain copy of so many bytes from pinned memory to a device."""
    driver = CudaDriver()
    try:
        with driver.pinned_memory(BUS_BYTES) as host, driver.device_memory(BUS_BYTES) as device:
            driver.copy_to_device(device, host, BUS_BYTES)
            begin = time.perf_counter()
            left = nbytes
            while left > 0:
                driver.copy_to_device(device, host, min(left, BUS_BYTES))
                left -= BUS_BYTES
            return time.perf_counter() - begin
    finally:
        driver.close()


def read_seconds(path: Path, *, direct: bool, threads: int) -> float:
    """Reads a file once, to a buffer of each thread that is used again and again."""
    blocks = -(-path.stat().st_size // READ_BYTES)
    buffers = [mmap.mmap(-1, READ_BYTES) for _ in range(threads)]
    for buffer in buffers:
        buffer.write(b"\xff" * READ_BYTES)
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    ready = threading.Barrier(threads + 1)

    def read(number: int) -> None:
        ready.wait()
        for block in range(number, blocks, threads):
            os.preadv(descriptor, [buffers[number]], block * READ_BYTES)

    workers = [threading.Thread(target=read, args=[number]) for number in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    begin = time.perf_counter()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - begin
    os.close(descriptor)
    return seconds


def storage_seconds(path: Path, place: str) -> dict[str, float]:
    """The seconds of each way of reading a file."""
    found = {}
    for direct, threads in READ_WAYS[place]:
        prepare(path, place)
        way = f"{'direct' if direct else 'buffered'} x{threads}"
        try:
            found[way] = read_seconds(path, direct=direct, threads=threads)
        except OSError as error:
            print(f"{way}: {error}", file=sys.stderr)
    return found


# ---- one measurement ---------------------------------------------------------------------------


def prepare(path: Path, place: str) -> None:
    """Has the page cache hold nothing of the file, or all."""
    if place == "cold":
        measure.make_cold(path)
    else:
        measure.make_warm(path)


def run(system: str, path: Path, place: str, leaves: list[Leaf], *, check: bool) -> dict[str, Any]:
    """Measures once."""
    if system == BUS:
        return {"seconds": bus_seconds(path.stat().st_size)}
    if system == STORAGE:
        ways = storage_seconds(path, place)
        best = min(ways, key=lambda way: ways[way])
        return {"seconds": ways[best], "way": best, "ways": ways}
    load = SYSTEMS[system]()
    with tempfile.TemporaryDirectory() as scratch:
        small = Path(scratch, "tiny.safetensors")
        write_model(small, states.describe("tiny"))
        load(small)
    prepare(path, place)
    begin = time.perf_counter()
    loaded = load(path)
    seconds = time.perf_counter() - begin
    wrong = differing(leaves if check else leaves[:3], loaded)
    if wrong is not None:
        raise RuntimeError(f"{system} has loaded other bytes than were saved: {wrong}")
    return {"seconds": seconds}


def differing(leaves: list[Leaf], loaded: dict[str, Any]) -> str | None:
    """The first tensor whose bytes are not those that were saved."""
    for leaf in leaves:
        found = loaded[leaf.name]
        is_torch = hasattr(found, "data_ptr")
        host = found.cpu().view(-1).view(_torch().uint8).numpy() if is_torch else np.asarray(found)
        if not np.array_equal(host.reshape(-1).view(np.uint8), states.expected(leaf).reshape(-1)):
            return leaf.name
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=[BUS, STORAGE, *SYSTEMS])
    parser.add_argument("path", type=Path)
    parser.add_argument("place", choices=list(READ_WAYS))
    parser.add_argument("--state", default="llama")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare the bytes of all tensors")
    arguments = parser.parse_args()
    leaves = leaves_of(arguments.state, arguments.copies, quick=arguments.quick)
    try:
        found = run(arguments.system, arguments.path, arguments.place, leaves, check=arguments.check)
    except NotMeasuredError as reason:
        found = {"missing": str(reason)}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
