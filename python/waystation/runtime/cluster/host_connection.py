"""What one host is told, in order, and what of that it has not ended as far as is known.

What there is to tell is kept until `flush`, which sends it in one frame. How much that can be is bounded by
what schedulers let be in flight. What is to be forgotten is in no hurry: it goes along with what comes next,
or by itself a moment later, since every frame wakes a host. In the event loop of the manager, without locks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from waystation._errors import Corrupt
from waystation.runtime.control.host_messages import (
    BeginMessage,
    ForgetCode,
    ReleaseBuffers,
    Told,
    pack_told,
    unpack_done,
)
from waystation.runtime.control.listener import End
from waystation.runtime.control.packing import Packer, Unpacker
from waystation.runtime.messages import Done, Message, is_transfer

_RELEASES_WAIT_S = 0.001


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A message that a host was told and has not ended.

    Attributes:
        number: Its place among all that the host was told.
        place: Its place in the order of the island.
        hosts: The hosts of the island that take part in its work.
        is_transfer: Whether it moves bytes between devices and storage: no other message waits for its end.
    """

    number: int
    place: int
    hosts: frozenset[str]
    is_transfer: bool


class HostConnection:
    """The controller's end of the connection of a host.

    Args:
        end: The connection.
        on_done: Is told what the host has done.
        on_lost: Is told of the end of the connection.

    Attributes:
        functions: The functions that the host has said to have.
    """

    def __init__(
        self, end: End, on_done: Callable[[Sequence[Done]], None], on_lost: Callable[[], None]
    ) -> None:
        self.functions: set[str] = set()
        self._calls: dict[str, frozenset[str]] = {}  # by list that it has, or is being given
        self._callers: Counter[str] = Counter()  # how many of these lists call each function
        self._end = end
        self._on_done = on_done
        self._count = 0
        self._under_way: dict[int, UnderWay] = {}  # by work, in order
        self._waiting: list[Told] = []
        self._is_urgent = False
        self._later: asyncio.TimerHandle | None = None
        self._packer = Packer()
        self._unpacker = Unpacker(end.name)
        end.attend(self._hear, on_lost)

    @property
    def work(self) -> int:
        """The work that the host is at, as far as is known; -1 if there is none."""
        computing = (work for work, each in self._under_way.items() if not each.is_transfer)
        return next(computing, next(iter(self._under_way), -1))

    def first(self) -> UnderWay | None:
        """The first message that the host has not ended, without transfers; None if there is none."""
        return next((each for each in self._under_way.values() if not each.is_transfer), None)

    def owes(self, begun: int) -> bool:
        """Whether it was told something that it has not said to have ended, other than transfers that go on.

        Args:
            begun: How many messages it has begun.
        """
        return self.first() is not None or any(True for _ in self._unbegun(begun))

    def place(self, begun: int, default: int) -> int:
        """The place in the order of the island of the first message that a host has not begun.

        Args:
            begun: How many it has begun.
            default: The place after all that there are.
        """
        return next((each.place for each in self._unbegun(begun)), default)

    def _unbegun(self, begun: int) -> Iterator[UnderWay]:
        return (each for each in self._under_way.values() if each.number >= begun)

    def begin(self, place: int, message: Message, hosts: Collection[str]) -> None:
        """Tells it to begin a message.

        Args:
            place: The place of the message in the order of the island.
            message: The message.
            hosts: The hosts of the island that take part in its work.
        """
        self._under_way[message.work] = UnderWay(
            self._count, place, frozenset(hosts), is_transfer(message.instructions)
        )
        self._waiting.append(BeginMessage(self._count, message))
        self._count += 1
        self._is_urgent = True

    def tell(self, told: Told) -> None:
        """Tells it something else, after all that it has been told."""
        self._waiting.append(told)
        self._is_urgent = self._is_urgent or not isinstance(told, ReleaseBuffers | ForgetCode)

    def give_list(self, listed: str, functions: Iterable[str]) -> None:
        """It is about to be given a list.

        Args:
            listed: What the list is known by.
            functions: The functions that the list calls.
        """
        self._calls[listed] = frozenset(functions)
        self._callers.update(self._calls[listed])

    def forget_list(self, listed: str) -> None:
        """Tells it to forget a list, and the functions that no other list of it calls."""
        functions = self._calls.pop(listed)
        self._callers.subtract(functions)
        uncalled = tuple(sorted(each for each in functions if not self._callers[each]))
        for each in uncalled:
            del self._callers[each]
        self.functions.difference_update(uncalled)
        self.tell(ForgetCode((listed,), uncalled))

    def flush(self) -> None:
        """Sends what it has not been sent, now or soon."""
        if self._is_urgent:
            self._send()
        elif self._waiting and self._later is None:
            self._later = asyncio.get_running_loop().call_later(_RELEASES_WAIT_S, self._send)

    def close(self) -> None:
        """Ends the connection."""
        self._waiting = []
        self._end.close()

    def _send(self) -> None:
        if self._later is not None:
            self._later.cancel()
        told, self._waiting = self._waiting, []
        self._is_urgent, self._later = False, None
        if told:
            self._end.send(pack_told(told, self._packer))

    def _hear(self, body: bytes) -> None:
        done = unpack_done(self._unpacker.open(body))
        for each in done:
            if self._under_way.pop(each.work, None) is None:
                raise Corrupt(
                    f"'{self._end.name}' says that it has done work {each.work}, which it was not told"
                )
        self._on_done(done)
