"""Values that end with the last who holds them: programs and functions, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Held(Generic[T]):
    """Values by name, each for as long as somebody holds that name.

    A name can be held before it has a value. Holds are counted: who holds a name twice releases it twice.
    """

    def __init__(self) -> None:
        self._values: dict[str, T] = {}
        self._counts: Counter[str] = Counter()
        self._names: dict[Hashable, Counter[str]] = {}  # by holder

    def __len__(self) -> int:
        """How many names are held."""
        return len(self._counts)

    def __contains__(self, name: object) -> bool:
        """Whether a name is held."""
        return name in self._counts

    def get(self, name: str) -> T | None:
        """The value of a name; None if it has none."""
        return self._values.get(name)

    def set(self, name: str, value: T) -> None:
        """Gives a name that is held its value."""
        if name in self._counts:
            self._values[name] = value

    def hold(self, name: str, holder: Hashable) -> None:
        """Somebody holds a name, once more."""
        self._counts[name] += 1
        self._names.setdefault(holder, Counter())[name] += 1

    def release(self, name: str, holder: Hashable) -> T | None:
        """Somebody holds a name once less; what they do not hold stays.

        Returns:
            The value that has ended with that, if one has.
        """
        names = self._names.get(holder)
        if names is None or name not in names:
            return None
        return self._release(names, name, 1, holder)

    def drop(self, holder: Hashable) -> list[T]:
        """Somebody holds nothing any more; returns the values that have ended with that."""
        names = self._names.get(holder, Counter())
        ended = [self._release(names, name, count, holder) for name, count in list(names.items())]
        return [value for value in ended if value is not None]

    def _release(self, names: Counter[str], name: str, count: int, holder: Hashable) -> T | None:
        names[name] -= count
        if not names[name]:
            del names[name]
        if not names:
            self._names.pop(holder, None)
        self._counts[name] -= count
        if self._counts[name]:
            return None
        del self._counts[name]
        return self._values.pop(name, None)
