"""What `safetensors.numpy` exports: NumPy arrays from and to safetensors files.

Unlike there, arrays of any strides are saved as their elements are, and dtypes of ml_dtypes are loaded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from waystation.compat.errors import NotAnArray, translated
from waystation.compat.opening import Backend, load_bytes, load_whole
from waystation.compat.serializing import TensorSpec, save_described, serialize
from waystation.safetensors.sources import PathLike

__all__ = ["load", "load_file", "save", "save_file"]


def save(tensor_dict: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file of arrays, by name, and text for people.

    Raises:
        SafetensorError: The format has no dtype for an array.
        TypeError: Something is no array.
    """
    held, specs = described(tensor_dict)
    data = serialize(specs, metadata)
    del held  # until here the addresses are in use
    return data


def save_file(
    tensor_dict: Mapping[str, NDArray[Any]], filename: PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Saves arrays, by name, and text for people, durably; an earlier file of the name stays until then.

    Raises:
        SafetensorError: The format has no dtype for an array, or the file cannot be written.
        TypeError: Something is no array.
    """
    save_described(lambda: described(tensor_dict), filename, metadata, time.monotonic())


def load(data: Buffer) -> dict[str, NDArray[Any]]:
    """The arrays in the bytes of a safetensors file.

    Raises:
        SafetensorError: They are not those of one.
    """
    return load_bytes(data, "numpy")


def load_file(filename: PathLike, *, backend: Backend = "mmap") -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file; they are read, whatever the backend.

    Raises:
        FileNotFoundError: There is no such file.
        SafetensorError: It is damaged.
    """
    return load_whole(filename, "np", backend=backend)


def described(arrays: Mapping[str, Any]) -> tuple[list[NDArray[Any]], dict[str, TensorSpec]]:
    """Arrays as they are written: what has their bytes, and what says where these are."""
    held: list[NDArray[Any]] = []
    specs: dict[str, TensorSpec] = {}
    with translated():
        if not isinstance(arrays, Mapping):
            raise NotAnArray(f"arrays must be a dict by name, not a {type(arrays).__name__}")
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray | np.generic):
                raise NotAnArray(f"a {type(array).__name__} is no NumPy array", tensor=name)
            own = np.asarray(array, order="C")
            own = own.astype(own.dtype.newbyteorder("="), copy=False)
            held.append(own)
            specs[name] = TensorSpec(
                dtype=own.dtype.name, shape=own.shape, data_ptr=own.ctypes.data, data_len=own.nbytes
            )
    return held, specs
