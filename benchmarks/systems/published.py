"""Published models: who publishes them, and `waystation.safetensors`, which loads them.

The publishers are systems that only save: a session names one of them for each state, and then all systems
load what it has written (`Selection.publishers`). Their bytes are those of the `safetensors` package, but for
`published-aligned`, whose tensors begin at multiples of 64 bytes, and `published-original`, a real model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.states import Leaf, real_model
from benchmarks.systems.base import DEFAULT, System
from benchmarks.systems.safetensors import FILE_NAME, SafetensorsJax, SafetensorsTorch

FILES = 5
"""So many files make a model of several."""


class Published(SafetensorsTorch):
    """One file, as `safetensors.torch.save_file` writes it."""

    name = "published"
    writer = "published"
    load_ways = ()
    stream_ways = ()
    mapped_ways = frozenset()
    is_usual = False


class PublishedInFiles(Published):
    """Several files of about equal size with an index, as the tools of Hugging Face write them."""

    name = "published-in-files"
    writer = "published-in-files"

    def save(self, path: Path, state: Any) -> None:
        path.mkdir(parents=True)
        parts = _parts(state)
        files = {}
        for number, part in enumerate(parts, 1):
            file = f"model-{number:05}-of-{len(parts):05}.safetensors"
            self._library.save_file(part, path / file, metadata={"format": "pt"})
            files.update(dict.fromkeys(part, file))
        total = sum(tensor.nbytes for tensor in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


class PublishedAligned(Published):
    """One file whose tensors begin at multiples of 64 bytes, as `waystation.safetensors.save` writes it."""

    name = "published-aligned"
    writer = "published-aligned"

    def save(self, path: Path, state: Any) -> None:
        import waystation

        path.mkdir(parents=True)
        waystation.safetensors.save(state, path / FILE_NAME)


class PublishedOriginal(Published):
    """The file of a real model, as it was published."""

    name = "published-original"
    writer = "published-original"

    def build(self, leaves: list[Leaf]) -> Path:
        del leaves
        return real_model()

    def save(self, path: Path, state: Path) -> None:
        path.mkdir(parents=True)
        shutil.copy(state, path / FILE_NAME)


def _parts(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The tensors in their order, dealt out to files; each file is full before the next is begun."""
    most_bytes = -(-sum(tensor.nbytes for tensor in state.values()) // FILES)
    parts: list[dict[str, Any]] = [{}]
    held = 0
    for name, tensor in state.items():
        if parts[-1] and held + tensor.nbytes > most_bytes:
            parts.append({})
            held = 0
        parts[-1][name] = tensor
        held += tensor.nbytes
    return parts


class _OfPublished(System):
    """Reads into memory of its own, or maps."""

    distribution = "waystation"
    save_ways = ()
    load_ways: ClassVar[tuple[str, ...]] = ("read", "mmap")
    stream_ways: ClassVar[tuple[str, ...]] = (DEFAULT,)
    mapped_ways: ClassVar[frozenset[str]] = frozenset({"mmap"})
    is_usual = False

    _waystation: Any
    _is_mapped: bool

    def prepare(self, way: str) -> None:
        super().prepare(way)
        import waystation

        self._waystation = waystation.safetensors
        self._is_mapped = way == "mmap"

    def load(self, path: Path, template: Any) -> Any:
        del template
        return self._waystation.load(path, framework=self.framework, mmap=self._is_mapped)

    def stream(self, path: Path) -> Iterator[tuple[str, Any]]:
        yield from self._waystation.stream(path, framework=self.framework)


class WaystationSafetensorsJax(_OfPublished, SafetensorsJax):
    name = "waystation-safetensors-jax"

    def load(self, path: Path, template: Any) -> Any:
        import jax

        return jax.block_until_ready(super().load(path, template))


class WaystationSafetensorsTorch(_OfPublished, SafetensorsTorch):
    name = "waystation-safetensors-torch"
