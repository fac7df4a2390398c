"""Sparse exchanges along sharded edges: which shard sends to which is decided while the program runs.

A producer counts what it sends in an `Outbox` and declares it to the `ExchangeTracker` of the exchange; a
consumer's `Inbox` knows when all is there. All three are pure machines; messages travel however they like.
"""

from waystation.runtime.exchange.progress import ExchangeTracker, Expected, Failed, Inbox, Outbox

__all__ = ["ExchangeTracker", "Expected", "Failed", "Inbox", "Outbox"]
