"""States whose arrays are on hosts: what the others who have to do with a save or a load are told of them.

A client takes a state apart. Its containers become JSON, in which a host, which need not have the classes,
sees what a file would say of them; arrays of hosts are named by handles, apart from this; other leaves travel
along as they are, through the controller, so they have to be small.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from waystation._errors import InvalidInput
from waystation.frameworks.numpy_arrays import AbstractNumpy
from waystation.tree import Structure, flatten, parse_json, plain, unflatten

# Of the leaves of one state that are no arrays of hosts, together.
MOST_VALUE_BYTES = 16 << 20
_NUMBER_BYTES = 16


@dataclass(frozen=True, slots=True)
class StateTree:
    """A state, or an abstract state, without its arrays of hosts.

    Attributes:
        structure: Its containers, as JSON.
        values: The leaves that are no such arrays, with their numbers; of an abstract state what is wanted
            in their places. Of an abstract state there may be leaves that are neither: they are not loaded.
    """

    structure: bytes
    values: tuple[tuple[int, Any], ...] = ()

    @classmethod
    def of(cls, structure: Structure, values: Mapping[int, Any]) -> StateTree:
        """That of a state that was taken apart."""
        encoded = json.dumps(structure.to_json(), separators=(",", ":")).encode()
        return cls(encoded, tuple(values.items()))

    @classmethod
    def of_names(cls, names: Sequence[str]) -> StateTree:
        """That of a dict of arrays, of which each has the number of its name."""
        return cls.of(flatten(dict.fromkeys(names, 0))[1], {})

    def build(self, leaves: Mapping[int, Any], rest: Any) -> Any:
        """A tree of plain containers.

        Args:
            leaves: By their numbers.
            rest: What all others are.
        """
        found = Structure.from_json(parse_json(self.structure, "a state of hosts"), path="a state of hosts")
        return unflatten(plain(found), [leaves.get(number, rest) for number in range(found.leaf_count)])


def require_small(values: Mapping[str, Any]) -> None:
    """Refuses values that are too large together to travel through the controller.

    Args:
        values: By their key paths, for people.

    Raises:
        InvalidInput: They are; names the largest.
    """
    sizes = {place: _bytes_of(value) for place, value in values.items()}
    total = sum(sizes.values())
    if total > MOST_VALUE_BYTES:
        largest = max(sizes, key=lambda place: sizes[place])
        raise InvalidInput(
            f"what is no array of hosts in this state takes {total} bytes, and at most {MOST_VALUE_BYTES} go "
            f"through the controller; the largest is {largest}, of {sizes[largest]} bytes: put it on a slice",
            array=largest,
        )


def _bytes_of(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, AbstractNumpy):
        return math.prod(value.shape) * (1 if value.dtype is None else value.dtype.itemsize)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return int(math.prod(value.shape) * value.dtype.itemsize)
    if type(value) is int:
        return max(_NUMBER_BYTES, value.bit_length() // 8)
    return _NUMBER_BYTES
