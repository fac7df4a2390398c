"""The state in the golden checkpoints."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import waystation


class Moments(NamedTuple):
    """A node that is registered when the golden state is read."""

    first: Any
    second: Any


waystation.register_node(Moments)


def state() -> dict[str, Any]:
    """The state in the golden checkpoint, without frameworks: NumPy and plain values only."""
    counting = np.arange(24)
    return {
        "every dtype": {
            name: counting.astype(np.dtype(getattr(ml_dtypes, name, None) or name)).reshape(2, 3, 4)
            for name in (
                *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
                *("float16", "float32", "float64", "complex64", "complex128"),
                *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4", "uint4"),
            )
        },
        "numpy": [np.array(["a", "äöü"]), np.array(["2026-11-21"], "M8[D]"), np.arange(3, dtype=">i4")],
        "shapes": (np.zeros((0, 3), np.float32), np.array(7.5), np.float32(3)),
        "aligned": np.arange(70_000, dtype=np.uint8).reshape(7, 10_000),
        "node": Moments(np.ones(3), (None, {}, [], ())),
        "a.b": np.zeros(2),
        "a": {"b": np.ones(2)},
        3: {"\0": 1, b"bytes": 2, (1, "x"): 3, "\ud800": 4, None: 5, 1.5: 6, True: 7},
        "scalars": [True, -1, 1 << 100, 0.1, -math.inf, 1 + 2j, "text\0", b"\x00\xff"],
        "long": "ü" * 40_000,
    }


CUSTOM_METADATA = {"made": "by hand", "nested": [1, None, {"x": 1.5}]}
