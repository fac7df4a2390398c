"""Who brings the weights of a model that transformers runs: it itself, or a library that fills a skeleton.

The libraries are the systems of the other tables, used as a program that loads a model would use them. A
*drop-in* is code written for another library with one import changed, to `waystation.compat`. Importing this
imports none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import startup_model
from benchmarks.systems import SYSTEMS
from benchmarks.systems.base import DEFAULT, System
from benchmarks.systems.safetensors import SafetensorsTorch
from benchmarks.systems.streamers import Fastsafetensors

OURS = "waystation-safetensors-torch"
_DROP_IN = "through waystation.compat"


class Clock:
    """Seconds since a moment; stands still while something is done that nobody wants to measure.

    Attributes:
        marks: When each stage was reached.
    """

    def __init__(self, started_s: float) -> None:
        self.marks: dict[str, float] = {}
        self._started_s = started_s

    def mark(self, name: str) -> None:
        self.marks[name] = time.monotonic() - self._started_s

    @contextmanager
    def standing(self) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._started_s += time.monotonic() - began_s


Start = Callable[[Path, Clock], Any]
"""Makes the model of a directory, and marks when its skeleton is there, where that can be seen."""


@dataclass(frozen=True, slots=True)
class Loader:
    """One way to a model that can speak.

    Attributes:
        name: How it is called in the results.
        prepare: Imports what a manner needs; returns what then makes the model.
        distribution: The package whose version is reported.
        ways: The manners that are measured, each by itself.
        mapped_ways: Those of them after which weights are still in their files.
        is_ours: Whether Waystation reads.
    """

    name: str
    prepare: Callable[[str], Start]
    distribution: str
    ways: tuple[str, ...] = (DEFAULT,)
    mapped_ways: frozenset[str] = frozenset()
    is_ours: bool = False


# ---- transformers itself -----------------------------------------------------------------------


def _prepare_transformers(way: str) -> Start:
    del way
    from transformers import LlamaForCausalLM

    def start(directory: Path, clock: Clock) -> Any:
        del clock
        return LlamaForCausalLM.from_pretrained(directory)

    return start


def _prepare_transformers_drop_in(way: str) -> Start:
    """transformers, as if it imported `safe_open` from `waystation.compat.safetensors`."""
    start = _prepare_transformers(way)
    from transformers import modeling_utils

    from waystation.compat.safetensors import safe_open

    vars(modeling_utils)["safe_open"] = safe_open
    return start


# ---- libraries that fill a skeleton ------------------------------------------------------------


class _SafetensorsDropIn(SafetensorsTorch):
    def prepare(self, way: str) -> None:
        super().prepare(way)
        from waystation.compat import safetensors_torch

        self._library = safetensors_torch


class _FastsafetensorsDropIn(Fastsafetensors):
    def prepare(self, way: str) -> None:
        super().prepare(way)
        from waystation.compat import fastsafetensors

        self._loader = fastsafetensors


def _filling(system: type[System], name: str | None = None, *, is_ours: bool = False) -> Loader:
    def prepare(way: str) -> Start:
        from transformers import LlamaForCausalLM  # noqa: F401  which the skeleton is made of

        library = system()
        library.prepare(way)

        def start(directory: Path, clock: Clock) -> Any:
            model = startup_model.skeleton(directory)
            clock.mark("skeleton")
            startup_model.fill(model, library.load(directory, None))
            return model

        return start

    distribution = "waystation" if is_ours else system.distribution
    return Loader(
        name or system.name, prepare, distribution, system.load_ways, system.mapped_ways, is_ours=is_ours
    )


_MAPPED = frozenset({DEFAULT})
LOADERS = {
    loader.name: loader
    for loader in (
        Loader("transformers", _prepare_transformers, "transformers", mapped_ways=_MAPPED),
        Loader(
            f"transformers {_DROP_IN}",
            _prepare_transformers_drop_in,
            "waystation",
            mapped_ways=_MAPPED,
            is_ours=True,
        ),
        _filling(SYSTEMS["safetensors-torch"]),
        _filling(_SafetensorsDropIn, f"safetensors {_DROP_IN}", is_ours=True),
        _filling(SYSTEMS["fastsafetensors"]),
        _filling(_FastsafetensorsDropIn, f"fastsafetensors {_DROP_IN}", is_ours=True),
        _filling(SYSTEMS["runai"]),
        _filling(SYSTEMS[OURS], is_ours=True),
    )
}
