"""Orbax, through its version 1 API: as it comes, and at its fastest settings."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.systems.base import JaxSystem, Wait


class Orbax(JaxSystem):
    """As it comes: OCDBT with zstd. Loads are given the abstract state, which saves it reading shardings."""

    name = "orbax"
    writer = "orbax"
    distribution = "orbax-checkpoint"
    saves_async = True
    syncs = False  # its data files are synced, its metadata and directories are not

    _library: Any

    def prepare(self, way: str) -> None:
        del way
        from orbax.checkpoint import v1

        self._library = v1

    def _context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def save(self, path: Path, state: Any) -> None:
        with self._context():
            self._library.save(path, state)

    def save_async(self, path: Path, state: Any) -> Wait:
        with self._context():
            response = self._library.save_async(path, state)
        wait: Wait = response.result
        return wait

    def load(self, path: Path, template: Any) -> Any:
        import jax

        with self._context():
            return jax.block_until_ready(self._library.load(path, template))


class OrbaxPlain(Orbax):
    """Neither OCDBT nor compression."""

    name = "orbax-plain"
    writer = "orbax-plain"

    def _context(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._library.Context()
        context.array.saving.use_ocdbt = False  # type: ignore[attr-defined]
        context.array.saving.use_compression = False  # type: ignore[attr-defined]
        return context
