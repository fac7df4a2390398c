"""Loads of what every process needs, from an object store that answers a bounded number of requests a second.

The store is a real server of S3's protocol (VersityGW). A link in front of it counts the requests and lets
through a bounded number each second, whatever their size. It holds the others back and refuses none. All
processes read the whole checkpoint, or each byte is read once and sent on. They share one machine and its
cores, so they are few; `Model` says what more of them would take.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.distributed import programs
from benchmarks.distributed.broadcast import BROADCAST, EVERYONE, MANNERS, OPERATION, compared
from benchmarks.distributed.process import Request
from benchmarks.distributed.replicas import save_request
from benchmarks.distributed.session import Session
from benchmarks.rounds import Case, Results
from benchmarks.storage import server
from benchmarks.systems import UnavailableError
from benchmarks.targets import Line

NAME = "readers"
COUNTS = (2, 4, 8)
MODELLED = (2, 4, 8, 16, 32)
REQUESTS_PER_S = 40
NEEDED_AT_MOST = 2.0


def subject_of(processes: int) -> str:
    return f"{processes} readers"


def measure(session: Session, repetition: int) -> None:
    """One round: a save without a bound, and the loads of it, beginning with another manner each time."""
    for processes in COUNTS:
        saving = Case(NAME, subject_of(processes), "waystation", "save")
        try:
            with _store(session) as (direct, throttled):
                path = f"s3://{server.BUCKET}/checkpoint"
                request = replace(save_request(session, path, processes), endpoint=direct)
                if session.run(saving, repetition, request):
                    _load_in_turns(session, request, throttled, repetition)
        except UnavailableError as error:
            session.record(saving, repetition, {"status": "missing", "reason": str(error)})


def _load_in_turns(session: Session, saved: Request, throttled: server.Throttled, repetition: int) -> None:
    manners = list(MANNERS)
    shift = repetition % len(manners)
    for manner in manners[shift:] + manners[:shift]:
        settings = {
            "array.loading.load_and_broadcast": MANNERS[manner],
            "array.loading.replica_axis": "data",
        }
        request = replace(
            saved,
            operation="load",
            settings=settings,
            endpoint=f"http://127.0.0.1:{throttled.port}",
            verify_all=repetition == 0,
        )
        before = throttled.requests()
        outcome = programs.run(request, session.directory / "program", session.timeout_s)
        outcome["requests"] = throttled.requests() - before
        session.record(Case(NAME, subject_of(saved.processes), manner, OPERATION), repetition, outcome)


@contextlib.contextmanager
def _store(session: Session) -> Iterator[tuple[str, server.Throttled]]:
    """A server with an empty bucket: where it is reached, and a link to it that is bounded."""
    directory = session.directory / "server"
    directory.mkdir(parents=True)
    try:
        with server.running(directory) as port, server.throttled(port, REQUESTS_PER_S) as link:
            yield f"http://127.0.0.1:{port}", link
    finally:
        shutil.rmtree(directory)


def count(session: Session, rounds: int) -> int:
    """How many programs that many rounds run."""
    del session
    return rounds * len(COUNTS) * (1 + len(MANNERS))


# ---- more readers than there are processes -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """How long a load takes with any number of readers, from the loads by the most that were measured.

    Attributes:
        alone_requests: What each reader asks for that reads everything.
        shared_requests: What all together ask for once, when each byte is read once.
        own_requests: What each asks for besides, when each byte is read once.
        everyone_s: Of the loads in which all read, beyond the store's time.
        broadcast_s: The same of the loads with a broadcast.
    """

    alone_requests: float
    shared_requests: float
    own_requests: float
    everyone_s: float
    broadcast_s: float

    def seconds(self, readers: int, *, broadcast: bool) -> float:
        """Of a load by so many."""
        if broadcast:
            requests = self.shared_requests + self.own_requests * readers
            return requests / REQUESTS_PER_S + self.broadcast_s
        return self.alone_requests * readers / REQUESTS_PER_S + self.everyone_s


def model_of(results: Results) -> Model | None:
    """From the medians of the fewest and of the most readers; None where they were not measured."""
    found = {}
    for manner in (EVERYONE, BROADCAST):
        for processes in (COUNTS[0], COUNTS[-1]):
            case = Case(NAME, subject_of(processes), manner, OPERATION)
            seconds, requests = results.series(case), results.series(case, "requests")
            if seconds is None or requests is None:
                return None
            found[manner, processes] = seconds.median, requests.median
    few, most = COUNTS[0], COUNTS[-1]
    read_s, read = found[EVERYONE, most]
    sent_s, sent = found[BROADCAST, most]
    own = max(0.0, (sent - found[BROADCAST, few][1]) / (most - few))
    return Model(
        alone_requests=read / most,
        shared_requests=sent - own * most,
        own_requests=own,
        everyone_s=max(0.0, read_s - read / REQUESTS_PER_S),
        broadcast_s=max(0.0, sent_s - sent / REQUESTS_PER_S),
    )


# ---- targets -----------------------------------------------------------------------------------


def evaluate(results: Results) -> Iterator[Line]:
    """How much faster one read is than many, and whether the choice is right."""
    return compared(results, NAME, [subject_of(processes) for processes in COUNTS], NEEDED_AT_MOST)
