"""Published models in safetensors files: opened and checked, loaded, streamed and saved."""

from waystation.safetensors.checksums import DamagedFile, verify_files, write_checksums
from waystation.safetensors.handle import Tensors, TensorSlice, open  # noqa: A004
from waystation.safetensors.load import load, load_async
from waystation.safetensors.placement import Divided, Joined, Only
from waystation.safetensors.save import save
from waystation.safetensors.spread import SpreadFile, SpreadModel, spread
from waystation.safetensors.stream import stream
from waystation.safetensors.torch_collective import load_in_group

__all__ = [
    "DamagedFile",
    "Divided",
    "Joined",
    "Only",
    "SpreadFile",
    "SpreadModel",
    "TensorSlice",
    "Tensors",
    "load",
    "load_async",
    "load_in_group",
    "open",
    "save",
    "spread",
    "stream",
    "verify_files",
    "write_checksums",
]
