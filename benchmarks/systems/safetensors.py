"""The `safetensors` package: its own mapping, and reading into memory that it owns.

For torch, `mmap` gives tensors that are views of the mapping, and `pread` reads into fresh memory. For
JAX both backends end in a copy, because `safetensors.flax` always makes arrays of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from benchmarks import states
from benchmarks.states import Leaf
from benchmarks.systems.base import JaxSystem, System, TorchSystem

FILE_NAME = "model.safetensors"


class _Safetensors(System):
    distribution = "safetensors"
    load_ways: ClassVar[tuple[str, ...]] = ("mmap", "pread")
    syncs = False

    _library: Any
    _backend: str

    def prepare(self, way: str) -> None:
        self._backend = way if way in ("mmap", "pread") else "mmap"

    def save(self, path: Path, state: Any) -> None:
        path.mkdir(parents=True)
        self._library.save_file(state, path / FILE_NAME)

    def load(self, path: Path, template: Any) -> Any:
        del template
        return self._library.load_file(path / FILE_NAME, backend=self._backend)


class SafetensorsJax(_Safetensors, JaxSystem):
    name = "safetensors-jax"
    writer = "safetensors-jax"

    def prepare(self, way: str) -> None:
        import safetensors.flax

        self._library = safetensors.flax
        super().prepare(way)

    def build(self, leaves: list[Leaf]) -> Any:
        return states.flatten(super().build(leaves))

    def load(self, path: Path, template: Any) -> Any:
        import jax

        return jax.block_until_ready(super().load(path, template))


class SafetensorsTorch(_Safetensors, TorchSystem):
    name = "safetensors-torch"
    writer = "safetensors-torch"
    mapped_ways = frozenset({"mmap"})

    def prepare(self, way: str) -> None:
        import safetensors.torch

        self._library = safetensors.torch
        super().prepare(way)

    def build(self, leaves: list[Leaf]) -> Any:
        return states.flatten(super().build(leaves))
