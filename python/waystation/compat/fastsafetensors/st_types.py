"""Devices and dtypes as fastsafetensors names them.

Invariant: the values of dtypes are their names in files.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from waystation._errors import InvalidInput, Unsupported
from waystation.frameworks import dtypes
from waystation.safetensors.description import PACKED


class DeviceType(Enum):
    """A kind of device."""

    CPU = "cpu"
    CUDA = "cuda"
    GPU = "gpu"


@dataclass(frozen=True)
class Device:
    """A device.

    Attributes:
        type: Its kind.
        index: Which of its kind; None for the present one.
    """

    type: DeviceType = DeviceType.CPU
    index: int | None = None

    def as_str(self) -> str:
        """The name that frameworks know it by: `cuda:0`."""
        return self.type.value if self.index is None else f"{self.type.value}:{self.index}"

    @classmethod
    def from_str(cls, s: str) -> Device:
        """The device of a name.

        Raises:
            ValueError: It names none.
        """
        kind, colon, number = s.partition(":")
        known = {member.value: member for member in DeviceType}
        if kind.lower() not in known:
            raise InvalidInput(f"{s!r} is on no kind of device that is known: {', '.join(known)}")
        if colon and not (number.isascii() and number.isdigit()):
            raise InvalidInput(f"{s!r} has no number after the colon")
        return cls(known[kind.lower()], int(number) if colon else None)


class DType(Enum):
    """A dtype, as files name it; `AUTO` stands for that of each tensor."""

    BOOL = "BOOL"
    I8 = "I8"
    I16 = "I16"
    I32 = "I32"
    I64 = "I64"
    U8 = "U8"
    U16 = "U16"
    U32 = "U32"
    U64 = "U64"
    F16 = "F16"
    F32 = "F32"
    F64 = "F64"
    BF16 = "BF16"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F4 = "F4"
    AUTO = "AUTO"


# Bytes of one element; of F4, two are in one byte.
DTYPE_SIZES: dict[DType, float] = {
    dtype: 0.5 if dtype is DType.F4 else dtypes.STORAGE_ITEM_BYTES[dtype.value]
    for dtype in DType
    if dtype is not DType.AUTO
}


def dtype_of(storage_dtype: str) -> DType:
    """The dtype of a name in a file.

    Raises:
        Unsupported: It is none of these.
    """
    try:
        return DType(storage_dtype)
    except ValueError:
        raise Unsupported(
            f"fastsafetensors has no dtype {storage_dtype}; load the file with waystation.safetensors"
        ) from None


def logical_name(dtype: DType) -> str:
    """The name of a dtype in the rest of this library."""
    found = PACKED if dtype is DType.F4 else dtypes.name_of_storage(dtype.value)
    assert found is not None, dtype
    return found


def dtype_of_logical(name: str) -> DType:
    """The dtype of such a name.

    Raises:
        Unsupported: It is none of these.
    """
    logical = dtypes.of_name(name)
    if logical.trailing and name != PACKED:
        raise Unsupported(f"safetensors has no dtype for {name}; cast the tensor")
    return dtype_of("F4" if name == PACKED else logical.storage)
