"""Tokens choose their experts, and go to the hosts that have them: a sparse exchange between real processes.

    python examples/route_tokens.py [--hosts 4] [--tokens 1000]

Every host has some tokens and one expert. A gate chooses an expert for each token, so nobody knows beforehand
how many tokens go from which host to which; some hosts get none from others. Each host sends its tokens to
those hosts alone that have been chosen, knows when it has all that were sent to it, applies its expert, and
sends the results back. What comes out is compared with what one process computes by itself.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
from multiprocessing.connection import Connection

import numpy as np

from waystation.runtime.transport import TcpTransport
from waystation.runtime.transport.sparse import Consumer, Exchange, Producer, Tracker

WIDTH = 64


def tokens_of(host: int, count: int) -> np.ndarray:
    """The tokens that a host begins with."""
    return np.random.default_rng(host).standard_normal((count, WIDTH)).astype(np.float32)


def expert(host: int) -> np.ndarray:
    """The weights of a host's expert."""
    return np.random.default_rng(1000 + host).standard_normal((WIDTH, WIDTH)).astype(np.float32)


def choose(tokens: np.ndarray, experts: int) -> np.ndarray:
    """The gate: which expert each token goes to. The last is chosen by nobody, as happens."""
    gate = np.random.default_rng(2000).standard_normal((WIDTH, max(experts - 1, 1)))
    return np.argmax(tokens @ gate, axis=1)


def serve(pipe: Connection, host: int, secret: bytes, token_count: int) -> None:
    """One host: its tokens out, other hosts' tokens in, and the results back."""
    transport = TcpTransport(f"host{host}", secret)
    pipe.send(transport.address)
    hosts: tuple[str, ...] = pipe.recv()
    out = Exchange(
        run=1,
        epoch=1,
        first_transfer=0,
        producers=hosts,
        consumers=hosts,
        tracker=hosts[0],
        row_shape=(WIDTH,),
        dtype=np.dtype(np.float32),
    )
    back = Exchange(
        **{name: getattr(out, name) for name in out.__slots__} | {"first_transfer": out.transfer_count}
    )
    trackers = [Tracker(transport, out), Tracker(transport, back)] if host == 0 else [None, None]
    incoming, returning = Consumer(transport, out, host), Consumer(transport, back, host)

    tokens = tokens_of(host, token_count)
    chosen = choose(tokens, len(hosts))
    sender = Producer(transport, out, host)
    for number in np.unique(chosen):
        sender.send(int(number), tokens[chosen == number])
    sender.finish()
    if trackers[0]:
        trackers[0].run()

    answers = Producer(transport, back, host)
    taken = incoming.receive()
    for number, rows in taken.items():
        answers.send(number, rows @ expert(host))
    answers.finish()
    if trackers[1]:
        trackers[1].run()

    results = np.empty_like(tokens)
    for number, rows in returning.receive().items():
        results[chosen == number] = rows
    pipe.send((sum(map(len, taken.values())), len(taken), results))
    pipe.recv()  # nobody closes before all have what they were sent
    transport.close()


def main() -> None:
    """Starts the hosts, and compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1000, help="on each host")
    arguments = parser.parse_args()
    context, secret = multiprocessing.get_context("spawn"), secrets.token_bytes(32)
    pipes, processes = [], []
    for host in range(arguments.hosts):
        pipe, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, host, secret, arguments.tokens), daemon=True)
        process.start()
        theirs.close()
        pipes.append(pipe)
        processes.append(process)
    addresses = tuple(pipe.recv() for pipe in pipes)
    for pipe in pipes:
        pipe.send(addresses)
    for host, pipe in enumerate(pipes):
        token_count, sender_count, results = pipe.recv()
        tokens = tokens_of(host, arguments.tokens)
        chosen = choose(tokens, arguments.hosts)
        expected = np.stack([token @ expert(number) for token, number in zip(tokens, chosen, strict=True)])
        np.testing.assert_allclose(results, expected, rtol=1e-3, atol=1e-3)
        print(f"host {host}: {token_count} tokens came from {sender_count} hosts; its own results are right")
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("done")
        process.join()


if __name__ == "__main__":
    main()
