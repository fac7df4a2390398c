"""What processes have to agree on that each have a storage of their own: what is there, and what is left.

Every load, save and delete begins with `settle`: each process reports the checkpoint at its path and the
prepared parts beside it, and the process that decides says which of these belong to a checkpoint. A part
whose transaction any process has committed is committed; one that nobody has committed is removed, if
enough processes answered to know that; else it stays. Parts whose process still runs are left to it.

Invariants: a process looks at its own directory alone; what is decided about a part follows from the reports
of all processes; settling twice changes nothing. Failure sequence: killed while parts are committed or
removed, the rest is settled the same way by whoever comes next, since the outcome depends only on whether
somebody has committed, which no settling takes back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from waystation import storage
from waystation._errors import CheckpointNotFound, Corrupt, InvalidInput
from waystation.coordination import Session
from waystation.coordination.round_errors import named
from waystation.layouts.native import commit, transactions
from waystation.layouts.native.boxes import MissingBox, is_held
from waystation.layouts.native.read import OpenCheckpointable
from waystation.layouts.native.records import dump_json, load_json
from waystation.storage.attempts import (
    Attempt,
    Leftover,
    is_of_this_process,
    leftovers,
    remove,
)

# A prepared part of a process that cannot be seen from here is left alone for so long.
_SILENT_S = 86_400.0
_SHOWN_GROUPS = 8

_log = logging.getLogger("waystation")

# The transactions of saves that this process is in the midst of: their parts are not left.
in_progress: set[str] = set()


@dataclass(frozen=True, slots=True)
class Report:
    """What one process finds at its path.

    Attributes:
        process: The process, as the program numbers it.
        path: The path.
        record: What tells the checkpoint there from others, if it is complete in itself; None if there is no
            checkpoint, or a part of one.
        part: `(transaction, process, process_count)` of a part.
        undecided: The transactions of which a prepared part is left, with the number of their processes.
    """

    process: int
    path: str
    record: str | None
    part: tuple[str, int, int] | None
    undecided: dict[str, int]

    @property
    def identity(self) -> str | None:
        """What is the same for all parts of one save; None where no checkpoint is."""
        return self.record if self.part is None else self.part[0]

    @property
    def text(self) -> str:
        """What is there, for people."""
        if self.part is not None:
            return "a part of save {} (of process {} of {})".format(*self.part)
        return "no checkpoint" if self.record is None else "a checkpoint that is not of local storage"


Look = Callable[[Sequence[Report]], None]


def nothing(_: Sequence[bytes]) -> bytes:
    """The decision of a round in which nothing has to be decided."""
    return b""


def settle(session: Session, target: str, look: Look = lambda _reports: None) -> None:
    """Ends the transactions that were left at the processes' paths, as far as their end can be told.

    Args:
        session: Of all processes.
        target: This process's path.
        look: Called in the process that decides, with what each process finds afterwards.
    """
    here = session.processes[session.process_index]

    def decide(parts: Sequence[bytes]) -> bytes:
        reports = list(map(_decode, parts))
        verdicts = _verdicts(reports)
        if not verdicts:
            look(reports)
            return b""
        return dump_json(verdicts)

    decided = session.round(lambda: _encode(_report(target, here)), decide)
    if not decided:
        return
    verdicts = load_json(decided, "what was decided about prepared parts")

    def work() -> bytes:
        _end(target, verdicts)
        return _encode(_report(target, here))

    def look_again(parts: Sequence[bytes]) -> bytes:
        look(list(map(_decode, parts)))
        return b""

    session.round(work, look_again)


def require_agreement(reports: Sequence[Report]) -> None:
    """Refuses processes that do not all have a part of the same save.

    Raises:
        NotFound: No process has a checkpoint.
        Corrupt: Some have none, or another one: says which process has which.
    """
    identities = {report.identity for report in reports}
    if len(identities) == 1 and None not in identities:
        return
    waiting = sorted({transaction for report in reports for transaction in report.undecided})
    hint = ""
    if waiting:
        hint = (
            f"\nparts of save {', '.join(waiting)} are prepared, but whether they belong to a checkpoint "
            "only all processes of that save can tell: start as many again, on the same hosts"
        )
    if identities == {None}:
        raise CheckpointNotFound(f"no process has a checkpoint at its path{_shown(reports)}{hint}")
    raise Corrupt(
        f"the processes do not have parts of the same checkpoint at their paths{_shown(reports)}{hint}\n"
        "load an earlier checkpoint that all of them have, on the hosts that saved it"
    )


def tell_holders(session: Session, opened: OpenCheckpointable, work: Callable[[], bytes]) -> None:
    """Does a round in which each process reads its storage; if one lacks something, finds out who has it.

    Raises:
        InvalidInput: A process needs a box that its storage does not hold: names the array, the box, and the
            processes whose storage does.
    """

    def attempt() -> bytes:
        try:
            return work()
        except MissingBox as error:
            here = session.processes[session.process_index]
            return dump_json([here, error.array, error.box, error.message])

    missing = session.round(attempt, lambda parts: next(filter(None, parts), b""))
    if not missing:
        return
    process, array, box, message = load_json(missing, "what another process lacks")
    offset, shape = (tuple(part) for part in box)
    label = opened.tree.labels[array]

    def explain(parts: Sequence[bytes]) -> bytes:
        holders = [holder for holder, part in zip(session.processes, parts, strict=True) if part == b"held"]
        who = (
            f"the storage of {named(holders)} has it"
            if holders
            else "no process of this program has all of it in its storage"
        )
        raise InvalidInput(f"{message}; {who}", array=label, process=process)

    def answer() -> bytes:
        tree = opened.tree
        return b"held" if is_held(opened.tables, array, (offset, shape), tree.arrays, tree.labels) else b""

    session.round(answer, explain)


def _shown(reports: Sequence[Report]) -> str:
    groups: dict[str, list[Report]] = {}
    for report in reports:
        groups.setdefault(report.text, []).append(report)
    lines = [
        f"\n  {named([report.process for report in group])}: {text}, at '{group[0].path}'"
        for text, group in list(groups.items())[:_SHOWN_GROUPS]
    ]
    more = len(groups) - _SHOWN_GROUPS
    return ":" + "".join(lines) + (f"\n  and {more} others" if more > 0 else "")


def _report(target: str, process: int) -> Report:
    found = transactions.look(target)
    undecided = {}
    for leftover in _undecided(target):
        part = transactions.prepared_part(target, leftover.attempt_id)
        if part is not None:
            undecided[part.transaction] = part.process_count
    if found is None:
        return Report(process, target, None, None, undecided)
    if found.part is None:
        return Report(process, target, f"record {found.digest.crc64:016x}", None, undecided)
    part = found.part
    there = (part.transaction, part.process, part.process_count)
    return Report(process, target, None, there, undecided)


def _undecided(target: str) -> Iterator[Leftover]:
    """The prepared parts at a path that their processes have left."""
    for leftover in leftovers(*os.path.split(target)):
        if leftover.undecided and (not leftover.is_running or _is_given_up(leftover)):
            yield leftover


def _is_given_up(leftover: Leftover) -> bool:
    """Whether it is of a save of this process that has failed, when it could not tell the outcome."""
    is_own = is_of_this_process(leftover.attempt_id)
    return is_own and storage.names.transaction(leftover.attempt_id) not in in_progress


def _verdicts(reports: Sequence[Report]) -> dict[str, bool]:
    """Of each transaction that can be ended, whether its parts belong to a checkpoint."""
    committed = {report.part[0] for report in reports if report.part is not None}
    counts: dict[str, int] = {}
    for report in reports:
        counts.update(report.undecided)
    return {
        transaction: transaction in committed
        for transaction, process_count in counts.items()
        if transaction in committed or len(reports) >= process_count
    }


def _end(target: str, verdicts: dict[str, bool]) -> None:
    """Commits or removes the parts at this process's path."""
    for leftover in _undecided(target):
        transaction = storage.names.transaction(leftover.attempt_id) or ""
        part = transactions.prepared_part(target, leftover.attempt_id)
        if part is None or transaction not in verdicts:
            continue
        if verdicts[transaction]:
            attempt = Attempt.reopened(target, leftover)
            commit.publish_part(attempt, part)
            commit.remove_replaced(attempt)
            _log.info("completed the checkpoint '%s' of a save that was killed", target)
        elif leftover.dead or _is_given_up(leftover) or leftover.age_s >= _SILENT_S:
            remove(leftover)
            _log.info("removed a part of a save of '%s' that was killed before its commit", target)


def _encode(report: Report) -> bytes:
    return dump_json([report.process, report.path, report.record, report.part, report.undecided])


def _decode(data: bytes) -> Report:
    process, path, record, part, undecided = load_json(data, "the report of another process")
    return Report(process, path, record, None if part is None else (part[0], part[1], part[2]), undecided)
