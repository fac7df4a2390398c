"""Arrays in device memory that no framework owns: for every CUDA driver, a simulated one too."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.cuda_driver import CudaDriver

from waystation import _native
from waystation._options.in_effect import current_options
from waystation.frameworks import dtypes
from waystation.frameworks.base import Codec, Target
from waystation.grid import volume, whole
from waystation.layouts.opened import Opened
from waystation.safetensors.making import OpenedTensors
from waystation.safetensors.stream import stream_arrays
from waystation.transfers.buffers import Incoming
from waystation.transfers.filling import Filling
from waystation.transfers.handle import Progress

ALIGN_BYTES = 256
GUARD_BYTES = 256
UNTOUCHED = 0x5A


class DeviceCodec(Codec):
    """A codec whose arrays are bytes, copied back from the device once they are there."""

    name = "device"

    def __init__(self, driver: CudaDriver, stack: contextlib.ExitStack) -> None:
        self._driver = driver
        self._stack = stack
        self._made: list[_DeviceArrays] = []
        self.devices = self

    def stays_on_host(self, target: Target) -> bool:
        """No array does."""
        return False

    def goes_to_devices(self, target: Target, stored_dtype: str) -> bool:
        """All do that are wanted as they are stored."""
        return target.dtype == stored_dtype

    def on_devices(self, targets: Sequence[Target], stored_dtypes: Sequence[str], rule: Any) -> _DeviceArrays:
        """Memory for them, one after another, with bytes between that nobody may touch."""
        made = _DeviceArrays(self._driver, self._stack, targets)
        self._made.append(made)
        return made

    def assemble(self, targets: Sequence[Target], boxes: Sequence[Any]) -> list[Any]:
        """Nothing goes through host memory."""
        assert not targets
        return []

    def check_guards(self) -> None:
        """Nothing was written to bytes that nobody may touch."""
        for made in self._made:
            made.check_guards()


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

    def take(self, number: int) -> list[bytes]:
        """The bytes of the boxes of an array, as they are on the device now."""
        found = []
        for size, (_, address) in zip(self._sizes[number], self.places[number], strict=True):
            assert address % ALIGN_BYTES == 0
            host = np.empty(size, np.uint8)
            self._driver.copy_to_host(host.ctypes.data, address, size)
            found.append(host.tobytes())
        return found

    def check_guards(self) -> None:
        """Nothing was written between arrays."""
        host = np.empty(self._total, np.uint8)
        self._driver.copy_to_host(host.ctypes.data, self._memory, host.nbytes)
        untouched = np.ones(self._total, bool)
        for own, places in zip(self._sizes, self.places, strict=True):
            for size, (_, address) in zip(own, places, strict=True):
                start = address - self._memory
                untouched[start : start + size] = False
        assert (host[untouched] == UNTOUCHED).all()


def item_bytes(dtype: str) -> int:
    """Bytes of an element in memory."""
    form = dtypes.of_name(dtype)
    return int(form.host.itemsize) * math.prod(form.host_trailing)


class Kept:
    """What was made, by the numbers of arrays."""

    def __init__(self) -> None:
        self.found: dict[int, Any] = {}

    def keep(self, numbers: Sequence[int], leaves: Sequence[Any]) -> None:
        """Takes arrays that are made."""
        self.found.update(zip(numbers, leaves, strict=True))

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
    **engine: Any,
) -> tuple[dict[int, list[bytes]], Filling]:
    """Loads every array of something, or boxes of some, to the device as a load does; returns their bytes.
    Further options are the engine's."""
    chosen = current_options().thawed()
    chosen.memory.read_concurrent_bytes = limit_bytes
    chosen.array.loading.verify = verify
    for name, value in engine.items():
        setattr(chosen.engine, name, value)
    incoming = incoming_whole(opened)
    if boxes is not None:
        incoming = [
            dataclasses.replace(one, target=dataclasses.replace(one.target, boxes=boxes[one.leaf]))
            for one in incoming
            if one.leaf in boxes
        ]
    kept = Kept()
    with contextlib.ExitStack() as stack:
        codec: Any = DeviceCodec(driver, stack)
        filling = Filling(opened, chosen.frozen(), progress or Progress(), None, [(codec, incoming)])
        maker: Any = kept
        filling.finish(maker)
        codec.check_guards()
    return kept.found, filling


def incoming_whole(opened: Opened) -> list[Incoming]:
    """Every array of something, whole and as it is stored."""
    return [
        Incoming(
            number, stored, number, None, Target(stored.shape, stored.dtype, [whole(stored.shape)], None)
        )
        for number, stored in enumerate(opened.tree.arrays)
    ]


def stream(
    opened: OpenedTensors, driver: CudaDriver, *, limit_bytes: int = 256 << 20, **engine: Any
) -> Generator[tuple[str, bytes], None, None]:
    """Streams every array of a published model to the device; yields labels, and the bytes that are on the
    device when an array is handed out. Further options are the engine's."""
    chosen = current_options().thawed()
    chosen.memory.read_concurrent_bytes = limit_bytes
    for name, value in engine.items():
        setattr(chosen.engine, name, value)
    with contextlib.ExitStack() as stack:
        codec: Any = DeviceCodec(driver, stack)
        arrays = stream_arrays(opened, codec, incoming_whole(opened), chosen.frozen())
        with contextlib.closing(arrays):  # before the memory is given back that they are brought to
            for label, boxes in zip(opened.labels, arrays, strict=True):
                yield label, b"".join(boxes)
        codec.check_guards()


def write_model(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """A safetensors file of tensors of any dtype: name to dtype, shape and bytes."""
    described = [(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()]
    header = _native.build_safetensors_header(described, None, 8)
    path.write_bytes(header + b"".join(data for _, _, data in tensors.values()))
    return path
