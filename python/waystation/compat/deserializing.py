"""The bytes of a safetensors file as tensors, without a file.

Invariants: the header is checked whole, as that of a file; what is made shares no memory with the bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from typing_extensions import Buffer

from waystation import _native
from waystation._errors import WrongType
from waystation.compat import arrays
from waystation.compat.errors import translated
from waystation.frameworks import dtypes
from waystation.layouts.native import memory
from waystation.layouts.native.memory import as_array
from waystation.safetensors.headers import Header, Identity
from waystation.safetensors.making import Framework, as_held_by, codec_of, naming_tensors
from waystation.safetensors.open_files import OpenFiles

_NO_PATH = "<bytes>"


def deserialize(bytes: Buffer) -> list[tuple[str, dict[str, Any]]]:  # noqa: A002
    """The tensors of a file that is in memory: names, each with `dtype`, `shape` and `data`.

    Raises:
        SafetensorError: They are not the bytes of a safetensors file.
        TypeError: They are no bytes.
    """
    with translated():
        tensors = _opened(bytes).tensors
    view = memoryview(bytes)
    return [
        (name, {"dtype": dtype, "shape": list(shape), "data": bytearray(view[begin:end])})
        for name, dtype, shape, begin, end in tensors
    ]


def load(data: Buffer, framework: Framework) -> dict[str, Any]:
    """The tensors of a file that is in memory, as arrays of a framework on its default device."""
    with translated():
        opened = _opened(data)
        codec = codec_of(framework)
        numbers = range(len(opened.tensors))
        stored = [as_held_by(opened.array(number), codec.name) for number in numbers]
        spans = np.array([tensor[3:] for tensor in opened.tensors], np.int64).reshape(-1, 2)
        sizes = spans[:, 1] - spans[:, 0]
        places, addresses = memory.allocate(sizes.tolist())
        start = np.frombuffer(data, np.uint8).ctypes.data
        words = np.stack([addresses, start + spans[:, 0], sizes], axis=1)[sizes > 0]
        _native.copy_batch(np.ascontiguousarray(words), (data, places))
        held = [
            as_array(place, tensor.shape, dtypes.of_stored(tensor).host)
            for place, tensor in zip(places, stored, strict=True)
        ]
        with naming_tensors(opened, numbers):
            found = arrays.made(codec, codec.place_of(None), stored, held)
    return dict(zip(opened.labels, found, strict=True))


def _opened(data: Buffer) -> OpenFiles:
    try:
        nbytes = memoryview(data).nbytes
    except TypeError as error:
        raise WrongType(f"the content of a file is bytes, not a {type(data).__name__}") from error
    return OpenFiles([parsed_header(data, nbytes, _NO_PATH)])


def parsed_header(data: Buffer, file_bytes: int, path: str) -> Header:
    """The header at the beginning of bytes that are, or are the first ones, of a file of a length.

    Raises:
        Corrupt: They are not those of a safetensors file of that length.
    """
    metadata, tensors, data_start = _native.parse_safetensors_header(data, file_bytes, path)
    return Header(path, Identity(0, 0, file_bytes, 0, 0), metadata, tensors, data_start)
