"""What the tests of broadcasts have in common, whatever the framework."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tests.support.programs import raised

import waystation
from waystation import coordination

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Case:
    """An array of bits at random, among them those of infinities, negative zeros and all kinds of NaN."""

    dtype: str
    shape: tuple[int, ...]
    seed: int

    def values(self) -> np.ndarray:
        generator = np.random.default_rng(self.seed)
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        count = int(np.prod(self.shape))
        if self.dtype == "bool":
            flat = generator.integers(0, 2, count).astype(bool)
        elif self.dtype in ("int4", "uint4"):
            limits = ml_dtypes.iinfo(dtype)
            flat = generator.integers(limits.min, limits.max + 1, count).astype(dtype)
        elif self.dtype == "float4_e2m1fn":
            flat = generator.integers(0, 16, count).astype(np.uint8).view(dtype)
        else:
            flat = np.frombuffer(generator.bytes(count * dtype.itemsize), dtype).copy()
        return flat.reshape(self.shape)


def same_bits(array: Any, expected: np.ndarray) -> bool:
    """Whether a host array is another one, bit by bit."""
    return np.ascontiguousarray(array).tobytes() == np.ascontiguousarray(expected).tobytes()


@contextlib.contextmanager
def loading(seen: list[Any], **options: Any) -> Iterator[waystation.Context]:
    """Options of `array.loading`, and where the statistics go."""
    context = waystation.Context()
    context.multiprocessing.deadline_s = DEADLINE_S
    context.array.loading.on_statistics = seen.append
    for name, value in options.items():
        setattr(context.array.loading, name, value)
    with context:
        yield context


def told(seen: Sequence[Any]) -> dict[str, int]:
    """What the last load has told."""
    return {name: getattr(seen[-1], name) for name in ("bytes_needed", "bytes_read", "bytes_received")}


def outcome(function: Callable[[], Any]) -> Any:
    """What a function returns or raises."""
    try:
        return function()
    except BaseException as error:
        return raised(error)


def meet(what: str) -> None:
    """Waits for the other processes."""
    session = coordination.current().open(what, deadline_s=DEADLINE_S)
    session.barrier()
    session.close()


def damage(directory: Path) -> None:
    """Changes a byte in the middle of every data file; done by one process."""
    for file in directory.glob("state/p*.safetensors"):
        with file.open("r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            byte = opened.read(1)
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte[0] ^ 1]))
