"""Waystation: its own layout, read into memory it owns or mapped, and what it writes for Orbax to load."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.measure import available_bytes
from benchmarks.states import Leaf
from benchmarks.systems.base import JaxSystem, NumpySystem, System, TorchSystem, Wait


class _Waystation(System):
    distribution = "waystation"
    load_ways: ClassVar[tuple[str, ...]] = ("read", "mmap")
    mapped_ways: ClassVar[frozenset[str]] = frozenset({"mmap"})
    saves_async = True

    _library: Any
    _context: AbstractContextManager[Any]

    def prepare(self, way: str) -> None:
        import waystation

        self._library = waystation
        self._context = waystation.Context()
        self._context.array.loading.mmap = way == "mmap"

    def save(self, path: Path, state: Any) -> None:
        self._library.save(path, state)

    def save_async(self, path: Path, state: Any) -> Wait:
        response = self._library.save_async(path, state)
        wait: Wait = response.result
        return wait

    def load(self, path: Path, template: Any) -> Any:
        with self._context:
            return self._library.load(path, template)

    def snapshot_limit_bytes(self) -> int | None:
        limit = self._library.Context().memory.snapshot_bytes
        return available_bytes() // 2 if limit is None else int(limit)


class WaystationJax(_Waystation, JaxSystem):
    name = "waystation"
    writer = "waystation"

    def load(self, path: Path, template: Any) -> Any:
        import jax

        return jax.block_until_ready(super().load(path, template))


class WaystationNumpy(_Waystation, NumpySystem):
    """Loads without an abstract state. For states whose dtypes are NumPy's own."""

    name = "waystation-numpy"
    writer = "waystation-numpy"
    is_usual = False


class WaystationTorch(_Waystation, TorchSystem):
    """Loads without an abstract state: tensors come back as the tensors that were saved."""

    name = "waystation-torch"
    writer = "waystation-torch"

    def prepare(self, way: str) -> None:
        import torch  # noqa: F401  its import must not be timed with the first load

        super().prepare(way)

    def template(self, leaves: list[Leaf]) -> None:
        del leaves

    def load_into(self, path: Path, own: Any) -> None:
        with in_place():
            self._library.load(path, own)


def in_place() -> AbstractContextManager[Any]:
    """A context in which loads are into the tensors that they are given."""
    import waystation

    context = waystation.Context()
    context.array.loading.in_place = True
    return context


class _ForOrbax(WaystationJax):
    """Writes a layout of Orbax, which genuine Orbax loads."""

    load_ways = ("read",)
    mapped_ways = frozenset()
    is_usual = False

    use_ocdbt: ClassVar[bool]
    use_compression: ClassVar[bool]

    def prepare(self, way: str) -> None:
        super().prepare(way)
        self._context.array.saving.use_ocdbt = self.use_ocdbt  # type: ignore[attr-defined]
        self._context.array.saving.use_compression = self.use_compression  # type: ignore[attr-defined]

    def save(self, path: Path, state: Any) -> None:
        with self._context:
            super().save(path, state)

    def save_async(self, path: Path, state: Any) -> Wait:
        with self._context:
            return super().save_async(path, state)


class WaystationFiles(_ForOrbax):
    """Files for each array, without compression."""

    name = "waystation-files"
    writer = "waystation-files"
    use_ocdbt = False
    use_compression = False


class WaystationOcdbt(_ForOrbax):
    """OCDBT with zstd, as Orbax writes it."""

    name = "waystation-ocdbt"
    writer = "waystation-ocdbt"
    use_ocdbt = True
    use_compression = True


class WaystationOcdbtPlain(_ForOrbax):
    """OCDBT without compression."""

    name = "waystation-ocdbt-plain"
    writer = "waystation-ocdbt-plain"
    use_ocdbt = True
    use_compression = False
