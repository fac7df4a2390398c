"""The one table of logical dtypes: their names, how they lie in host memory and how files store them.

A logical name is NumPy's (`float32`), ml_dtypes' (`bfloat16`, `int4`), `key<implementation>` for PRNG keys,
or `numpy:<description>` for NumPy dtypes without a name above (strings, dates, structures, foreign byte
orders). Invariants: a name maps to one host dtype and one storage dtype for ever, since files hold names;
the storage shape is the logical shape and then `trailing`; a host array of a box has the box's shape and
then `host_trailing` (only PRNG keys have one). Names read from files are validated, never evaluated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import ml_dtypes
import numpy as np

from waystation._errors import Corrupt, Unsupported, UnsupportedLeaf
from waystation.frameworks.base import StoredArray

Category = Literal["bool", "integer", "float", "complex", "packed", "key", "other"]

# In the order of safetensors, whose files begin with the tensors of the last.
STORAGE_ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 8),
}

# safetensors' name for a dtype that torch's reader of safetensors 0.8 gives back as the very same dtype.
_STORAGE: dict[str, str] = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}

_NAME_OF_STORAGE = {storage: name for name, storage in _STORAGE.items()}

# Elements that devices pack into less than a byte. ml_dtypes keeps them one to a byte, and so do files.
SUB_BYTE = frozenset({"int1", "int2", "int4", "uint1", "uint2", "uint4", "float4_e2m1fn"})

# Stored as bytes with a trailing axis.
_STORED_AS_BYTES: dict[Category, tuple[str, ...]] = {
    "integer": ("int1", "int2", "int4", "uint1", "uint2", "uint4"),
    "float": (
        "float4_e2m1fn",
        "float6_e2m3fn",
        "float6_e3m2fn",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
    ),
    "complex": ("complex32", "bcomplex32", "complex128"),
}

_NUMPY_PREFIX = "numpy:"
_CATEGORY_OF_KIND: dict[str, Category] = {
    "b": "bool",
    "i": "integer",
    "u": "integer",
    "f": "float",
    "c": "complex",
}


@dataclass(frozen=True, slots=True)
class LogicalDtype:
    """One logical dtype.

    Attributes:
        name: As files and metadata show it.
        host: The NumPy dtype of host arrays.
        storage: The safetensors dtype.
        trailing: The axes that storage appends to the logical shape.
        host_trailing: The axes that host arrays append to the logical shape.
        category: What it may be cast to, see `casts`.
    """

    name: str
    host: np.dtype[Any]
    storage: str
    trailing: tuple[int, ...] = ()
    host_trailing: tuple[int, ...] = ()
    category: Category = "other"

    @property
    def storage_item_bytes(self) -> int:
        """Bytes of one storage element."""
        return STORAGE_ITEM_BYTES[self.storage]

    def storage_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in storage of an array of the logical `shape`."""
        return shape + self.trailing

    def storage_strides(self, strides: tuple[int, ...]) -> tuple[int, ...]:
        """The strides in storage terms of a host array's `strides`, both in bytes."""
        return (*strides, 1) if self.trailing and not self.host_trailing else strides


def _build_table() -> dict[str, LogicalDtype]:
    table = {}
    for name, storage in _STORAGE.items():
        host = _host_dtype(name)
        if host is not None:
            table[name] = LogicalDtype(name, host, storage, category=_category(name))
    for category, names in _STORED_AS_BYTES.items():
        for name in names:
            host = _host_dtype(name)
            if host is not None:
                table[name] = LogicalDtype(name, host, "U8", (host.itemsize,), category=category)
    # torch's two 4-bit floats in a byte: no host library can take them apart, so they stay bytes.
    packed = LogicalDtype("float4_e2m1fn_x2", np.dtype(np.uint8), "U8", (1,), category="packed")
    return {**table, packed.name: packed}


def _host_dtype(name: str) -> np.dtype[Any] | None:
    """None for what the installed ml_dtypes is too old to know."""
    if hasattr(ml_dtypes, name):
        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    return np.dtype(name) if name in np.sctypeDict else None


def _category(name: str) -> Category:
    if name == "bool":
        return "bool"
    if "complex" in name:
        return "complex"
    return "float" if "float" in name else "integer"


TABLE: dict[str, LogicalDtype] = _build_table()
_BY_HOST: dict[np.dtype[Any], LogicalDtype] = {
    entry.host: entry for entry in TABLE.values() if entry.category != "packed"
}


# ---- look-ups ----------------------------------------------------------------------------------


def of_numpy(dtype: np.dtype[Any]) -> LogicalDtype:
    """The logical dtype of a NumPy dtype. Raises UnsupportedLeaf for objects and the like."""
    known = _BY_HOST.get(dtype)
    return known if known is not None else _of_other_numpy(dtype)


def key_dtype(implementation: str, words: tuple[int, ...]) -> LogicalDtype:
    """The logical dtype of PRNG keys that are `words` unsigned 32-bit words each."""
    return LogicalDtype(f"key<{implementation}>", np.dtype(np.uint32), "U32", words, words, "key")


def is_key(name: str) -> bool:
    """Whether a logical name is that of PRNG keys."""
    return name.startswith("key<") and name.endswith(">") and len(name) > 5


def key_implementation(name: str) -> str:
    """The implementation in the logical name of PRNG keys."""
    return name[4:-1]


@lru_cache(maxsize=1024)
def of_name(name: str, key_words: tuple[int, ...] = ()) -> LogicalDtype:
    """The logical dtype of a name, which may come from a file.

    Args:
        name: The logical name.
        key_words: The trailing axes of a PRNG key's data; ignored for other dtypes.

    Raises:
        Corrupt: The name describes nothing that a save could have written.
        Unsupported: A name of a newer version, or one that the installed ml_dtypes does not know.
    """
    known = TABLE.get(name)
    if known is not None:
        return known
    if is_key(name):
        return key_dtype(key_implementation(name), key_words)
    if name.startswith(_NUMPY_PREFIX):
        return _of_description(name)
    raise Unsupported(f"unknown dtype {name!r}; update waystation, and ml_dtypes to 0.6 or newer")


def of_stored(stored: StoredArray) -> LogicalDtype:
    """The logical dtype of a stored array, checked against how the file says that it is stored."""
    shape, storage_shape = stored.shape, stored.storage_shape
    known = TABLE.get(stored.dtype)
    plain = known is not None and stored.storage_dtype == known.storage and not known.trailing
    if known is not None and plain and storage_shape == shape:  # nearly always, and there are thousands
        return known
    rank = len(shape)
    found = of_name(stored.dtype, storage_shape[rank:])
    if stored.storage_dtype != found.storage or storage_shape != shape + found.trailing:
        raise Corrupt(
            f"an array of {stored.dtype} with shape {shape} is said to be stored as "
            f"{stored.storage_dtype} {storage_shape}, not {found.storage} {found.storage_shape(shape)}"
        )
    return found


def numpy_dtype(name: str) -> np.dtype[Any] | None:
    """The NumPy dtype of host arrays of a logical dtype; None where no NumPy dtype holds a whole element
    (PRNG keys): such arrays are held in `storage_numpy_dtype` with the trailing axes of storage."""
    found = of_name(name)
    return None if found.category == "key" else found.host


def name_of_storage(storage_dtype: str) -> str | None:
    """The logical dtype whose elements are stored as the elements of a safetensors dtype; None if there is
    none (of elements that fill no bytes)."""
    name = _NAME_OF_STORAGE.get(storage_dtype)
    return name if name in TABLE else None


def storage_numpy_dtype(storage_dtype: str) -> np.dtype[Any]:
    """The NumPy dtype of one storage element."""
    name = _NAME_OF_STORAGE.get(storage_dtype)
    if name is None or name not in TABLE:
        raise Unsupported(f"unknown safetensors dtype {storage_dtype!r}; update waystation")
    return TABLE[name].host


# ---- NumPy dtypes without a name of their own --------------------------------------------------


@lru_cache(maxsize=1024)
def _of_other_numpy(dtype: np.dtype[Any]) -> LogicalDtype:
    if dtype.hasobject:
        raise UnsupportedLeaf(
            f"arrays of {dtype} hold Python objects, which a checkpoint does not store; convert them to "
            "numbers or fixed-width strings, or save the values as leaves of their own"
        )
    description: Any = None
    try:
        description = np.lib.format.dtype_to_descr(dtype)
        restored = _from_json(json.loads(json.dumps(description)))
    except (TypeError, ValueError):
        restored = None
    if restored != dtype:
        raise UnsupportedLeaf(f"cannot describe the NumPy dtype {dtype}; convert the array to a plainer one")
    text = description if isinstance(description, str) else json.dumps(description, separators=(",", ":"))
    category = _CATEGORY_OF_KIND.get(dtype.kind, "other")
    return LogicalDtype(f"{_NUMPY_PREFIX}{text}", dtype, "U8", (dtype.itemsize,), category=category)


def _of_description(name: str) -> LogicalDtype:
    text = name.removeprefix(_NUMPY_PREFIX)
    try:
        dtype = _from_json(json.loads(text) if text.startswith("[") else text)
        found = of_numpy(dtype)
    except (TypeError, ValueError, KeyError, SyntaxError, RecursionError, OverflowError) as error:
        raise Corrupt(f"{name[:200]!r} is not a NumPy dtype that this system knows: {error}") from None
    if found.name != name:
        raise Corrupt(f"{name[:200]!r} does not describe a storable NumPy dtype")
    return found


def _from_json(value: Any) -> np.dtype[Any]:
    return np.dtype(np.lib.format.descr_to_dtype(_with_tuples(value)))


def _with_tuples(value: Any) -> Any:
    """Gives back the tuples that JSON turned into lists: each field is one, and so are shapes and titles."""
    if not isinstance(value, list):
        return value
    return [
        tuple(_with_tuples(part) if _is_fields(part) else _frozen(part) for part in field) for field in value
    ]


def _is_fields(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and isinstance(part[0], list)


def _frozen(part: Any) -> Any:
    return tuple(part) if isinstance(part, list) else part
