"""Waystation loading what genuine Orbax has saved, as it comes and at its fastest settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.systems.base import DEFAULT, Wait
from benchmarks.systems.orbax import Orbax, OrbaxPlain
from benchmarks.systems.waystation import WaystationJax


class WaystationOfOrbax(WaystationJax):
    """Of OCDBT with zstd."""

    name = "waystation-of-orbax"
    writer = "orbax"
    save_ways = ()
    load_ways = (DEFAULT,)
    mapped_ways = frozenset()
    saves_async = False
    is_usual = False

    saver: type[Orbax] = Orbax
    _saver: Orbax

    def prepare(self, way: str) -> None:
        super().prepare(way)
        self._saver = self.saver()
        self._saver.prepare(way)

    def save(self, path: Path, state: Any) -> None:
        """For the warm-up alone."""
        self._saver.save(path, state)

    def save_async(self, path: Path, state: Any) -> Wait:
        raise NotImplementedError


class WaystationOfOrbaxPlain(WaystationOfOrbax):
    """Of files without compression."""

    name = "waystation-of-orbax-plain"
    writer = "orbax-plain"
    saver = OrbaxPlain
