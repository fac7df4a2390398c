"""Who is there, what share each has, and the numbers of what each submits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from waystation._errors import Conflict, InvalidInput
from waystation.runtime.scheduling import (
    Candidate,
    ClientNumbers,
    FirstInFirstOut,
    Policy,
    ProportionalShare,
)

_MOST_NAME_BYTES = 200  # a credential has room for 255; a name that is used again gets a number


class Clients:
    """Clients by name. A name that is used again later gets a number, so that the two are not mixed up."""

    def __init__(self) -> None:
        self._numbers: dict[str, ClientNumbers] = {}
        self._names: dict[str, str] = {}
        self._times: dict[str, int] = {}
        self._given: set[str] = set()  # what clients are known by, or were
        self._shares: dict[str, int] = {}
        self._policies: list[_Changeable] = []

    def __contains__(self, client: object) -> bool:
        return client in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def all(self) -> tuple[str, ...]:
        """Those who are there, by name."""
        return tuple(sorted(self._numbers))

    def add(self, name: str) -> str:
        """Counts a client in; returns what it is known by.

        Raises:
            InvalidInput: It cannot have that name.
            Conflict: One of that name is there.
        """
        if not name.isprintable() or not 0 < len(name.encode()) <= _MOST_NAME_BYTES:
            raise InvalidInput(
                f"a program cannot connect as {name!r:.60}: a name is printable and has 1 to "
                f"{_MOST_NAME_BYTES} bytes"
            )
        if name in self._names.values():
            raise Conflict(f"a program is connected as '{name}' already; connect under another name")
        client, times = name, self._times.get(name, 1)
        while client in self._given:
            times += 1
            client = f"{name} ({times})"
        self._times[name] = times
        self._given.add(client)
        self._names[client] = name
        self._numbers[client] = ClientNumbers()
        self._tell_policies()
        return client

    def remove(self, client: str) -> None:
        """Counts a client out."""
        self._numbers.pop(client, None)
        self._names.pop(client, None)

    def numbers(self, client: str) -> ClientNumbers:
        """What numbers the works of a client."""
        return self._numbers[client]

    def share(self, shares: Mapping[str, int]) -> None:
        """Divides device time in proportion to weights, by name of client; others have weight 1.

        Raises:
            InvalidInput: A weight is below 1.
        """
        ProportionalShare(shares)
        self._shares.update(shares)
        self._tell_policies()

    def policy(self) -> Policy:
        """Whose turn it is, of one island: first in first out, until there are shares."""
        made = _Changeable()
        self._policies.append(made)
        self._tell_policies()
        return made

    def _tell_policies(self) -> None:
        if self._shares:
            weights = {client: self._shares.get(name, 1) for client, name in self._names.items()}
            for policy in self._policies:
                policy.share(weights)


class _Changeable:
    """First in first out, and by shares once it is told them."""

    def __init__(self) -> None:
        self._policy: FirstInFirstOut | ProportionalShare = FirstInFirstOut()

    def share(self, weights: Mapping[str, int]) -> None:
        """Goes over to shares, or changes them."""
        if not isinstance(self._policy, ProportionalShare):
            self._policy = ProportionalShare()
        for client, weight in weights.items():
            self._policy.set_weight(client, weight)

    def choose(self, candidates: Sequence[Candidate]) -> str:
        """See `Policy`."""
        return self._policy.choose(candidates)

    def charge(self, client: str, seconds: float) -> None:
        """See `Policy`."""
        self._policy.charge(client, seconds)

    def forget(self, client: str) -> None:
        """See `Policy`."""
        self._policy.forget(client)
