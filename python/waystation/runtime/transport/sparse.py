"""Sparse exchanges over a transport: which shard sends to which is decided while the program runs.

Every producer sends rows to the consumers of its choice, at most one block to each, and then declares how
many rows it has sent to whom. One host, the *tracker*, collects the declarations and tells each consumer what
it gets, as `waystation.runtime.exchange` says; the consumer then fetches exactly that. Messages other than
rows are as many as producers and consumers. Consumers and tracker ask before there is anything, so nobody
waits longer than for the bytes.

Failures: a producer dies before it has declared (the tracker fails the run: all consumers are told who has
died); it dies later (those fail who were to get something of it).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from waystation._errors import Conflict, InvalidInput, WaystationError
from waystation.grid import Shape
from waystation.runtime.exchange import ExchangeTracker, Expected, Inbox, Outbox
from waystation.runtime.transport.interface import Block, Fetch, Key, Transport, Wanted

_COUNT = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What all who take part in an exchange know beforehand.

    Attributes:
        run: The run that it is a part of; it fails with the exchange.
        epoch: The run's epoch.
        first_transfer: The first of `transfer_count` numbers of transfers of the run that nothing else uses.
        producers: The address of the host of each producer, in order.
        consumers: That of each consumer.
        tracker: That of the host that tracks; it may be one of them.
        row_shape: The shape of a row.
        dtype: The dtype of rows.
        deadline_s: How long a producer or a consumer may keep others waiting.
    """

    run: int
    epoch: int
    first_transfer: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    tracker: str
    row_shape: Shape
    dtype: np.dtype[Any]
    deadline_s: float = 60.0

    @property
    def transfer_count(self) -> int:
        """How many numbers of transfers it may use."""
        producers, consumers = len(self.producers), len(self.consumers)
        return producers + consumers + producers * consumers

    def declaration(self, producer: int) -> Key:
        """What a producer declares: for each consumer the number of rows."""
        return self._key(producer)

    def total(self, consumer: int) -> Key:
        """What a consumer is told: from each producer the number of rows."""
        return self._key(len(self.producers) + consumer)

    def rows(self, producer: int, consumer: int) -> Key:
        """The rows from one to the other."""
        before = len(self.producers) + len(self.consumers)
        return self._key(before + producer * len(self.consumers) + consumer)

    def _key(self, number: int) -> Key:
        return Key(self.run, self.epoch, self.first_transfer + number)


class Producer:
    """One that sends.

    Args:
        transport: That of its host.
        exchange: What it takes part in.
        number: Which of the producers it is.
    """

    def __init__(self, transport: Transport, exchange: Exchange, number: int) -> None:
        self._transport = transport
        self._exchange = exchange
        self._number = number
        self._outbox = Outbox()
        self._row_counts = np.zeros(len(exchange.consumers), _COUNT)

    def send(self, consumer: int, rows: Block) -> None:
        """Sends rows to a consumer, which has not been sent any.

        Raises:
            InvalidInput: They are not rows of the exchange, or there is no such consumer.
            Conflict: It has been sent some.
        """
        exchange = self._exchange
        if rows.shape[1:] != exchange.row_shape or rows.dtype != exchange.dtype or rows.ndim == 0:
            raise InvalidInput(
                f"rows of shape {exchange.row_shape}, {exchange.dtype} are exchanged, these are an array of "
                f"{rows.shape}, {rows.dtype}"
            )
        if not 0 <= consumer < len(exchange.consumers):
            raise InvalidInput(f"there is no consumer {consumer} among {len(exchange.consumers)}")
        if self._row_counts[consumer]:
            raise Conflict(f"producer {self._number} has sent rows to consumer {consumer} before")
        if len(rows):
            self._outbox.send(consumer)
            self._row_counts[consumer] = len(rows)
            self._transport.offer({exchange.rows(self._number, consumer): rows})

    def finish(self) -> None:
        """Declares that this was all."""
        self._transport.offer({self._exchange.declaration(self._number): self._row_counts})


@dataclass(slots=True)
class Tracker:
    """The one who tells consumers what they get. It asks producers as soon as it is made.

    Attributes:
        transport: That of its host.
        exchange: What it tracks.
    """

    transport: Transport
    exchange: Exchange
    _asked: list[Fetch] = field(init=False)

    def __post_init__(self) -> None:
        counts = (len(self.exchange.consumers),)
        self._asked = [
            self.transport.fetch(
                address,
                [Wanted(self.exchange.declaration(producer), counts, _COUNT)],
                deadline_s=self.exchange.deadline_s,
            )
            for producer, address in enumerate(self.exchange.producers)
        ]

    def run(self) -> None:
        """Waits for all producers, and tells all consumers.

        Raises:
            WaystationError: A producer has not declared; the run has been poisoned with that.
        """
        exchange = self.exchange
        machine = ExchangeTracker(len(exchange.producers), len(exchange.consumers))
        row_counts = np.zeros((len(exchange.producers), len(exchange.consumers)), _COUNT)
        expected: list[Expected] = []
        for producer, fetch in enumerate(self._asked):
            try:
                [row_counts[producer]] = fetch.result()
            except WaystationError as error:
                [failed, *_] = machine.fail(producer, str(error))
                reason = type(error)(failed.why)
                self.transport.poison(reason, run=exchange.run)
                raise reason from error
            sent = np.flatnonzero(row_counts[producer])
            expected += machine.declare([producer], {int(consumer): 1 for consumer in sent})
        totals = {
            exchange.total(each.consumer): np.ascontiguousarray(row_counts[:, each.consumer])
            for each in expected
        }
        self.transport.offer(totals)


class Consumer:
    """One that receives. It asks what it gets as soon as it is made.

    Args:
        transport: That of its host.
        exchange: What it takes part in.
        number: Which of the consumers it is.
    """

    def __init__(self, transport: Transport, exchange: Exchange, number: int) -> None:
        self._transport = transport
        self._exchange = exchange
        self._inbox = Inbox(number)
        wanted = [Wanted(exchange.total(number), (len(exchange.producers),), _COUNT)]
        self._total = transport.fetch(exchange.tracker, wanted, deadline_s=exchange.deadline_s)

    def receive(self) -> dict[int, Block]:
        """Waits for all rows that were sent to it; returns them by producer.

        Raises:
            WaystationError: A producer has failed, or has not declared in time.
        """
        [row_counts] = self._total.result()
        number = self._inbox.consumer
        senders = [int(producer) for producer in np.flatnonzero(row_counts)]
        self._inbox.expect(Expected(number, len(senders)))
        by_host: defaultdict[str, list[int]] = defaultdict(list)
        for producer in senders:
            by_host[self._exchange.producers[producer]].append(producer)
        fetches = [
            (producers, self._fetch(address, producers, row_counts)) for address, producers in by_host.items()
        ]
        received: dict[int, Block] = {}
        for producers, fetch in fetches:
            for producer, rows in zip(producers, fetch.result(), strict=True):
                self._inbox.receive(producer, 0)
                received[producer] = rows
        assert self._inbox.is_complete
        return dict(sorted(received.items()))

    def _fetch(self, address: str, producers: list[int], row_counts: Block) -> Fetch:
        exchange, number = self._exchange, self._inbox.consumer
        wanted = [
            Wanted(
                exchange.rows(producer, number),
                (int(row_counts[producer]), *exchange.row_shape),
                exchange.dtype,
            )
            for producer in producers
        ]
        return self._transport.fetch(address, wanted, deadline_s=exchange.deadline_s)
