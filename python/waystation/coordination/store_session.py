"""Sessions of several processes over a key-value store. What lies in the store is described in `store`.

A round fails, in this order of preference for what is then raised: this process's own error, as it is; the
verdict, once there is one; what this process finds out while it waits: a death, a deadline that has passed,
a store that does not answer. All but the last of these become the verdict for everybody.

Invariants: whatever is raised in a round has been told to the others, or could not be told because the
store is gone; after an error the session is over; nothing waits without a limit; a process that has not come
is called dead or late, never out of step.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from waystation._errors import Internal, InvalidInput, Unavailable, WaystationError
from waystation.coordination import envelopes, error_codec, round_errors
from waystation.coordination.envelopes import DECISION, DISAGREEMENT, FAILURE, PART, Envelope
from waystation.coordination.store import Store

_log = logging.getLogger("waystation")

_SHORTEST_WAIT_S = 0.25
# Between looks whether all have left a session that is closed together.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1
# How long a process that takes the store with it waits for the others to have read the last verdict.
FAREWELL_S = 5.0
# Those that wait longer than this for the first round ask whether they wait for the same.
_COMPARE_AFTER_S = 1.0
# How long the first round of a call waits until it is logged who has not come: usually nobody is that slow.
TELL_AFTER_S = 30.0
# If the primary has not come, one of so many others tells.
_MOST_TELLING = 8

_ALL_HERE, _FAILED = b"all are here", b"failed"
_ALL_OUT, _NOT_AWAITED = b"all are out", b"not awaited"


@dataclass(slots=True)
class Numbering:
    """Sessions of one sequence that are numbered from 0 on.

    Attributes:
        prefix: Of their keys.
        index: Which numbering of the sequence this is.
        opened: How many this process has opened.
        ended_at: The session in which the processes were out of step, once this process knows of one.
    """

    prefix: str
    index: int
    opened: int = 0
    ended_at: int | None = None

    @property
    def ended(self) -> str:
        """The key of the disagreement."""
        return f"{self.prefix}/ended"

    def end(self, number: int) -> None:
        """The processes were out of step in this session; of several the first counts."""
        self.ended_at = number if self.ended_at is None else min(number, self.ended_at)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of one round."""

    prefix: str

    @property
    def arrived(self) -> str:
        return f"{self.prefix}/arrived"

    @property
    def ready(self) -> str:
        return f"{self.prefix}/ready"

    @property
    def verdict(self) -> str:
        return f"{self.prefix}/verdict"

    @property
    def verdict_pieces(self) -> str:
        return f"{self.prefix}/pieces/verdict"

    @property
    def parts(self) -> str:
        return f"{self.prefix}/part"

    @property
    def wanted(self) -> str:
        return f"{self.prefix}/wanted"

    @property
    def looking(self) -> str:
        return f"{self.prefix}/looking"

    def part_pieces(self, process: int) -> str:
        return f"{self.prefix}/pieces/{process}"


class StoreSession:
    """One operation of several processes. See `coordination.base.Session`."""

    def __init__(
        self,
        store: Store,
        numbering: Numbering,
        number: int,
        what: str,
        processes: tuple[int, ...],
        process_index: int,
        primary: int,
        deadline_s: float,
    ) -> None:
        self.process_index = process_index
        self.process_count: int = len(processes)
        self.primary = primary
        self.processes = processes
        # The store's own process, if it takes part: then it has to outlive the others' last look.
        self._host = processes.index(store.host) if store.host in processes else None
        self._store = store
        self._numbering = numbering
        self._number = number
        self._prefix = f"{numbering.prefix}/{number}"
        self._what = what
        # On which all processes of the session have to agree.
        self._agreement: dict[str, Any] = {"what": what, "primary": processes[primary]}
        self._deadline_s = deadline_s
        self._rounds = 0
        self._in_round: _Keys | None = None  # the one that has begun, and has no decision yet
        self._over = False
        self._is_told = False  # whether the others know why it is over
        self._closed = False
        self._handed_in: list[str] = []  # the keys of this process's part
        self._verdict_pieces: dict[int, list[str]] = {}  # of the last rounds, by their number
        # Processes of the program that do not come to the end of the session, as far as this one knows, and
        # those of them that all have given up: the dead, and the late.
        self._absent: set[int] = set()
        self._given_up: set[int] = set()
        self._handled = sys.exception()  # which the caller was handling before, so that it is not of this
        self._others = [index for index in range(self.process_count) if index != self.process_index]
        self._watched = self._named(self._others if self.is_primary else [primary])
        try:
            store.begin(self._watched)
        except BaseException as error:  # the others have taken the same number, and come
            self._tell_others(error)
            raise

    @property
    def is_primary(self) -> bool:
        """Whether this process decides."""
        return self.process_index == self.primary

    def round(self, work: Callable[[], bytes], decide: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Does this process's part, has the primary decide, and returns the decision."""
        if self._over or self._closed:
            raise InvalidInput(f"{self._what}: this session has ended, so that it has no more rounds")
        keys = self._in_round = self._keys(self._rounds)
        self._rounds += 1
        try:
            outcome = self._outcome(keys, work, decide)
        except BaseException as error:
            self._over = True
            if not isinstance(error, Exception):  # an interrupt waits for nobody who has not come
                self._note_absent(keys)
            self._tell_others(error)
            self._note_failure([])
            raise
        finally:
            # Not before the verdict: whoever misses a part knows that there is one.
            handed_in, self._handed_in = self._handed_in, []
            if not self._store.removes_below:
                self._remove(handed_in)
        if isinstance(outcome, WaystationError):
            self._over = self._is_told = True
            self._note_failure([])
            raise outcome
        self._in_round = None
        return outcome

    def barrier(self) -> None:
        """Waits until every process is here."""
        self.round(lambda: b"", lambda parts: b"")

    def look(self) -> None:
        """Raises what another process has failed with since the last round."""
        if self._over or self._closed:
            return
        keys = self._keys(self._rounds)
        sealed = self._store.get(keys.verdict, 0)
        # Without this process's part only a failure can be there.
        outcome = None if sealed is None else self._open_verdict(keys, sealed)
        if isinstance(outcome, WaystationError):
            self._over = self._is_told = True
            self._note_failure([])
            raise outcome

    def broadcast(self, make: Callable[[], bytes]) -> bytes:
        """What `make` returns in the primary, in which alone it is called."""
        return self.round(lambda: b"", lambda parts: make())

    def gather(self, part: bytes) -> list[bytes] | None:
        """The parts of all processes by their index in the primary, None elsewhere."""
        gathered: list[bytes] | None = None

        def keep(parts: Sequence[bytes]) -> bytes:
            nonlocal gathered
            gathered = list(parts)
            return b""

        self.round(lambda: part, keep)
        return gathered

    def close(self) -> None:
        """Ends the session. If an error leads here that no round has told, the others hear of it."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._is_in_vain:
                return
            error = sys.exception()
            # A second interrupt may have kept a round from telling of the first.
            if error is not None and error is not self._handled and not self._is_told:
                self._tell_others(error)
            self._leave()
        except WaystationError as unable:
            # The work is done, or has failed with an error that says more; the store takes its keys along.
            _log.debug("a session could not be ended in the store: %s", unable)
        finally:
            self._store.end(self._watched)

    def close_together(self) -> None:
        """Ends the session, and waits until every other process has, or cannot be waited for."""
        if self._closed:
            return
        self.close()
        if self._is_in_vain:
            return
        self._store.begin(self._watched)
        try:
            self._await_others()
        except WaystationError as unable:
            _log.debug("who has left a session could not be read: %s", unable)
        finally:
            self._store.end(self._watched)

    # One round ------------------------------------------------------------------------------------------

    def _outcome(
        self, keys: _Keys, work: Callable[[], bytes], decide: Callable[[Sequence[bytes]], bytes]
    ) -> bytes | WaystationError:
        """The decision, or the error of another process."""
        part = work()
        self._hand_in(keys, part)
        if self.is_primary:
            return self._decide(keys, part, decide)
        verdict = self._wait(keys, keys.verdict)
        return verdict if isinstance(verdict, WaystationError) else self._open_verdict(keys, verdict)

    def _hand_in(self, keys: _Keys, part: bytes) -> None:
        """Puts this process's part into the store, and says that it has come."""
        agreement = self._agreement if self._in_first_round else None
        value = b"" if self.is_primary else part  # the primary needs its own from nowhere
        pieces_at = keys.part_pieces(self.process_index)
        envelope, self._handed_in = envelopes.seal(self._store, PART, value, pieces_at, agreement)
        key = f"{keys.parts}/{self.process_index}"
        self._handed_in.append(key)
        self._store.set(key, envelope)
        if self._store.add(keys.arrived, 1) == self.process_count:
            self._store.set_once(keys.ready, _ALL_HERE)

    def _decide(
        self, keys: _Keys, own: bytes, decide: Callable[[Sequence[bytes]], bytes]
    ) -> bytes | WaystationError:
        """What the primary does once its own part is done."""
        ready = self._wait(keys, keys.ready)
        if isinstance(ready, WaystationError):
            return ready
        parts = self._collect(keys, own) if ready == _ALL_HERE else None
        if isinstance(parts, WaystationError):
            return parts
        if parts is None:
            return self._read_verdict(keys)
        decision = decide(parts)
        envelope, pieces = envelopes.seal(self._store, DECISION, decision, keys.verdict_pieces)
        if not self._store.set_once(keys.verdict, envelope):
            self._remove(pieces)
            return self._read_verdict(keys)
        self._verdict_pieces[self._rounds - 1] = pieces
        if not self._store.removes_below:
            self._remove([keys.arrived, keys.ready, *self._verdict_before()])
        elif self._rounds > 1:
            self._remove([self._keys(self._rounds - 2).prefix])
        return decision

    def _collect(self, keys: _Keys, own: bytes) -> list[bytes] | WaystationError | None:
        """The parts of all processes, or the error that they are out of step; None if somebody has ended the
        round meanwhile."""
        found = self._read_parts(keys, self._others)
        opened = {index: envelope for index, envelope in found.items() if envelope is not None}
        if len(opened) < len(found):
            return None
        disagreement = self._disagreement(opened) if self._in_first_round else None
        if disagreement is not None:
            return self._end_numbering(keys, disagreement)
        parts = []
        for index in range(self.process_count):
            part: bytes | None = own
            if index != self.process_index:
                pieces_at = keys.part_pieces(index)
                part = envelopes.content(self._store, opened[index], pieces_at)
            if part is None:
                return None
            parts.append(part)
        return parts

    def _read_parts(self, keys: _Keys, processes: Sequence[int]) -> dict[int, Envelope | None]:
        read = self._store.read(keys.parts, [str(index) for index in processes])
        return {
            index: None if envelope is None else envelopes.unseal(envelope)
            for index, envelope in zip(processes, read, strict=True)
        }

    # Out of step ----------------------------------------------------------------------------------------

    def _disagreement(self, others: dict[int, Envelope]) -> InvalidInput | None:
        """The error of a first round in which these processes want something else than this one, or than one
        another; None if they agree."""
        said = {self.process_index: self._agreement}
        said |= {index: envelope.agreement for index, envelope in others.items()}
        return round_errors.disagreement(
            {
                self.processes[index]: (str(wanted.get("what")), int(wanted.get("primary", -1)))
                for index, wanted in said.items()
            }
        )

    def _compare(self, keys: _Keys) -> WaystationError | None:
        """Whether those that have come to the first round are out of step, without waiting for the others."""
        ended = self._ended_before()
        if ended is not None:
            return self._give_up(keys, ended, DISAGREEMENT)
        wanted = json.dumps(self._agreement).encode()
        if self._store.set_once(keys.wanted, wanted) or self._store.get(keys.wanted, 0) in (None, wanted):
            return None
        # One of those that notice looks what everybody wants: there may be many.
        if not self._store.set_once(keys.looking, b"%d" % self.process_index):
            return None
        disagreement = self._disagreement(self._come(keys))
        return None if disagreement is None else self._end_numbering(keys, disagreement)

    def _end_numbering(self, keys: _Keys, error: WaystationError) -> WaystationError:
        """Tells all processes that they are out of step, whichever session they wait in; ends this one."""
        return self._give_up(keys, self._told(error), DISAGREEMENT)

    def _told(self, error: WaystationError) -> WaystationError:
        """Tells that the processes are out of step, unless another has; what everybody raises then."""
        encoded = error_codec.encode(error, self.processes[self.process_index])
        envelope, _ = envelopes.seal(self._store, DISAGREEMENT, encoded, "", {"number": self._number})
        before = None if self._store.set_once(self._numbering.ended, envelope) else self._ended_before()
        self._numbering.end(self._number)
        return before or error

    def _ended_before(self) -> WaystationError | None:
        """The error of a numbering that has ended with this session or one before it."""
        ended = self._store.get(self._numbering.ended, 0)
        if ended is None:
            return None
        envelope = envelopes.unseal(ended)
        number = int(envelope.agreement["number"])
        if number > self._number:
            return None
        self._numbering.end(number)
        return error_codec.decode(envelope.content)

    # Waiting --------------------------------------------------------------------------------------------

    def _wait(self, keys: _Keys, key: str) -> bytes | WaystationError:
        """The value of a key, or the error that everybody raises because it did not come."""
        begun = time.monotonic()
        has_told = not self._in_first_round
        while True:
            waited_s = time.monotonic() - begun
            left_s = max(0.0, self._deadline_s - waited_s)
            # Short at first, so that news are seen early; later longer, to spare the store.
            patience_s = max(_SHORTEST_WAIT_S, waited_s / 4)
            value = self._store.get(key, min(self._store.longest_wait_s, patience_s, left_s))
            if value is not None:
                return value
            dead = self._store.dead(self._watched)
            if dead:
                self._given_up.update(dead)
                self._note_failure(sorted(dead))  # before anyone can have read the verdict
                error = round_errors.deaths(self._round_name(), dead, self._store.describe)
                return self._give_up(keys, error)
            if self._in_first_round and waited_s >= _COMPARE_AFTER_S:
                disagreement = self._compare(keys)
                if disagreement is not None:
                    return disagreement
            if not has_told and waited_s >= TELL_AFTER_S:
                has_told = True
                self._tell_of_absent(keys, waited_s)
            if left_s == 0:
                return self._lateness(keys)

    def _lateness(self, keys: _Keys) -> WaystationError:
        """The deadline has passed; looks who has not come."""
        come = self._come(keys)
        disagreement = self._disagreement(come) if self._in_first_round else None
        if disagreement is not None:
            return self._end_numbering(keys, disagreement)
        late = self._named([index for index in self._others if index not in come])
        self._absent = self._given_up = set(late)
        primary = self.processes[self.primary]
        error = round_errors.lateness(
            self._round_name(),
            late,
            primary,
            self._deadline_s,
            self._store.describe,
            in_first_round=self._in_first_round,
        )
        return self._give_up(keys, error)

    def _tell_of_absent(self, keys: _Keys, waited_s: float) -> None:
        """Logs who has not come, in the primary; where that has not come, in the first one that has."""
        if self.is_primary:
            others = self._others
        else:
            others = sorted({self.primary, *range(self.process_index)})
            if len(others) > _MOST_TELLING:
                return
        come = self._read_parts(keys, others)
        late = self._named([index for index in others if come[index] is None])
        if not late or (not self.is_primary and len(late) < len(others)):
            return
        _log.warning(
            "%s has been waiting for %s for %.0f s; it gives up after %g s (multiprocessing.deadline_s). %s",
            self._what,
            round_errors.described(late, self._store.describe),
            waited_s,
            self._deadline_s,
            round_errors.EVERY_PROCESS,
        )

    def _note_absent(self, keys: _Keys) -> None:
        """Remembers who has not come to a round that this process leaves."""
        try:
            come = self._come(keys)
        except WaystationError as error:
            _log.debug("who has come could not be read: %s", error)
            return
        self._absent = set(self._named([index for index in self._others if index not in come]))

    def _come(self, keys: _Keys) -> dict[int, Envelope]:
        """What those others have handed in that have come so far."""
        found = self._read_parts(keys, self._others)
        return {index: envelope for index, envelope in found.items() if envelope is not None}

    def _give_up(self, keys: _Keys, error: WaystationError, kind: str = FAILURE) -> WaystationError:
        """Makes an error everybody's, unless there is a verdict already, which is then returned."""
        if self._put_failure(keys, error, kind):
            return error
        outcome = self._read_verdict(keys)
        return outcome if isinstance(outcome, WaystationError) else error

    def _note_failure(self, dead: Sequence[int]) -> None:
        try:
            self._store.note_failure(dead)
        except WaystationError as error:
            _log.debug("the store could not be told of a failure: %s", error)

    # Verdicts -------------------------------------------------------------------------------------------

    def _tell_others(self, error: BaseException) -> None:
        """Makes an error that is being raised here everybody's."""
        # Where there is a decision already, the others go on to the next round.
        if self._in_round is None or not self._tell(self._in_round, error):
            self._tell(self._keys(self._rounds), error)
        self._is_told = True

    def _tell(self, keys: _Keys, error: BaseException) -> bool:
        """Makes an error that is being raised here everybody's, if the store allows; returns False if the
        round has ended already."""
        try:
            return self._put_failure(keys, error)
        except WaystationError as unable:
            if unable is not error:
                error.add_note(f"The other processes could not be told: {unable}")
            return True

    def _put_failure(self, keys: _Keys, error: BaseException, kind: str = FAILURE) -> bool:
        encoded = error_codec.encode(error, self.processes[self.process_index])
        agreement = {
            **self._agreement,
            "process": self.process_index,
            "number": self._numbering.ended_at,
            "absent": sorted(self._absent | self._given_up),
        }
        envelope, _ = envelopes.seal(self._store, kind, encoded, "", agreement)
        first = self._store.set_once(keys.verdict, envelope)
        self._store.set_once(keys.ready, _FAILED)
        return first

    def _read_verdict(self, keys: _Keys) -> bytes | WaystationError:
        """The verdict, where it is known to be there."""
        envelope = self._store.get(keys.verdict, 0)
        if envelope is None:
            raise Internal(f"{self._round_name()} was ended without a verdict; please report this")
        return self._open_verdict(keys, envelope)

    def _open_verdict(self, keys: _Keys, sealed: bytes) -> bytes | WaystationError:
        envelope = envelopes.unseal(sealed)
        if envelope.kind == DISAGREEMENT:
            self._numbering.end(int(envelope.agreement["number"]))
            return error_codec.decode(envelope.content)
        if envelope.kind == FAILURE:
            return self._failure(keys, envelope)
        pieces = envelopes.piece_keys(keys.verdict_pieces, envelope.pieces)
        self._verdict_before()
        self._verdict_pieces[self._rounds - 1] = pieces
        decision = envelopes.content(self._store, envelope, keys.verdict_pieces)
        if decision is None:
            raise Internal(f"the decision of {self._round_name()} has gone; please report this")
        return decision

    def _failure(self, keys: _Keys, envelope: Envelope) -> WaystationError:
        """The error of another process; unless it is of a call that this one has not made."""
        error = error_codec.decode(envelope.content)
        self._absent.update(envelope.agreement["absent"])
        if isinstance(error, Unavailable):
            self._given_up.update(envelope.agreement["absent"])
        process = int(envelope.agreement["process"])
        is_of_call = self._in_first_round and not isinstance(error, Unavailable)  # somebody is dead, or late
        if not is_of_call or self._disagreement({process: envelope}) is None:
            return error
        disagreement = self._disagreement({**self._come(keys), process: envelope})
        assert disagreement is not None, "there are two processes that disagree"
        disagreement.__cause__ = error
        return self._told(disagreement)

    # What is left behind --------------------------------------------------------------------------------

    def _verdict_before(self) -> list[str]:
        """The keys of the verdict of the round before this one, which everybody has read."""
        before = self._rounds - 2
        if before < 0:
            return []
        return [self._keys(before).verdict, *self._verdict_pieces.pop(before, [])]

    def _remove(self, keys: list[str]) -> None:
        try:
            self._store.delete(keys)
        except WaystationError as error:
            # What they were for is done, or has failed with an error that says more.
            _log.debug("what is left of a round could not be removed: %s", error)

    def _leave(self) -> None:
        """Counts this process out; the last one removes what is left."""
        closed, over = f"{self._prefix}/closed", f"{self._prefix}/over"
        host = self._host
        if self._store.add(closed, 1) < self.process_count:
            if host == self.process_index:
                self._await_farewell(closed, over)
            return
        self._store.delete([closed, *self._left_of_rounds()])
        if host not in (None, self.process_index) and not self._store.set_once(over, _ALL_OUT):
            self._store.delete([over])

    def _await_others(self) -> None:
        """Waits until all are out. The last one has removed the count, which is 0 then."""
        closed = f"{self._prefix}/closed"
        until_s, pause_s = time.monotonic() + self._deadline_s, _FIRST_PAUSE_S
        while (count := self._store.add(closed, 0)) > 0:
            gone = self._given_up.union(self._store.dead(self._watched))
            if count + len(gone) >= self.process_count or time.monotonic() >= until_s:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._store.delete([closed])

    def _left_of_rounds(self) -> list[str]:
        """What there may still be of the last rounds. They do not end everywhere at once: some processes may
        have begun one more or one less."""
        last = [self._keys(number) for number in range(max(0, self._rounds - 2), self._rounds + 1)]
        if self._store.removes_below:
            return [keys.prefix for keys in last]
        pieces = [key for keys in self._verdict_pieces.values() for key in keys]
        first = self._keys(0)
        left = [key for keys in last for key in (keys.arrived, keys.ready, keys.verdict)]
        return [*pieces, *left, first.wanted, first.looking]

    def _await_farewell(self, closed: str, over: str) -> None:
        """Waits, not for long, until the last one is out; the dead, and those given up, never are."""
        begun = time.monotonic()
        while (left_s := FAREWELL_S - (time.monotonic() - begun)) > 0:
            if self._store.get(over, min(left_s, _SHORTEST_WAIT_S)) is not None:
                break
            gone = self._absent.union(self._store.dead(self._watched))
            if gone and self._store.add(closed, 0) + len(gone) >= self.process_count:
                break
        # If it comes later, the last one finds that nobody waits; this also ends the wait inside the store.
        if not self._store.set_once(over, _NOT_AWAITED):
            self._store.delete([over])

    # Names ----------------------------------------------------------------------------------------------

    def _named(self, indices: Sequence[int]) -> list[int]:
        """Processes of this session as the program knows them."""
        return [self.processes[index] for index in indices]

    def _keys(self, number: int) -> _Keys:
        return _Keys(f"{self._prefix}/{number}")

    @property
    def _in_first_round(self) -> bool:
        return self._rounds == 1

    @property
    def _is_in_vain(self) -> bool:
        """Whether the numbering ended before all processes came to this session, which some then never do."""
        ended_at = self._numbering.ended_at
        agreed = self._rounds > 1 or (self._rounds == 1 and not self._over)
        return ended_at is not None and ended_at < self._number and not agreed

    def _round_name(self) -> str:
        return f"round {self._rounds} of {self._what}"
