"""Models to be loaded: tensors of every dtype, files of them, and sets of files with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}

NUMPY_DTYPES = ["bool", "int8", "uint16", "int32", "uint64", "float16", "float64", "complex64"]

NAMES = {
    "BF16": ml_dtypes.bfloat16,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor whose bytes are those of small numbers, so that each is a value of the dtype."""
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2, count, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def every_dtype() -> dict[str, torch.Tensor]:
    """A tensor of each dtype that torch has."""
    return {name: tensor_of(dtype, (3, 4), seed) for seed, (name, dtype) in enumerate(TORCH_DTYPES.items())}


def bits(array: Any) -> bytes:
    """The bytes of an array of any framework."""
    if isinstance(array, torch.Tensor):
        if array.numel() == 0:  # torch views nothing as something else
            return b""
        return array.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(np.asarray(array)).tobytes()


def numbers(count: int, *, rows: int = 8) -> dict[str, np.ndarray[Any, Any]]:
    """So many arrays with values of their own."""
    return {
        f"layers.{number}.weight": (np.arange(rows * 16, dtype=np.float32) + 1000 * number).reshape(rows, 16)
        for number in range(count)
    }


def write_file(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Path:
    """One file, written by the package `safetensors`."""
    safetensors.numpy.save_file(dict(arrays), path)
    return path


def write_set(directory: Path, arrays: Mapping[str, np.ndarray[Any, Any]], count: int) -> Path:
    """Several files and their index; returns the index."""
    directory.mkdir(parents=True, exist_ok=True)
    names = list(arrays)
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        own = names[number::count]
        write_file(directory / file, {name: arrays[name] for name in own})
        weight_map |= dict.fromkeys(own, file)
    return write_index(directory, weight_map)


def write_index(directory: Path, weight_map: Mapping[str, Any]) -> Path:
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": dict(weight_map)}))
    return index


def raw_file(header: str | bytes, data_bytes: int = 0) -> bytes:
    """A file with this text as its header, and so many bytes of data."""
    text = header if isinstance(header, bytes) else header.encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
