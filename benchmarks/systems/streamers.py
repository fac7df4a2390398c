"""Loaders of safetensors files that cannot save: fastsafetensors, Run:ai's model streamer, InstantTensor.

They read what `safetensors-torch` wrote, onto the CPU. Each is measured in more than one manner, since
which is the faster depends on the disk; the better one counts. What refuses the CPU is asked for it
nevertheless, so that the results hold its own words.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.systems.base import DEFAULT, UnavailableError
from benchmarks.systems.safetensors import SafetensorsTorch, files_of


class Fastsafetensors(SafetensorsTorch):
    name = "fastsafetensors"
    distribution = "fastsafetensors"
    save_ways = ()
    load_ways = ("direct", "buffered")
    stream_ways = ("direct", "buffered")
    mapped_ways = frozenset()

    _loader: Any

    def prepare(self, way: str) -> None:
        os.environ["FASTSAFETENSORS_ODIRECT"] = "1" if way == "direct" else "0"
        super().prepare(way)
        import fastsafetensors  # type: ignore[import-untyped]

        self._loader = fastsafetensors

    def load(self, path: Path, template: Any) -> Any:
        del template
        loader = self._loader.SafeTensorsFileLoader(self._loader.SingleGroup(), device="cpu", nogds=True)
        loader.add_filenames({0: files_of(path)})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        buffers.close()
        loader.close()
        return tensors

    def stream(self, path: Path) -> Iterator[tuple[str, Any]]:
        loader = self._loader.ParallelLoader(
            None, files_of(path), use_tqdm_on_load=False, device="cpu", nogds=True
        )
        try:
            with contextlib.closing(loader.iterate_weights()) as weights:
                yield from weights
        finally:
            loader.close()


class RunaiStreamer(SafetensorsTorch):
    name = "runai"
    distribution = "runai-model-streamer"
    save_ways = ()
    load_ways = (DEFAULT, "io_uring_direct", "io_uring_buffered")
    stream_ways = load_ways
    mapped_ways = frozenset()

    _streamer: Any

    def prepare(self, way: str) -> None:
        if way != DEFAULT:
            os.environ["RUNAI_STREAMER_FS_STRATEGY"] = way
        super().prepare(way)
        from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-untyped]

        self._streamer = SafetensorsStreamer

    def load(self, path: Path, template: Any) -> Any:
        del template
        return dict(self.stream(path))

    def stream(self, path: Path) -> Iterator[tuple[str, Any]]:
        with self._streamer() as streamer:
            streamer.stream_files(files_of(path), device="cpu")
            yield from streamer.get_tensors()


class InstantTensor(SafetensorsTorch):
    """Refuses any device but a GPU with CUDA, as of version 0.2."""

    name = "instanttensor"
    distribution = "instanttensor"
    save_ways = ()
    load_ways = (DEFAULT,)
    stream_ways = (DEFAULT,)
    mapped_ways = frozenset()
    is_usual = False

    _open: Any

    def prepare(self, way: str) -> None:
        super().prepare(way)
        self._open = importlib.import_module("instanttensor").safe_open

    def load(self, path: Path, template: Any) -> Any:
        del template
        return dict(self.stream(path))

    def stream(self, path: Path) -> Iterator[tuple[str, Any]]:
        try:
            opened = self._open(files_of(path), framework="pt", device="cpu")
        except ValueError as error:
            raise UnavailableError(str(error)) from error
        with opened:
            yield from opened.tensors()
