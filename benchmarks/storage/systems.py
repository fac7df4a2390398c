"""Who saves to the store and loads from it; each as a user of that library writes it, with torch tensors."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import states
from benchmarks.states import Leaf
from benchmarks.storage.server import ACCESS_KEY, BUCKET, REGION, SECRET_KEY
from benchmarks.systems.base import TorchSystem

MODEL = "model.safetensors"
REQUEST_BYTES = 8 << 20
IN_FLIGHT = 16


def reach(endpoint: str) -> None:
    """Tells all clients of this process by the usual variables where the server is, and who asks."""
    os.environ |= {
        "AWS_ENDPOINT": endpoint,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }


class StoreSystem(TorchSystem):
    """A library that is given names beneath `s3://bench` as paths."""

    def location(self, path: Path) -> str:
        """Where a path is."""
        return f"s3://{BUCKET}/{path}"


class Raw(StoreSystem):
    """The limit: plain objects of the bytes alone, by the client of the `object_store` crate, in parallel."""

    name = "raw"
    writer = "raw"
    distribution = "obstore"

    _client: Any
    _store: Any

    def prepare(self, way: str) -> None:
        del way
        import obstore
        from obstore.store import S3Store

        self._client = obstore
        self._store = S3Store(BUCKET)

    def template(self, leaves: list[Leaf]) -> Any:
        return leaves

    def save(self, path: Path, state: Any) -> None:
        views = self.views(state)

        def put(name: str) -> None:
            self._client.put(
                self._store,
                f"{path}/{name}",
                memoryview(views[name]),
                chunk_size=REQUEST_BYTES,
                max_concurrency=IN_FLIGHT,
            )

        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            list(threads.map(put, views))

    def load(self, path: Path, template: Any) -> Any:
        state = self.empty(template)
        views = self.views(state)
        units = [
            (name, start) for name, view in views.items() for start in range(0, view.nbytes, REQUEST_BYTES)
        ]

        def fetch(unit: tuple[str, int]) -> None:
            name, start = unit
            end = min(start + REQUEST_BYTES, views[name].nbytes)
            found = self._client.get_range(self._store, f"{path}/{name}", start=start, end=end)
            views[name][start:end] = np.frombuffer(found, np.uint8)

        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            list(threads.map(fetch, units))
        return state


class Waystation(StoreSystem):
    name = "waystation"
    writer = "waystation"
    distribution = "waystation"

    _library: Any

    def prepare(self, way: str) -> None:
        del way
        import waystation

        self._library = waystation

    def save(self, path: Path, state: Any) -> None:
        self._library.save(self.location(path), state)

    def load(self, path: Path, template: Any) -> Any:
        del template
        return self._library.load(self.location(path))


class TorchDcp(StoreSystem):
    """`torch.distributed.checkpoint` in one process, by its writer and reader for fsspec, and s3fs."""

    name = "torch-dcp"
    writer = "torch-dcp"
    distribution = "s3fs"

    _library: Any
    _files: Any

    def prepare(self, way: str) -> None:
        del way
        import fsspec.config  # type: ignore[import-untyped]
        import torch.distributed.checkpoint
        from torch.distributed.checkpoint import _fsspec_filesystem

        fsspec.config.conf["s3"] = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
        self._library, self._files = torch.distributed.checkpoint, _fsspec_filesystem

    def template(self, leaves: list[Leaf]) -> Any:
        return leaves

    def save(self, path: Path, state: Any) -> None:
        writer = self._files.FsspecWriter(self.location(path))
        self._library.save(state, storage_writer=writer, no_dist=True)

    def load(self, path: Path, template: Any) -> Any:
        state = self.empty(template)
        reader = self._files.FsspecReader(self.location(path))
        self._library.load(state, storage_reader=reader, no_dist=True)
        return state


class ModelLoader(StoreSystem):
    """A library that loads a model from one safetensors file, and saves none."""

    writer = "published"
    save_ways = ()

    def file(self, path: Path) -> str:
        """Where the file is."""
        return f"{self.location(path)}/{MODEL}"

    def arrays(self, loaded: Any) -> dict[str, Any]:
        return dict(loaded)


class Runai(ModelLoader):
    """Run:ai's model streamer."""

    name = "runai"
    distribution = "runai-model-streamer-s3"

    _streamer: Any

    def prepare(self, way: str) -> None:
        del way
        from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-untyped]

        self._streamer = SafetensorsStreamer

    def load(self, path: Path, template: Any) -> Any:
        del template
        with self._streamer() as streamer:
            streamer.stream_files([self.file(path)], device="cpu")
            return dict(streamer.get_tensors())


class WaystationPublished(ModelLoader):
    """`waystation.safetensors.load`."""

    name = "waystation-safetensors"
    distribution = "waystation"

    _library: Any

    def prepare(self, way: str) -> None:
        del way
        import waystation.safetensors

        self._library = waystation.safetensors

    def load(self, path: Path, template: Any) -> Any:
        del template
        return self._library.load(self.file(path), framework="torch")


class Published(StoreSystem):
    """Who puts a model into the store as one safetensors file."""

    name = "published"
    writer = "published"
    distribution = "safetensors"
    load_ways = ()

    def prepare(self, way: str) -> None:
        del way

    def save(self, path: Path, state: Any) -> None:
        import obstore
        from obstore.store import S3Store
        from safetensors.torch import save

        content = save(states.flatten(state))
        obstore.put(S3Store(BUCKET), f"{path}/{MODEL}", content, chunk_size=REQUEST_BYTES)


SYSTEMS: dict[str, type[StoreSystem]] = {
    kind.name: kind for kind in (Raw, Waystation, TorchDcp, Published, Runai, WaystationPublished)
}
