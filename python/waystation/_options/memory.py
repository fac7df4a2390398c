"""How much host memory saves and loads may take beside the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from waystation._errors import InvalidInput
from waystation._options import checks
from waystation._options.base import Opposite, OptionGroup

_BYTES_OF_GIB = 1 << 30
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RegulatorOptions:
    """A bound on the memory of saves as Orbax's regulator of it is told.

    Orbax begins with `min_memory_limit_gib` and raises that from save to save while memory is left. A
    save is no faster here with more than that, so it is the bound of every save; the other values, which
    say how Orbax raises it, need nothing.

    Attributes:
        max_memory_limit_gib: The most that Orbax would raise it to.
        profiler: What Orbax would measure with.
        target_ratio: The part of the memory that Orbax would aim at.
        min_memory_limit_gib: The bound, in GiB.
        kp: Orbax's proportional coefficient.
        ki: Orbax's integral coefficient.
        kd: Orbax's derivative coefficient.
    """

    max_memory_limit_gib: float
    profiler: Any
    target_ratio: float = 0.80
    min_memory_limit_gib: float = 10.0
    kp: float = 0.4
    ki: float = 0.05
    kd: float = 0.1

    def __post_init__(self) -> None:
        if self.profiler is None:
            raise InvalidInput("RegulatorOptions needs a profiler")
        if not 0 < self.min_memory_limit_gib <= self.max_memory_limit_gib:
            raise InvalidInput(
                f"RegulatorOptions: min_memory_limit_gib is {self.min_memory_limit_gib}; it must be above 0, "
                f"up to max_memory_limit_gib, {self.max_memory_limit_gib}"
            )


def _regulator_or_none(value: Any) -> str | None:
    return None if value is None or isinstance(value, RegulatorOptions) else "RegulatorOptions or None"


def _amount_or_none(value: Any) -> str | None:
    fits = value is None or (checks.is_number(value) and value >= 0)
    return None if fits else "a number of bytes or None"


_Regulator = RegulatorOptions


class StatusCallback(Protocol):
    """What a program is told of the arrays of its saves (see `MemoryOptions`).

    Threads of a save call its methods, each for all arrays in turn.
    """

    def key_priority(self, key_path: Any) -> Any:
        """The priority of an array's transfer: a member of an enumeration, as Orbax's `TransferPriority`."""

    def on_transfer_end(self, key_path: Any) -> None:
        """The caller may change the array."""

    def on_write_end(self, key_path: Any) -> None:
        """This process has written its part of the array."""


def _status_callback_or_none(value: Any) -> str | None:
    methods = ("key_priority", "on_transfer_end", "on_write_end")
    fits = value is None or all(callable(getattr(value, method, None)) for method in methods)
    return None if fits else f"an object with the methods {', '.join(methods)}, or None"


@dataclass(kw_only=True)
class MemoryOptions(OptionGroup):
    """How much host memory saves and loads may use beyond the state.

    Attributes:
        read_concurrent_bytes: Maximum host memory that a load uses beyond its result: arrays on their way to
            other devices or to another dtype, and the engine's buffers. Values below 2 MiB count as 2 MiB. A
            larger array is read in pieces. None sets no limit.
        write_concurrent_bytes: Maximum host memory that a save uses beyond the state: device memory on its
            way to the disk, the engine's blocks, and the copies of an asynchronous save. Values below 1 MiB
            count as 1 MiB. A larger array is written in pieces. None gives the engine 64 MiB, and copies
            `snapshot_bytes`. Arrays that must be rebuilt to be stored (a cast, the 4-bit dtypes of JAX) are
            not counted. If arrays are compressed, compression uses half of the limit, at least 4 MiB, and
            chunks are smaller unless their size is given.
        transfer_concurrent_bytes: Orbax's limit on device memory on its way to the host. It is part of
            `write_concurrent_bytes`, so the smaller of the two applies.
        regulator_options: Another limit on the same, in the form of Orbax's regulator. It takes precedence
            over `transfer_concurrent_bytes`.
        expected_surge_bytes: Reduces the limit of `regulator_options` by this amount.
        snapshot_bytes: Maximum size that an asynchronous save copies before it returns, of leaves that could
            change afterwards (NumPy, torch, GPU). The call blocks until the excess is written. None means
            half of the available memory.
        caller_keeps: The caller promises not to change NumPy arrays and torch tensors until the save has
            ended. The save copies none of them.
        deepcopy_host_arrays: Orbax's name of the opposite of `caller_keeps`.
        is_prioritized_key_fn: Accepted for compatibility with Orbax, and without effect: every leaf is safe
            from later changes before the call returns.
        serialization_status_callback: An object with Orbax's methods, which a save calls for each array:
            `on_transfer_end(key_path)` once the caller may change it, `on_write_end(key_path)` once this
            process has written its part of it. A key path is a tuple of JAX's keys where the program uses
            JAX. With a limit on transfers, `key_priority(key_path)` is asked for each array first, and must
            return a priority; it has no effect, since every array is safe before the call returns. An error
            of a method fails the save.
    """

    RegulatorOptions = _Regulator

    read_concurrent_bytes: int | None = None
    write_concurrent_bytes: int | None = None
    transfer_concurrent_bytes: int | None = None
    regulator_options: _Regulator | None = None
    expected_surge_bytes: int | float | None = None
    snapshot_bytes: int | None = None
    caller_keeps: bool = False
    deepcopy_host_arrays: Opposite = Opposite("caller_keeps", True)
    is_prioritized_key_fn: Callable[[Any], bool] | None = None
    serialization_status_callback: StatusCallback | None = None
    _checks: ClassVar = {
        "read_concurrent_bytes": checks.positive_or_none,
        "write_concurrent_bytes": checks.positive_or_none,
        "transfer_concurrent_bytes": checks.positive_or_none,
        "regulator_options": _regulator_or_none,
        "expected_surge_bytes": _amount_or_none,
        "snapshot_bytes": checks.bytes_or_none,
        "caller_keeps": checks.boolean,
        "is_prioritized_key_fn": checks.callable_or_none,
        "serialization_status_callback": _status_callback_or_none,
    }

    def write_limit_bytes(self) -> int | None:
        """The bound on the memory of a save that follows from all of these together."""
        transfer = self.transfer_concurrent_bytes
        if self.regulator_options is not None:
            regulated = self.regulator_options.min_memory_limit_gib * _BYTES_OF_GIB
            transfer = max(_LEAST_BYTES, int(regulated - (self.expected_surge_bytes or 0)))
        limits = [limit for limit in (self.write_concurrent_bytes, transfer) if limit is not None]
        return min(limits, default=None)
