"""Loaders of safetensors files that cannot save: fastsafetensors and Run:ai's model streamer.

They read what `safetensors-torch` wrote, onto the CPU. Each is measured in more than one manner, since
which is the faster depends on the disk; the better one counts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.systems.base import DEFAULT
from benchmarks.systems.safetensors import FILE_NAME, SafetensorsTorch


class Fastsafetensors(SafetensorsTorch):
    name = "fastsafetensors"
    distribution = "fastsafetensors"
    save_ways = ()
    load_ways = ("direct", "buffered")
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
        loader.add_filenames({0: [str(path / FILE_NAME)]})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        buffers.close()
        loader.close()
        return tensors


class RunaiStreamer(SafetensorsTorch):
    name = "runai"
    distribution = "runai-model-streamer"
    save_ways = ()
    load_ways = (DEFAULT, "io_uring_direct", "io_uring_buffered")
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
        with self._streamer() as streamer:
            streamer.stream_files([str(path / FILE_NAME)], device="cpu")
            return dict(streamer.get_tensors())
