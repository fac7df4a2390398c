"""What a save tells the caller's `memory.serialization_status_callback`, array by array."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Self

from waystation._errors import InvalidInput
from waystation._options import Options, StatusCallback
from waystation.checkpoint.prepare import Described
from waystation.frameworks import registry
from waystation.tree import flatten, format_key_path


class StatusCalls:
    """The calls of one save. Each method calls once for each array, however often it is called.

    Args:
        callback: The caller's; None calls nothing.
        key_paths: Those of the arrays, with the keys that the program's framework has for them.
    """

    def __init__(self, callback: StatusCallback | None = None, key_paths: Sequence[Any] = ()) -> None:
        self._callback = callback
        self._to_transfer: Sequence[Any] = key_paths
        self._to_write: Sequence[Any] = key_paths

    @classmethod
    def begun(cls, options: Options, states: Mapping[str, Any], described: Mapping[str, Described]) -> Self:
        """Those for the arrays of states. Asks for priorities where transfers are limited, as Orbax does.

        Raises:
            InvalidInput: The callback does not know the priority of an array.
        """
        callback = options.memory.serialization_status_callback
        if callback is None:
            return cls()
        key_paths = []
        is_limited = options.memory.write_limit_bytes() is not None
        for name, state in states.items():
            paths = flatten(state)[1].key_paths()
            for number in described[name].array_leaf_numbers:
                key_path = registry.keys_of_program(paths[number])
                if is_limited:
                    _require_priority(callback.key_priority(key_path), format_key_path(paths[number]))
                key_paths.append(key_path)
        return cls(callback, key_paths)

    def transferred(self) -> None:
        """The caller may change the arrays."""
        told, self._to_transfer = self._to_transfer, ()
        for key_path in told:
            assert self._callback is not None
            self._callback.on_transfer_end(key_path)

    def written(self) -> None:
        """This process has written what it writes of the arrays."""
        self.transferred()
        told, self._to_write = self._to_write, ()
        for key_path in told:
            assert self._callback is not None
            self._callback.on_write_end(key_path)


def _require_priority(priority: object, label: str) -> None:
    if not isinstance(priority, enum.Enum) or priority.name == "UNKNOWN":
        raise InvalidInput(
            "key_priority of memory.serialization_status_callback must return the priority of each array "
            f"(a member of TransferPriority other than UNKNOWN), not {priority!r}",
            array=label,
        )
