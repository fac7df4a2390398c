"""What `safetensors.flax` exports: JAX arrays from and to safetensors files.

Unlike there, CPU arrays alias the memory that was read instead of being copied, FP8 is loaded, and integers
that JAX without its 64-bit mode has no room for are refused instead of becoming other numbers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from waystation.compat import safetensors_numpy
from waystation.compat.errors import NotAnArray, translated
from waystation.compat.opening import Backend, load_bytes, load_whole
from waystation.compat.serializing import save_described
from waystation.safetensors.making import codec_of
from waystation.safetensors.sources import PathLike

__all__ = ["load", "load_file", "save", "save_file"]


def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file of JAX arrays, by name, and text for people.

    Raises:
        SafetensorError: The format has no dtype for an array.
        TypeError: Something is no array.
    """
    return safetensors_numpy.save(_on_host(tensors), metadata)


def save_file(
    tensors: Mapping[str, Any], filename: PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Saves JAX arrays, by name, and text for people, durably; an earlier file of the name stays until then.

    Raises:
        SafetensorError: The format has no dtype for an array, or the file cannot be written.
        TypeError: Something is no array.
    """
    save_described(
        lambda: safetensors_numpy.described(_on_host(tensors)), filename, metadata, time.monotonic()
    )


def load(data: Buffer) -> dict[str, Any]:
    """The arrays in the bytes of a safetensors file, on JAX's default device.

    Raises:
        SafetensorError: They are not those of one.
    """
    return load_bytes(data, "jax")


def load_file(filename: PathLike, *, backend: Backend = "mmap") -> dict[str, Any]:
    """The arrays of a safetensors file, on JAX's default device; they are read, whatever the backend.

    Raises:
        FileNotFoundError: There is no such file.
        SafetensorError: It is damaged.
    """
    return load_whole(filename, "flax", backend=backend)


def _on_host(tensors: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    with translated():
        if not isinstance(tensors, Mapping):
            raise NotAnArray(f"arrays must be a dict by name, not a {type(tensors).__name__}")
        codec = codec_of("jax")
        for name, tensor in tensors.items():
            if not codec.is_leaf(tensor) and not isinstance(tensor, np.ndarray | np.generic):
                raise NotAnArray(f"a {type(tensor).__name__} is no JAX array", tensor=name)
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}
