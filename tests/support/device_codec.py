"""Arrays in device memory that no framework owns: for every CUDA driver, a simulated one too."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.cuda_driver import CudaDriver

from waystation import _native
from waystation._options.in_effect import current_options
from waystation.frameworks import dtypes
from waystation.frameworks.base import Target
from waystation.grid import volume, whole
from waystation.layouts.opened import Opened
from waystation.transfers.buffers import Incoming
from waystation.transfers.filling import Filling
from waystation.transfers.handle import Progress

ALIGN_BYTES = 256
GUARD_BYTES = 256
UNTOUCHED = 0x5A


class DeviceCodec:
    """A codec whose arrays are bytes, copied back from the device once they are there."""

    name = "device"

    def __init__(self, driver: CudaDriver, stack: contextlib.ExitStack) -> None:
        self._driver = driver
        self._stack = stack

    def stays_on_host(self, target: Target) -> bool:
        """No array does."""
        return False

    def goes_to_devices(self, target: Target, stored_dtype: str) -> bool:
        """All do that are wanted as they are stored."""
        return target.dtype == stored_dtype

    def on_devices(self, targets: Sequence[Target], stored_dtypes: Sequence[str]) -> _DeviceArrays:
        """Memory for them, one after another, with bytes between that nobody may touch."""
        return _DeviceArrays(self._driver, self._stack, targets)


class _DeviceArrays:
    def __init__(self, driver: CudaDriver, stack: contextlib.ExitStack, targets: Sequence[Target]) -> None:
        self._driver = driver
        self._sizes = [[volume(box) * item_bytes(target.dtype) for box in target.boxes] for target in targets]
        total = sum(
            -(-size // ALIGN_BYTES) * ALIGN_BYTES + GUARD_BYTES for own in self._sizes for size in own
        )
        self._total = max(total, 1)
        self._memory = stack.enter_context(driver.device_memory(self._total))
        before = np.full(self._total, UNTOUCHED, np.uint8)
        driver.copy_to_device(self._memory, before.ctypes.data, before.nbytes)
        self.regions = [(driver.ordinal, self._memory, self._total)]
        self.places: list[list[tuple[int, int]]] = []
        position = self._memory
        for own in self._sizes:
            places = []
            for number, size in enumerate(own):
                places.append((number, position))
                position += -(-size // ALIGN_BYTES) * ALIGN_BYTES + GUARD_BYTES
            self.places.append(places)

    def finish(self) -> list[list[bytes]]:
        """The bytes of the boxes of each array."""
        host = np.empty(self._total, np.uint8)
        self._driver.copy_to_host(host.ctypes.data, self._memory, host.nbytes)
        untouched = np.ones(self._total, bool)
        found = []
        for own, places in zip(self._sizes, self.places, strict=True):
            arrays = []
            for size, (_, address) in zip(own, places, strict=True):
                assert address % ALIGN_BYTES == 0
                start = address - self._memory
                arrays.append(host[start : start + size].tobytes())
                untouched[start : start + size] = False
            found.append(arrays)
        assert (host[untouched] == UNTOUCHED).all()
        return found


def item_bytes(dtype: str) -> int:
    """Bytes of an element in memory."""
    form = dtypes.of_name(dtype)
    return int(form.host.itemsize) * math.prod(form.host_trailing)


class Kept:
    """What was made, by the numbers of arrays."""

    def __init__(self) -> None:
        self.found: dict[int, Any] = {}

    def keep(self, arrays: Sequence[Incoming], leaves: Sequence[Any]) -> None:
        """Takes arrays that are made."""
        for incoming, leaf in zip(arrays, leaves, strict=True):
            self.found[incoming.leaf] = leaf

    def make(self, codec: Any, arrays: Sequence[Incoming], *, wait: bool) -> None:
        """Nothing goes another way."""
        assert not arrays


def load(
    opened: Opened,
    driver: CudaDriver,
    *,
    limit_bytes: int | None = 256 << 20,
    progress: Progress | None = None,
    verify: bool | None = None,
    boxes: dict[int, list[Any]] | None = None,
    threads: int | None = None,
) -> tuple[dict[int, list[bytes]], Filling]:
    """Loads every array of something, or boxes of some, to the device as a load does; returns their bytes."""
    chosen = current_options().thawed()
    chosen.memory.read_concurrent_bytes = limit_bytes
    chosen.array.loading.verify = verify
    chosen.engine.threads = threads
    stored = opened.tree.arrays
    wanted = boxes or {number: [whole(array.shape)] for number, array in enumerate(stored)}
    incoming = [
        Incoming(
            number,
            stored[number],
            number,
            None,
            Target(stored[number].shape, stored[number].dtype, own, None),
        )
        for number, own in wanted.items()
    ]
    kept = Kept()
    with contextlib.ExitStack() as stack:
        codec: Any = DeviceCodec(driver, stack)
        filling = Filling(opened, chosen.frozen(), progress or Progress(), None, [(codec, incoming)])
        maker: Any = kept
        filling.finish(maker)
    return kept.found, filling


def write_model(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """A safetensors file of tensors of any dtype: name to dtype, shape and bytes."""
    described = [(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()]
    header = _native.build_safetensors_header(described, None, 8)
    path.write_bytes(header + b"".join(data for _, _, data in tensors.values()))
    return path
