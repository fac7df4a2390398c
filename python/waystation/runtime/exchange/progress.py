"""Progress of a sparse exchange: each consumer finds out when it has all its messages.

Any producer may send to any consumer, but each chooses only a few, while it runs. So a consumer cannot know
how many messages to wait for until every producer has said that it is done, and how many it has sent to whom.
Producers tell that to one `ExchangeTracker`, which adds up and tells each consumer its total: messages as
many as producers and consumers, where telling each other would take as many as pairs. Counts of what was not
sent are not sent either.

Pure machines. What drives the tracker: `declare` and `fail` of producers; it emits `Expected` or `Failed` for
each consumer. What drives a consumer: its messages, and what the tracker emits; both may come in any order,
and twice. Invariant: a consumer is complete when it has every message that was sent to it, and never before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from waystation._errors import Conflict, InvalidInput, Unavailable


@dataclass(frozen=True, slots=True)
class Expected:
    """How many messages a consumer gets in all.

    Attributes:
        consumer: Its number.
        count: The number of messages, from all producers together.
    """

    consumer: int
    count: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A consumer will not get all its messages.

    Attributes:
        consumer: Its number.
        why: What happened to which producer.
    """

    consumer: int
    why: str


class Outbox:
    """Counts what one producer sends."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def send(self, consumer: int) -> int:
        """Notes a message to a consumer; returns its number among those of this producer to that consumer."""
        self._counts[consumer] += 1
        return self._counts[consumer] - 1

    def counts(self) -> dict[int, int]:
        """How many messages went to each consumer that got any: what the producer declares at its end."""
        return dict(sorted(self._counts.items()))


class ExchangeTracker:
    """Adds up what producers have sent.

    Args:
        producers: How many producers there are, numbered from 0 on.
        consumers: How many consumers there are, numbered from 0 on.
    """

    def __init__(self, producers: int, consumers: int) -> None:
        self._consumers = consumers
        self._producers = producers
        self._undeclared = set(range(producers))
        self._declarations: dict[frozenset[int], dict[int, int]] = {}
        self._totals: Counter[int] = Counter()
        self._failure: str | None = None

    @property
    def undeclared(self) -> frozenset[int]:
        """The producers that are not done."""
        return frozenset(self._undeclared)

    def declare(self, producers: Collection[int], counts: Mapping[int, int]) -> list[Expected]:
        """Producers are done; those of one host may declare together.

        Args:
            producers: Their numbers.
            counts: How many messages they have sent to each consumer together; none to those that are not
                here.

        Returns:
            What every consumer is to be told, once all producers are done; else nothing.

        Raises:
            InvalidInput: There is no such producer or consumer.
            Conflict: A producer has declared something else before.
        """
        declared = frozenset(producers)
        wrong = [number for number in declared if not 0 <= number < self._producers]
        if wrong or not all(0 <= number < self._consumers and count >= 0 for number, count in counts.items()):
            raise InvalidInput(
                f"producers {sorted(declared)} declare {dict(counts)} among {self._producers} producers and "
                f"{self._consumers} consumers"
            )
        if self._declarations.get(declared) == dict(counts):
            return []
        if not declared <= self._undeclared:
            again = sorted(declared - self._undeclared)
            raise Conflict(f"producers {again} have declared what they sent, and declare something else now")
        self._declarations[declared] = dict(counts)
        self._undeclared -= declared
        self._totals.update(counts)
        if self._undeclared or self._failure is not None:
            return []
        return [Expected(consumer, self._totals[consumer]) for consumer in range(self._consumers)]

    def fail(self, producer: int, why: str) -> list[Failed]:
        """A producer has died before it was done; its consumers are unknown, so all are told, once.

        Args:
            producer: Its number; the death of one that is done changes nothing.
            why: What happened, naming program and host.
        """
        if producer not in self._undeclared or self._failure is not None:
            return []
        self._failure = f"producer {producer} of an exchange: {why}"
        return [Failed(consumer, self._failure) for consumer in range(self._consumers)]


class Inbox:
    """What one consumer has got.

    Args:
        consumer: Its number.
    """

    def __init__(self, consumer: int) -> None:
        self.consumer = consumer
        self._received: set[tuple[int, int]] = set()
        self._expected: int | None = None
        self._failure: str | None = None

    @property
    def received_count(self) -> int:
        """How many different messages have come."""
        return len(self._received)

    @property
    def is_complete(self) -> bool:
        """Whether all messages are here.

        Raises:
            Unavailable: Some will never come.
        """
        if self._failure is not None:
            raise Unavailable(
                f"consumer {self.consumer} lacks messages of {self._failure}; run the program again"
            )
        return self._expected == len(self._received)

    def receive(self, producer: int, number: int) -> bool:
        """Notes a message; returns whether it is new.

        Args:
            producer: Who sent it.
            number: What `Outbox.send` returned for it.

        Raises:
            Conflict: There are more messages than all producers have declared.
        """
        if (producer, number) in self._received:
            return False
        if self._expected == len(self._received):
            raise Conflict(
                f"consumer {self.consumer} gets message {number} of producer {producer}, one more than the "
                f"{self._expected} that were declared"
            )
        self._received.add((producer, number))
        return True

    def expect(self, expected: Expected) -> None:
        """Notes how many messages there are.

        Raises:
            Conflict: More have come already.
        """
        if expected.count < len(self._received):
            raise Conflict(
                f"consumer {self.consumer} has {len(self._received)} messages, declared are {expected.count}"
            )
        self._expected = expected.count

    def fail(self, failed: Failed) -> None:
        """Notes that messages will never come."""
        self._failure = failed.why
