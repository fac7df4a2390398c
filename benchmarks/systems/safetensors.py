"""The `safetensors` package: its own mapping, and reading into memory that it owns.

For torch, `mmap` gives tensors that are views of the mapping, and `pread` reads into fresh memory. For
JAX both backends end in a copy, because `safetensors.flax` always makes arrays of its own. Several files
are loaded one after another, as programs do that use the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from benchmarks import states
from benchmarks.states import Leaf
from benchmarks.systems.base import JaxSystem, System, TorchSystem

FILE_NAME = "model.safetensors"


def files_of(path: Path) -> list[str]:
    """The files of a model, in the order of their names."""
    return sorted(str(file) for file in path.glob("*.safetensors"))


class _Safetensors(System):
    distribution = "safetensors"
    load_ways: ClassVar[tuple[str, ...]] = ("mmap", "pread")
    stream_ways: ClassVar[tuple[str, ...]] = ("mmap", "pread")
    syncs = False

    open_framework: ClassVar[str]
    """What `safe_open` calls the framework."""

    _library: Any
    _backend: str

    def prepare(self, way: str) -> None:
        self._backend = way if way in ("mmap", "pread") else "mmap"

    def save(self, path: Path, state: Any) -> None:
        path.mkdir(parents=True)
        self._library.save_file(state, path / FILE_NAME)

    def load(self, path: Path, template: Any) -> Any:
        del template
        arrays: dict[str, Any] = {}
        for file in files_of(path):
            arrays.update(self._library.load_file(file, backend=self._backend))
        return arrays

    def stream(self, path: Path) -> Iterator[tuple[str, Any]]:
        from safetensors import safe_open

        for file in files_of(path):
            with safe_open(file, framework=self.open_framework, backend=self._backend) as opened:
                for name in opened.offset_keys():
                    yield name, opened.get_tensor(name)


class SafetensorsJax(_Safetensors, JaxSystem):
    name = "safetensors-jax"
    writer = "safetensors-jax"
    open_framework = "flax"

    def prepare(self, way: str) -> None:
        import jax
        import safetensors.flax

        jax.config.update("jax_enable_x64", True)  # or integers of 64 bits would lose half of them
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
    open_framework = "pt"

    def prepare(self, way: str) -> None:
        import safetensors.torch

        self._library = safetensors.torch
        super().prepare(way)

    def build(self, leaves: list[Leaf]) -> Any:
        return states.flatten(super().build(leaves))
